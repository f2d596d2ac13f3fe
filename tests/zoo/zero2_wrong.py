"""Lab 07: ZeRO-2 engines that are wrong."""

from __future__ import annotations
