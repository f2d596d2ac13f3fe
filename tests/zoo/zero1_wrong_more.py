"""Lab 06: more ZeRO-1 engines that are wrong."""

from __future__ import annotations
