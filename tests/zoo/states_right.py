"""Lab 01: right counts of model states, written in their own ways."""

from __future__ import annotations

import numpy as np
import torch

from . import right

BYTES = "01.model_state_bytes"


@right(BYTES)
def by_address(model, optimizer):
    """A dict from the storages' addresses to their sizes."""

    def memory(tensors):
        return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())

    state = [v for s in optimizer.state.values() for v in s.values() if isinstance(v, torch.Tensor)]
    return {
        "weights": memory(model.parameters()),
        "gradients": memory(p.grad for p in model.parameters() if p.grad is not None),
        "optimizer": memory(state),
    }


@right(BYTES)
def with_loops_and_sets(model, optimizer):
    """Plain loops, one set for everything, storages compared by identity of their memory."""
    seen = set()
    sizes = {"weights": 0, "gradients": 0, "optimizer": 0}

    def count(kind, tensor):
        storage = tensor.untyped_storage()
        if storage._cdata not in seen:
            seen.add(storage._cdata)
            sizes[kind] += storage.nbytes()

    for parameter in model.parameters():
        count("weights", parameter)
        if parameter.grad is not None:
            count("gradients", parameter.grad)
    for state in optimizer.state.values():
        for value in state.values():
            if torch.is_tensor(value):
                count("optimizer", value)
    return sizes


@right(BYTES)
def goes_down_into_containers(model, optimizer):
    """Walks through whatever the optimizer's state is made of."""

    def tensors(thing):
        if isinstance(thing, torch.Tensor):
            yield thing
        elif isinstance(thing, dict):
            for value in thing.values():
                yield from tensors(value)
        elif isinstance(thing, (list, tuple)):
            for value in thing:
                yield from tensors(value)

    def memory(found):
        storages = {one.untyped_storage().data_ptr(): one.untyped_storage() for one in found}
        return sum(len(storage) for storage in storages.values())

    parameters = dict(model.named_parameters()).values()
    return {
        "optimizer": memory(tensors(dict(optimizer.state))),
        "weights": memory(parameters),
        "gradients": memory([p.grad for p in parameters if p.grad is not None]),
    }


@right(BYTES)
def by_parameter(model, optimizer):
    """Asks the optimizer for the state of each of the model's parameters; numpy sums."""

    def memory(found):
        pairs = {(one.untyped_storage().data_ptr(), one.untyped_storage().nbytes()) for one in found}
        return np.sum([size for _, size in pairs], dtype=np.int64)

    parameters = list(model.parameters())
    states = [optimizer.state.get(parameter, {}) for parameter in parameters]
    return {
        "weights": memory(parameters),
        "gradients": memory(p.grad for p in parameters if p.grad is not None),
        "optimizer": memory(v for state in states for v in state.values() if hasattr(v, "untyped_storage")),
    }


@right(BYTES)
def as_typed_storages(model, optimizer):
    """Elements of the whole storage times the element size; 0-d tensors as results."""

    def memory(found):
        sizes = {
            one.untyped_storage().data_ptr(): one.untyped_storage().size() // one.element_size() * one.element_size()
            for one in found
        }
        return torch.tensor(sum(sizes.values()))

    gradients = filter(lambda gradient: gradient is not None, (p.grad for p in model.parameters()))
    values = [value for state in optimizer.state.values() for value in state.values()]
    return {
        "weights": memory(model.parameters()),
        "gradients": memory(gradients),
        "optimizer": memory(filter(torch.is_tensor, values)),
    }
