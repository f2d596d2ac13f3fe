"""Who sends what to whom between the devices of one process, and how much each device has to carry: a static picture.

The arrows are what the busiest device exchanged with each of the others; the bars are all that a device received and
sent, split by what it was. Made without a browser and without a font's metrics, so it is the same everywhere.
"""

from __future__ import annotations

from dataclasses import dataclass
from html import escape
from typing import Any

from shardlab.errors import UsageError
from shardlab.records import Run
from shardlab.theory import format_bytes
from shardlab.widgets.colours import rank_look

INK, DIM, PAGE = "#111111", "#595959", "#FFFFFF"
FONT = 'font-family="sans-serif"'
FILLS = {"parameters": "#F2F2F2", "gradients": "#9B9B9B", "other": "#444444"}  # greys: the devices have the colours
ROW, LEFT, BOX, TARGET, BARS, LONGEST = 62, 16, 84, 350, 500, 320
MOST_DEVICES = 8


@dataclass(frozen=True)
class Carried:
    """What one device received and sent, in bytes, by what it was ("parameters", "gradients", "other")."""

    device: int
    received: dict[str, int]
    sent: dict[str, int]


@dataclass(frozen=True)
class DeviceTraffic:
    """carried[d] is device d's. exchanged[d]: bytes that the root sent to d, and got from it."""

    root: int
    carried: tuple[Carried, ...]
    exchanged: tuple[tuple[int, int], ...]
    title: str

    def __repr__(self) -> str:
        lines = [self.title]
        for one in self.carried:
            got, gave = sum(one.received.values()), sum(one.sent.values())
            lines.append(f"device {one.device}: received {got:,} bytes, sent {gave:,} bytes")
        return "\n".join(lines)

    def _repr_mimebundle_(self, **_: Any) -> dict[str, str]:
        return {"text/plain": repr(self), "image/svg+xml": svg(self)}


def device_traffic(run: Run, title: str = "one training step") -> DeviceTraffic:
    """The picture of a run of `launch_devices`, to be the last line of a cell. UsageError when nothing was moved."""
    if run.noun != "device" or not any(run.calls):
        raise UsageError("device_traffic draws a run of launch_devices in which something moved between devices")
    if run.world_size > MOST_DEVICES:
        raise UsageError(f"device_traffic draws up to {MOST_DEVICES} devices; this run had {run.world_size}")
    traffic = run.traffic
    root = max(traffic, key=lambda one: (one.sent + one.received, -one.rank)).rank
    carried = tuple(
        Carried(
            one.rank,
            _by_kind({what: totals.received for what, totals in one.by_what.items()}),
            _by_kind({what: totals.sent for what, totals in one.by_what.items()}),
        )
        for one in traffic
    )
    peers = traffic[root].by_peer
    exchanged = tuple(
        (int(peers[d].sent), int(peers[d].received)) if d in peers else (0, 0) for d in range(run.world_size)
    )
    return DeviceTraffic(root, carried, exchanged, title)


def _by_kind(what: dict[str, float]) -> dict[str, int]:
    kinds = {"parameters": 0, "gradients": 0, "other": 0}
    for name, size in what.items():
        kinds[name if name in kinds else "other"] += int(size)
    return kinds


def svg(picture: DeviceTraffic) -> str:
    """SVG text without styles, ids or scripts: it survives strict sanitizers."""
    others = [one.device for one in picture.carried if one.device != picture.root]
    rows = len(picture.carried)
    width, height = BARS + LONGEST + 110, 78 + rows * ROW + 34
    said = escape(f"{picture.title}: {repr(picture).partition(chr(10))[2].replace(chr(10), '; ')}")
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'role="img" aria-label="{said}">',
        f'<rect width="{width}" height="{height}" fill="{PAGE}"/>',
        _text(LEFT, 24, picture.title, 15, weight="bold"),
        _text(LEFT, 50, "who sends to whom", 12, weight="bold"),
        _text(BARS, 50, "what a device receives (above) and sends (below)", 12, weight="bold"),
    ]
    parts += _arrows(picture, others)
    most = max((sum(side.values()) for one in picture.carried for side in (one.received, one.sent)), default=0) or 1
    for place, one in enumerate(picture.carried):
        top = 64 + place * ROW
        parts.append(_box(one.device, BARS, top + 6, 24, 38, str(one.device)))
        for line, side in enumerate((one.received, one.sent)):
            parts += _bar(side, BARS + 32, top + 6 + 20 * line, most)
    parts += _legend(height - 14)
    return "".join([*parts, "</svg>"])


def _arrows(picture: DeviceTraffic, others: list[int]) -> list[str]:
    first, high = 64, ROW * max(1, len(others))
    parts = [_box(picture.root, LEFT, first + 6, BOX, high - 18, f"device {picture.root}")]
    begin, end = LEFT + BOX + 6, TARGET - 6
    for place, device in enumerate(others):
        top = first + place * ROW
        out, back = picture.exchanged[device]
        parts.append(_box(device, TARGET, top + 6, BOX, ROW - 18, f"device {device}"))
        for y, size, text, way in ((top + 17, out, "parameters, batch", 1), (top + 40, back, "gradients, loss", -1)):
            if not size:
                continue
            tip, tail = (end, begin) if way > 0 else (begin, end)
            parts.append(f'<path d="M{tail} {y}H{tip}" stroke="{INK}" stroke-width="1.6" fill="none"/>')
            parts.append(f'<path d="M{tip} {y}l{-9 * way} -4v8z" fill="{INK}"/>')
            parts.append(_text((begin + end) / 2, y - 4, f"{format_bytes(size)}: {text}", 11, anchor="middle"))
    return parts


def _bar(side: dict[str, int], left: float, top: float, most: int) -> list[str]:
    parts, x = [], left
    for kind, size in side.items():
        wide = round(LONGEST * size / most, 2)
        if wide:
            parts.append(
                f'<rect x="{x:g}" y="{top}" width="{wide:g}" height="16" fill="{FILLS[kind]}" stroke="{INK}" '
                f'stroke-width="0.8"/>'
            )
        x = round(x + wide, 2)
    return [*parts, _text(x + 6, top + 12, format_bytes(sum(side.values())), 11)]


def _legend(y: float) -> list[str]:
    parts, x = [], float(BARS)
    for kind, words in (("parameters", "parameters"), ("gradients", "gradients"), ("other", "batch, losses, the rest")):
        parts.append(
            f'<rect x="{x:g}" y="{y - 10:g}" width="12" height="12" fill="{FILLS[kind]}" stroke="{INK}" '
            'stroke-width="0.8"/>'
        )
        parts.append(_text(x + 17, y, words, 11))
        x += 32 + 7 * len(words)
    return parts


def _box(device: int, x: float, y: float, width: float, height: float, text: str) -> str:
    look = rank_look(device)
    box = f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="4" fill="{look.fill}" stroke="{INK}"/>'
    return box + _text(x + width / 2, y + height / 2 + 4, text, 12, look.text, "middle", "bold")


def _text(
    x: float, y: float, text: str, size: int, fill: str = INK, anchor: str = "start", weight: str = "normal"
) -> str:
    return (
        f'<text x="{x:g}" y="{y:g}" {FONT} font-size="{size}" fill="{fill}" text-anchor="{anchor}" '
        f'font-weight="{weight}">{escape(text)}</text>'
    )
