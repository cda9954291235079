"""Keeps saves from the moment at which a clock is moved on and its batch is not mapped yet."""

from __future__ import annotations

import threading

__all__ = ["CLOCKS"]

CLOCKS = threading.Lock()
"""Held from before a batch moves clocks of tables on until it is mapped, and while tables are cut.

A mapped batch in flight is hidden from cuts, its time too; a time alone would not be.
"""
