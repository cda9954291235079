"""Every setting of torchrec is honoured by hash tables, or refused by its name.

What is listed here is compared with torchrec's own dataclasses and signatures: a setting that a
later torchrec adds makes a test fail until it is in one list or the other.
"""

from __future__ import annotations

import inspect
from dataclasses import fields
from types import SimpleNamespace
from typing import Any

import arguments_on_ranks
import pytest
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    SplitTableBatchedEmbeddingBagsCodegen,
)
from rank_pool import RankPool
from torchrec.distributed import fused_params
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner.types import ParameterConstraints
from torchrec.distributed.types import (
    BoundsCheckMode,
    CacheParams,
    KeyValueParams,
    ParameterSharding,
)
from torchrec.modules.embedding_configs import DataType

from recsdk_sharding import (
    HashEmbeddingBagCollectionSharder,
    HashEmbeddingCollectionSharder,
    HashParameterConstraints,
)
from recsdk_sharding._batch.output_dist import check_codecs
from recsdk_sharding._configs.settings import (
    HONOURED_CONSTRAINTS,
    HONOURED_IN_PLANS,
    KERNEL_SETTINGS,
    Subject,
    check_constraints,
    check_fused_params,
    check_plan,
)

TYPES = ("row_wise", "column_wise", "data_parallel")

KERNEL_CASES: dict[str, tuple[list[Any], list[Any]]] = {
    "cache_params": ([], [CacheParams(), CacheParams(load_factor=0.5)]),
    "enforce_hbm": ([False], [True]),
    "stochastic_rounding": ([True, False], []),
    "bounds_check_mode": ([BoundsCheckMode.NONE], [BoundsCheckMode.FATAL, BoundsCheckMode.IGNORE]),
    "output_dtype": ([DataType.FP32], [DataType.FP16, DataType.BF16]),
    "key_value_params": ([], [KeyValueParams()]),
}
"""Values that say what float32 tables on the cpu do, and values that do not."""

HALF = {"data_type": DataType.BF16}

CONSTRAINT_CASES: dict[str, tuple[list[Any], list[Any]]] = {
    **KERNEL_CASES,
    "sharding_types": ([["row_wise"], ["shape_wise", "row_wise"]], ["row_wise", ["shape_wise"]]),
    "compute_kernels": ([["fused"]], ["fused", ["fused_uvm_caching"], ["quant"]]),
    "min_partition": ([4], []),
    "pooling_factors": ([[3.0]], []),
    "num_poolings": ([[2.0]], []),
    "batch_sizes": ([[8]], []),
    "is_weighted": ([True], []),
    "feature_names": ([["user", "ad"], ["ad", "user"]], [["user"]]),
    "device_group": (["cpu"], ["cuda"]),
    "use_virtual_table": ([], [True]),
}
"""Constraints of table "user", whose features are user and ad, for a plan on the cpu."""

OF_ROWS = {"expected_rows", "growth"}


def test_every_field_of_a_plan_is_listed() -> None:
    names = {field.name for field in fields(ParameterSharding)}
    assert names == HONOURED_IN_PLANS | KERNEL_CASES.keys()
    assert KERNEL_CASES.keys() == KERNEL_SETTINGS.keys()


def test_every_field_of_constraints_is_listed() -> None:
    names = {field.name for field in fields(ParameterConstraints)}
    assert names == CONSTRAINT_CASES.keys()
    assert names - KERNEL_CASES.keys() - {"use_virtual_table"} | OF_ROWS == HONOURED_CONSTRAINTS
    assert {field.name for field in fields(HashParameterConstraints)} == names | OF_ROWS


@pytest.mark.parametrize("kind", ["bag", "sequence"])
def test_settings_of_a_plan(ranks: RankPool, kind: str) -> None:
    good = [{name: value} for name, (values, _) in KERNEL_CASES.items() for value in values]
    bad = [{name: value} for name, (_, values) in KERNEL_CASES.items() for value in values]
    bad += [{"sharding_type": "shape_wise"}, {"compute_kernel": "dense"}]
    bad += [{"ranks": None}, {"sharding_spec": None}]
    (found,) = ranks.run(1, arguments_on_ranks.shard_with, [*good, *bad], {}, kind)
    assert found[: len(good)] == [""] * len(good)
    for change, error in zip(bad, found[len(good) :], strict=True):
        (name,) = change
        assert error.startswith("ValueError: table 'user': the plan says"), error
        assert (name if name != "sharding_type" else "shape_wise") in error


def test_rows_of_16_bits_are_rounded_stochastically(ranks: RankPool) -> None:
    changes = [{"stochastic_rounding": value} for value in (True, False)]
    ((taken, refused),) = ranks.run(1, arguments_on_ranks.shard_with, changes, HALF, "bag")
    assert taken == ""
    assert "the plan says stochastic_rounding=False: rows of 16 bits are always" in refused
    (found,) = ranks.run(
        1,
        arguments_on_ranks.plan_with,
        [ParameterConstraints(**change) for change in changes],
        HALF,
    )
    assert found[0] == ""
    assert "its constraints say stochastic_rounding=False" in found[1]


def test_settings_of_constraints(ranks: RankPool) -> None:
    good, bad = (
        [
            ParameterConstraints(**{name: value})
            for name, values in CONSTRAINT_CASES.items()
            for value in values[index]
        ]
        for index in (0, 1)
    )
    names = [name for name, (_, values) in CONSTRAINT_CASES.items() for _ in values]
    others = [7, {"sharding_types": ["row_wise"]}, [ParameterConstraints()]]
    (found,) = ranks.run(1, arguments_on_ranks.plan_with, [*good, *bad, *others], {})
    assert found[: len(good)] == [""] * len(good)
    for name, error in zip(names, found[len(good) : -len(others)], strict=True):
        assert error.partition(": ")[2].startswith("table 'user': its constraints"), error
        assert name in error
    for error in found[-len(others) :]:
        assert error.startswith("TypeError: constraints must be a dict of ParameterConstraints by")


def test_a_setting_that_torchrec_adds_is_refused_until_it_is_known() -> None:
    from dataclasses import make_dataclass

    subject = Subject("t", device_type="cpu")
    of_plan = make_dataclass("Later", [("later", Any, None)], bases=(ParameterSharding,))
    with pytest.raises(ValueError, match="table 't': the plan says later=3: hash tables do not"):
        check_plan(subject, of_plan("data_parallel", "dense", [0], None, later=3), TYPES)
    check_plan(subject, of_plan("data_parallel", "dense", [0], None), TYPES)
    constraints = make_dataclass("Later", [("later", Any, None)], bases=(ParameterConstraints,))
    with pytest.raises(ValueError, match="table 't': its constraints say later=3: hash tables do"):
        check_constraints(subject, constraints(later=3), TYPES, ["f"], "cpu")


@pytest.mark.parametrize("device_type", ["npu", "cuda"])
def test_on_a_device_rows_are_in_its_memory(device_type: str) -> None:
    subject = Subject("t", device_type=device_type)
    for value in (True, False):
        check_constraints(subject, ParameterConstraints(enforce_hbm=value), TYPES, [], device_type)
    group = ParameterConstraints(device_group=device_type)
    check_constraints(subject, group, TYPES, [], device_type)


def keys_of_fused_params() -> set[str]:
    """All that torchrec and fbgemm's kernels take in fused_params."""
    own = {value for name, value in vars(fused_params).items() if name.startswith("FUSED_PARAM_")}
    kernels = set(inspect.signature(SplitTableBatchedEmbeddingBagsCodegen.__init__).parameters)
    stored = {field.name for field in fields(KeyValueParams)}
    return (own | kernels | stored) - {"self"}


HONOURED_FUSED = {
    "output_dtype": DataType.FP32,
    "stochastic_rounding": True,
    "bounds_check_mode": BoundsCheckMode.NONE,
    "enforce_hbm": True,
}


@pytest.mark.parametrize("name", sorted(keys_of_fused_params()))
def test_fused_params_are_refused_by_name_unless_they_say_what_happens(name: str) -> None:
    with pytest.raises(ValueError, match=f"sharder: fused_params has {name}="):
        check_fused_params(Subject("sharder"), {name: object()})
    if name in HONOURED_FUSED:
        check_fused_params(Subject("sharder"), {name: HONOURED_FUSED[name]})


def test_fused_params_with_an_optimizer_say_where_it_goes() -> None:
    for given in (
        {"optimizer": EmbOptimType.EXACT_ADAGRAD},
        {"learning_rate": 0.1},
        {"beta1": 0.9},
    ):
        with pytest.raises(ValueError, match="give the optimizer to apply_optimizer_in_backward"):
            check_fused_params(Subject("sharder"), given)


def test_sharders_check_their_arguments(ranks: RankPool) -> None:
    given: list[dict[str, Any]] = [
        {"fused_params": HONOURED_FUSED},
        {"fused_params": {"cache_load_factor": 0.2}},
        {"fused_params": ["output_dtype"]},
        {"qcomm_codecs_registry": ["fp16"]},
        {"qcomm_codecs_registry": {"POOLED": None}},
    ]
    (found,) = ranks.run(1, arguments_on_ranks.with_options, given)
    starts = ["", "fused_params has cache_load_factor=0.2", "fused_params must be a dict"]
    starts += ["qcomm_codecs_registry must be a dict", "qcomm_codecs_registry has ['POOLED']"]
    for errors, start in zip(found, starts, strict=True):
        assert len(errors) == 2
        assert all(start in error and bool(error) == bool(start) for error in errors)


@pytest.mark.parametrize(
    ("stock", "ours"),
    [
        (EmbeddingBagCollectionSharder, HashEmbeddingBagCollectionSharder),
        (EmbeddingCollectionSharder, HashEmbeddingCollectionSharder),
    ],
)
def test_arguments_of_torchrecs_sharders_are_taken_or_refused_by_name(
    stock: Any, ours: Any
) -> None:
    taken = inspect.signature(ours.__init__).parameters
    missing = inspect.signature(stock.__init__).parameters.keys() - taken.keys()
    assert missing <= {"sharded_module_order_overwrite"}
    for name in missing:
        with pytest.raises(TypeError, match=name):
            ours(None, **{name: None})


class FailingCodec:
    """A codec of torchrec that fails in one way."""

    def __init__(self, error: Exception | None) -> None:
        self._error = error

    def create_context(self) -> None:
        return None

    def encode(self, numbers: torch.Tensor, context: None) -> torch.Tensor:
        if self._error is not None:
            raise self._error
        return numbers

    def decode(self, numbers: torch.Tensor, context: None) -> torch.Tensor:
        return numbers


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (AssertionError(), "AssertionError"),
        (RuntimeError(""), "RuntimeError"),
        (ValueError("no such\nkind"), "no such"),
    ],
)
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_a_codec_that_fails_is_named_even_if_it_says_nothing(
    error: Exception, reason: str, direction: str
) -> None:
    codecs = {"forward": FailingCodec(None), "backward": FailingCodec(None)}
    codecs[direction] = FailingCodec(error)
    message = f"the {direction} codec of POOLED fails on cpu: {reason}; take FP16"
    with pytest.raises(ValueError, match=message):
        check_codecs(SimpleNamespace(**codecs), "POOLED", torch.device("cpu"))  # type: ignore[arg-type]
