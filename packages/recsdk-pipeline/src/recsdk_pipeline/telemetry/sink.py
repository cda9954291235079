"""Where reports go."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from recsdk_pipeline.telemetry.metrics import Report

__all__ = ["Sink", "needing"]


@runtime_checkable
class Sink(Protocol):
    """Where reports go; a class of one's own will do.

    A sink belongs to one `Telemetry`, which calls it from the training thread, so it should return
    soon.
    """

    def open(self, rank: int | None) -> None:
        """Called once, before the first report.

        `rank`: whose numbers come; None: those of all ranks. What it raises, `Telemetry` raises.
        """

    def write(self, report: Report) -> None:
        """Takes a report. If it raises, a RuntimeWarning tells, and the sink gets no more."""

    def close(self) -> None:
        """Called once, after the last report."""


def needing(sink: str, package: str, extra: str) -> ImportError:
    """What to raise where a sink's package is missing."""
    return ImportError(
        f'telemetry.{sink} needs {package}; run pip install "recsdk-pipeline[{extra}]"'
    )
