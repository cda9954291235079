"""Keeps saves from the moment at which a clock is moved on and its batch is not mapped yet."""

from __future__ import annotations

import os
import threading

__all__ = ["CLOCKS"]

CLOCKS = threading.RLock()
"""Held from before a batch moves clocks of tables on until it is mapped, and while tables are cut.

A mapped batch in flight is hidden from cuts, its time too; a time alone would not be. A signal's
handler may save amid a save. A fork waits, as the child would never see that batch mapped.
"""

os.register_at_fork(
    before=CLOCKS.acquire, after_in_parent=CLOCKS.release, after_in_child=CLOCKS.release
)
