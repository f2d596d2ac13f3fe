"""Collectives that complete as late as they may: the sibling of held.py for operations among all ranks.

An asynchronous collective promises its result after `wait()`, and may read its inputs until then. On a fast machine it
is usually done at once, and code that forgets a wait passes by luck. Here the operation runs on copies; the tensors it
is to fill are unusable until `wait()` of this very operation puts the result there. Whoever writes to a tensor of an
operation that is on its way gets an unusable result, every time.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch._C._distributed_c10d import Work

from .held import poison, unseen
from .signatures import Signature, tensors_in

FUTURE_SECONDS = 0.1  # after which a future that somebody asked for is completed: late, but without a wait()


@dataclass(frozen=True)
class Part:
    """A tensor of the caller's that is on its way. held: what it must still hold when the operation is waited for."""

    tensor: torch.Tensor
    held: torch.Tensor

    @property
    def untouched(self) -> bool:
        same_size = self.tensor.untyped_storage().nbytes() >= self.held.untyped_storage().nbytes()
        return same_size and torch.equal(_bits(self.tensor), _bits(self.held))


class LateCollective(Work):
    """The handle of a collective on copies. wait() delivers the result into the caller's tensors."""

    def __init__(self, collectives: LateCollectives, real: Work, results: list, outputs: list, parts: list) -> None:
        super().__init__()
        self._collectives, self._real = collectives, real
        self._results, self._outputs, self._parts = results, outputs, parts
        self._lock = threading.Lock()
        self._delivered = False
        self._future: Any = None

    def wait(self, timeout: Any = None) -> bool:
        return self._collectives.waited(self, self._deliver)

    def _deliver(self) -> bool:
        with self._lock:
            if not self._delivered:
                self._collectives.plain_wait(self._real)
                self._delivered = True
                with unseen():
                    untouched = all(part.untouched for part in self._parts)
                    for output, result in zip(self._outputs, self._results, strict=True):
                        if output.untyped_storage().nbytes() == 0 and output.numel():
                            continue  # freed while it was on its way: there is nowhere to put the result
                        output.copy_(result) if untouched else output.fill_(poison(output.dtype))
                self._parts = []
        return True

    def is_completed(self) -> bool:
        done = self._real.is_completed() and self._deliver()
        if done:
            self._collectives.completed(self)
        return done

    def get_future(self) -> Any:
        if self._future is None:
            self._future = torch.futures.Future()
            timer = threading.Timer(FUTURE_SECONDS, self._complete_future)
            timer.daemon = True
            timer.start()
        return self._future

    def _complete_future(self) -> None:
        self._deliver()
        self._collectives.completed(self)
        self._future.set_result(list(self._outputs))

    def exception(self) -> Any:
        return self._real.exception()

    def result(self) -> Any:
        self._deliver()
        return list(self._outputs)


class LateCollectives:
    """Makes the collectives of one rank late. waited, plain_wait: see held.HeldSends. completed(work) tells the tap."""

    def __init__(
        self,
        waited: Callable[[Work, Callable], Any],
        plain_wait: Callable[[Work], Any],
        completed: Callable[[Work], None],
    ) -> None:
        self.waited, self.plain_wait, self.completed = waited, plain_wait, completed

    def issue(self, signature: Signature, original: Callable, group: Any, args: tuple, rank_is_root: bool) -> Work:
        """rank_is_root: of a broadcast. Its root only reads."""
        first, *rest = args
        outputs = tensors_in(first)
        inputs = tensors_in(rest[0]) if signature.tensors == 1 or signature.op == "scatter" else []
        only_read = signature.op == "reduce" or (signature.op == "broadcast" and rank_is_root)
        with unseen():
            copies = _copied(first)
            if inputs:
                rest[0] = _copied(rest[0])
        work = original(group, copies, *rest)
        with unseen():
            if not only_read:
                for output in outputs:
                    output.fill_(poison(output.dtype))
            parts = [Part(tensor, tensor.clone()) for tensor in outputs + inputs]
        return LateCollective(self, work, tensors_in(copies), outputs, parts)


def _copied(argument: Any) -> Any:
    """The same tensor, list of tensors, or list of lists of them, as copies."""
    if isinstance(argument, torch.Tensor):
        return argument.clone(memory_format=torch.contiguous_format)
    return [_copied(item) for item in argument]


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """For comparing NaN with NaN."""
    return tensor.detach().contiguous().view(-1).view(torch.uint8)
