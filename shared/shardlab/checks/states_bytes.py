"""Cases for counting model states: a model and an optimizer each, with what they hold by an independent count."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from .notes import Finding, Judged, Prepared
from .trial import digest_of

KINDS = ("weights", "gradients", "optimizer")
Pair = tuple[nn.Module, Any]


@dataclass(frozen=True)
class BytesCase:
    """name: what a learner reads, and which of `_CASES` makes the model and the optimizer."""

    name: str

    def prepare(self, rank: int, world_size: int) -> Prepared:
        torch.manual_seed(0)
        model, optimizer = _CASES[self.name]()
        before = _digest(model, optimizer)

        def judge(returned: Any) -> Judged:
            finding = _shape(returned) or _numbers(returned, model, optimizer)
            if finding is None and _digest(model, optimizer) != before:
                finding = Finding(
                    "the model, its gradients or the optimizer's state have been changed", "only counting"
                )
            return Judged(finding, "")

        return Prepared((model, optimizer), judge, lambda: None)


def bytes_cases() -> list[BytesCase]:
    return [BytesCase(name) for name in _CASES]


def held(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of the memory behind some tensors, each piece of it once."""
    storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values())


def state_tensors(optimizer: Any) -> list[torch.Tensor]:
    return [one for state in optimizer.state.values() for one in state.values() if isinstance(one, torch.Tensor)]


def right_bytes(model: nn.Module, optimizer: Any) -> dict[str, int]:
    parameters = list(model.parameters())
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    return dict(zip(KINDS, map(held, (parameters, gradients, state_tensors(optimizer))), strict=True))


def _digest(model: nn.Module, optimizer: Any) -> str:
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    return digest_of([*model.parameters(), *model.buffers(), *gradients, *state_tensors(optimizer)])


def _shape(returned: Any) -> Finding | None:
    expected = 'a dict {"weights": int, "gradients": int, "optimizer": int}'
    if not isinstance(returned, dict):
        return Finding(f"it returned {'None' if returned is None else f'a {type(returned).__name__}'}", expected)
    if set(returned) != set(KINDS):
        return Finding(f"it returned a dict with the keys {sorted(map(str, returned))}", expected)
    for kind in KINDS:
        try:
            whole = int(returned[kind]) == returned[kind]
        except (TypeError, ValueError, OverflowError):
            whole = False
        if not whole:
            return Finding(f'"{kind}" is {returned[kind]!r}', "a whole number of bytes")
    return None


def _numbers(returned: dict[str, Any], model: nn.Module, optimizer: Any) -> Finding | None:
    for kind, right in right_bytes(model, optimizer).items():
        seen = int(returned[kind])
        if seen != right:
            look = next((words for words, value in _mistakes(kind, model, optimizer) if value == seen), "")
            return Finding(f'"{kind}" is {seen:,}', f"{right:,} bytes", look)
    return None


def _mistakes(kind: str, model: nn.Module, optimizer: Any) -> list[tuple[str, int]]:
    """What counts with one mistake give, and the words for it."""
    parameters = list(model.parameters())
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    tensors = {"weights": parameters, "gradients": gradients, "optimizer": state_tensors(optimizer)}[kind]
    total, elements = held(tensors), sum(map(torch.numel, tensors))
    sizes = {one.element_size() for one in tensors}
    found = [
        ("that is the number of elements, not of bytes", elements),
        *(
            (f"bytes per element are not always {size}: tensor.element_size() knows", size * elements)
            for size in (4, 2)
            if sizes != {size}
        ),
        (
            "counted by elements of each tensor. Several tensors can share one memory, and a slice keeps all of the"
            " memory behind it alive: tensor.untyped_storage() is that memory, .nbytes() its size",
            sum(one.numel() * one.element_size() for one in tensors),
        ),
        ("memory that several tensors share counts once", sum(one.untyped_storage().nbytes() for one in tensors)),
        (
            "each memory is counted once, but by the elements of one tensor in it: a slice keeps all of it alive",
            sum({one.untyped_storage()._cdata: one.numel() * one.element_size() for one in reversed(tensors)}.values()),
        ),
    ]
    if kind == "weights":
        trained = [one for one in parameters if one.requires_grad]
        with_gradient = [one for one in parameters if one.grad is not None]
        counted = [one for one in parameters if one in set(optimizer.state)]
        doubled = [one for module in model.modules() for one in module._parameters.values() if one is not None]
        found += [
            ("buffers are no model state: parameters only", total + held(model.buffers())),
            ("frozen parameters take memory too", held(trained)),
            ("a parameter without gradient takes memory too", held(with_gradient)),
            ("a parameter that the optimizer does not know takes memory too", held(counted)),
            ("a tied weight counts once", sum(one.untyped_storage().nbytes() for one in doubled)),
        ]
    if kind == "gradients":
        trained = [one for one in parameters if one.requires_grad]
        optimized = {id(one) for one in optimizer.state}
        found += [
            ("a gradient takes memory only while .grad is not None", held(parameters)),
            ("a gradient takes memory only while .grad is not None", held(trained)),
            (
                "a gradient takes memory also where the optimizer does not know the parameter",
                held(one.grad for one in parameters if one.grad is not None and id(one) in optimized),
            ),
        ]
    if kind == "optimizer":
        large = [one for one in tensors if one.dim()]
        twice = sum(2 * one.untyped_storage().nbytes() for one in model.parameters())
        moments = [state.get(name) for state in optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")]
        found += [
            ("a step count that is a tensor holds bytes too", held(large)),
            ("that is twice the weights; look at what the optimizer really holds", twice),
            (
                "that is exp_avg and exp_avg_sq only; optimizers have other tensors too",
                held(one for one in moments if isinstance(one, torch.Tensor)),
            ),
        ]
    return found


def _net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, 3))


def _backward(model: nn.Module, *inputs: torch.Tensor) -> None:
    dtype = next(model.parameters()).dtype
    given = inputs or (torch.ones(2, 7, dtype=dtype),)
    model(*given).float().square().mean().backward()


def _stepped(model: nn.Module, optimizer: torch.optim.Optimizer, *inputs: torch.Tensor) -> Pair:
    _backward(model, *inputs)
    optimizer.step()
    return model, optimizer


def _fresh() -> Pair:
    model = _net()
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def _sgd() -> Pair:
    return _stepped(*_fresh())


def _adamw() -> Pair:
    model = _net()
    return _stepped(model, torch.optim.AdamW(model.parameters()))


def _cleared(set_to_none: bool) -> Callable[[], Pair]:
    def make() -> Pair:
        model, optimizer = _adamw()
        optimizer.zero_grad(set_to_none=set_to_none)
        return model, optimizer

    return make


def _of_dtype(dtype: torch.dtype, kind: Callable[..., torch.optim.Optimizer], **options: Any) -> Callable[[], Pair]:
    def make() -> Pair:
        model = _net().to(dtype)
        return _stepped(model, kind(model.parameters(), lr=0.01, **options))

    return make


class _Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(7, 6).half(), nn.Linear(6, 5)
        self.third = nn.Linear(5, 4).bfloat16()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.third(self.second(self.first(x.half()).float()).bfloat16())


def _mixed() -> Pair:
    model = _Mixed()
    return _stepped(model, torch.optim.AdamW(model.parameters()), torch.ones(2, 7))


class _Tied(nn.Module):
    """shared: how the head comes by the embedding's matrix."""

    def __init__(self, shared: str) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(11, 6), nn.Linear(6, 11, bias=False)
        if shared == "parameter":
            self.head.weight = self.embedding.weight
        else:
            self.head.weight = nn.Parameter(self.embedding.weight.detach())

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.embedding(tokens))


def _tied(shared: str) -> Callable[[], Pair]:
    def make() -> Pair:
        model = _Tied(shared)
        return _stepped(model, torch.optim.AdamW(model.parameters()), torch.arange(4))

    return make


def _flat() -> Pair:
    """Weights and gradients are views of two long buffers."""
    model = _net()
    count = sum(parameter.numel() for parameter in model.parameters())
    weights, gradients, at = torch.zeros(count), torch.zeros(count), 0
    for parameter in model.parameters():
        piece = slice(at, at + parameter.numel())
        parameter.data, parameter.grad = weights[piece].view_as(parameter), gradients[piece].view_as(parameter)
        at = piece.stop
    return _stepped(model, torch.optim.AdamW(model.parameters()))


def _slice() -> Pair:
    model = nn.Linear(7, 3, bias=False)
    model.weight.data = torch.zeros(100, 7)[10:13]
    return _stepped(model, torch.optim.AdamW(model.parameters()))


def _batch_norm() -> Pair:
    model = nn.Sequential(nn.Linear(7, 5), nn.BatchNorm1d(5))
    return _stepped(model, torch.optim.AdamW(model.parameters(), amsgrad=True))


def _frozen() -> Pair:
    model = _net()
    model[0].requires_grad_(False)
    return _stepped(model, torch.optim.AdamW(model[2].parameters()))


def _only_a_part() -> Pair:
    model = _net()
    return _stepped(model, torch.optim.Adam(model[2].parameters()))


def _adagrad() -> Pair:
    model = _net()
    return model, torch.optim.Adagrad(model.parameters())


def _hand_written() -> Pair:
    model = _net().half()
    state = {
        parameter: {
            "master": parameter.detach().float(),
            "first_moment": torch.zeros(parameter.shape),
            "second_moment": torch.zeros(parameter.shape),
            "step": 3,
            "name": "weights",
            "extra": None,
        }
        for parameter in model.parameters()
    }
    return model, SimpleNamespace(state=state)


_CASES: dict[str, Callable[[], Pair]] = {
    "SGD, before any backward": _fresh,
    "SGD, after a step": _sgd,
    "AdamW, after a step": _adamw,
    "AdamW, after zero_grad()": _cleared(True),
    "AdamW, after zero_grad(set_to_none=False)": _cleared(False),
    "float16 weights, SGD with momentum": _of_dtype(torch.float16, torch.optim.SGD, momentum=0.9),
    "bfloat16 weights, AdamW": _of_dtype(torch.bfloat16, torch.optim.AdamW),
    "float64 weights, RMSprop": _of_dtype(torch.float64, torch.optim.RMSprop),
    "layers of three dtypes, AdamW": _mixed,
    "a tied weight": _tied("parameter"),
    "two parameters that share one memory": _tied("memory"),
    "weights that are views of one buffer": _flat,
    "a weight that is a slice of a larger tensor": _slice,
    "BatchNorm, AdamW with amsgrad": _batch_norm,
    "a frozen layer": _frozen,
    "an optimizer of one layer only": _only_a_part,
    "Adagrad, before any step": _adagrad,
    "an engine's own state, with numbers and None in it": _hand_written,
}
