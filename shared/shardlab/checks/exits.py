"""Finds IPython's `exit` among what a function uses.

In a notebook `exit` is an object that ends the kernel. It belongs to the kernel's process and cannot travel to a rank.
"""

from __future__ import annotations

import dis
import inspect
from collections.abc import Iterator
from types import CodeType
from typing import Any

from ..meters import is_library
from ..records import Where


def calls_exit(solution: Any) -> tuple[str, Where] | None:
    """The name, "exit" or "quit", and the line, in the function itself or in one of the learner's that it uses."""
    known, reached = set(), [solution]
    while reached:
        function = reached.pop()
        if not inspect.isfunction(function) or function in known or is_library(function.__code__.co_filename):
            continue
        known.add(function)
        for name, where in _globals_used(function.__code__):
            value = function.__globals__.get(name)
            if name in ("exit", "quit") and type(value).__module__.startswith("IPython."):
                return name, where
            reached.append(value)
    return None


def _globals_used(code: CodeType) -> Iterator[tuple[str, Where]]:
    """The global names in a function and in those inside it, and their lines."""
    for instruction in dis.get_instructions(code):
        if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            line = instruction.positions.lineno if instruction.positions else None
            yield instruction.argval, Where(code.co_filename, line or code.co_firstlineno, code.co_name)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _globals_used(constant)
