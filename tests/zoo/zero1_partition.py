"""Lab 06: partitions, wrong and right ones."""

from __future__ import annotations
