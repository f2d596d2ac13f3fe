"""Which tensors of an engine hold which elements of which parameters: the model's own, torch's optimizers', and those
that the engine's `states()` names."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from ..errors import UsageError
from ..pieces import Piece
from ..state_records import KINDS, Pieces
from .layers import unwrapped

# What optimizers call the states that pictures show: torch's, and those of the course.
MOMENTS = {
    "exp_avg": "first_moment",
    "momentum_buffer": "first_moment",
    "exp_avg_sq": "second_moment",
    "square_avg": "second_moment",
    "master_param": "master",
} | {kind: kind for kind in KINDS[2:]}

Holder = tuple[str, torch.Tensor, Pieces]


class Holders:
    """Finds the tensors anew each time it is asked: an engine may swap, free and make them at any moment."""

    def __init__(self, parts: Iterable[Any]) -> None:
        """parts: an engine, a model, optimizers; or lists and dicts of these. UsageError when there is no model."""
        self._parts = [part for item in parts for part in _opened(item)]
        model = next((found for part in self._parts if (found := _model_of(part)) is not None), None)
        if model is None:
            raise UsageError(
                "watch_states: give it an engine with a model in its attribute `module`, or the model itself "
                f"(and its optimizer): watch_states(model, optimizer). It got {_names(self._parts)}."
            )
        self.model = model
        self.parameters = dict(model.named_parameters())
        self._numbers = {id(parameter): number for number, parameter in enumerate(self.parameters.values())}

    def all(self) -> Iterator[Holder]:
        """(kind, tensor, pieces): the pieces lie in the tensor one after the other, from its first element."""
        now = dict(self.model.named_parameters())  # FSDP2 swaps the parameters themselves for whole ones, for a while
        for number, (name, parameter) in enumerate(self.parameters.items()):
            for each in {id(each): each for each in (parameter, now.get(name, parameter))}.values():
                yield from self._whole("weights", number, each)
                if each.grad is not None:
                    yield from self._whole("gradients", number, each.grad)
        for part in self._parts:
            for state in _optimizer_states(part):
                yield from self._of_optimizer(state)
            states = getattr(part, "states", None)
            if callable(states) and not isinstance(part, torch.optim.Optimizer):
                yield from map(_checked, states())

    def _of_optimizer(self, states: Mapping[Any, Any]) -> Iterator[Holder]:
        for parameter, state in list(states.items()):
            number = self._numbers.get(id(parameter))
            if number is None or not isinstance(state, dict):
                continue
            for name, value in state.items():
                if name in MOMENTS and isinstance(value, torch.Tensor):
                    yield from self._whole(MOMENTS[name], number, value)

    def _whole(self, kind: str, number: int, tensor: torch.Tensor) -> Iterator[Holder]:
        """A tensor that is shaped like the parameter: one piece of all its elements; of a DTensor, this rank's rows."""
        first, local = 0, getattr(tensor, "_local_tensor", tensor)
        if local is not tensor:
            first = _first_element(tensor)
        if local.numel():
            yield kind, local, (Piece(number, first, first + local.numel()),)


def _first_element(tensor: Any) -> int:
    """Where this rank's rows of a DTensor begin."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset  # slow to load, seldom needed

    _, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return offset[0] * (tensor.numel() // max(1, tensor.shape[0])) if offset else 0


def _checked(holder: Any) -> Holder:
    try:
        kind, tensor, pieces = holder
        pieces = tuple(Piece(*piece) for piece in pieces)
    except TypeError:
        raise UsageError(f"states() must yield (kind, tensor, pieces); it yielded {type(holder).__name__}") from None
    except ValueError:
        raise UsageError(f"states() must yield three things: kind, tensor, pieces; it yielded {len(holder)}") from None
    if kind not in KINDS or not isinstance(tensor, torch.Tensor):
        raise UsageError(
            f"states() yielded ({kind!r}, {type(tensor).__name__}, ...); it must yield one of {', '.join(KINDS)}, "
            "a tensor, and the pieces that lie in it"
        )
    return kind, tensor, pieces


def _opened(item: Any) -> Iterator[Any]:
    if isinstance(item, Mapping):
        item = list(item.values())
    if isinstance(item, (list, tuple)):
        for inner in item:
            yield from _opened(inner)
    else:
        yield item


def _model_of(part: Any) -> nn.Module | None:
    inner = getattr(part, "module", None)
    if isinstance(inner, nn.Module):
        return unwrapped(inner)
    return part if isinstance(part, nn.Module) else None


def _optimizer_states(part: Any) -> Iterator[Mapping[Any, Any]]:
    """The `state` of every optimizer: the part itself, what it wraps (ZeroRedundancyOptimizer's `optim`), and those in
    its attributes. An optimizer is what keeps a dict for each parameter in `state`, as torch's do."""
    attributes = list(getattr(part, "__dict__", {}).values())
    found: dict[int, Mapping[Any, Any]] = {}
    for value in [part, *(inner for attribute in attributes for inner in _inside(attribute))]:
        for optimizer in (value, getattr(value, "optim", None)):
            state = getattr(optimizer, "state", None)
            if isinstance(state, Mapping):
                found[id(state)] = state
    yield from found.values()


def _inside(attribute: Any) -> Iterable[Any]:
    if isinstance(attribute, dict):
        return list(attribute.values())
    return list(attribute) if isinstance(attribute, (list, tuple)) else [attribute]


def _names(parts: list[Any]) -> str:
    return ", ".join(f"a {type(part).__name__}" for part in parts) or "nothing"
