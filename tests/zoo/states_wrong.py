"""Lab 01: wrong counts of model states."""

from __future__ import annotations

import pickle
import sys

import torch

from . import wrong
from .states_right import BYTES


def parameters_and_gradients(model):
    parameters = list(model.parameters())
    return parameters, [p.grad for p in parameters if p.grad is not None]


def values_in(optimizer):
    return [v for state in optimizer.state.values() for v in state.values() if torch.is_tensor(v)]


def storages(tensors):
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


def counted(memory, model, optimizer):
    parameters, gradients = parameters_and_gradients(model)
    return {"weights": memory(parameters), "gradients": memory(gradients), "optimizer": memory(values_in(optimizer))}


@wrong(BYTES, reason="values", says=r'"weights" is 58(?s:.*)232(?s:.*)elements, not of bytes')
def counts_elements(model, optimizer):
    """numel() alone."""
    return counted(lambda tensors: sum(t.numel() for t in tensors), model, optimizer)


@wrong(BYTES, reason="values", says=r"float16(?s:.*)not always 4")
def four_bytes_each(model, optimizer):
    """Every element is taken for fp32."""
    return counted(lambda tensors: sum(4 * t.numel() for t in tensors), model, optimizer)


@wrong(BYTES, reason="values", says=r"share(?s:.*)untyped_storage|memory that several")
def by_elements_of_each_tensor(model, optimizer):
    """numel times element_size: right until memory is shared or sliced."""
    return counted(lambda tensors: sum(t.numel() * t.element_size() for t in tensors), model, optimizer)


@wrong(
    BYTES,
    reason="values",
    says=r"two parameters that share one memory(?s:.*)memory that several tensors share counts once",
)
def storages_without_a_set(model, optimizer):
    """Adds up storages, each as often as there are tensors in it."""
    return counted(lambda tensors: sum(t.untyped_storage().nbytes() for t in tensors), model, optimizer)


@wrong(BYTES, reason="values", says="views of one buffer")
def elements_once_by_address(model, optimizer):
    """Tensors with one address count once, but by their elements."""

    def memory(tensors):
        return sum({t.data_ptr(): t.numel() * t.element_size() for t in tensors}.values())

    return counted(memory, model, optimizer)


@wrong(BYTES, reason="values", says=r"views of one buffer|slice of a larger")
def storages_by_the_tensors_address(model, optimizer):
    """Whole storages, but told apart by where the tensors begin: views of one buffer count the buffer again."""

    def memory(tensors):
        return sum({t.data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())

    return counted(memory, model, optimizer)


@wrong(BYTES, reason="values", says=r"two parameters that share")
def once_per_parameter_object(model, optimizer):
    """A set of the tensors themselves: two parameters over one memory are two."""
    return counted(lambda tensors: sum(t.untyped_storage().nbytes() for t in set(tensors)), model, optimizer)


@wrong(BYTES, reason="values", says=r"BatchNorm(?s:.*)buffers are no model state")
def buffers_too(model, optimizer):
    """Counts the buffers among the weights."""
    found = counted(storages, model, optimizer)
    return {**found, "weights": storages([*model.parameters(), *model.buffers()])}


@wrong(BYTES, reason="values", says=r"BatchNorm(?s:.*)buffers are no model state")
def the_state_dict(model, optimizer):
    """model.state_dict() has the buffers too."""
    found = counted(storages, model, optimizer)
    return {**found, "weights": storages(model.state_dict().values())}


@wrong(BYTES, reason="values", says=r"frozen layer(?s:.*)frozen parameters take memory")
def trained_parameters_only(model, optimizer):
    """Leaves out what does not require a gradient."""
    found = counted(storages, model, optimizer)
    return {**found, "weights": storages(p for p in model.parameters() if p.requires_grad)}


@wrong(BYTES, reason="values", says=r'before any backward: "gradients" is 232(?s:.*)not None')
def gradients_are_as_large_as_weights(model, optimizer):
    """Takes for granted that every parameter has a gradient."""
    found = counted(storages, model, optimizer)
    return {**found, "gradients": found["weights"]}


@wrong(BYTES, reason="crash", says=r"'NoneType' object has no attribute 'untyped_storage'")
def forgets_that_grad_can_be_none(model, optimizer):
    """p.grad.untyped_storage() of a parameter without gradient."""
    return {
        "weights": storages(model.parameters()),
        "gradients": storages([p.grad for p in model.parameters()]),
        "optimizer": storages(values_in(optimizer)),
    }


@wrong(BYTES, reason="values", says=r"AdamW, after a step(?s:.*)a step count that is a tensor")
def moments_only(model, optimizer):
    """Leaves out 0-d tensors."""
    found = counted(storages, model, optimizer)
    return {**found, "optimizer": storages(v for v in values_in(optimizer) if v.dim())}


@wrong(BYTES, reason="values", says=r'"optimizer" is 464')
def twice_the_weights(model, optimizer):
    """Adam has two moments, so the optimizer holds twice the weights, even before the first step and with SGD."""
    found = counted(storages, model, optimizer)
    return {**found, "optimizer": 2 * found["weights"]}


@wrong(BYTES, reason="values", says=r'"optimizer" is (0|464)')
def the_names_of_adam(model, optimizer):
    """Looks for exp_avg and exp_avg_sq by name."""
    found = counted(storages, model, optimizer)
    moments = [s[n] for s in optimizer.state.values() for n in ("exp_avg", "exp_avg_sq") if n in s]
    return {**found, "optimizer": storages(moments)}


@wrong(BYTES, reason="crash", says=r"'(int|float|str|NoneType)' object has no attribute")
def every_value_is_a_tensor(model, optimizer):
    """Does not look whether a value is a tensor."""
    found = counted(storages, model, optimizer)
    return {**found, "optimizer": storages(v for state in optimizer.state.values() for v in state.values())}


@wrong(BYTES, reason="values", says=r"None in it|momentum|SGD")
def numbers_take_eight_bytes(model, optimizer):
    """Counts numbers that are no tensors, too."""
    found = counted(storages, model, optimizer)
    plain = [v for state in optimizer.state.values() for v in state.values() if not torch.is_tensor(v)]
    return {**found, "optimizer": found["optimizer"] + 8 * len(plain)}


@wrong(BYTES, reason="values", says=r"one layer only")
def what_the_optimizer_knows(model, optimizer):
    """Weights and gradients of the optimizer's parameters only."""
    known = list(optimizer.state) or list(model.parameters())
    if any(not p.requires_grad for p in model.parameters()):
        known = list(model.parameters())
    return {
        "weights": storages(known),
        "gradients": storages(p.grad for p in known if p.grad is not None),
        "optimizer": storages(values_in(optimizer)),
    }


@wrong(BYTES, reason="values", says=r"a tied weight")
def tied_weights_twice(model, optimizer):
    """Walks through the modules: a tied weight is met twice."""
    found = counted(storages, model, optimizer)
    each = [p for module in model.modules() for p in module.parameters(recurse=False)]
    return {**found, "weights": sum(storages([p]) for p in each)}


@wrong(BYTES, reason="values", says=r"it returned a int(?s:.*)dict")
def one_number(model, optimizer):
    """The sum of everything."""
    return sum(counted(storages, model, optimizer).values())


@wrong(BYTES, reason="values", says=r"it returned None")
def prints(model, optimizer):
    """Prints the numbers instead of returning them."""
    print(counted(storages, model, optimizer))


@wrong(BYTES, reason="values", says=r"keys \['gradients', 'optimizer', 'parameters'\]")
def another_name(model, optimizer):
    """Says parameters instead of weights."""
    found = counted(storages, model, optimizer)
    return {"parameters": found.pop("weights"), **found}


@wrong(BYTES, reason="values", says=r"a whole number of bytes")
def in_kilobytes(model, optimizer):
    """Divides by 1000."""
    return {kind: size / 1000 for kind, size in counted(storages, model, optimizer).items()}


@wrong(BYTES, reason="values", says=r'"weights" is')
def size_of_the_objects(model, optimizer):
    """sys.getsizeof knows the Python object, not the memory of its numbers."""
    return counted(lambda tensors: sum(sys.getsizeof(t) for t in tensors), model, optimizer)


@wrong(BYTES, reason="values", says=r'"weights" is')
def size_of_a_pickle(model, optimizer):
    """The length of a pickle has names and shapes in it."""
    return counted(lambda tensors: sum(len(pickle.dumps(t.detach())) for t in tensors), model, optimizer)


@wrong(BYTES, reason="values", says=r"have been changed(?s:.*)only counting")
def empties_the_gradients(model, optimizer):
    """Sets the gradients to zero on the way."""
    found = counted(storages, model, optimizer)
    for p in model.parameters():
        if p.grad is not None:
            p.grad.zero_()
    return found


@wrong(BYTES, reason="signature", says=r"2 arguments: \(model, optimizer\)")
def only_a_model(model):
    """Takes one argument."""


@wrong(BYTES, reason="not written", says="not written yet")
def stub(model, optimizer):
    """As handed out."""
    raise NotImplementedError("not written yet")


def optimizer_by(memory):
    """A right count, but for the optimizer's state, which is counted by `memory(optimizer)`."""
    return lambda model, optimizer: {**counted(storages, model, optimizer), "optimizer": memory(optimizer)}


@wrong(BYTES, reason="values", says=r"three flat buffers(?s:.*)counted by elements of each tensor")
def the_optimizers_elements(model, optimizer):
    """Weights and gradients by storage, the optimizer by numel."""
    return optimizer_by(lambda o: sum(v.numel() * v.element_size() for v in values_in(o)))(model, optimizer)


@wrong(BYTES, reason="values", says=r"three flat buffers(?s:.*)share counts once")
def the_optimizers_storages_without_a_set(model, optimizer):
    """Every tensor's whole storage, each time."""
    return optimizer_by(lambda o: sum(v.untyped_storage().nbytes() for v in values_in(o)))(model, optimizer)


@wrong(BYTES, reason="values", says=r"three flat buffers(?s:.*)share counts once")
def the_optimizers_storages_parameter_by_parameter(model, optimizer):
    """A new set for each parameter's state."""

    def memory(o):
        return sum(storages(v for v in state.values() if torch.is_tensor(v)) for state in o.state.values())

    return optimizer_by(memory)(model, optimizer)


@wrong(BYTES, reason="values", says=r"views of one buffer: \"gradients\" is (?s:.*)counted by elements")
def gradients_by_elements(model, optimizer):
    """Weights and optimizer by storage, gradients by numel."""
    _, gradients = parameters_and_gradients(model)
    return {
        **counted(storages, model, optimizer),
        "gradients": sum(g.numel() * g.element_size() for g in gradients),
    }


@wrong(BYTES, reason="values", says=r"of type float(?s:.*)an int")
def whole_floats(model, optimizer):
    """2.0 is not 2."""
    return {kind: float(size) for kind, size in counted(storages, model, optimizer).items()}
