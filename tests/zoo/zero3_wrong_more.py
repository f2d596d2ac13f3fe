"""Lab 08: more ZeRO-3 engines that are wrong."""

from __future__ import annotations
