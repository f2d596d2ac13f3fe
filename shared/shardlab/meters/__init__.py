"""Instruments inside a rank: what it sends, what it holds, when it did what."""

from .instruments import Instruments, inside_rank, label, mark, memory_so_far, on_call
from .tap import Turn
from .where import caller, is_library

__all__ = ["Instruments", "Turn", "caller", "inside_rank", "is_library", "label", "mark", "memory_so_far", "on_call"]
