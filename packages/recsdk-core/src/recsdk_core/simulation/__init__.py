"""What a table of some size would do with a stream of ids, before memory is bought for it."""

from __future__ import annotations

from recsdk_core.simulation.running import Simulated, simulate
from recsdk_core.simulation.traces import Trace, open_trace

__all__ = ["Simulated", "Trace", "open_trace", "simulate"]
