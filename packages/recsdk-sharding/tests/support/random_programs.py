"""Random programs: tables of any settings, turns of any kind, and ranks that change in between.

Gradients are few small multiples of powers of two, so that their sums are exact in any order:
whatever the ranks and the plan, a row has the same bits as in the unsharded collection.
Shape letters: B samples, G bags of a feature, N ids, W ranks.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

import numpy as np
from plans import Spec
from policy_batches import Array, Bags, time_of
from policy_crossing import (
    ALL_RULES,
    BY_HAND,
    COUNTING_NOTHING,
    DEFAULTS,
    DTYPES,
    SEQUENCE_TYPES,
    TYPES,
)
from worlds import EDGE_KEYS

from optimizer_cases import CLIPS, DECAYS, PLAIN, is_a_product
from recsdk_sharding._configs.data_taken import evicts_by_time, needed_by

FEATURES = ("a", "b", "c", "d")
MAX_ROWS = 40
CUT = ("column_wise", "grid_shard")
"""Sharding types that cut tables by columns."""
LOOKS = ("low_norm", "function")
"""Orders of eviction for which rows are measured."""


def _different(kind: str) -> dict[str, Any]:
    """The rules of one kind of all tables of `policy_crossing`, and none."""
    found: dict[str, Any] = {"none": None}
    for name, rules in ALL_RULES.items():
        for table, rule in getattr(rules, kind).items():
            if rule not in found.values():
                found[f"{name}, {table}"] = rule
    return found


EVICTION, ADMISSION = _different("eviction"), _different("admission")
OF_TABLE: dict[str, list[str]] = {
    "eviction": list(EVICTION),
    "admission": list(ADMISSION),
    "optimizer": list(PLAIN),
    "type": [name for name in TYPES if name != "mixed"],
    "limit": ["none", "few"],
    "default": list(DEFAULTS),
    "rows": list(DTYPES),
    "accumulate": ["1", "2", "3"],
    "pooling": ["sum", "mean"],
}
OF_PROGRAM: dict[str, list[str]] = {
    "kind": ["bags", "sequences"],
    "weights": ["none", "given", "processed"],
    "sizes": ["one", "each its own"],
    "duplicates": ["sent", "dropped"],
    "data": ["no", "yes"],
    "way": [
        BY_HAND,
        "TrainPipelineSparseDist",
        "TrainPipelineFusedSparseDist, attached anew",
        "PrefetchTrainPipelineSparseDist",
    ],
    "turns": ["trained", "any"],
    "before": ["nothing", "Saver", "torch"],
    "device": ["cpu", "npu"],
    "ranks": ["2", "3", "4", "1"],
}
SETTINGS = OF_TABLE | OF_PROGRAM
APART = [("optimizer", "eviction"), ("optimizer", "admission"), ("eviction", "admission")]
"""Pairs of settings with many values."""


def is_legal(row: Mapping[str, str]) -> bool:
    """Whether the values of some or all settings go together."""
    eviction = EVICTION[row.get("eviction", "none")]
    admission = ADMISSION[row.get("admission", "none")]
    if row.get("data") == "no" and needed_by(eviction, admission):
        return False
    leaves = eviction is not None and (not eviction.expires or eviction.share is not None)
    records = admission is not None and any(term.max_records for term in admission.terms())
    if row.get("limit") == "none" and (leaves or records):
        return False
    if eviction is not None and eviction.order in LOOKS and not _may_look(row, eviction.order):
        return False
    is_on_device = row.get("device") == "npu" or row.get("way", "").startswith("Prefetch")
    if is_on_device and (row.get("device") == "cpu" or row.get("rows", "32 bits") != "32 bits"):
        return False
    if row.get("type") in CUT and not _may_be_cut(row):
        return False
    if row.get("before") == "torch" and row.get("type") == "data_parallel":
        return False  # it takes copies with rows in one order alone
    return _has_bags(row)


def _may_look(row: Mapping[str, str], order: str) -> bool:
    """Whether rows have no batches in flight at looks, and of norms, are whole and exact."""
    if row.get("way", BY_HAND) != BY_HAND or row.get("turns") == "any":
        return False
    return order != "low_norm" or (
        row.get("accumulate", "1") == "1"
        and row.get("device", "cpu") == "cpu"
        and row.get("type") not in CUT
    )


def _may_be_cut(row: Mapping[str, str]) -> bool:
    """Whether what becomes of a column follows from that column alone."""
    name = row.get("optimizer", "sgd")
    is_by_row = "rowwise" in name or "lamb" in name or "by row" in name
    return not is_by_row and row.get("rows", "32 bits") == "32 bits"  # which are not rounded


def _has_bags(row: Mapping[str, str]) -> bool:
    """Whether ids come as they must for the kind of collection."""
    drops = row.get("duplicates") == "dropped"
    if drops and not (
        row.get("kind", "sequences") == "sequences"
        and ADMISSION[row.get("admission", "none")] is None
        and row.get("eviction", "none").partition(",")[0] in ("none", *COUNTING_NOTHING)
    ):
        return False
    if row.get("weights") == "processed" and row.get("pooling") == "mean":
        return False  # its means are not exact
    return not (drops or row.get("kind") == "sequences") or (
        row.get("type", "row_wise") in SEQUENCE_TYPES
        and row.get("pooling", "sum") == "sum"
        and row.get("weights", "none") == "none"
    )


# ---- what is drawn -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Turn:
    """What all ranks do at once."""

    kind: Literal["train", "leave", "read", "erase"]
    """A batch that is left is looked up in training and has no backward."""
    batches: tuple[int, ...]
    """The seeds of the batches, which are all looked up before the first of them is trained."""


@dataclass(frozen=True)
class Part:
    """Turns on ranks of one kind."""

    device: str
    world_size: int
    turns: tuple[Turn, ...]
    specs: dict[str, Spec]
    """How each table is sharded."""
    codec: str
    """Of what is saved."""
    is_used: bool
    """Whether the model has trained before it loads."""


@dataclass(frozen=True)
class Program:
    """Tables, what they are trained with, and where."""

    seed: int
    tables: tuple[dict[str, Any], ...]
    """The arguments of their configs."""
    optimizers: dict[str, Any]
    row: dict[str, str]
    """The settings of all tables, and what else was chosen."""
    parts: tuple[Part, ...]

    @property
    def shown(self) -> dict[str, tuple[str, int]]:
        """What the vectors of a feature are called: the feature, and which table they are of."""
        readers = [name for table in self.tables for name in table["feature_names"]]
        return {
            name if readers.count(name) == 1 else f"{name}@{table['name']}": (name, number)
            for number, table in enumerate(self.tables)
            for name in table["feature_names"]
        }

    @property
    def names(self) -> list[str]:
        """The features that a batch has."""
        return sorted({name for name, _ in self.shown.values()})

    @property
    def timed(self) -> dict[str, list[str]]:
        """The features of each table that goes by time."""
        return {
            table["name"]: table["feature_names"]
            for table in self.tables
            if evicts_by_time(table["eviction"])
        }

    def batch(self, number: int, world_size: int) -> Batch:
        """A batch by its seed, for so many ranks."""
        timed = [name for names in self.timed.values() for name in names]
        return _batch_of(
            self.seed,
            number,
            world_size,
            tuple(self.names),
            bags_vary=self.row["sizes"] != "one",
            times_vary=len(timed) == len(set(timed)),
        )


def program_of(row: dict[str, str], seed: int) -> Program:
    """A program with these settings, whose first table has those of tables."""
    source = np.random.default_rng([seed, 1])
    rows = [row, *(_like(row, source) for _ in range(int(source.integers(0, 4))))]
    width = int(source.integers(2, 7))
    widths = [width if row["kind"] == "sequences" else int(source.integers(2, 7)) for _ in rows]
    tables = [
        _table_of(each, width, f"t{n}", source)
        for n, (each, width) in enumerate(zip(rows, widths, strict=True))
    ]
    optimizers = {f"t{n}": _optimizer_of(each, source) for n, each in enumerate(rows)}
    return Program(seed, tuple(tables), optimizers, row, _parts_of(row, rows, widths, source))


def _like(row: Mapping[str, str], source: Any) -> dict[str, str]:
    """Settings of another table of the same program."""
    own = {name: row[name] for name in OF_PROGRAM}
    while True:
        drawn = {name: str(source.choice(values)) for name, values in OF_TABLE.items()} | own
        if is_legal(drawn):
            return drawn


def _table_of(row: Mapping[str, str], width: int, name: str, source: Any) -> dict[str, Any]:
    most = int(source.integers(1, 3))
    table: dict[str, Any] = {
        "name": name,
        "embedding_dim": width,
        "num_embeddings": 1_000,
        "feature_names": [str(each) for each in source.permutation(FEATURES)[:most]],
        "seed": int(source.integers(0, 9)),
        "eviction": EVICTION[row["eviction"]],
        "admission": ADMISSION[row["admission"]],
        "default": _one_of(DEFAULTS[row["default"]].values(), source),
        "data_type": DTYPES[row["rows"]],
        "accumulate_steps": int(row["accumulate"]),
    }
    if row["limit"] == "few":
        table |= {"max_rows": MAX_ROWS, "eviction_groups": _one_of([4, 8], source)}
    return table | ({"is_mean": row["pooling"] == "mean"} if row["kind"] == "bags" else {})


def _one_of(values: Any, source: Any) -> Any:
    every = list(values)
    return every[int(source.integers(0, len(every)))]


def _optimizer_of(row: Mapping[str, str], source: Any) -> Any:
    made = PLAIN[row["optimizer"]]
    names = {field.name for field in fields(made)}
    is_cut = row["type"] in CUT
    decays = [
        decay
        for decay in DECAYS.values()
        if names >= set(decay) and not (decay.get("catch_up") and not is_a_product(made, **decay))
    ]
    clips = [clip for clip in CLIPS.values() if not (is_cut and "clip_norm" in clip)]
    return replace(made, **_one_of(decays, source), **_one_of(clips, source))


def _parts_of(
    row: Mapping[str, str], rows: list[dict[str, str]], widths: list[int], source: Any
) -> tuple[Part, ...]:
    """One part, or one that is saved, and one that goes on from there on other ranks.

    Before it is saved no table has gradients that wait.
    """
    whole = int(np.lcm.reduce([int(each["accumulate"]) for each in rows]))
    number = max(whole, 6 // whole * whole)
    parts = []
    for place in range(1 if row["before"] == "nothing" else 2):
        is_last = place == 1 or row["before"] == "nothing"
        has_npu = row["device"] == "npu"
        world_size = int(row["ranks"]) if is_last else int(source.integers(1, 5))
        specs = {
            f"t{n}": _spec_of(each["type"], widths[n], world_size, source)
            for n, each in enumerate(rows)
        }
        part = Part(
            row["device"] if is_last else _one_of(["cpu", "npu"] if has_npu else ["cpu"], source),
            world_size,
            _turns_of(row, 20 * place, number, source),
            specs,
            _one_of(["none", "zstd"], source),
            bool(source.integers(0, 2)),
        )
        parts.append(part)
    return tuple(parts)


def _turns_of(row: Mapping[str, str], first: int, number: int, source: Any) -> tuple[Turn, ...]:
    """So many batches to train, and others between them."""
    made: list[Turn] = []
    is_any, seeds = row["turns"] == "any", iter(range(first, first + 20))
    most = 2 if is_any and row["way"] == BY_HAND else 1
    while number:
        kind = _one_of(["train", "train", "leave", "read", "erase"], source) if is_any else "train"
        count = min(number, int(source.integers(1, most + 1))) if kind == "train" else 1
        made.append(Turn(kind, tuple(next(seeds) for _ in range(count))))
        number -= count if kind == "train" else 0
        is_any = is_any and len(made) < 12
    return tuple(made)


def local_size_of(world_size: int) -> int:
    return 2 if world_size == 4 else world_size


def _spec_of(sharding_type: str, width: int, world_size: int, source: Any) -> Spec:
    nodes = world_size // local_size_of(world_size)
    places = nodes if sharding_type in ("table_row_wise", "grid_shard") else world_size
    if sharding_type in ("table_wise", "table_row_wise"):
        return sharding_type, int(source.integers(0, places))
    if sharding_type not in ("column_wise", "grid_shard"):
        return (sharding_type,)
    first, second = (int(each) for each in source.integers(0, places, 2))
    if sharding_type == "grid_shard" and first == second:  # a node has a range of columns once
        return sharding_type, [(width, first)]
    cut = int(source.integers(1, width))
    return sharding_type, [(cut, first), (width - cut, second)]


# ---- batches -----------------------------------------------------------------------------------

LENGTHS = (0, 1, 2, 4)
"""Of bags whose means are exact."""
FIRST_TIME = -7
"""What all ranks set before the first batch: of times that ranks set for it the latest counts."""
WEIGHTS = {1: (1.0,), 2: (1.5, 0.5), 4: (1.5, 0.5, 1.75, 0.25)}
"""Of the ids of a bag, which add up to a power of two."""


@dataclass(frozen=True)
class Batch:
    """What all ranks have."""

    ends: tuple[int, ...]
    """Where the samples of each rank begin, and where the last one's end."""
    bags: dict[str, Bags]
    """By feature."""
    has_times: tuple[bool, ...]
    """Whether the ids of each rank come with times and counts."""
    times_set: tuple[int | None, ...]
    """The time that each rank sets before."""

    def own(self, ranks: slice) -> dict[str, Bags]:
        """What some ranks have that follow one another."""
        begin, end, _ = ranks.indices(len(self.ends) - 1)
        return {
            name: each.own(self.ends[begin], self.ends[end]) for name, each in self.bags.items()
        }


@functools.lru_cache(maxsize=64)
def _batch_of(
    seed: int,
    number: int,
    world_size: int,
    names: tuple[str, ...],
    *,
    bags_vary: bool,
    times_vary: bool,
) -> Batch:
    """`times_vary`: ids of some ranks may have no times, as only one table reads what they lack."""
    source = np.random.default_rng([seed, number, 2])
    sizes = source.integers(0, 5, world_size) * int(source.random() < 0.9)
    ends = tuple(np.cumsum([0, *sizes]).tolist())
    bags = {name: _bags_of(source, number, sizes, bags_vary) for name in names}
    share = float(source.choice([1, 0.5, 0.5, 0] if times_vary else [1, 1, 0]))
    has_times = tuple((source.random(world_size) < share).tolist())
    sets_time = source.random(world_size) < source.choice([0, 0.5, 1])
    times_set = (time_of(number) + source.integers(FIRST_TIME + 1, 5, world_size)).tolist()
    pairs = zip(sets_time, times_set, strict=True)
    return Batch(ends, bags, has_times, tuple(time if sets else None for sets, time in pairs))


def _bags_of(source: Any, batch: int, sizes: Array, varies: bool) -> Bags:
    num_bags_W = source.integers(1, 4, len(sizes)) * (sizes > 0) if varies else sizes
    starts = np.cumsum([0, *num_bags_W])
    firsts = np.append(np.repeat(starts[:-1], sizes), starts[-1])
    bag_B = np.arange(sizes.sum())
    if varies:
        bag_B = firsts[:-1] + source.integers(0, np.repeat(num_bags_W, sizes))
    lengths_G = source.choice(LENGTHS, starts[-1]) if source.random() < 0.8 else np.ones(starts[-1])
    lengths_G = lengths_G.astype(np.int64) * int(source.random() < 0.85)
    num_keys = int(lengths_G.sum())
    keys_N = (source.zipf(1.3, num_keys) % 300 + 3 * batch) * 0x9E3779B97F4A7C1
    is_edge_N = source.random(num_keys) < 0.1
    keys_N = np.where(is_edge_N, source.choice(EDGE_KEYS, num_keys), keys_N.astype(np.int64))
    weights = [source.permutation(WEIGHTS[n]) for n in lengths_G.tolist() if n]
    return Bags(
        keys_N,
        _data_of(source, batch, num_keys),
        np.concatenate([np.zeros(0), *weights]).astype(np.float32),
        lengths_G,
        bag_B,
        firsts,
    )


def _data_of(source: Any, batch: int, num_keys: int) -> dict[str, Array]:
    return {
        "scores": source.integers(-9, 10, num_keys).astype(np.float32),
        "clicks": source.integers(0, 3, num_keys),
        "times": time_of(batch) + source.integers(-4, 5, num_keys),
        "counts": source.integers(1, 4, num_keys),
    }


def gradients_of(program: Program, batch: int, samples: slice) -> dict[str, Array]:
    """(B, D) of what each feature's vectors are called, of some of a batch's samples."""
    found = {}
    for place, (shown, (_, number)) in enumerate(program.shown.items()):
        columns_D = np.arange(program.tables[number]["embedding_dim"])
        numbers_BD = 5 * np.arange(100)[samples, None] + 3 * place + 11 * columns_D + batch
        found[shown] = ((numbers_BD % 7 - 2) / 4).astype(np.float32)
    return found
