"""When each layer computes, seen through hooks that change nothing: for pictures of overlap.

Forward is what module hooks enclose. Backward is seen at the tensors between the layers. A layer's backward begins when
autograd takes up the gradient of the layer's output. It ends when autograd takes up the gradient of the layer's input:
what a forward made later, autograd runs first, so by then everything inside the layer is done, its parameters'
gradients and the hooks on them included. A layer without a gradient at its input (an embedding, whose input is
integers) has no such moment: it ends when the next layer's backward begins, or with the backward pass.

`register_full_backward_hook` is not used: it wraps a module's tensors in a function of its own, after which an
in-place operation on a layer's output raises an error that the plain model does not raise; and for a layer without a
gradient at its input it fires before that layer has computed anything.

On a GPU the spans tell when the CPU handed out the work, not when the GPU did it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from ..records import GradientReady, Span
from .instruments import current
from .tap import Tap

CONTAINERS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)


def layers_of(model: nn.Module) -> dict[str, nn.Module]:
    """The layers to watch, by name: the model's children, those of its lists and sequences one by one.

    What wraps a model in an attribute `module` (DistributedDataParallel) is looked through. A model without children is
    one layer.
    """
    model = unwrapped(model)
    layers = dict(_layers(model, ""))
    return layers or {type(model).__name__: model}


def unwrapped(model: nn.Module) -> nn.Module:
    while isinstance(inner := getattr(model, "module", None), nn.Module):
        model = inner
    return model


def _layers(module: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module]]:
    for name, child in module.named_children():
        if isinstance(child, CONTAINERS):
            yield from _layers(child, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", child


@contextmanager
def watch_layers(model: nn.Module) -> Iterator[None]:
    """While this is open, each layer leaves spans on this rank's record, and each gradient the time it was ready.

    Also `DistributedDataParallel` and the like may be given. Values and gradients stay as they are to the last bit.
    Outside a metered launch it does nothing, nor where the model is watched already.
    """
    instruments = current()
    watched = instruments.tap.spans.watched if instruments is not None else set()
    me = id(unwrapped(model))
    if instruments is None or not instruments.tap.spans.keep or me in watched:
        yield
        return
    watch = _Watch(instruments.tap)
    watched.add(me)
    try:
        for name, layer in layers_of(model).items():
            watch.layer(name, layer)
        for number, (name, parameter) in enumerate(unwrapped(model).named_parameters()):
            if parameter.requires_grad:
                watch.parameter(number, name, parameter)
        with watch.waits_for_threads():
            yield
    finally:
        watched.discard(me)
        watch.stop()


@contextmanager
def span(label: str, kind: str = "other") -> Iterator[None]:
    """Leaves a span on this rank's record: "optimizer", say. kind: "forward", "backward" or "other".

    Outside a metered launch it does nothing.
    """
    instruments = current()
    if instruments is None:
        yield
        return
    with instruments.tap.spans.during(kind, label):
        yield


class _Watch:
    """The hooks of one `watch_layers`, and the spans that are open."""

    def __init__(self, tap: Tap) -> None:
        self.tap, self.spans = tap, tap.spans
        self._thread = threading.get_ident()
        self._on = True  # a hook on a tensor outlives the watch
        self._handles: list[Any] = []
        self._forward = threading.local()
        self._backward: dict[int, Span] = {}  # the open one of each backward pass; checkpointing nests them
        self._passes: set[int] = set()

    def stop(self) -> None:
        for handle in self._handles:
            handle.remove()
        for task in list(self._backward):
            self._end(task)
        self._on = False

    def layer(self, name: str, layer: nn.Module) -> None:
        def before(_: nn.Module, args: Any, kwargs: Any) -> None:
            kind = "forward" if torch._C._current_graph_task_id() == -1 else "recompute"
            given = _differentiable((args, kwargs))
            made_by = {id(tensor): tensor.grad_fn for tensor in given}
            self._open_forward().append((name, self.spans.begin(kind, name), made_by))
            for tensor in given:
                self._on_gradient(tensor, self._leave, name)

        def after(_: nn.Module, args: Any, kwargs: Any, result: Any) -> None:
            opened = self._open_forward()
            made_by: dict[int, Any] = {}
            # An exception that no hook sees (an interrupt) leaves inner ones open.
            while opened:
                ending, span, made_by = opened.pop()
                self.spans.end(span)
                if ending == name:
                    break
            for tensor in _differentiable(result):
                # A layer that hands on its input has no backward; one that works in place has.
                if id(tensor) not in made_by or made_by[id(tensor)] is not tensor.grad_fn:
                    self._on_gradient(tensor, self._enter, name)

        self._handles.append(layer.register_forward_pre_hook(before, with_kwargs=True))
        # Checkpointing leaves a forward that it repeats by an exception, as soon as it has what it needs.
        self._handles.append(layer.register_forward_hook(after, with_kwargs=True, always_call=True))

    def parameter(self, number: int, name: str, parameter: nn.Parameter) -> None:
        numel, dtype = parameter.numel(), str(parameter.dtype).removeprefix("torch.")

        def ready(_: torch.Tensor) -> None:
            # Before it is added to .grad, hence before any hook that then sends it off.
            self.spans.gradients.append(GradientReady(self.spans.rank, name, number, numel, dtype, self.spans.now()))

        self._handles.append(parameter.register_hook(ready))

    def _open_forward(self) -> list[tuple[str, Span, dict[int, Any]]]:
        """Of this thread: each layer whose forward is open, its span, and what made its inputs."""
        if not hasattr(self._forward, "opened"):
            self._forward.opened = []
        return self._forward.opened

    def _on_gradient(self, tensor: torch.Tensor, action: Callable[[str], None], name: str) -> None:
        def hook(_: torch.Tensor) -> None:
            if self._on:
                action(name)

        handle = tensor.register_hook(hook)
        if tensor.is_leaf:  # another's hooks go with the graph
            self._handles.append(handle)

    def _enter(self, name: str) -> None:
        """Autograd takes up the gradient of a layer's output."""
        task = torch._C._current_graph_task_id()
        opened = self.spans.begin("backward", name)
        self._end(task, opened.began)
        self._backward[task] = opened
        if task not in self._passes:
            self._passes.add(task)
            # The first callback of all, so DDP's own, which waits for the reductions, comes after it.
            when_done(lambda: self._end_pass(task))

    def _leave(self, name: str) -> None:
        """Autograd takes up the gradient of a layer's input."""
        task = torch._C._current_graph_task_id()
        opened = self._backward.get(task)
        if opened is not None and opened.label == name:
            self._end(task)

    def _end(self, task: int, time: float | None = None) -> None:
        opened = self._backward.pop(task, None)
        if opened is not None:
            self.spans.end(opened, time)

    def _end_pass(self, task: int) -> None:
        """Autograd has run everything. What follows in backward() are callbacks: DDP waits for its reductions there."""
        self._end(task)
        self._passes.discard(task)
        callbacks = self.spans.begin("waiting", "the end of backward")
        when_done(lambda: self.spans.end(callbacks))

    @contextmanager
    def waits_for_threads(self) -> Iterator[None]:
        """A thread that stands still for another one (a ring in a thread of its own, say) does not compute."""
        with ExitStack() as stack:
            stack.enter_context(self._waits_are_seen(threading.Thread, "join", "a thread"))
            stack.enter_context(self._waits_are_seen(threading.Condition, "wait", "a thread"))
            stack.enter_context(self._waits_are_seen(torch._C.Future, "wait", "a future"))
            yield

    @contextmanager
    def _waits_are_seen(self, owner: type, name: str, label: str) -> Iterator[None]:
        original = getattr(owner, name)

        def wait(waiting: Any, *args: Any, **kwargs: Any) -> Any:
            if self.tap.inside_call or not self._watched_here():  # inside a call, the tap sees the wait
                return original(waiting, *args, **kwargs)
            with self.spans.during("waiting", label):
                return original(waiting, *args, **kwargs)

        setattr(owner, name, wait)
        try:
            yield
        finally:
            setattr(owner, name, original)

    def _watched_here(self) -> bool:
        """Whether this thread trains. Others (data loaders, the link) wait all the time."""
        here = threading.get_ident()
        return here == self._thread or any(opened.thread == here for opened in list(self._backward.values()))


def when_done(callback: Callable[[], None]) -> None:
    """Inside a backward pass: calls `callback` when autograd has run everything, after those that asked before."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def _differentiable(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
