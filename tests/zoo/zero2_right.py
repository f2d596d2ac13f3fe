"""Lab 07: ZeRO-2 engines that are right, written in their own ways."""

from __future__ import annotations
