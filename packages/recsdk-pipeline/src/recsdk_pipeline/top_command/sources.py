"""Where `recsdk top` reads: ports that Prometheus would scrape, and files of JSON lines."""

from __future__ import annotations

import json
import math
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from typing import Any, Protocol

from recsdk_pipeline.telemetry.metrics import METRICS, Labels, Values

__all__ = ["FileSource", "PortSource", "Sample", "Source", "source_of"]

_TIME = "recsdk_report_timestamp_seconds"
_SECONDS_TO_ANSWER = 5
_LAST_PORT = 65_535


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One report as it was read."""

    time: float
    """Seconds since 1970."""
    rank: str | None
    """Whose numbers these are; None: those of all ranks."""
    values: Values
    """Numbers by the metric's name and labels."""

    def is_of_another_run(self, before: Sample) -> bool:
        """Whether the time or a counter has fallen."""
        return self.time < before.time or any(
            number < before.values.get(name, {}).get(labels, number)
            for name, of_labels in self.values.items()
            if METRICS[name].kind == "counter"
            for labels, number in of_labels.items()
        )


class Source(Protocol):
    """Something to read reports from."""

    name: str
    """As the user has it."""

    def read(self) -> list[Sample]:
        """The reports since it was read before, oldest first; OSError or ValueError if it fails."""


class FileSource:
    """A file of JSON lines that may still grow."""

    def __init__(self, path: str) -> None:
        self.name = path
        self._path = Path(path)
        self._offset = 0

    def read(self) -> list[Sample]:
        """The lines since it was read before; one that is not whole yet comes later.

        Beside others, one that cannot be read is passed over: its writer may have been killed.
        """
        with self._path.open("rb") as file:
            if file.seek(0, 2) < self._offset:  # another run has begun
                self._offset = 0
            file.seek(self._offset)
            found = file.read()
        whole = found[: found.rfind(b"\n") + 1]
        self._offset += len(whole)
        told = [self._told_by(line) for line in whole.splitlines()]
        samples = [each for each in told if isinstance(each, Sample)]
        wrong = [each for each in told if isinstance(each, ValueError)]
        if wrong and not samples:
            raise wrong[-1]
        return samples

    def _told_by(self, line: bytes) -> Sample | ValueError:
        try:
            told = json.loads(line)
            return Sample(
                time=float(told["time"]),
                rank=_rank_of(told["rank"]),
                values={name: dict(_flat(name, told[name])) for name in told if name in METRICS},
            )
        except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
            text = line[:60].decode(errors="replace")
            return ValueError(f"{self.name}: no line of telemetry: {text!r}")


class PortSource:
    """A port on which a training shows its last report to Prometheus."""

    def __init__(self, name: str, url: str) -> None:
        """Raises ImportError without prometheus-client."""
        from prometheus_client.parser import text_string_to_metric_families

        self.name = name
        self._url = url
        self._parse: Any = text_string_to_metric_families

    def read(self) -> list[Sample]:
        """The report that is shown now, if there is one."""
        try:
            with urllib.request.urlopen(self._url, timeout=_SECONDS_TO_ANSWER) as answer:
                text = answer.read().decode()
        except HTTPException as error:
            raise OSError(f"no answer of HTTP: {error!r}") from error
        values: Values = {}
        rank = None
        for family in self._parse(text):
            for sample in family.samples:
                if sample.name not in METRICS:
                    continue
                labels = dict(sample.labels)
                rank = labels.pop("rank", rank)
                own = METRICS[sample.name].labels
                if labels.keys() != set(own):
                    raise ValueError(f"{sample.name} has the labels {[*labels]}, not {[*own]}")
                values.setdefault(sample.name, {})[tuple(labels[k] for k in own)] = sample.value
        if _TIME not in values:
            return []
        return [Sample(time=values[_TIME][()], rank=_rank_of(rank), values=values)]


def source_of(text: str) -> Source:
    """A port (`9400`), a `host:port`, a URL, or else the path of a file; ValueError for no port."""
    if text.startswith(("http://", "https://")):
        return PortSource(text, text)
    host, _, port = text.rpartition(":")
    if port.isdigit() and not Path(text).exists():
        if int(port) > _LAST_PORT:
            raise ValueError(f"SOURCES: a port must be 0 to {_LAST_PORT}, got {text!r}")
        return PortSource(text, f"http://{host or '127.0.0.1'}:{port}/metrics")
    return FileSource(text)


def _rank_of(told: Any) -> str | None:
    return None if told is None else str(int(told))


def _flat(name: str, value: Any, labels: Labels = ()) -> Iterator[tuple[Labels, float]]:
    if len(labels) < len(METRICS[name].labels):
        for label, inner in dict(value).items():
            yield from _flat(name, inner, (*labels, label))
    else:
        yield labels, math.nan if value is None else float(value)
