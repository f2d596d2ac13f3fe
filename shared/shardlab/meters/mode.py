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


class MeterMode(TorchDispatchMode):
    """Active while the learner's function runs. Autograd's threads inherit it; other threads do not."""

    def __init__(self, tap: Tap, memory: MemoryMeter) -> None:
        super().__init__()
        self.tap, self.memory = tap, memory

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self.tap.status.progressed()
        noted = None
        if func.namespace in ("c10d", "_c10d_functional") and not self.tap.inside_call:
            noted = self._note(func, args)
        try:
            result = func(*args, **kwargs)
        except Exception:
            if noted is not None:
                self.tap.withdraw(*noted)
            raise
        if noted is not None:
            self._follow(result, *noted)
        self.memory.saw(tensors_in(args))
        self.memory.saw(tensors_in(result))
        return result

    def _note(self, func: Any, args: tuple) -> Any:
        signature = signature_of_operator(func._schema.name)
        if signature is None:
            return None
        named = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False))
        root = named.get("root_rank", named.get("dst", named.get("src")))
        tensors = [] if signature.op == "barrier" else tensors_in(args[signature.tensors])
        return self.tap.note(signature, tensors, _group(named), root, named.get("tag", 0))

    def _follow(self, result: Any, call: Any, turn: Any) -> None:
        work = result[-1] if isinstance(result, (tuple, list)) and result else result
        if isinstance(work, torch.ScriptObject):
            self.tap.adopt(Work.unbox(work), call, turn)


def _group(named: dict[str, Any]) -> ProcessGroup:
    group: Any = named.get("process_group", named.get("group_name"))
    if isinstance(group, str):
        return dist.distributed_c10d._resolve_process_group(group)  # type: ignore[arg-type]
    return group if isinstance(group, ProcessGroup) else ProcessGroup.unbox(group)
