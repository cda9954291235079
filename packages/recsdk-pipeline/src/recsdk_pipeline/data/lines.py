"""Malformed lines: named, counted, and skipped up to a limit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from recsdk_core import RecsdkError
from recsdk_pipeline._internal.checks import int_within


class BadLine(RecsdkError, ValueError):
    """A line or row that cannot be read; the message names file, line and column."""

    def __init__(
        self,
        path: Path | str,
        line: int,
        column: str,
        problem: str,
        fields: Mapping[str, str] | None = None,
        *,
        noun: str = "line",
    ) -> None:
        super().__init__(f"{path}, {noun} {line}, column {column}: {problem}")
        self.path = path
        self.line = line
        self.column = column
        self.problem = problem
        self.fields = dict(fields or {})
        """The line's columns by name, as far as it has them."""


@dataclass(kw_only=True)
class BadLines:
    """Counts malformed lines and stops the reading after too many."""

    limit: int = 0
    """How many malformed lines are skipped; the next one is raised."""

    count: int = 0
    """Malformed lines met so far, skipped ones and the one raised."""

    first: list[str] = field(default_factory=list)
    """The messages of the first ten."""

    def __post_init__(self) -> None:
        self.limit = int_within("limit", self.limit, 0)

    def add(self, error: BadLine) -> None:
        """Count `error`; raise it if more than `limit` lines are malformed."""
        if not isinstance(error, BadLine):
            raise TypeError(f"error must be a BadLine, got {error!r:.100}")
        self.count += 1
        if len(self.first) < 10:
            self.first.append(str(error))
        if self.count > self.limit:
            raise error


def check_bad(bad: object) -> None:
    """Raise TypeError for what is neither `BadLines` nor None."""
    if bad is not None and not isinstance(bad, BadLines):
        raise TypeError(f"bad must be BadLines(limit=...) or None, got {bad!r:.100}")
