"""Random programs: tables of any settings, turns of any kind, and ranks that change in between.

Gradients are few small multiples of powers of two, so that their sums are exact in any order:
whatever the ranks and the plan, a row has the same bits as in the unsharded collection.
Shape letters: B samples, D columns, N ids.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

import numpy as np
import torch
from plans import Spec
from policy_batches import Array
from policy_crossing import (
    ALL_RULES,
    BY_HAND,
    COUNTING_NOTHING,
    DEFAULTS,
    DTYPES,
    SEQUENCE_TYPES,
    TYPES,
)
from random_batches import Batch, batch_of

from optimizer_cases import CLIPS, DECAYS, PLAIN, is_a_product
from recsdk_core import init
from recsdk_core.virtual_shards import default_eviction_groups
from recsdk_sharding._configs.configs import limit_groups
from recsdk_sharding._configs.data_taken import evicts_by_time, needed_by
from recsdk_sharding.placement.ranks import RankRule

FEATURES = ("a", "b", "c", "d")
LIMITS: dict[str, dict[str, int]] = {
    "none": {},
    "few": {"max_rows": 40},
    "few in one group": {"max_rows": 40},
    "some": {"max_rows": 1_100},
    "no room": {"max_rows": 0},
}
"""Rows of a table: of "few" in groups that are drawn, else in those that follow from it."""
CUT = ("column_wise", "grid_shard")
"""Sharding types that cut tables by columns."""
CUT_BY_ROWS = ("row_wise", "table_row_wise", "grid_shard")
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


def _by_key(keys_N: Array, values_ND: Array) -> None:
    values_ND[:] = (keys_N % 7)[:, None] / 4 + np.arange(values_ND.shape[1])


def _drawn(row_1D: torch.Tensor) -> None:
    row_1D.normal_().abs_()


FIRST_VALUES: dict[str, dict[str, Any]] = {
    "of torchrec": {},
    "between ends": {"weight_init_min": -0.5, "weight_init_max": 2.0},
    "normal": {"initializer": init.Normal(mean=0.5, stddev=2.0)},
    "truncated": {"initializer": init.TruncatedNormal(stddev=0.5, low=-0.5, high=1.0)},
    "constant": {"initializer": init.Constant(value=0.5)},
    "by a function of keys": {"initializer": init.Custom(fn=_by_key)},
    "by a function of a row": {"init_fn": _drawn},
}
"""How new rows of a table get theirs: arguments of its config."""
OF_TABLE: dict[str, list[str]] = {
    "eviction": list(EVICTION),
    "admission": list(ADMISSION),
    "optimizer": list(PLAIN),
    "type": [name for name in TYPES if name != "mixed"],
    "limit": ["none", "few", "few in one group", "some", "no room"],
    "full": ["refuse", "raise"],
    "default": list(DEFAULTS),
    "rows": list(DTYPES),
    "accumulate": ["1", "2", "3"],
    "pooling": ["sum", "mean"],
    "first values": list(FIRST_VALUES),
    "nonfinite": ["apply", "skip", "raise"],
}
OF_PROGRAM: dict[str, list[str]] = {
    "kind": ["bags", "sequences"],
    "weights": ["none", "given", "processed", "learned"],
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
    "errors": ["none", "raised"],
    "gradients": ["finite", "some not"],
    "rates": ["one", "scheduled"],
    "ids": ["64 bits", "any type"],
    "rule": ["virtual_shard", "modulo"],
    "default type": ["float32", "float64", "bfloat16"],
    "before": ["nothing", "Saver", "torch"],
    "device": ["cpu", "npu"],
    "ranks": ["2", "3", "4", "1"],
}
SETTINGS = OF_TABLE | OF_PROGRAM
APART = [("optimizer", "eviction"), ("optimizer", "admission"), ("eviction", "admission")]
"""Pairs of settings with many values."""


def is_legal(row: Mapping[str, str]) -> bool:
    """Whether the values of some or all settings go together, and steps that may raise do."""
    raises = row.get("nonfinite", "raise") == "raise" or (
        row.get("full", "raise") == "raise" and row.get("limit", "few") not in ("none", "some")
    )
    return _go_together(row) and (raises or row.get("errors") != "raised")


def _go_together(row: Mapping[str, str]) -> bool:
    """Whether a table may have them."""
    eviction = EVICTION[row.get("eviction", "none")]
    admission = ADMISSION[row.get("admission", "none")]
    if row.get("data") == "no" and needed_by(eviction, admission):
        return False
    leaves = eviction is not None and (not eviction.expires or eviction.share is not None)
    records = admission is not None and any(term.max_records for term in admission.terms())
    has_groups = leaves or records or limit_groups(None, admission) is not None
    if row.get("limit") == "none" and (leaves or records):
        return False
    if row.get("limit") == "some" and _num_kept(row) < default_eviction_groups(1_100):
        return False
    if row.get("limit") in ("few in one group", "no room") and (
        records or row.get("type", "table_wise") in CUT_BY_ROWS
    ):
        return False  # ranks have whole groups
    if not _may_raise(row):
        return False
    if row.get("rule") == "modulo" and (  # which keeps no group of ids together
        has_groups or row.get("limit", "none") != "none" or _has_shared_rows(row)
    ):
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


def _num_kept(row: Mapping[str, str]) -> float:
    """Of how many ids without a row the rules keep something at most."""
    eviction = EVICTION[row.get("eviction", "none")]
    admission = ADMISSION[row.get("admission", "none")]
    found = [] if admission is None else [term.max_records for term in admission.terms()]
    found += [] if eviction is None else [eviction.churn_records]
    return min((each for each in found if each is not None), default=np.inf)


def _has_shared_rows(row: Mapping[str, str]) -> bool:
    """Whether ids on different ranks may read one row."""
    is_cut = row.get("type", "row_wise") in CUT_BY_ROWS
    return is_cut and row.get("default") in ("shared", "begun", "mixed")


def _may_raise(row: Mapping[str, str]) -> bool:
    """Whether what ranks go back to once a step has failed is what one process goes back to."""
    if row.get("errors") == "in pipelines":
        return True  # which say what was mapped, and are compared with the same one by one
    raises = row.get("full") == "raise" or row.get("nonfinite") == "raise"
    if row.get("errors", "raised") == "none":
        return not raises
    is_by_hand = row.get("way", BY_HAND) == BY_HAND and row.get("turns", "trained") == "trained"
    goes_back = (
        is_by_hand
        # Gradients that wait are dropped, and then others wait at the end of a part.
        and (row.get("accumulate", "1") == "1" or row.get("before", "nothing") == "nothing")
        and row.get("weights") != "processed"  # DDP takes no batch after one without its backward
    )
    has_ranks = row.get("ranks", "1") != "1" or row.get("before", "nothing") != "nothing"
    closes_groups = row.get("nonfinite") == "raise" and has_ranks
    return (goes_back or not (raises or "errors" in row)) and not closes_groups


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
    if row.get("weights") == "learned" and row.get("way", BY_HAND) != BY_HAND:
        return False  # torchrec's pipelines copy batches beside autograd
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
    rule: RankRule
    """Which rank owns an id."""
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
        return batch_of(
            self.seed,
            number,
            world_size,
            tuple(self.names),
            types_vary=self.row["ids"] == "any type",
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
        if _go_together(drawn):
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
        "on_nonfinite": row["nonfinite"],
        "on_full": row["full"],
        **FIRST_VALUES[row["first values"]],
    }
    table |= LIMITS[row["limit"]]
    if row["limit"] == "few":
        table["eviction_groups"] = _one_of([4, 8], source)
        if row["errors"] == "in pipelines" and row["full"] == "raise":
            table["max_rows"] = _one_of([40, 120, 200], source)
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
            _one_of(["virtual_shard", row["rule"]], source) if not is_last else row["rule"],
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


NOT_FINITE = (np.nan, np.inf, -np.inf)
RATES = (1.0, 0.5, 2.0)
"""By which learning rates are multiplied in turn, from another on for each table, where they are
scheduled."""


def rate_of(program: Program, batch: int, table: str) -> float:
    """By what the learning rate of a table is multiplied in a batch."""
    place = batch + int(table.removeprefix("t"))
    return RATES[place % len(RATES)] if program.row["rates"] == "scheduled" else 1.0


def gradients_of(program: Program, batch: int, samples: slice) -> dict[str, Array]:
    """(B, D) of what each feature's vectors are called, of some of a batch's samples."""
    has_others = program.row["gradients"] != "finite"
    found = {}
    for place, (shown, (_, number)) in enumerate(program.shown.items()):
        columns_D = np.arange(program.tables[number]["embedding_dim"])
        numbers_BD = 5 * np.arange(100)[samples, None] + 3 * place + 11 * columns_D + batch
        found[shown] = ((numbers_BD % 7 - 2) / 4).astype(np.float32)
        if has_others:
            found[shown][numbers_BD[:, 0] % 13 == 0] = NOT_FINITE[(place + batch) % 3]
    return found
