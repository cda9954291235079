"""What a benchmark measures, how contestants take turns, and how results are shown and kept."""

from __future__ import annotations

import json
import random
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from rich.console import Console
from rich.table import Table

LESS_IS_BETTER = frozenset({"ms", "us", "ns", "bytes", "entries"})
SEED_OF_ORDERS = 1


@dataclass(kw_only=True)
class Record:
    """One operation on one workload: our figure beside those of the peers, from one run.

    Figures are medians; `spread` holds the quartiles of each contestant, `pairs` of each peer the
    lower quartile and the median of the ratios of single turns. A ratio above 1 means that we are
    better. A peer that could not run stands in `errors`.
    """

    workload: str
    op: str
    unit: str
    ours: float
    peers: dict[str, float] = field(default_factory=dict)
    ratio: dict[str, float] = field(default_factory=dict)
    spread: dict[str, tuple[float, float]] = field(default_factory=dict)
    pairs: dict[str, tuple[float, float]] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)


def record_of(
    workload: str,
    op: str,
    unit: str,
    ours: str,
    samples: Mapping[str, Sequence[float]],
    errors: Mapping[str, str] | None = None,
) -> Record:
    """A record from all samples of all contestants, of which `ours` names ours."""
    medians = {name: statistics.median(values) for name, values in samples.items()}
    spread = {name: quartiles(values) for name, values in samples.items()}
    peers = {name: value for name, value in medians.items() if name != ours}
    return Record(
        workload=workload,
        op=op,
        unit=unit,
        ours=medians[ours],
        peers=peers,
        ratio={name: ratio(unit, medians[ours], value) for name, value in peers.items()},
        spread=spread,
        pairs={name: _pairs(unit, samples[ours], samples[name]) for name in peers},
        errors=dict(errors or {}),
    )


def _pairs(unit: str, ours: Sequence[float], peer: Sequence[float]) -> tuple[float, float]:
    ratios = [ratio(unit, *turn) for turn in zip(ours, peer, strict=True)]
    return quartiles(ratios)[0], statistics.median(ratios)


def ratio(unit: str, ours: float, peer: float) -> float:
    """How many times better ours is."""
    return peer / ours if unit in LESS_IS_BETTER else ours / peer


def quartiles(values: Sequence[float]) -> tuple[float, float]:
    if len(values) < 2:
        return values[0], values[0]
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, high


def race(
    contestants: Mapping[str, Callable[[], object]],
    repetitions: int,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, list[float]]:
    """Milliseconds of every contestant in every repetition; they take turns, as `orders` deals.

    A contestant that returns a callable is timed only while that runs: what comes before prepares.
    `clock` gives seconds.
    """
    samples: dict[str, list[float]] = {name: [] for name in contestants}
    for repetition, names in enumerate(orders(contestants, 1 + repetitions)):
        for name in names:
            milliseconds = timed(contestants[name], clock)
            if repetition > 0:  # the first does not count
                samples[name].append(milliseconds)
    return samples


def orders(names: Iterable[str], repetitions: int) -> Iterator[list[str]]:
    """The order of every repetition, dealt anew: nobody always finds what the same one left."""
    dealer = random.Random(SEED_OF_ORDERS)
    order = list(names)
    for _ in range(repetitions):
        dealer.shuffle(order)
        yield list(order)


def race_by(
    clocks: Mapping[str, Callable[[], float]],
    contestants: Mapping[str, Callable[[], object]],
    repetitions: int,
) -> dict[str, dict[str, list[float]]]:
    """`race` by several clocks at once, under the name of each."""
    found = {clock: {name: list[float]() for name in contestants} for clock in clocks}
    for repetition, names in enumerate(orders(contestants, 1 + repetitions)):
        for name in names:
            starts = {clock: now() for clock, now in clocks.items()}
            contestants[name]()
            for clock, now in clocks.items():
                if repetition > 0:  # the first does not count
                    found[clock][name].append((now() - starts[clock]) * 1e3)
    return found


def timed(
    contestant: Callable[[], object], clock: Callable[[], float] = time.perf_counter
) -> float:
    start = clock()
    rest = contestant()
    if callable(rest):
        start = clock()
        rest()
    return (clock() - start) * 1e3


def show(title: str, records: Sequence[Record]) -> None:
    """Prints a table: a line per record, the peers with their ratios."""
    table = Table(title=title)
    for column in ("workload", "operation", "unit"):
        table.add_column(column, overflow="fold")
    table.add_column("ours", justify="right")
    heading = "peers: figure (ratio, above 1: ours is better; lower quartile and median of turns)"
    table.add_column(heading, overflow="fold")
    for record in records:
        cells = [_cell(record, name) for name in record.peers]
        cells += [f"{name}: {error}" for name, error in record.errors.items()]
        table.add_row(
            record.workload, record.op, record.unit, f"{record.ours:.4g}", "\n".join(cells)
        )
    Console(width=140).print(table)


def _cell(record: Record, peer: str) -> str:
    figures = f"{record.ratio[peer]:.2f}x"
    if peer in record.pairs:
        low, median = record.pairs[peer]
        figures += f"; turns {low:.2f}x, {median:.2f}x"
    return f"{peer} {record.peers[peer]:.4g} ({figures})"


def write(path: Path, records: Sequence[Record]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps([asdict(r) for r in records], indent=1) + "\n")
