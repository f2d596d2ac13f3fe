"""The dispatch mode of a metered rank: sees every torch operation, for memory, and C++ code's communication calls."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import ProcessGroup, Work
from torch.utils._python_dispatch import TorchDispatchMode

from .memory import MemoryMeter
from .signatures import signature_of_operator, tensors_in
from .tap import Tap

_WAIT_TENSOR = torch.ops._c10d_functional.wait_tensor.default
_DETACH = torch.ops.aten.detach.default


class MeterMode(TorchDispatchMode):
    """Active while the learner's function runs, in its thread. Autograd's threads inherit it."""

    def __init__(self, tap: Tap, memory: MemoryMeter) -> None:
        super().__init__()
        self.tap, self.memory = tap, memory
        self._functional: dict[int, Any] = {}  # calls of functional collectives, by the address of their result

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if types and any(hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented  # a DTensor, say: it comes again as operations on the plain tensors inside
        kwargs = kwargs or {}
        self.tap.status.progressed()
        noted = None
        if func.namespace in ("c10d", "_c10d_functional") and not self.tap.inside_call:
            if func is _WAIT_TENSOR:
                return self._wait(*args)
            noted = self._note(func, args)
        try:
            result = func(*args, **kwargs)
        except Exception:
            if noted is not None:
                self.tap.withdraw(*noted)
            raise
        if noted is not None:
            result = self._follow(result, *noted)
        self.memory.saw(args)
        self.memory.saw((result,))
        if func is _DETACH and _accumulating_gradient():
            self.memory.label("gradients", [result], override=False)
        return result

    def _note(self, func: Any, args: tuple) -> Any:
        signature = signature_of_operator(func._schema.name)
        if signature is None:
            return None
        named = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False))
        root = named.get("root_rank", named.get("dst", named.get("src")))
        tensors = [] if signature.op == "barrier" else tensors_in(args[signature.tensors])
        return self.tap.note(signature, tensors, _group(named), root, named.get("tag", 0))

    def _follow(self, result: Any, call: Any, turn: Any) -> Any:
        """Watches over a call that C++ code made. Returns what that code gets as the operation's result."""
        several = isinstance(result, (tuple, list)) and len(result) > 0
        work = result[-1] if several else result
        if not isinstance(work, torch.ScriptObject):
            for tensor in tensors_in(result):
                self._functional[tensor.untyped_storage()._cdata] = (call, turn)
            return result
        handle = self.tap.adopt(Work.unbox(work), call, turn)
        return (*result[:-1], handle.boxed()) if several else handle.boxed()

    def _wait(self, tensor: torch.Tensor) -> torch.Tensor:
        """Functional collectives hand out tensors, and `wait_tensor` waits for one."""
        known = self._functional.pop(tensor.untyped_storage()._cdata, None)
        if known is None:
            return _WAIT_TENSOR(tensor)
        call, turn = known
        return self.tap.blocked(call, turn, lambda: _WAIT_TENSOR(tensor))


def _accumulating_gradient() -> bool:
    """Whether autograd is just putting a gradient into a leaf's `.grad`, which ends with a detach of it."""
    node = torch._C._current_autograd_node()
    return node is not None and node.name().endswith("AccumulateGrad")


def _group(named: dict[str, Any]) -> ProcessGroup:
    group: Any = named.get("process_group", named.get("group_name"))
    if isinstance(group, str):
        return dist.distributed_c10d._resolve_process_group(group)  # type: ignore[arg-type]
    return group if isinstance(group, ProcessGroup) else ProcessGroup.unbox(group)
