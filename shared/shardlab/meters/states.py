"""Finds out what tensors are for, so that memory can be told apart as parameters, gradients and optimizer state.

A module's parameters and their `.grad`, and the state of a `torch.optim` optimizer, are known to torch. They are looked
up at moments when they are sure to be in place: after a module's forward, after backward, around an optimizer step, and
at each communication call. Tensors that hand-written code keeps need `label`, which always wins.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_parameter_registration_hook,
)
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from .memory import Labels


class StateFinder:
    """Labels tensors for a `MemoryMeter`. Knows modules, not parameters: a weak reference to a tensor would keep
    `torch.utils.swap_tensors` (used by `module.to` of sharded modules) from working."""

    def __init__(self, memory: Labels, threads: bool = False) -> None:
        """threads: modules are at work in several threads. Then nobody's `.grad` is read before an optimizer steps:
        autograd writes it without the interpreter's lock, and reading it meanwhile can crash. Who gives the labels must
        see gradients as autograd accumulates them."""
        self.memory, self.threads = memory, threads
        self._modules: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
        self._adding = threading.Lock()  # a set must not grow while another thread lists it
        self._handles: list[Any] = []
        self._set_state = torch.nn.Module.__setstate__
        self._backward = torch.autograd.backward

    def start(self) -> None:
        finder = self

        def set_state(module: torch.nn.Module, state: Any) -> None:  # of a module that was copied or unpickled
            finder._set_state(module, state)
            finder._module_seen(module)

        def backward(*args: Any, **kwargs: Any) -> None:
            finder._backward(*args, **kwargs)
            if not finder.threads:
                finder.look()

        self._handles = [
            register_module_parameter_registration_hook(
                lambda module, name, parameter: self._registered(module, parameter)
            ),
            register_module_forward_hook(lambda module, args, output: self._module_seen(module)),
            register_optimizer_step_pre_hook(lambda optimizer, args, kwargs: self._stepping(optimizer)),
            register_optimizer_step_post_hook(lambda optimizer, args, kwargs: self._stepping(optimizer)),
        ]
        torch.nn.Module.__setstate__ = set_state  # type: ignore[method-assign]
        torch.autograd.backward = backward

    def stop(self) -> None:
        for handle in self._handles:
            handle.remove()
        torch.nn.Module.__setstate__ = self._set_state  # type: ignore[method-assign]
        torch.autograd.backward = self._backward

    def look(self) -> None:
        """Labels the parameters and gradients that the known modules have now."""
        with self._adding:
            modules = list(self._modules)
        for module in modules:
            self._module_seen(module)

    def _registered(self, module: torch.nn.Module, parameter: Any) -> None:
        self._know(module)
        if parameter is not None:
            self._parameters([parameter])

    def _module_seen(self, module: torch.nn.Module) -> None:
        parameters = [parameter for parameter in module._parameters.values() if parameter is not None]
        if parameters:
            self._know(module)
            self._parameters(parameters)

    def _know(self, module: torch.nn.Module) -> None:
        with self._adding:
            self._modules.add(module)

    def _parameters(self, parameters: Iterable[torch.Tensor]) -> None:
        parameters = list(parameters)
        self.memory.label("parameters", parameters, override=False)
        if not self.threads:
            self._gradients(parameters)

    def _gradients(self, parameters: Iterable[torch.Tensor]) -> None:
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        self.memory.label("gradients", gradients, override=False)

    def _stepping(self, optimizer: torch.optim.Optimizer) -> None:
        for group in optimizer.param_groups:
            self._parameters(group["params"])
            self._gradients(group["params"])
        states = [value for state in optimizer.state.values() for value in state.values()]
        tensors = [value for value in states if isinstance(value, torch.Tensor)]
        self.memory.label("optimizer", tensors, override=False)
