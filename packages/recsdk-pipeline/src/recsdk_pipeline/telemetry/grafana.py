"""A dashboard of Grafana for what is told to Prometheus."""

from __future__ import annotations

from importlib.resources import files

__all__ = ["dashboard"]


def dashboard() -> str:
    """The dashboard, as JSON to import into Grafana, which asks for the Prometheus to take.

    It fits both ways to report, together and each rank by itself.
    """
    return files("recsdk_pipeline.telemetry").joinpath("grafana.json").read_text()
