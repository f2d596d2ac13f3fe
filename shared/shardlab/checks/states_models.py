"""Models and optimizers whose states are to be counted: by what a learner reads of them, a function that makes both."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

Pair = tuple[nn.Module, Any]


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


PADDING = 6  # elements at the end of a flat buffer that are nobody's


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
    """Weights and gradients are views of two long buffers, which are a little longer than all of them."""
    model = _net()
    count = sum(parameter.numel() for parameter in model.parameters())
    weights, gradients, at = torch.zeros(count + PADDING), torch.zeros(count + PADDING), 0
    for parameter in model.parameters():
        piece = slice(at, at + parameter.numel())
        parameter.data, parameter.grad = weights[piece].view_as(parameter), gradients[piece].view_as(parameter)
        at = piece.stop
    return _stepped(model, torch.optim.AdamW(model.parameters()))


def _slice() -> Pair:
    model = nn.Linear(7, 3, bias=False)
    model.weight.data = torch.zeros(100, 7)[10:13]
    return _stepped(model, torch.optim.AdamW(model.parameters()))


def _sliced_gradients() -> Pair:
    model, optimizer = _adamw()
    for parameter in model.parameters():
        whole = torch.ones(20, *parameter.shape)
        parameter.grad = whole[3]
    return model, optimizer


def _flat_states(own: bool) -> Callable[[], Pair]:
    """An engine's states as views of flat buffers. own: one buffer for each parameter, else one for each kind."""

    def make() -> Pair:
        model = _net().half()
        parameters, state = list(model.parameters()), {}
        count = sum(parameter.numel() for parameter in parameters)
        kinds, at = ("master", "first_moment", "second_moment"), 0
        whole = {kind: torch.zeros(count + PADDING) for kind in kinds}
        for parameter in parameters:
            size = parameter.numel()
            alone = torch.zeros(3 * size + PADDING)
            state[parameter] = {
                kind: alone[place * size : (place + 1) * size] if own else whole[kind][at : at + size]
                for place, kind in enumerate(kinds)
            }
            at += size
        _backward(model)
        return model, SimpleNamespace(state=state)

    return make


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


MAKERS: dict[str, Callable[[], Pair]] = {
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
    "gradients that are slices of larger tensors": _sliced_gradients,
    "an engine's states as views of three flat buffers": _flat_states(own=False),
    "an engine's states as views of one buffer per parameter": _flat_states(own=True),
    "BatchNorm, AdamW with amsgrad": _batch_norm,
    "a frozen layer": _frozen,
    "an optimizer of one layer only": _only_a_part,
    "Adagrad, before any step": _adagrad,
    "an engine's own state, with numbers and None in it": _hand_written,
}
