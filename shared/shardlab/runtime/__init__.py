"""Runs a notebook's function on N ranks; faults become reports."""

from .api import launch
from .here import device

__all__ = ["device", "launch"]
