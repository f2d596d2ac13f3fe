"""Instruments inside a rank: what it sends, what it holds, when it did what."""

from .instruments import Instruments, inside_rank, label, mark, on_call
from .tap import Turn
from .where import caller, is_library

__all__ = ["Instruments", "Turn", "caller", "inside_rank", "is_library", "label", "mark", "on_call"]
