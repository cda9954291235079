"""What a training does, told to TensorBoard, Prometheus, OpenTelemetry or a file of JSON lines."""

from __future__ import annotations

from typing import TYPE_CHECKING

from recsdk_pipeline.telemetry.grafana import dashboard
from recsdk_pipeline.telemetry.json_lines import JsonLines
from recsdk_pipeline.telemetry.metrics import METRICS, Metric, Report
from recsdk_pipeline.telemetry.open_telemetry import OpenTelemetry
from recsdk_pipeline.telemetry.prometheus import Prometheus
from recsdk_pipeline.telemetry.sink import Sink
from recsdk_pipeline.telemetry.tensorboard import TensorBoard

if TYPE_CHECKING:
    from recsdk_pipeline.telemetry.telemetry import Telemetry

__all__ = [
    "METRICS",
    "JsonLines",
    "Metric",
    "OpenTelemetry",
    "Prometheus",
    "Report",
    "Sink",
    "Telemetry",
    "TensorBoard",
    "dashboard",
]


def __getattr__(name: str) -> object:
    # On first use: `recsdk top` need not import torchrec.
    if name == "Telemetry":
        from recsdk_pipeline.telemetry.telemetry import Telemetry

        return Telemetry
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
