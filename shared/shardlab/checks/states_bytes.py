"""Cases for counting model states: what was counted is held against an independent count."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from .notes import Finding, Judged, Prepared
from .states_models import MAKERS
from .trial import digest_of

KINDS = ("weights", "gradients", "optimizer")


@dataclass(frozen=True)
class BytesCase:
    """name: what a learner reads, and which of `MAKERS` makes the model and the optimizer."""

    name: str

    def prepare(self, rank: int, world_size: int) -> Prepared:
        torch.manual_seed(0)
        model, optimizer = MAKERS[self.name]()
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
    return [BytesCase(name) for name in MAKERS]


def held(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of the memory behind some tensors, each piece of it once."""
    storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values())


def state_tensors(optimizer: Any) -> list[torch.Tensor]:
    return [one for state in optimizer.state.values() for one in state.values() if isinstance(one, torch.Tensor)]


def right_bytes(model: nn.Module, optimizer: Any) -> dict[str, int]:
    parameters = list(model.parameters())
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    return {"weights": held(parameters), "gradients": held(gradients), "optimizer": held(state_tensors(optimizer))}


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
            operator.index(returned[kind])
        except TypeError:
            said = f'"{kind}" is {returned[kind]!r}, of type {type(returned[kind]).__name__}'
            return Finding(said, "a whole number of bytes, an int")
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
    kinds: dict[str, list[Any]] = {
        "weights": parameters,
        "gradients": gradients,
        "optimizer": state_tensors(optimizer),
    }
    tensors = kinds[kind]
    total, elements = held(tensors), sum(map(torch.numel, tensors))
    sizes = {one.element_size() for one in tensors}
    found = [
        ("that is the number of elements, not of bytes", elements),
        *(
            (f"bytes per element are not always {size}: tensor.element_size() knows", size * elements)
            for size in (4, 2)
            if sizes != {size}
        ),
        # In some cases this and the next give one number; then these words are true of both.
        (
            "memory that several tensors share counts once: tensor.untyped_storage().data_ptr() tells one from another",
            sum(one.untyped_storage().nbytes() for one in tensors),
        ),
        (
            "counted by elements of each tensor. A slice keeps all of the memory behind it alive, and several tensors"
            " can share one: tensor.untyped_storage() is that memory, .nbytes() its size",
            sum(one.numel() * one.element_size() for one in tensors),
        ),
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
            (
                "memory that the states of several parameters share counts once, across all of them",
                sum(
                    held(one for one in state.values() if isinstance(one, torch.Tensor))
                    for state in optimizer.state.values()
                ),
            ),
            ("a step count that is a tensor holds bytes too", held(large)),
            ("that is twice the weights; look at what the optimizer really holds", twice),
            (
                "that is exp_avg and exp_avg_sq only; optimizers have other tensors too",
                held(one for one in moments if isinstance(one, torch.Tensor)),
            ),
        ]
    return found
