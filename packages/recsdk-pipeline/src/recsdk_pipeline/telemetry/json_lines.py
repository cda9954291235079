"""Reports as lines of JSON."""

from __future__ import annotations

import fcntl
import json
import math
import os
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

from recsdk_core.files import local_path
from recsdk_pipeline.telemetry.metrics import Report
from recsdk_pipeline.telemetry.sink import check_report, rank_of

__all__ = ["JsonLines"]


class JsonLines:
    """Appends each report to a file, as a line of JSON.

    A line has `time`, `step`, `rank` (null: all ranks), `num_ranks`, and by the metric's name a
    number, or objects within objects by the values of its labels: `{"recsdk_table_rows": {"user":
    12}}`. An infinite number, or one that is none (a loss that diverged), is null. Counters count
    from the start of the process. With ranks="each", rank r writes
    `<stem>.rank_<r><suffix>`. A file has one writer at a time.
    """

    def __init__(self, path: Any) -> None:
        """`path`: of the file, whose folder is made if it is not there."""
        self.path = Path(local_path(path))
        """Where it writes."""
        self._file: TextIO | None = None

    def open(self, rank: int | None) -> None:
        """Opens the file. Raises OSError, also if another sink or process writes to it."""
        number = rank_of(rank)
        if self._file is not None:
            raise OSError(f"{self.path}: is open; give each Telemetry a JsonLines of its own")
        path = self.path
        if number is not None:
            path = path.with_name(f"{path.stem}.rank_{number}{path.suffix}")
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("a")
        if not _is_alone(file):
            file.close()
            raise OSError(f"{path}: another JsonLines writes to it; give each its own path")
        if file.seekable() and _is_cut_off(path):
            file.write("\n")  # its writer was killed: the first line here is not the end of that
        self.path, self._file = path, file

    def write(self, report: Report) -> None:
        """Writes a line, whole, so that others can read it at once."""
        check_report("JsonLines", report, is_open=self._file is not None)
        assert self._file is not None
        line: dict[str, Any] = {
            "time": report.time,
            "step": report.step,
            "rank": report.rank,
            "num_ranks": report.num_ranks,
        }
        for name, values in report.values.items():
            for labels, number in values.items():
                _put(line, (name, *labels), number)
        self._file.write(json.dumps(line, allow_nan=False) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Closes the file."""
        if self._file is not None:
            with suppress(OSError):  # children of this process have it open too
                fcntl.flock(self._file, fcntl.LOCK_UN)
            self._file.close()
            self._file = None


def _is_cut_off(path: Path) -> bool:
    """Whether the last line of the file has no end; False if it cannot be read."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - 1))
            return file.read(1) not in (b"", b"\n")
    except OSError:
        return False


def _is_alone(file: TextIO) -> bool:
    """Whether nobody else has locked it; a file system without locks cannot tell."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True


def _put(whole: dict[str, Any], way: tuple[str, ...], number: float) -> None:
    *outer, last = way
    for name in outer:
        whole = whole.setdefault(name, {})
    whole[last] = number if math.isfinite(number) else None
