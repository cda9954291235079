"""What a table of some size would do with a stream of ids, before memory is bought for it."""

from __future__ import annotations

from recsdk_core.simulation.descriptions import DESCRIPTION_FORMAT, read_description
from recsdk_core.simulation.running import Simulated, simulate
from recsdk_core.simulation.traces import Trace, open_trace

__all__ = [
    "DESCRIPTION_FORMAT",
    "Simulated",
    "Trace",
    "open_trace",
    "read_description",
    "simulate",
]
