"""Lab 02: the cases of `dp.forward_backward(inputs, targets, loss_function)`."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial

import torch
from torch import nn
from torch.nn import functional

from .data_parallel_forward import judge_bytes, judge_own, judge_raises, judge_rows, judge_shares, judge_together, wide
from .data_parallel_forward import samples as draw
from .data_parallel_step import LossFunction, Setup, near, off, reference_step, shards_of, two_layers
from .device_trial import Bench, Case, Fault
from .device_watch import Branches, Characters, Picky, Scaled, Tied, Watched, watching


def backward_cases() -> list[Case]:
    def values(n: int, rows: int, order: tuple[int, ...] | None = None) -> Case:
        name = f"N = {n}, {rows} samples" + (f", devices {list(order)}" if order else "")
        return Case(name, partial(_values, order=order or tuple(range(n)), rows=rows))

    return [
        values(1, 3),
        values(2, 6),
        Case("N = 3, 6 samples", _replicas),
        Case("N = 4, 8 samples", partial(_bytes, order=(0, 1, 2, 3))),
        values(4, 8),
        *(values(n, rows) for n, rows in ((4, 13), (3, 7), (4, 2), (3, 1), (5, 9))),
        Case("N = 3, 6 samples, devices [2, 0, 3]", partial(_bytes, order=(2, 0, 3))),
        values(3, 7, (2, 0, 3)),
        Case("N = 3, 7 samples, .grad holds something", _adds),
        Case("N = 2, two calls without zero_grad", _twice),
        *(
            Case(f"N = 3, 3 steps of SGD, zero_grad(set_to_none={how})", partial(_steps, how=how))
            for how in (True, False)
        ),
        Case("N = 2, 6 samples, a tied weight and a frozen layer", partial(_module, make=_tied)),
        Case("N = 4, 8 samples, a layer that devices 0 and 2 use", partial(_branches, users=[0, 1, 5])),
        Case("N = 4, 8 samples, a layer that device 2 alone uses", partial(_branches, users=[5])),
        Case("N = 3, 7 samples of tokens", _tokens),
        Case("N = 2, 6 samples, float32", _float32),
        Case("N = 2, BatchNorm", _batch_norm),
        Case("N = 3, a buffer has changed between two calls", _buffers),
        Case("N = 3, the module raises on device 1", partial(_raises, where="module")),
        Case("N = 3, the loss function raises on device 1", partial(_raises, where="loss")),
        Case("N = 3, 4 steps", _leaks),
    ]


def _values(bench: Bench, order: tuple[int, ...], rows: int) -> Fault | None:
    setup = Setup.of(bench, order)
    return _one_step(setup, rows)


def _one_step(
    setup: Setup, rows: int, before: dict[str, torch.Tensor] | None = None, seed: int = 1, positive: bool = False
) -> Fault | None:
    inputs, targets = draw(rows, seed)
    inputs = inputs.abs() if positive else inputs
    kept = inputs.clone()
    with watching() as watch:
        loss = setup.step(inputs, targets)
    shards = shards_of(setup, watch, inputs, targets)
    want = reference_step(setup.reference, inputs, targets)
    wrong = judge_rows(watch, rows) or judge_shares(watch, setup.order, rows)
    wrong = wrong or setup.judge_gradients(shards, before) or setup.judge_loss(loss, want)
    if wrong and " nan" in wrong.seen and rows < len(setup.order):
        look = "the mean over no samples is nan, and 0 times nan is nan too"
        return Fault(wrong.reason, wrong.seen, "a device without samples does nothing", look)
    return wrong or (None if torch.equal(inputs, kept) else Fault("values", "the inputs have changed", "as they were"))


def _replicas(bench: Bench) -> Fault | None:
    setup = Setup.of(bench, (0, 1, 2))
    inputs, targets = draw(6)
    with watching(forward=3, backward=3) as watch:
        setup.step(inputs, targets)
    return judge_together(watch, "forward") or judge_own(watch) or judge_together(watch, "backward")


def _bytes(bench: Bench, order: tuple[int, ...]) -> Fault | None:
    setup = Setup.of(bench, order, wide)
    rows = 2 * len(order)
    inputs, targets = draw(rows)
    with bench.traffic() as traffic:
        setup.step(inputs, targets)
    psi = sum(parameter.nbytes for parameter in setup.module.parameters())
    root = traffic[order[0]]
    bench.facts["psi"] = psi
    bench.facts[f"bytes {len(order)}"] = (root.received, root.sent)
    return judge_bytes(
        setup,
        traffic,
        {"inputs": inputs[:2].nbytes, "targets": targets[:2].nbytes},
        {"gradients": psi},
    )


def _adds(bench: Bench) -> Fault | None:
    setup = Setup.of(bench, (0, 1, 2))
    torch.manual_seed(3)
    before = {}
    for (name, mine), theirs in zip(setup.module.named_parameters(), setup.reference.parameters(), strict=True):
        theirs.grad = before[name] = torch.randn_like(theirs)
        mine.grad = before[name].clone().to(setup.devices[0])  # type: ignore[arg-type]
        before[name] = before[name].clone()
    return _one_step(setup, 7, before)


def _twice(bench: Bench) -> Fault | None:
    setup = Setup.of(bench, (0, 1))
    wrong = _one_step(setup, 6)
    before = {name: one.grad.clone() for name, one in setup.reference.named_parameters() if one.grad is not None}
    return wrong or _one_step(setup, 6, before, seed=2)


def _steps(bench: Bench, how: bool) -> Fault | None:
    setup = Setup.of(bench, (0, 1, 2))
    mine = torch.optim.SGD(setup.module.parameters(), lr=0.5)
    theirs = torch.optim.SGD(setup.reference.parameters(), lr=0.5)
    for number in range(3):
        for optimizer in (mine, theirs):
            optimizer.zero_grad(set_to_none=how)
        wrong = _one_step(setup, 7, seed=number)
        if wrong:
            look = wrong.look or (number and "replicas are made anew on every call: the optimizer has stepped since")
            return Fault(wrong.reason, f"step {number + 1}: {wrong.seen}", wrong.expected, look or "")
        mine.step()
        theirs.step()
    for (name, one), other in zip(setup.module.named_parameters(), setup.reference.parameters(), strict=True):
        if not near(off(one), other.detach()):
            return Fault("values", f"after 3 steps {name} differs from training on one device", "the same parameters")
    return None


def _tied() -> nn.Module:
    return Watched(Tied())


def _module(bench: Bench, make: Callable[[], nn.Module]) -> Fault | None:
    setup = Setup.of(bench, (0, 1), make)
    return _one_step(setup, 6)


def _branches(bench: Bench, users: list[int]) -> Fault | None:
    """These samples use `rare`; on devices that have none of them it has no gradient. `never` has none anywhere."""
    setup = Setup.of(bench, (0, 1, 2, 3), lambda: Watched(Branches()))
    inputs, targets = draw(8)
    inputs[:, 0] = -inputs[:, 0].abs()
    inputs[users, 0] *= -1
    with watching() as watch:
        loss = setup.step(inputs, targets)
    shards = shards_of(setup, watch, inputs, targets)
    want = reference_step(setup.reference, inputs, targets)
    wrong = setup.judge_gradients(shards)
    if wrong and "rare" in wrong.seen:
        look = wrong.look or "a parameter may have a gradient on some devices and None on others; None counts as zeros"
        return Fault(wrong.reason, wrong.seen, wrong.expected, look)
    return wrong or setup.judge_loss(loss, want)


def _tokens(bench: Bench) -> Fault | None:
    setup = Setup.of(bench, (0, 1, 2), lambda: Watched(Characters()))
    tokens = torch.randint(5, (7, 6), generator=torch.Generator().manual_seed(0))
    targets = tokens.roll(1, 1)

    def loss_function(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())

    with watching() as watch:
        loss = setup.step(tokens, targets, loss_function)
    shards = shards_of(setup, watch, tokens, targets, loss_function)
    want = reference_step(setup.reference, tokens, targets, loss_function)
    return setup.judge_gradients(shards) or setup.judge_loss(loss, want)


def _float32(bench: Bench) -> Fault | None:
    setup = Setup.of(bench, (0, 1))
    setup.module.float(), setup.reference.float()
    setup.dp = bench.call(bench.solution, setup.module, setup.devices)
    inputs, targets = (each.float() for each in draw(6))
    with bench.traffic() as traffic:
        loss = setup.step(inputs, targets)
    want = reference_step(setup.reference, inputs, targets)
    for (name, mine), theirs in zip(setup.module.named_parameters(), setup.reference.parameters(), strict=True):
        assert theirs.grad is not None
        if mine.grad is None or mine.grad.dtype != torch.float32:
            said = f".grad of {name} is {'None' if mine.grad is None else mine.grad.dtype}"
            return Fault("values", said, "float32, as the parameter")
        if not torch.allclose(off(mine.grad), theirs.grad, rtol=1e-4, atol=1e-6):
            return Fault("values", f".grad of {name} is wrong in float32", "the gradient over the whole batch")
    if not isinstance(loss, torch.Tensor) or abs(loss.item() - want.item()) > 1e-5:
        return Fault("values", f"the loss is {loss}, not {want.item():.6g}", "the loss of the whole batch")
    psi = sum(parameter.nbytes for parameter in setup.module.parameters())
    there = {"inputs": inputs[:3].nbytes, "targets": targets[:3].nbytes}
    return judge_bytes(setup, traffic, there, {"gradients": psi})


def _batch_norm(bench: Bench) -> Fault | None:
    """Every device normalises with its own part of the batch; device 0's running statistics are kept."""
    setup = Setup.of(bench, (0, 1), lambda: nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), Watched(nn.Linear(3, 3))))
    inputs, targets = draw(6)
    with watching() as watch:
        setup.step(inputs, targets)
    norm, twins = setup.module[1], [copy.deepcopy(setup.reference) for _ in range(2)]  # type: ignore[index]
    rows = sum(visit.rows for visit in watch.visits if visit.device == 0)
    for twin, part in zip(twins, (slice(0, rows), slice(rows, 6)), strict=True):
        (functional.mse_loss(twin(inputs[part]), targets[part]) * len(inputs[part]) / 6).backward()
    for mine, *theirs in zip(setup.reference.parameters(), *(twin.parameters() for twin in twins), strict=True):
        mine.grad = sum(one.grad for one in theirs)  # type: ignore[assignment]
    wrong = setup.judge_gradients()
    for name, kept in norm.named_buffers():  # type: ignore[union-attr, operator]
        values, want = off(kept), [dict(twin[1].named_buffers())[name] for twin in twins]  # type: ignore[index]
        if wrong or torch.allclose(values, want[0]):
            continue
        said = f"the module's {name} is not what device 0's replica made of it"
        fresh = torch.equal(values, dict(setup.reference[1].named_buffers())[name])  # type: ignore[index]
        said = f"the module's {name} has not changed in a training step" if fresh else said
        look = "replica 0 can be the module itself, or share its buffers; or copy them back"
        return Fault("values", said, "buffers of device 0's replica are kept", look)
    return wrong


def _buffers(bench: Bench) -> Fault | None:
    setup = Setup.of(bench, (0, 1, 2), lambda: Scaled(two_layers()))
    for number, factor in enumerate((2.0, 7.0)):
        for module in (setup.module, setup.reference):
            module.zero_grad()
            module.factor.fill_(factor)  # type: ignore[union-attr, operator]
        wrong = _one_step(setup, 6, seed=number)
        if wrong:
            look = "buffers are part of the module's state: replicas get them on every call, as they get parameters"
            return Fault(wrong.reason, wrong.seen, wrong.expected, look)
    return None


def _raises(bench: Bench, where: str) -> Fault | None:
    setup = Setup.of(bench, (0, 1, 2), lambda: Picky(two_layers()))
    inputs, targets = draw(6)
    inputs[:, 0] = inputs[:, 0].abs()
    spoilt, loss_function = inputs.clone(), None
    spoilt[2] = -1.0
    if where == "loss":
        spoilt, loss_function = inputs, _picky_loss(targets[2])
    others = 3 if where == "loss" else 2
    wrong = judge_raises(bench, lambda: setup.step(spoilt, targets, loss_function), others)
    if wrong:
        return wrong
    setup.module.zero_grad()
    return _one_step(setup, 6, positive=True)


def _picky_loss(target: torch.Tensor) -> LossFunction:
    first = target[0].item()

    def loss_function(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        if bool((targets[:, 0] == first).any()):
            raise ValueError("a sample with nothing but negative numbers")
        return functional.mse_loss(outputs, targets)

    return loss_function


def _leaks(bench: Bench) -> Fault | None:
    setup = Setup.of(bench, (0, 1, 2))
    held = []
    for number in range(4):
        setup.module.zero_grad(set_to_none=False)
        inputs, targets = draw(6, number)
        setup.step(inputs, targets)
        del inputs, targets
        held.append(bench.live())
    for index in setup.order:
        if held[3][index] > held[2][index] > held[1][index]:
            grown = ", ".join(f"{live[index]:,}" for live in held[1:])
            said = f"device {index} holds {grown} bytes after steps 2 to 4"
            return Fault(
                "memory", said, "no more after each step", "what keeps old replicas, gradients or losses alive"
            )
    bench.facts["held"] = held[3]
    return None
