"""Instruments inside a rank: what it sends, what it holds, when it did what."""

from .instruments import Instruments, inside_rank, label, mark, on_call

__all__ = ["Instruments", "inside_rank", "label", "mark", "on_call"]
