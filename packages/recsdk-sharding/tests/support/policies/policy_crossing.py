"""Rules of tables and defaults, and all that they must not depend on.

A combination of the settings is a program: it trains on ranks, whose number, devices and plan may
change on the way.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from loops import ON_CPU, STOCK_PIPELINES
from plans import Spec
from policy_batches import FEATURES, Shape
from policy_cases import ADMISSION, BY_HAND, MEASURED, PLANNERS, RULES, WIDTH, Case
from policy_model import STEPS, Expected
from torchrec.modules.embedding_configs import DataType

from optimizer_cases import DECAYS, PLAIN
from recsdk_core import Admit, Default, Evict, optim
from recsdk_sharding._configs.configs import DTYPES as TABLE_DTYPES

_LATEST = Evict.lru(by="time").expiring(ttl=9, every=2)
BY_DATA: dict[str, Evict | None] = {
    "user": _LATEST,
    "item": Evict.show_click(beta=2.0, decay=0.5, min_age=2).expiring(share=0.2, every=3),
    "ad": Evict.score(),
    "full": None,
}
EXPIRING = {**BY_DATA, "item": _LATEST, "ad": Evict.lru(by="time").expiring(ttl=5, every=1)}
TOTALS: dict[str, Evict | None] = {
    "user": Evict.show_click_totals(beta=2.0, decay=0.25).expiring(share=0.2, every=3),
    "item": Evict.show_click_totals(beta=0.5, min_age=2),
    "ad": Evict.show_click_totals(decay=0.5).expiring(ttl=9, every=2),
    "full": None,
}
OF_STEP = {
    "user": Admit.show_click_of_step(threshold=2.0, beta=1.5),
    "ad": Admit.show_click_of_step(threshold=3.0, alpha=0.5, beta=1.0) | Admit.count(4),
    "full": Admit.show_click_of_step(threshold=3.0),
}
CLICKED = {"user": Admit.count(3), "full": Admit.show_click(threshold=7, beta=1.5)}


@dataclass(frozen=True)
class Rules:
    """Of each table, by name."""

    eviction: dict[str, Evict | None]
    admission: dict[str, Admit] = field(default_factory=dict)
    is_limited: bool = True
    """Whether there is no room for all rows."""
    needs_data: bool = False


ALL_RULES = {
    "evicting": Rules(RULES),
    "expiring": Rules(RULES, is_limited=False),
    "admitting": Rules(RULES, ADMISSION),
    "counting": Rules(
        dict.fromkeys(RULES),
        dict.fromkeys(RULES, Admit.count(2, max_records=1_024)),
        is_limited=False,
    ),
    "by data": Rules(BY_DATA, CLICKED, needs_data=True),
    "expiring by data": Rules(EXPIRING, CLICKED, is_limited=False, needs_data=True),
    "totals by data": Rules(TOTALS, OF_STEP, needs_data=True),
    "measured": Rules(MEASURED),
    "latest": Rules(
        {
            "user": Evict.lru(),
            "item": Evict.lru(by="time", min_age=1).expiring(ttl=6, every=2),
            "ad": Evict.lru(min_age=2).expiring(ttl=4, every=1).with_churn(5),
            "full": None,
        }
    ),
    "by step": Rules(
        {
            "user": Evict.lru(min_age=2),
            "item": Evict.lru(min_age=1).expiring(ttl=6, every=2),
            "ad": Evict.lru(min_age=2).expiring(ttl=4, every=1),
            "full": None,
        }
    ),
}
COUNTING_NOTHING = ("latest", "by step")
"""Rules for which it is no matter how often an id comes."""
DEFAULTS: dict[str, dict[str, Default]] = {
    "zeros": dict.fromkeys(RULES, Default.zeros()),
    "constant": {
        "user": Default.constant(0.5),
        "item": Default.zeros(),
        "ad": Default.constant(-2.0),
        "full": Default.constant(3.0),
    },
    "shared": {
        "user": Default.shared_rows(4),
        "item": Default.shared_rows(64),
        "ad": Default.shared_rows(16),
        "full": Default.shared_rows(4),
    },
    "begun": {
        "user": Default.shared_rows(4, begin_with="shared_row"),
        "item": Default.shared_rows(64, begin_with="shared_row"),
        "ad": Default.shared_rows(16),
        "full": Default.shared_rows(8, begin_with="shared_row"),
    },
    "mixed": {
        "user": Default.initial_row(),
        "item": Default.shared_rows(8),
        "ad": Default.constant(1.0),
        "full": Default.initial_row(),
    },
}
"""Of each table, by name."""
SEQUENCE_TYPES = ("row_wise", "column_wise", "table_wise", "data_parallel", "mixed")
"""What sequences can be sharded by."""
TYPES = (*SEQUENCE_TYPES, "table_row_wise", "grid_shard")
MIXED = dict(zip(RULES, ("row_wise", "data_parallel") * 2, strict=True))
BEFORE: dict[str, list[tuple[str, int, str]]] = {
    "nothing": [],
    "others": [("npu", 2, "Saver"), ("cpu", 3, "torch")],
    "others on hosts": [("cpu", 4, "torch"), ("cpu", 3, "Saver")],
}
"""Devices and numbers of ranks that train before, and by what they save what the next load."""
ENDS = {1: (0, STEPS), 3: (0, 4, 9, STEPS)}
"""Where each of a number of parts begins and ends."""

OPTIMIZERS: dict[str, Any] = {
    "sgd": optim.SGD(lr=1.0),
    "rowwise adagrad": PLAIN["rowwise adagrad"],
    "adamw": replace(PLAIN["adamw"], **DECAYS[" decoupled, catching up"]),
    "lamb": PLAIN["lamb by row"],
    "ftrl": PLAIN["ftrl regularized"],
    "rmsprop": PLAIN["rmsprop both"],
}
WAYS = (
    BY_HAND,
    "TrainPipelineSparseDist",
    "TrainPipelineFusedSparseDist",
    "TrainPipelineSemiSync from 0",
    "PrefetchTrainPipelineSparseDist",
)
"""How batches run: of torchrec's pipelines those that do other things ahead than another."""

DTYPES = {
    "32 bits": DataType.FP32,
    "float16": DataType.FP16,
    "bfloat16": DataType.BF16,
}
ACCUMULATE: dict[str, dict[str, int]] = {
    "1": {},
    "2": dict.fromkeys(RULES, 2),
    "3": dict.fromkeys(RULES, 3),
    "each its own": {"user": 1, "item": 2, "ad": 3, "full": 4},
}
RATES = {"one": (1.0,), "scheduled": (1.0, 0.5, 2.0)}

SETTINGS: dict[str, list[str]] = {
    "rules": list(ALL_RULES),
    "type": list(TYPES),
    "default": list(DEFAULTS),
    "depth": ["1", "2", "3", "12"],
    "accumulate": list(ACCUMULATE),
    "optimizer": list(OPTIMIZERS),
    "way": list(WAYS),
    "features": list(FEATURES),
    "pooling": ["sum", "mean"],
    "weights": ["none", "given", "processed"],
    "bags": ["two ids", "any"],
    "sizes": ["one", "each its own"],
    "duplicates": ["sent", "dropped"],
    "rows": list(DTYPES),
    "rates": list(RATES),
    "cast": ["no", "yes"],
    "planner": [BY_HAND, *PLANNERS],
    "codec": ["none", "zstd"],
    "kernels": ["torch's", "triton's"],
    "kind": ["bags", "sequences"],
    "data": ["no", "yes"],
    "ranks": ["2", "1", "3", "4"],
    "device": ["cpu", "npu"],
    "before": list(BEFORE),
}
"""Names of what is tried; of what follows `codec` the cheapest first."""
BY_COST = ("kernels", "kind", "data", "ranks", "device", "before")


def is_legal(row: Mapping[str, str]) -> bool:
    """Whether the values of some or all settings go together."""
    rules, way = row.get("rules"), row.get("way", BY_HAND)
    if rules and ALL_RULES[rules].needs_data and row.get("data") == "no":
        return False
    if way not in (BY_HAND, *ON_CPU) and row.get("device") == "cpu":
        return False
    if row.get("kernels", "torch's") != "torch's" and (
        row.get("device") == "cpu"
        or row.get("rows", "32 bits") != "32 bits"  # where rows of 16 bits are
    ):
        return False
    if row.get("before", "nothing") != "nothing" and (
        _is_early(row)  # the first batch of each part is looked up late
        or row.get("accumulate") == "each its own"  # no step is the last of all tables' updates
    ):
        return False
    if rules == "measured" and not _is_exact(row):
        return False
    if not _has_room_for_rows(row):
        return False
    drops = row.get("duplicates") == "dropped"
    if drops and (row.get("kind") == "bags" or rules not in (None, *COUNTING_NOTHING)):
        return False
    return not (drops or row.get("kind") == "sequences") or (
        row.get("type", "mixed") in SEQUENCE_TYPES
        and row.get("pooling", "sum") == "sum"
        and row.get("weights", "none") == "none"
    )


def _is_exact(row: Mapping[str, str]) -> bool:
    """Whether rows have no rounding error at looks, nor batches in flight."""
    return (
        row.get("accumulate", "1") == "1"
        and row.get("optimizer", "sgd") == "sgd"
        and row.get("pooling", "sum") == "sum"
        and row.get("way", BY_HAND) == BY_HAND
    )


def _has_room_for_rows(row: Mapping[str, str]) -> bool:
    """Whether rows hold all numbers of the program, so that none is rounded."""
    bits = row.get("rows", "32 bits")
    if bits == "32 bits":
        return True
    if bits == "bfloat16" and row.get("bags", "two ids") != "two ids":
        return False
    return (
        row.get("device", "cpu") == "cpu"
        and row.get("way", BY_HAND) in (BY_HAND, *ON_CPU)
        and row.get("before") != "others"  # which are on devices, too
        and row.get("optimizer", "sgd") == "sgd"
        and row.get("pooling", "sum") == "sum"
        and row.get("weights", "none") == "none"
        and row.get("rates", "one") == "one"
    )


def _is_early(row: Mapping[str, str]) -> bool:
    """Whether a batch's rows are read before the batch before it is trained."""
    return STOCK_PIPELINES.get(row.get("way", BY_HAND)) == "looked up early"


OF_MODEL = ("rules", "default", "data", "accumulate", "optimizer", "rows", "rates")
OF_SHAPE = ("features", "pooling", "weights", "bags", "sizes")


def shape_by(row: Mapping[str, str]) -> Shape:
    """How the ids of a program come."""
    given = {name: row.get(name, SETTINGS[name][0]) for name in OF_SHAPE}
    return Shape(
        features=given["features"],
        is_mean=given["pooling"] == "mean",
        is_weighted=given["weights"] != "none",
        is_processed=given["weights"] == "processed",
        has_any_bags=given["bags"] == "any",
        batches_vary=given["sizes"] == "each its own",
    )


@functools.cache
def _expected_of(
    rules: str,
    default: str,
    data: str,
    accumulate: str,
    optimizer: str,
    rows: str,
    rates: str,
    is_early: bool,
    shape: Shape,
) -> Expected:
    of = ALL_RULES[rules]
    return Expected(
        of.eviction,
        of.admission,
        DEFAULTS[default],
        OPTIMIZERS[optimizer],
        shape,
        is_limited=of.is_limited,
        has_data=data == "yes",
        accumulate=ACCUMULATE[accumulate],
        is_early=is_early,
        dtype=TABLE_DTYPES[DTYPES[rows]],
        rates=RATES[rates],
    )


def expected_by(row: Mapping[str, str]) -> Expected:
    """What the plain model does by the values of these settings, of others by their first."""
    given = [row.get(name, SETTINGS[name][0]) for name in OF_MODEL]
    return _expected_of(*given, _is_early(row), shape_by(row))


def _types_of(row: Mapping[str, str], num_after: int) -> dict[str, str]:
    """How each table is sharded in the last part; in parts before it otherwise."""
    types = SEQUENCE_TYPES if row["kind"] == "sequences" else TYPES
    chosen = types[(types.index(row["type"]) + num_after) % len(types)]
    return MIXED if chosen == "mixed" else dict.fromkeys(RULES, chosen)


def _spec_of(sharding_type: str, world_size: int, is_whole: bool) -> Spec:
    last_rank, last_node = world_size - 1, world_size // _local_size(world_size) - 1
    last = {"table_wise": last_rank, "table_row_wise": last_node}
    if sharding_type in last:
        return sharding_type, last[sharding_type]
    if sharding_type in ("column_wise", "grid_shard"):
        place = last_rank if sharding_type == "column_wise" else last_node
        return sharding_type, [(WIDTH, place)] if is_whole else [(1, 0), (WIDTH - 1, place)]
    return (sharding_type,)


def _local_size(world_size: int) -> int:
    return 2 if world_size == 4 else world_size


@dataclass(frozen=True)
class Part:
    """Some steps of a program on ranks of one kind."""

    device: str
    world_size: int
    steps: tuple[int, int]
    case: Case
    saved_by: str
    """What saves it; of the last one nothing does."""


def parts_of(row: Mapping[str, str]) -> list[Part]:
    """A program: what is saved after each part but the last goes on in the next.

    That lacks the last steps whose gradients wait for others: they come again.
    """
    ways = [*BEFORE[row["before"]], (row["device"], int(row["ranks"]), "")]
    made = []
    for number, (device, world_size, saved_by) in enumerate(ways):
        case = _case_of(row, device, world_size, len(ways) - 1 - number)
        if case.plan is not None and ("data_parallel",) in case.plan.values():
            saved_by = saved_by and "Saver"  # torch's takes copies with rows in one order alone
        first, last = ENDS[len(ways)][number], ENDS[len(ways)][number + 1]
        steps = first - first % case.accumulate.get("user", 1), last
        made.append(Part(device, world_size, steps, case, saved_by))
    return made


def _case_of(row: Mapping[str, str], device: str, world_size: int, num_after: int) -> Case:
    expected = expected_by(row)
    rules = ALL_RULES[row["rules"]].eviction
    plan = {
        name: _spec_of(sharding_type, world_size, is_whole=_needs_whole_rows(rules[name]))
        for name, sharding_type in _types_of(row, num_after).items()
    }
    return Case(
        plan,
        local_size=_local_size(world_size),
        is_sequence=row["kind"] == "sequences",
        device=device,
        depth=int(row["depth"]),
        way=row["way"] if device == "npu" or row["way"] in ON_CPU else BY_HAND,
        accumulate=ACCUMULATE[row["accumulate"]],
        drops_duplicates=row["duplicates"] == "dropped",
        planner=row["planner"],
        codec=row["codec"],
        returned=_returned(row, expected, plan),
        **settings_of(row),
    )


def settings_of(row: Mapping[str, str]) -> dict[str, Any]:
    """What cases have of the rules and the default, and what is to become of keys."""
    expected = expected_by(row)
    rules = ALL_RULES[row["rules"]]
    unlimited = {"max_rows": None, "eviction_groups": None, "num_embeddings": 4_096}
    return {
        "rules": rules.eviction,
        "admission": rules.admission,
        "default": DEFAULTS[row["default"]],
        "state": {
            **({} if rules.is_limited else unlimited),
            "data_type": DTYPES[row.get("rows", "32 bits")],
        },
        "rates": RATES[row.get("rates", "one")],
        "is_cast": row.get("cast") == "yes",
        "has_data": row["data"] == "yes",
        "shape": shape_by(row),
        "optimizer": OPTIMIZERS[row.get("optimizer", "sgd")],
        "reads": expected.reads,
        "outcomes": None if _is_early(row) else expected.outcomes,
        "left": expected.left,
    }


def _needs_whole_rows(rule: Evict | None) -> bool:
    return rule is not None and rule.order == "low_norm"


def _returned(
    row: Mapping[str, str], expected: Expected, plan: Mapping[str, Spec]
) -> dict[str, tuple[int, int]]:
    """Who returned, of tables of which each key is counted once, and by the groups of all."""
    if row["before"] != "nothing" or not ALL_RULES[row["rules"]].is_limited:
        return {}
    return {name: expected.returned[name] for name, spec in plan.items() if spec == ("row_wise",)}
