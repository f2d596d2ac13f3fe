"""Finds the learner's line among the frames of libraries."""

from __future__ import annotations

import os
import sys
import sysconfig
from types import FrameType

import torch

from ..records import Where

_LIBRARIES = (
    *sorted({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}),
    os.path.dirname(torch.__path__[0]),
    os.path.dirname(os.path.dirname(__file__)),
    "<frozen",
)


def is_library(filename: str) -> bool:
    """Whether code in this file is Python's, an installed package's or ShardLab's."""
    return filename.startswith(_LIBRARIES)


def caller(frame: FrameType | None = None) -> Where | None:
    """The innermost frame, of `frame` (the current one) and those that called it, that belongs to no library."""
    frame = frame or sys._getframe(1)
    while frame is not None:
        if not is_library(frame.f_code.co_filename):
            return Where(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)
        frame = frame.f_back
    return None
