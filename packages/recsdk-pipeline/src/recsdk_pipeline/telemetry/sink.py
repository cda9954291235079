"""Where reports go."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from recsdk_pipeline._internal.checks import int_within
from recsdk_pipeline.telemetry.metrics import Report

__all__ = ["Sink", "check_report", "needing", "rank_of"]

_MOST_RANKS = 2**31


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


def rank_of(rank: object) -> int | None:
    """Whose numbers come, as `Sink.open` is told; TypeError or ValueError for no rank."""
    return None if rank is None else int_within("rank", rank, 0, _MOST_RANKS)


def check_report(sink: str, report: object, *, is_open: bool) -> None:
    """Raises TypeError for what is no report, RuntimeError if the sink is not open."""
    if not isinstance(report, Report):
        raise TypeError(f"report must be a Report, got {report!r:.100}")
    if not is_open:
        raise RuntimeError(f"this {sink} is not open; give it to a Telemetry, which opens it")


def needing(sink: str, package: str, extra: str) -> ImportError:
    """What to raise where a sink's package is missing."""
    return ImportError(
        f'telemetry.{sink} needs {package}; run pip install "recsdk-pipeline[{extra}]"'
    )
