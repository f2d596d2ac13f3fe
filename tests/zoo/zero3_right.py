"""Lab 08: ZeRO-3 engines that are right, written in their own ways."""

from __future__ import annotations
