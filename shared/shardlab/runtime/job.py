"""What a rank is told to do, and what it leaves behind: plain data and the files it lies in."""

from __future__ import annotations

import io
import pickle
import types
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import cloudpickle
import torch

from ..records import Call, Event, GradientReady, Link, RankMemory, Span, Where
from ..state_records import RankStates


@dataclass(frozen=True)
class Job:
    """One launch, as told to every rank. folder: a private directory for the files of this launch."""

    folder: str
    address: str | tuple[str, int]  # the launcher's door
    world_size: int
    device: str  # "cpu" or "cuda"
    backend: str
    began: float  # monotonic clock, seconds
    meter: bool
    slow: frozenset[int]
    link: Link | None
    threads: int  # torch threads of a rank
    working_directory: str
    environment: dict[str, str]
    launcher: int  # process id

    @property
    def function_file(self) -> Path:
        return Path(self.folder) / "function.pkl"

    @property
    def board_file(self) -> Path:
        return Path(self.folder) / "board"

    @property
    def store_file(self) -> Path:
        return Path(self.folder) / "store"

    def result_file(self, rank: int) -> Path:
        return Path(self.folder) / f"result-{rank}.pkl"


@dataclass(frozen=True)
class Outcome:
    """What a rank leaves when its function has returned."""

    result: Any
    calls: list[Call] = field(default_factory=list)
    memory: RankMemory | None = None
    marks: list[Event] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    gradients: list[GradientReady] = field(default_factory=list)
    states: list[RankStates] = field(default_factory=list)


@dataclass(frozen=True)
class Frame:
    """One line of a rank's traceback."""

    filename: str
    line: int
    function: str


@dataclass(frozen=True)
class Failure:
    """An exception of a rank's function. kind: "raised", or "exited" for SystemExit."""

    rank: int
    kind: str
    time: float
    exception_type: str
    message: str
    frames: tuple[Frame, ...]
    causes: str = ""  # the exceptions behind it, formatted


@dataclass(frozen=True)
class Position:
    """A rank's answer to "where are you?". busy: the learner's threads that do not wait for anybody.

    main: the learner's line that the main thread is in, or that of a thread which it waits for.
    """

    rank: int
    busy: int
    main: Where | None = None


class _Pickler(cloudpickle.Pickler):
    """Functions by value; tensors as one copy of their elements, on the CPU.

    Torch's own pickling would send a view's whole storage, and a CUDA tensor would make the kernel open the GPU.
    """

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, torch.nn.parallel.DistributedDataParallel):
            raise pickle.PicklingError(
                "a DDP-wrapped model belongs to the process that wrapped it (its .module may travel)"
            )
        if type(obj) in (torch.Tensor, torch.nn.Parameter) and obj.layout == torch.strided and not obj.is_quantized:
            flat = obj.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
            is_parameter = isinstance(obj, torch.nn.Parameter)
            buffer = pickle.PickleBuffer(flat.numpy()) if flat.numel() else b""
            return rebuild_tensor, (buffer, obj.dtype, tuple(obj.shape), obj.requires_grad, is_parameter)
        if isinstance(obj, types.CodeType):
            # cloudpickle drops the file's name; a traceback needs it to find the notebook's line.
            make, parts = self.dispatch_table[types.CodeType](obj)
            return make, tuple(obj.co_filename if part == "<dynamic-code>" else part for part in parts)
        return super().reducer_override(obj)


def rebuild_tensor(buffer: Any, dtype: torch.dtype, shape: tuple, requires_grad: bool, is_parameter: bool) -> Any:
    """The tensor that `_Pickler` took apart."""
    data = buffer if isinstance(buffer, bytearray) else bytearray(buffer)
    tensor = torch.frombuffer(data, dtype=dtype) if data else torch.empty(0, dtype=dtype)
    tensor = tensor.reshape(shape)
    if is_parameter:
        return torch.nn.Parameter(tensor, requires_grad=requires_grad)
    return tensor.requires_grad_() if requires_grad else tensor


def dump(value: Any, path: Path) -> None:
    """Pickles `value` to a file that appears whole or not at all."""
    partial = path.with_suffix(".part")
    try:
        with partial.open("wb") as file:
            _Pickler(file, protocol=5).dump(value)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    partial.replace(path)


def why_not(value: Any) -> Exception | None:
    """The error that keeps `value` from travelling to another process, or None."""
    try:
        _Pickler(io.BytesIO(), protocol=5).dump(value)
    except Exception as error:
        return error
    return None


def load(path: Path) -> Any:
    with path.open("rb") as file:
        return pickle.load(file)
