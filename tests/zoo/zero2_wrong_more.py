"""Lab 07: more ZeRO-2 engines that are wrong."""

from __future__ import annotations
