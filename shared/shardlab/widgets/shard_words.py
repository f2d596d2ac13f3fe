"""What a shard map says in words: its events, its kinds of state, and what is wrong with it."""

from __future__ import annotations

from shardlab.shard_map import MapFrame, ShardMap, size_of
from shardlab.theory import format_bytes
from shardlab.widgets.colours import KINDS, KindLook

# The looks of the kinds; colours.KINDS calls them as people do.
LOOKS: dict[str, KindLook] = {
    "weights": KINDS["weights"],
    "gradients": KINDS["gradients"],
    "master": KINDS["master weights"],
    "first_moment": KINDS["first moment"],
    "second_moment": KINDS["second moment"],
}
SLACK = 1.02  # padding and torch's step counters may take this much over the formula


def heading(frame: MapFrame) -> str:
    """What happened, as a sentence without its full stop: "the gradient of head.weight is ready"."""
    text = _event(frame)
    if len(frame.on) == len(frame.ranks):
        return text
    ranks = ", ".join(map(str, frame.on))
    return f"{text} (on rank{'s' if len(frame.on) > 1 else ''} {ranks} only)"


def _event(frame: MapFrame) -> str:
    what = frame.label.replace("_", "-") if frame.kind == "waiting" else frame.label
    begins, ended = {
        "start": ("before the step", ""),
        "end": ("after the step", ""),
        "forward": (f"forward of {what} begins", f"forward of {what} has ended"),
        "recompute": (f"forward of {what} is repeated", f"the repeated forward of {what} has ended"),
        "backward": (f"backward of {what} begins", f"backward of {what} has ended"),
        "gradient": (f"the gradient of {what} is ready", ""),
        "call": (f"{what} is issued", ""),
        "waiting": (f"waits for {what}", f"has waited for {what}"),
        "mark": (what, ""),
    }.get(frame.kind, (f"{what} begins", f"{what} has ended"))
    return ended if frame.ends else begins


def summary(shards: ShardMap) -> str:
    """One line: what each rank holds after the step beside the formula, or what it still holds and should not."""
    last = shards.last
    held = sorted({rank.state_bytes for rank in last})
    each = format_bytes(held[0]) if len(held) == 1 else f"{format_bytes(held[0])} to {format_bytes(held[-1])}"
    most = max(shards.most(rank) for rank in range(shards.world_size))
    text = f"after the step each rank holds {each} of model states, formula {format_bytes(shards.formula)}"
    return f"{text}; most during the step {format_bytes(most)}"


def too_much(shards: ShardMap, rank: int) -> bool:
    """Whether a rank holds more model states after the step than the formula and some padding."""
    return shards.last[rank].state_bytes > SLACK * shards.formula


def complaints(shards: ShardMap) -> list[str]:
    """What looks wrong after the step, a sentence each; the ranks that are alike share one."""
    found: dict[str, list[int]] = {}
    for rank in range(shards.world_size):
        for text in _left_over(shards, rank) or _over(shards, rank):
            found.setdefault(text, []).append(rank)
    return [f"{_ranks(ranks, shards.world_size)} {text}" for text, ranks in found.items()]


def _left_over(shards: ShardMap, rank: int) -> list[str]:
    """Kinds of which as much is left over share a sentence."""
    alike: dict[str, list[str]] = {}
    for kind, ranges in shards.left_over(rank).items():
        text = f"{percent(size_of(ranges) / shards.psi)} % of the {{}} that it does not own"
        if shards.share(len(shards.frames) - 1, rank, kind) == 1:
            text = f"all of the {{}}, expected 1/{shards.world_size}"
        alike.setdefault(text, []).append(LOOKS[kind].name)
    return [text.format(listed(names)) for text, names in alike.items()]


def _over(shards: ShardMap, rank: int) -> list[str]:
    more = shards.last[rank].state_bytes - shards.formula
    return [f"{format_bytes(more)} more than the formula"] if too_much(shards, rank) else []


def percent(share: float) -> int:
    """Only all is 100 %, and only nothing is 0 %."""
    return round(100 * share) if share in (0, 1) else min(99, max(1, round(100 * share)))


def listed(words: list[str]) -> str:
    return " and ".join(filter(None, [", ".join(words[:-1]), words[-1]]))


def _ranks(ranks: list[int], world_size: int) -> str:
    if len(ranks) == world_size > 1:
        return "every rank holds"
    if len(ranks) == 1:
        return f"rank {ranks[0]} holds"
    return f"ranks {listed([str(rank) for rank in ranks])} hold"
