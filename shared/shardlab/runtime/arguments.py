"""Checks what launch was given, and says what is wrong with it in one line."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from ..errors import UsageError
from ..meters import inside_rank
from ..records import Link
from .job import why_not

Call = tuple[Callable[..., Any], tuple, dict[str, Any]]
MOST_RANKS = 512


@dataclass(frozen=True)
class Backend:
    """device: "cpu" or "cuda". name: "gloo" or "nccl". why: the reason, in plain words."""

    device: str
    name: str
    why: str


_said: list[str] = []  # choices of "auto" that were told already: each is told once


def choose_backend(device: str, world_size: int, quiet: bool = False) -> Backend:
    """NCCL with one GPU per rank when device is "cuda", or "auto" and there are enough GPUs; else gloo on the CPU."""
    gpus = torch.cuda.device_count()
    has_nccl = dist.is_nccl_available()
    if device == "cuda" and (gpus < world_size or not has_nccl):
        reason = f"this machine has {gpus}" if gpus < world_size else "this torch was built without NCCL"
        raise UsageError(f'{world_size} ranks on device="cuda" need {world_size} GPUs and NCCL; {reason}. Try "auto".')
    if device == "cuda" or (device == "auto" and has_nccl and gpus >= world_size):
        chosen = Backend("cuda", "nccl", f"one GPU per rank, {gpus} found")
    elif device == "cpu":
        chosen = Backend("cpu", "gloo", "as asked")
    elif gpus:
        chosen = Backend("cpu", "gloo", f"{world_size} ranks need a GPU each, {gpus} found")
    else:
        chosen = Backend("cpu", "gloo", "no GPU found")
    if device == "auto" and not quiet and chosen.why not in _said:
        _said.append(chosen.why)
        place = "on GPUs" if chosen.device == "cuda" else "on the CPU"
        print(f"ShardLab runs the ranks {place}, backend {chosen.name} ({chosen.why}).")
    return chosen


def checked(
    fn: Any, world_size: Any, args: Any, kwargs: Any, device: Any, timeout: Any, slow_ranks: Any, link: Any
) -> Call:
    """The call that each rank will make. Raises UsageError naming the argument that cannot be used."""
    if inside_rank():
        raise UsageError("launch was called inside a rank. A rank is one process; only the notebook starts ranks.")
    if dist.is_available() and dist.is_initialized() and dist.get_backend() != "fake":
        raise UsageError(
            "The notebook's own process has called init_process_group, but it is no rank: launch starts the ranks and "
            "calls it for them. Call torch.distributed.destroy_process_group(), and leave init_process_group out."
        )
    call = checked_call(fn, args, kwargs)
    if isinstance(world_size, bool) or not isinstance(world_size, int):
        raise UsageError(f"world_size is the number of ranks, a whole number such as 4; got {_described(world_size)}.")
    if not 1 <= world_size <= MOST_RANKS:
        raise UsageError(f"world_size is the number of ranks, from 1 to {MOST_RANKS}; got {world_size}.")
    if device not in ("auto", "cpu", "cuda"):
        raise UsageError(f'device is "auto", "cpu" or "cuda"; got {_described(device)}.')
    if isinstance(timeout, bool) or not isinstance(timeout, (int, float)) or not timeout > 0:
        raise UsageError(f"timeout is a number of seconds above 0; got {_described(timeout)}.")
    if isinstance(slow_ranks, (str, bytes)) or not isinstance(slow_ranks, Collection):
        raise UsageError(f"slow_ranks is a set of ranks, such as {{0, 1}}; got {_described(slow_ranks)}.")
    strangers = [rank for rank in slow_ranks if rank not in range(world_size)]
    if strangers:
        raise UsageError(f"slow_ranks names ranks from 0 to {world_size - 1}; got {strangers[0]!r}.")
    _check_link(link, bool(slow_ranks))
    return call


def checked_call(fn: Any, args: Any, kwargs: Any, first: tuple = ()) -> Call:
    """The function and its arguments. first: arguments that it will be given before these."""
    if not callable(fn):
        raise UsageError(f"launch needs a function to run on every rank, got {_described(fn)}.")
    if isinstance(args, (str, bytes)) or not isinstance(args, Sequence):
        raise UsageError(f"args is a tuple of the function's arguments, such as (x,); got {_described(args)}.")
    if kwargs is not None and not isinstance(kwargs, dict):
        raise UsageError(f"kwargs is a dictionary of the function's named arguments; got {_described(kwargs)}.")
    call = (fn, tuple(args), dict(kwargs or {}))
    _check_signature(fn, (*first, *args), call[2])
    return call


def _check_link(link: Any, slow: bool) -> None:
    if link is None:
        return
    if not isinstance(link, Link):
        raise UsageError(f"link is a Link(latency=seconds, bandwidth=bytes per second); got {_described(link)}.")
    if not (link.latency >= 0 and link.bandwidth > 0):
        raise UsageError(f"a link's latency is at least 0 seconds, its bandwidth above 0 bytes per second; got {link}.")
    if slow:
        raise UsageError("slow_ranks and link both say when operations complete: give one of them.")


def _check_signature(fn: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> None:
    try:
        signature = inspect.signature(fn)
    except (TypeError, ValueError):
        return  # built-in functions may have none
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        name = getattr(fn, "__name__", "the function")
        given = f"{len(args)} argument{'' if len(args) == 1 else 's'}"
        raise UsageError(f"{name}{signature} cannot be called with {given} ({error}). See args=(...).") from None


def _described(value: Any) -> str:
    return f"{value!r:.60} ({type(value).__name__})"


def explain_pickling(call: Call, error: Exception) -> UsageError:
    """Names what in the call cannot travel to another process, and what to do instead."""
    for name, value in _used_by(call).items():
        cause = why_not(value)
        if cause is not None:
            reason = str(cause).splitlines()[0] if str(cause) else type(cause).__name__
            advice = _advice(value, reason)
            return UsageError(
                f"{name}, a {type(value).__name__}, cannot be sent to the ranks ({reason}) {advice}".strip()
            )
    return UsageError(f"The function cannot be sent to the ranks ({error}). Create what it uses inside it.")


def _used_by(call: Call) -> dict[str, Any]:
    """What travels with the call, by the name that the learner knows."""
    fn, args, kwargs = call
    used = {f"argument {position}": value for position, value in enumerate(args)}
    used |= {f"argument {name!r}": value for name, value in kwargs.items()}
    if inspect.isfunction(fn):
        names = inspect.getclosurevars(fn)
        used |= {f"{name!r}": value for name, value in {**names.globals, **names.nonlocals}.items()}
    return used


def _advice(value: Any, reason: str) -> str:
    if "DDP-wrapped" in reason:
        return "Wrap the model inside the function."
    if isinstance(value, dist.ProcessGroup) or "ProcessGroup" in reason:
        return "A process group belongs to one process. Each rank has its own: use it inside the function."
    return "Create it inside the function, so that each rank makes its own."
