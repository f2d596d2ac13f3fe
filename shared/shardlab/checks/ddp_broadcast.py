"""Lab 03: models whose states differ between ranks, and how they are judged after a broadcast, inside each rank."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from .ddp_modules import BF16, F16, F64, Spec, build, integers
from .ddp_words import broadcasting_guesses, close, numbers
from .notes import Finding, Judged, Prepared
from .trial import digest_of


def _plain(rank: int) -> nn.Module:
    return build("sizes", rank)


def _frozen(rank: int) -> nn.Module:
    module = build("frozen", rank)
    module.get_parameter("first").grad = torch.full((4,), float(rank))
    return module


def _measured(rank: int) -> nn.Module:
    return build("many", rank)


def _shapes(rank: int) -> nn.Module:
    return build("shapes", rank)


def _dtypes(rank: int) -> nn.Module:
    module = build("dtypes", rank)
    for name, dtype in (("half", F16), ("brain", BF16), ("double", F64)):
        module.register_buffer(f"buffer_{name}", integers(Spec(name, (3,)), rank, 1).to(dtype))
    return module


def _batch_norm(rank: int) -> nn.Module:
    """A network that has seen `rank + 1` batches of its own: running mean, running variance and a count."""
    module = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Sequential(nn.Linear(4, 2)))
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        with torch.no_grad():
            values = integers(Spec(name, tuple(tensor.shape)), rank, 2) / 4
            tensor.copy_(values.abs() + rank if tensor.dtype is torch.int64 else values)
    return module


def _buffers(rank: int) -> nn.Module:
    """Buffers of other kinds: a mask, bytes, one that state_dict() leaves out, one that is not there, none trained."""
    module = nn.Module()
    module.inner = nn.Module()
    module.inner.register_buffer("mask", integers(Spec("mask", (5,)), rank, 3) > 0)
    module.inner.register_buffer("bytes", integers(Spec("bytes", (3, 2)), rank, 3).abs().to(torch.uint8) + rank)
    module.register_buffer("cache", integers(Spec("cache", (4,)), rank, 4).float(), persistent=False)
    module.register_buffer("absent", None)
    module.register_buffer("count", torch.tensor(2**40 + rank))
    return module


def _empty(rank: int) -> nn.Module:
    return nn.ReLU()


MODELS: dict[str, Callable[[int], nn.Module]] = {
    "three parameters": _plain,
    "9 parameters, one frozen, one tied": _measured,
    "a frozen parameter between two others": _frozen,
    "a network with BatchNorm": _batch_norm,
    "0-d, empty and transposed parameters": _shapes,
    "parameters and buffers of four dtypes": _dtypes,
    "buffers of all kinds": _buffers,
    "a model without parameters": _empty,
}


@dataclass(frozen=True)
class BroadcastCase:
    """model: of MODELS."""

    model: str

    @property
    def name(self) -> str:
        return self.model

    def prepare(self, rank: int, world_size: int) -> Prepared:
        given = [_states(MODELS[self.model](other)) for other in range(world_size)]
        module = MODELS[self.model](rank)
        module.train(rank % 2 == 0)
        judge = _Judge(rank, module, dict(module.named_parameters()), given, module.training)
        return Prepared((module,), judge, lambda: None)


def _states(module: nn.Module) -> dict[str, torch.Tensor]:
    named = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    return {name: tensor.detach().clone() for name, tensor in named.items()}


@dataclass(frozen=True)
class _Judge:
    rank: int
    module: nn.Module
    parameters: dict[str, nn.Parameter]
    given: list[dict[str, torch.Tensor]]
    training: bool

    def __call__(self, returned: Any) -> Judged:
        now = {**dict(self.module.named_parameters()), **dict(self.module.named_buffers())}
        finding = next((found for name in self.given[0] if (found := self._finding(name, now.get(name)))), None)
        tensors = [now[name] for name in self.given[0] if name in now]
        unusable = any(bool(tensor.isnan().any()) for tensor in tensors if tensor.is_floating_point())
        return Judged(finding, digest_of(tensors), unusable)

    def _finding(self, name: str, now: torch.Tensor | None) -> Finding | None:
        what = self._what(name)
        root = self.given[0][name]
        if now is None:
            return Finding(f"{what} is gone", "a tensor, as before")
        original = self.parameters.get(name)
        if original is not None and now is not original:
            look = "copy the values into it: the optimizer, and a tied layer, hold the old object"
            return Finding(f"{what} is another object now", "the same Parameter with rank 0's values", look)
        if now.dtype != root.dtype or now.shape != root.shape:
            seen = f"{what} is {now.dtype} of shape {tuple(now.shape)} now".replace("torch.", "")
            return Finding(seen, f"{root.dtype} of shape {tuple(root.shape)}".replace("torch.", ""))
        if original is not None and (original.requires_grad != (name != "frozen") or not original.is_leaf):
            look = "change the numbers, not the graph: detach(), .data or torch.no_grad()"
            seen = f"{what} {'is no leaf of the graph any more' if not original.is_leaf else 'changed requires_grad'}"
            return Finding(seen, "the same parameter with rank 0's values", look)
        if torch.equal(now.detach(), root):
            return None
        return self._values(what, name, now.detach(), root)

    def _values(self, what: str, name: str, now: torch.Tensor, root: torch.Tensor) -> Finding:
        expected = f"rank 0's: {numbers(root)}"
        everybodys = [given[name].double() for given in self.given]
        if self.rank == 0:
            guesses = broadcasting_guesses(everybodys, self.rank)[1:]
        else:
            guesses = broadcasting_guesses(everybodys, self.rank)
        held = next((guess for guess in guesses if torch.equal(now.double(), guess.values)), None)
        if held is None and close(now.double(), root.double(), torch.float32):
            look = "no detour through another dtype: float32 cannot hold every float64 or int64"
            return Finding(f"{what} is almost rank 0's: digits were lost", "rank 0's, bit for bit", look)
        if held is None:
            return Finding(f"{what} is {numbers(now)}", expected, "bit for bit")
        return Finding(f"{what} is {held.words}", expected, self._look(name) or self._own_left_out() or held.look)

    def _own_left_out(self) -> str:
        """When inner modules' parameters have arrived, and none of the module's own."""
        arrived: dict[bool, list[bool]] = {True: [], False: []}  # by whether the parameter is an inner module's
        for name, parameter in self.parameters.items():
            arrived["." in name].append(torch.equal(parameter.detach(), self.given[0][name]))
        if self.rank and any(arrived[True]) and not any(arrived[False]):
            return "the module's own parameters were left out; parameters() lists them, and those of inner modules"
        return ""

    def _what(self, name: str) -> str:
        if name not in self.parameters:
            return f"the buffer '{name}'"
        return f"the {'frozen ' if name == 'frozen' else ''}parameter '{name}'"

    def _look(self, name: str) -> str:
        if name == "cache":
            return "a buffer with persistent=False is not in state_dict(); module.buffers() has all of them"
        if name not in self.parameters:
            return "buffers are no parameters: module.buffers() lists them, those of inner modules too"
        if "." in name:
            return "inner modules have parameters too"
        if name == "frozen":
            return "frozen parameters have values too, though no gradients"
        return ""


def broadcast_cases(n: int) -> list[BroadcastCase]:
    """Cases at world size n. Index 1 is the one whose bytes the verdict tells."""
    names = list(MODELS) if n <= 3 else list(MODELS)[:4]
    return [BroadcastCase(name) for name in names]


def measured_bytes() -> int:
    return sum(tensor.nbytes for tensor in _states(_measured(0)).values())
