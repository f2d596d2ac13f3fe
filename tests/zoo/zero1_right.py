"""Lab 06: ZeRO-1 engines that are right, written in their own ways."""

from __future__ import annotations
