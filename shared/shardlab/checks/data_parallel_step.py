"""Lab 02: what a case of DataParallel works with, and how outputs, losses and gradients are compared.

The module is float64, so that a wrong factor or a lost sample can't hide in rounding. The reference is a copy of the
module on the host that takes the whole batch at once.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from ..devices.device import Device
from .device_trial import Bench, Fault
from .device_watch import Watch, Watched

LossFunction = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def two_layers() -> nn.Module:
    return Watched(nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)))


@dataclass
class Setup:
    """reference: a copy of the module, on the host. dp: what the solution made of it."""

    bench: Bench
    devices: list[Device]
    order: tuple[int, ...]
    module: nn.Module
    reference: nn.Module
    dp: Any

    @classmethod
    def of(cls, bench: Bench, order: Sequence[int], make: Callable[[], nn.Module] = two_layers, seed: int = 0) -> Setup:
        torch.manual_seed(seed)
        reference = make().double()
        devices = bench.devices(order)
        module = copy.deepcopy(reference).to(devices[0])  # type: ignore[arg-type]
        dp = bench.call(bench.solution, module, devices)
        return cls(bench, devices, tuple(order), module, reference, dp)

    def forward(self, inputs: torch.Tensor) -> Any:
        return self.bench.call(self.dp, self._there(inputs))

    def step(self, inputs: torch.Tensor, targets: torch.Tensor, loss_function: LossFunction | None = None) -> Any:
        arguments = self._there(inputs), self._there(targets), loss_function or functional.mse_loss
        return self.bench.call(self.dp.forward_backward, *arguments)

    def _there(self, host: torch.Tensor) -> torch.Tensor:
        return host.clone().to(self.devices[0])  # type: ignore[arg-type]

    def judge_outputs(self, outputs: Any, inputs: torch.Tensor) -> Fault | None:
        wrong = self.judge_place("the output", outputs)
        if wrong:
            return wrong
        with torch.no_grad():
            want = self.reference(inputs)
        got = off(outputs)
        if got.shape != want.shape:
            said = f"the output has the shape {tuple(got.shape)}"
            return Fault("values", said, f"{tuple(want.shape)}: a row for every sample")
        if near(got, want):
            return None
        return Fault("values", _rows_said(got, want), "module(inputs), sample by sample, in the order of the inputs")

    def judge_place(self, name: str, tensor: Any) -> Fault | None:
        if not isinstance(tensor, torch.Tensor):
            kind = "None" if tensor is None else f"a {type(tensor).__name__}"
            return Fault("values", f"{name} is {kind}", "a tensor on devices[0]")
        found = self.bench.index_of(tensor)
        if found != self.order[0]:
            where = "on the host" if found is None else f"on device {found}"
            here = f"on devices[0], which is device {self.order[0]}" if self.order[0] else "on device 0"
            return Fault("device", f"{name} lives {where}", here)
        return None

    def judge_loss(self, loss: Any, want: torch.Tensor) -> Fault | None:
        wrong = self.judge_place("the loss", loss)
        if wrong:
            return wrong
        if loss.dim():
            return Fault("values", f"the loss has the shape {tuple(loss.shape)}", "one number, 0-d")
        if near(off(loss).double(), want.detach().double()):
            return None
        said = f"the loss is {loss.item():.6g}, not {want.item():.6g}"
        return Fault("values", said, "the loss of the whole batch: each device's counts by its number of samples")

    def judge_gradients(self, shards: list[Shard] | None = None, before: dict[str, torch.Tensor] | None = None) -> Any:
        """The module's `.grad` against the reference's. shards: to say what a wrong one is; before: what was there."""
        for (name, mine), theirs in zip(self.module.named_parameters(), self.reference.parameters(), strict=True):
            want = theirs.grad
            if mine.grad is None:
                if want is None or not bool(want.any()):
                    continue
                look = "gradients of the replicas belong into .grad of the module's own parameters"
                return Fault("values", f".grad of {name} is None", "the gradient over the whole batch", look)
            wrong = self.judge_place(f".grad of {name}", mine.grad)
            if wrong:
                return wrong
            if want is None and not theirs.requires_grad and bool(off(mine.grad).any()):
                look = "a new nn.Parameter requires gradients unless it is told otherwise"
                return Fault("values", f"{name} is frozen and has a gradient", "none: requires_grad is False", look)
            want = torch.zeros_like(theirs) if want is None else want
            got = off(mine.grad)
            if got.shape != want.shape or got.dtype != want.dtype:
                return Fault("values", f".grad of {name} is {got.dtype} {tuple(got.shape)}", f"{tuple(want.shape)}")
            if not near(got, want):
                return self._wrong_gradient(name, got, want, shards, before or {})
        return None

    def _wrong_gradient(
        self,
        name: str,
        got: torch.Tensor,
        want: torch.Tensor,
        shards: list[Shard] | None,
        before: dict[str, torch.Tensor],
    ) -> Fault:
        place = int((got - want).abs().argmax())
        said = f".grad of {name} is {got.reshape(-1)[place]:.6g}, not {want.reshape(-1)[place]:.6g}"
        meanings = dict(_meanings(name, want, shards or []))
        if name in before:
            meanings["the new gradient alone: what was in .grad before is lost"] = want - before[name]
            meanings["only what was there before: nothing was added"] = before[name]
            meanings["what was there before counted twice"] = want + before[name]
            scaled = (got - want + before[name]) / before[name]  # of what was there before
            if near(scaled, scaled.mean().expand_as(scaled)):
                meanings[f"what was there before, times {scaled.mean():.3g}, and the new gradient"] = got
        look = next((words for words, value in meanings.items() if near(got, value)), "")
        expected = "the gradient of loss_function(module(inputs), targets) over the whole batch"
        expected += ", added to what was there" if before else ""
        return Fault("values", said, expected, f"it is {look}" if look else "")


@dataclass(frozen=True)
class Shard:
    """Which rows a device had, and the gradient of the mean loss over them alone, by parameter."""

    rows: int
    gradients: dict[str, torch.Tensor]


def reference_step(
    reference: nn.Module, inputs: torch.Tensor, targets: torch.Tensor, loss_function: LossFunction | None = None
) -> torch.Tensor:
    """The loss of the whole batch; its gradient is added to the reference's `.grad`."""
    loss = (loss_function or functional.mse_loss)(reference(inputs), targets)
    loss.backward()
    return loss


def shards_of(
    setup: Setup, watch: Watch, inputs: torch.Tensor, targets: torch.Tensor, loss_function: LossFunction | None = None
) -> list[Shard]:
    """As the replicas were seen to share the batch."""
    shards, first = [], 0
    for index in setup.order:
        rows = sum(visit.rows for visit in watch.visits if visit.device == index)
        if rows and first + rows <= len(inputs):
            twin = copy.deepcopy(setup.reference)
            twin.zero_grad()
            part = slice(first, first + rows)
            (loss_function or functional.mse_loss)(twin(inputs[part]), targets[part]).backward()
            gradients = {name: one.grad for name, one in twin.named_parameters() if one.grad is not None}
            shards.append(Shard(rows, gradients))
        first += rows
    return shards


def _meanings(name: str, want: torch.Tensor, shards: list[Shard]) -> list[tuple[str, torch.Tensor]]:
    """What a wrong gradient may be, in words, and the numbers it then has."""
    parts = [shard.gradients.get(name, torch.zeros_like(want)) for shard in shards]
    if not parts:
        return []
    count = len(parts)
    rows = [shard.rows for shard in shards]
    weighted = [part * own / sum(rows) for part, own in zip(parts, rows, strict=True)]
    shares = ", ".join(map(str, rows))
    always = [
        ("the sum over all samples, not the mean", want * sum(rows)),
        ("twice the gradient", want * 2),
        ("the right number with the wrong sign", -want),
    ]
    if count == 1:
        return always
    found = [
        (
            f"the plain mean of the devices' gradients; they had {shares} samples, so they don't weigh the same",
            torch.stack(parts).mean(0),
        ),
        ("the sum of the devices' gradients, divided by nothing", torch.stack(parts).sum(0)),
        ("divided twice: by the number of samples, and by the number of devices", want / count),
    ]
    for place, part in enumerate(parts):
        found.append((f"the gradient of shard {place} alone", part))
        found.append((f"the part of shard {place} alone", weighted[place]))
        found.append((f"without the part of shard {place}", want - weighted[place]))
        found.append((f"with shard {place} counted twice", want + weighted[place]))
    return [*found, *always]


def _rows_said(got: torch.Tensor, want: torch.Tensor) -> str:
    """Which samples' outputs have come out where."""
    alike = [[near(row, other) for other in want] for row in got]
    places = [row.index(True) if True in row else -1 for row in alike]
    wrong = next(place for place, found in enumerate(places) if found != place)
    if -1 not in places and sorted(places) == list(range(len(want))):
        return f"the outputs come in the order of samples {', '.join(map(str, places[:12]))}"
    if places[wrong] >= 0:
        return f"row {wrong} of the output is that of sample {places[wrong]}"
    value, right = got[wrong].reshape(-1)[0].item(), want[wrong].reshape(-1)[0].item()
    return f"sample {wrong} comes out as {value:.6g}, not {right:.6g}"


def near(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Equal up to float64's rounding."""
    return torch.allclose(first, second, rtol=1e-9, atol=1e-12)


def off(tensor: torch.Tensor) -> torch.Tensor:
    """The values on the host; no transfer between devices."""
    return torch.from_numpy(tensor.detach().numpy().copy())
