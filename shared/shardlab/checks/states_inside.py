"""Inside a rank: what an engine keeps in `self.state`, held against its contract."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

NAMES = ("master", "first_moment", "second_moment")
CONTRACT = "for every parameter a dict with the float32 tensors " + ", ".join(f'"{name}"' for name in NAMES)


@dataclass(frozen=True)
class StateSeen:
    """kept[p]: copies of the three tensors of parameter p, flat; None where there are none yet.

    seen, expected: what is against the contract, in words; "" when nothing is. reason: that of the verdict.
    """

    kept: list[dict[str, torch.Tensor] | None] = field(default_factory=list)
    reason: str = ""
    seen: str = ""
    expected: str = ""


def look_inside(engine: Any, parameters: Sequence[torch.Tensor], stepped: Collection[int]) -> StateSeen:
    """stepped: places of the parameters that have been updated, which must have a state by now."""
    state = getattr(engine, "state", None)
    if not isinstance(state, Mapping):
        said = "has no attribute state" if state is None else f"has a state that is a {type(state).__name__}"
        return StateSeen([], "signature", f"the engine {said}", f"self.state: {CONTRACT}")
    kept: list[dict[str, torch.Tensor] | None] = []
    for place, parameter in enumerate(parameters):
        # Not `parameter in state`: beside a key id(parameter), which has the same hash, it would compare elements.
        entry = next((value for key, value in state.items() if key is parameter), None)
        if place not in stepped:
            kept.append(None)
            continue
        fault = _fault(place, parameter, entry, state, parameters)
        if fault is not None:
            return fault
        assert entry is not None  # else it were a fault
        kept.append({name: entry[name].detach().reshape(-1).clone() for name in NAMES})
    return _plain_count(state, parameters, stepped) or StateSeen(kept)


def _fault(
    place: int, parameter: torch.Tensor, entry: Any, state: Mapping, parameters: Sequence[torch.Tensor]
) -> StateSeen | None:
    if entry is None:
        keys = sorted({type(key).__name__ for key in state})
        said = f"its keys are of type {' and '.join(keys)}" if keys else "it is empty"
        wanted = f"the parameters themselves are the keys: {CONTRACT}"
        return StateSeen([], "signature", f"self.state has no entry for parameter {place}; {said}", wanted)
    if not isinstance(entry, Mapping):
        said = f"self.state[parameter {place}] is a {type(entry).__name__}"
        return StateSeen([], "signature", said, CONTRACT)
    for name in NAMES:
        tensor = entry.get(name)
        what = f'"{name}" of parameter {place} in self.state'
        if not isinstance(tensor, torch.Tensor):
            has = ", ".join(f'"{key}"' for key in entry) or "nothing"
            said = f"{what} is {'missing' if name not in entry else f'a {type(tensor).__name__}'}; there is {has}"
            return StateSeen([], "signature", said, f"{CONTRACT}: later labs count by these names")
        if tensor.dtype != torch.float32:
            wanted = "float32, whatever the parameter is: small changes must add up in it"
            return StateSeen([], "memory", f"{what} is {str(tensor.dtype).removeprefix('torch.')}", wanted)
        if tensor.numel() != parameter.numel():
            said = f"{what} has {tensor.numel()} elements"
            return StateSeen([], "memory", said, f"{parameter.numel()}, as many as the parameter")
        if any(_shares(tensor, other) for other in parameters):
            said = f"{what} and a parameter share one memory: 12 bytes per element are not held"
            wanted = (
                "memory of its own. float(), to() and detach() make no copy of float32, copy=True does; copy_() writes"
            )
            return StateSeen([], "memory", said, wanted)
    return None


def _shares(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr() != 0


def _plain_count(state: Mapping, parameters: Sequence[torch.Tensor], stepped: Collection[int]) -> StateSeen | None:
    """A fault when every entry has a further tensor of one element; larger ones are found where memory is measured."""
    entries = [value for key, value in state.items() if any(key is parameters[place] for place in stepped)]
    for name in entries[0] if entries else ():
        values = [entry.get(name) for entry in entries]
        tensors = [value for value in values if isinstance(value, torch.Tensor)]
        if name not in NAMES and len(tensors) == len(entries) and all(one.numel() == 1 for one in tensors):
            if len(entries) == 1 and parameters[min(stepped)].numel() == 1:
                continue
            held = tensors[0].element_size()
            said = f'"{name}" in self.state is a tensor: 12 bytes per element, and {held} per parameter'
            return StateSeen([], "memory", said, "a count is a plain number: 12 bytes per element, and no more")
    return None
