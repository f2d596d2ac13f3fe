"""Lab 02: the cases of `dp(inputs)`, and what both it and `forward_backward` are asked about their replicas."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import nn

from ..records import RankTraffic
from .data_parallel_step import Setup, two_layers
from .device_trial import Bench, Case, Fault
from .device_watch import SPOILT, Picky, Remembers, Scaled, Visit, Watch, Watched, watching

SMALL = 64  # bytes: as much as losses, weights and numbers of samples may take, per device and call


def forward_cases() -> list[Case]:
    def values(n: int, rows: int, order: tuple[int, ...] | None = None) -> Case:
        name = f"dp(inputs), N = {n}, {rows} samples" + (f", devices {list(order)}" if order else "")
        return Case(name, partial(_values, order=order or tuple(range(n)), rows=rows))

    return [
        values(1, 3),
        Case("dp(inputs), N = 3, 6 samples", _replicas),
        Case("dp(inputs), N = 3, 6 samples, device 2 is done first", _order),
        values(2, 6),
        *(values(n, rows) for n, rows in ((4, 13), (4, 2), (3, 1), (5, 9))),
        values(3, 6, (2, 0, 3)),
        Case("dp(inputs) again after the parameters have changed, N = 2", _stale),
        Case("dp(inputs), N = 4, 8 samples", _bytes),
        Case("dp(inputs) of a module with buffers, N = 2", _buffers),
        Case("dp(inputs) after module.eval(), N = 2", _eval),
        Case("dp(inputs), N = 3, a module that keeps something on itself", _keeps),
        Case("dp(inputs), N = 3, the module raises on device 1", _raises),
    ]


def samples(rows: int, seed: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs (rows, 4) and targets (rows, 3), float64, on the host."""
    generator = torch.Generator().manual_seed(seed)
    shape = {"generator": generator, "dtype": torch.float64}
    return torch.randn(rows, 4, **shape), torch.randn(rows, 3, **shape)  # type: ignore[call-overload]


def _values(bench: Bench, order: tuple[int, ...], rows: int) -> Fault | None:
    setup = Setup.of(bench, order)
    inputs, _ = samples(rows)
    with watching() as watch:
        outputs = setup.forward(inputs)
    return judge_rows(watch, rows) or judge_shares(watch, order, rows) or setup.judge_outputs(outputs, inputs)


def judge_rows(watch: Watch, rows: int) -> Fault | None:
    if watch.rows == rows:
        return None
    if not watch.visits:
        return Fault("values", "no replica of the module was called", "the module's forward, on every device's piece")
    said = f"the replicas were given {watch.rows} samples in all"
    return Fault("values", said, f"{rows}: every sample once")


def judge_shares(watch: Watch, order: tuple[int, ...], rows: int) -> Fault | None:
    """Every device has its part, and a replica of its own."""
    strangers = [visit.device for visit in watch.visits if visit.device not in order]
    if strangers:
        where = "the host" if strangers[0] is None else f"device {strangers[0]}"
        return Fault("device", f"a replica worked on {where}", f"the devices of the list: {list(order)}")
    most = -(-rows // len(order))
    for index in order:
        mine = sum(visit.rows for visit in watch.visits if visit.device == index)
        if mine > most:
            return Fault("values", f"device {index} worked on {mine} of {rows} samples", f"at most {most}")
    return None


def _replicas(bench: Bench) -> Fault | None:
    setup = Setup.of(bench, (0, 1, 2))
    inputs, _ = samples(6)
    with watching(forward=3) as watch:
        try:
            setup.forward(inputs)
        except Exception:
            shared = judge_own(watch)
            if shared is None:
                raise
            bench.world.failures.clear()
            return shared  # threads that share a module crash in one way or another
    return judge_shares(watch, setup.order, 6) or judge_together(watch, "forward") or judge_own(watch)


def judge_together(watch: Watch, phase: str) -> Fault | None:
    meeting = watch.forward if phase == "forward" else watch.backward
    assert meeting is not None
    if not meeting.most:
        return Fault("order", f"no replica ran its {phase}", "one per device")
    if meeting.met and len(meeting.threads) >= meeting.parties:
        return None
    seen = "one replica at a time" if meeting.most == 1 else f"{meeting.most} replicas at the same time"
    expected = f"{meeting.parties}, each in a thread of its own"
    look = "start all threads, then join them; a join() right after start() waits for this one"
    if phase == "backward":
        look = "backward() of each replica's loss belongs into the thread too"
    return Fault("order", f"{seen} in {phase}", expected, look)


def judge_own(watch: Watch) -> Fault | None:
    owners: dict[int, Visit] = {}
    for visit in watch.visits:
        owner = owners.setdefault(visit.replica, visit)
        if visit.thread != owner.thread:
            said = "the threads of two devices call one and the same module object"
            return Fault("memory", said, "a replica for each: what forward keeps on `self` is its own")
    return None


def _order(bench: Bench) -> Fault | None:
    setup = Setup.of(bench, (0, 1, 2))
    inputs, _ = samples(6)
    with watching(backwards=[0, 1, 2]):
        outputs = setup.forward(inputs)
    wrong = setup.judge_outputs(outputs, inputs)
    if wrong and "order of samples" in wrong.seen:
        look = "where results are put together: by the device's number, not by who is done first"
        return Fault(wrong.reason, wrong.seen, wrong.expected, look)
    return wrong


def _bytes(bench: Bench) -> Fault | None:
    setup = Setup.of(bench, (0, 1, 2, 3), wide)
    inputs, _ = samples(8)
    with bench.traffic() as traffic:
        outputs = setup.forward(inputs)
    piece = {"inputs": inputs[:2].nbytes}
    back = {"outputs": 2 * 3 * 8}
    return judge_bytes(setup, traffic, piece, back) or setup.judge_outputs(outputs, inputs)


def judge_bytes(setup: Setup, traffic: list[RankTraffic], there: dict[str, int], back: dict[str, int]) -> Fault | None:
    """Every other device gets a replica and its part of the batch, and gives back something; nobody else talks.

    there, back: bytes per device, in words. For batches that N divides, and all parameters in use.
    """
    root, *others = setup.order
    psi = sum(parameter.nbytes for parameter in setup.module.parameters())
    buffers = sum(buffer.nbytes for buffer in setup.module.buffers())
    there = {"parameters": psi} | ({"buffers": buffers} if buffers else {}) | there
    for index in others:
        seen = traffic[index]
        strangers = [peer for peer in seen.by_peer if peer != root]
        if strangers:
            said = f"device {index} talks to device {strangers[0]}"
            return Fault("bytes", said, f"replicas and pieces come from device {root}, and gradients go there")
        for verb, got, parts in (("receives", seen.received, there), ("sends", seen.sent, back)):
            want = sum(parts.values())
            if not want <= got <= want + SMALL:
                listed = " + ".join(f"{size:,} of {what}" for what, size in parts.items())
                said = f"device {index} {verb} {got:,.0f} bytes; psi is {psi:,} bytes"
                return Fault("bytes", said, f"{want:,}: {listed}", _explained(got - want, psi, buffers, parts))
    return None


def _explained(excess: float, psi: int, buffers: int, parts: dict[str, int]) -> str:
    if 0 <= excess - psi <= buffers + SMALL:
        return "as if the parameters (or gradients) travelled twice"
    if 0 <= psi + buffers + excess <= buffers + SMALL:
        return "as if the parameters (or gradients) did not travel"
    if buffers and abs(excess + buffers) <= SMALL:
        return "as if the buffers did not travel"
    batch = next((size for what, size in parts.items() if what == "inputs"), 0)
    if batch and excess > 0 and excess % batch == 0:
        return "as if the whole batch went to every device: cut first, then move"
    return ""


def wide() -> nn.Module:
    """psi is much more here than what else travels."""
    return Scaled(Watched(nn.Sequential(nn.Linear(4, 90), nn.Tanh(), nn.Linear(90, 3))))


def _stale(bench: Bench) -> Fault | None:
    setup = Setup.of(bench, (0, 1))
    inputs, _ = samples(6)
    setup.forward(inputs)
    torch.manual_seed(5)
    changes: list[tuple[str, Callable[[nn.Module], object]]] = [
        ("an optimizer has stepped", lambda module: [one.data.mul_(1.5) for one in module.parameters()]),
        ("parameter.data was replaced", lambda module: [_replace(one) for one in module.parameters()]),
    ]
    for said, change in changes:
        for module in (setup.module, setup.reference):
            with torch.no_grad():
                change(module)
        wrong = setup.judge_outputs(setup.forward(inputs), inputs)
        if wrong:
            look = f"replicas are made anew on every call; here {said} since the first"
            return Fault(wrong.reason, wrong.seen, "outputs of the module as it is now", look)
    return None


def _replace(parameter: torch.Tensor) -> torch.Tensor:
    parameter.data = parameter.data * 0.5
    return parameter


def _buffers(bench: Bench) -> Fault | None:
    setup = Setup.of(bench, (0, 1), lambda: Scaled(two_layers()))
    inputs, _ = samples(6)
    for factor in (2.0, 7.0):
        for module in (setup.module, setup.reference):
            module.factor.fill_(factor)  # type: ignore[union-attr, operator]
        wrong = setup.judge_outputs(setup.forward(inputs), inputs)
        if wrong:
            look = "buffers are part of the module's state: module.buffers(); here one has changed between two calls"
            return Fault(wrong.reason, wrong.seen, wrong.expected, look)
    return None


def _eval(bench: Bench) -> Fault | None:
    setup = Setup.of(bench, (0, 1), lambda: nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), two_layers_of(3)))
    inputs, _ = samples(6)
    setup.forward(inputs)
    for module in (setup.module, setup.reference):
        module.eval()
        module[1].running_mean.fill_(0.5), module[1].running_var.fill_(2.0)  # type: ignore[index]
    wrong = setup.judge_outputs(setup.forward(inputs), inputs)
    if wrong:
        look = "replicas must be in the mode that the module is in now: train() or eval()"
        return Fault(wrong.reason, wrong.seen, wrong.expected, look)
    return None


def two_layers_of(width: int) -> nn.Module:
    return Watched(nn.Sequential(nn.Linear(width, 5), nn.Tanh(), nn.Linear(5, 3)))


def _keeps(bench: Bench) -> Fault | None:
    setup = Setup.of(bench, (0, 1, 2), lambda: Remembers(two_layers()))
    inputs, _ = samples(6)
    with watching(forward=3) as watch:
        outputs = setup.forward(inputs)
    return judge_own(watch) or setup.judge_outputs(outputs, inputs)


def _raises(bench: Bench) -> Fault | None:
    setup = Setup.of(bench, (0, 1, 2), lambda: Picky(two_layers()))
    inputs = samples(6)[0]
    inputs[:, 0] = inputs[:, 0].abs()
    spoilt = inputs.clone()
    spoilt[2] = -1.0
    wrong = judge_raises(bench, lambda: setup.forward(spoilt), others=2)
    return wrong or setup.judge_outputs(setup.forward(inputs), inputs)


def judge_raises(bench: Bench, call: Callable[[], object], others: int) -> Fault | None:
    """An exception of a thread must reach the caller. others: replicas that run all the same, and may still do so when
    it has."""
    with watching(forward=others) as watch:
        fault = _judge_exception(bench, call)
        assert watch.forward is not None
        watch.forward.wait_until_over()
    return fault


def _judge_exception(bench: Bench, call: Callable[[], object]) -> Fault | None:
    expected = "the exception, in the thread that called dp: catch it in the other one, keep it, raise it after join()"
    try:
        call()
    except BaseException as error:
        bench.calling = False
        bench.world.failures.clear()
        seen: BaseException | None = error
        while seen is not None:
            if SPOILT in str(seen):
                return None
            seen = seen.__cause__ or seen.__context__
        said = f"device 1's thread raised ValueError, and the caller saw {type(error).__name__}: {str(error)[:80]}"
        return Fault("crash", said, expected)
    bench.world.failures.clear()
    return Fault("crash", "device 1's thread raised ValueError, and the caller saw nothing of it", expected)
