"""Tables on a device: the simulated NPU, asynchronously, over hccl.

They train as tables on the cpu do: the same keys, refusals and initial rows, and values within
float order. Twice the same training gives the same bits.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import device_machine
import numpy as np
import on_npus
import on_ranks
import planning_on_ranks
import pytest
import reference
import torch
from accumulating import ACCUMULATE, CLASSES, assert_equals_large_batches, every_optimizer
from comparing import assert_dense_close, assert_identical, assert_outputs_close, assert_rows_close
from device_type import DEVICE_TYPE, IS_CUDA, on_npus_alone
from loops import STOCK_PIPELINES
from planning_on_ranks import FACTOR, PIECE
from rank_pool import RankPool
from setups import SETUPS, WEIGHTED, on_npu, sizes_for, with_room
from torchrec.modules.embedding_configs import DataType
from worlds import Setup, joined, merged, new_model, rows_of

from recsdk_core import Admit, init, optim
from recsdk_sharding import (
    HashEmbeddingBagConfig,
    HashParameterConstraints,
    RowOptimizer,
    Saver,
)
from recsdk_sharding.device.kernels import kernel, register_kernel
from recsdk_sharding.device.optimizers import check_optimizer
from recsdk_sharding.device.table import DeviceTable
from recsdk_sharding.placement.layout import Shard
from sampling import crossed, sampled

NUM_MACHINES = 500 if os.environ.get("RECSDK_TEST_PROFILE") == "full" else 12
NUM_OPERATIONS = 25
NUM_STEPS_APART = 40
ROUNDINGS_APART = 8
"""Of the largest weight, after those steps; with gradients that depend on rows they multiply."""


def row_optimizer(settings: Any) -> Setup:
    return Setup(RowOptimizer, {"settings": settings})


NESTEROV = {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}
MORE_SETUPS = {
    "adamw": Setup(torch.optim.AdamW, {"lr": 0.02, "weight_decay": 0.1}),
    "momentum": Setup(torch.optim.SGD, NESTEROV),
    "partial_rowwise_adam": row_optimizer(optim.PartialRowwiseAdam(lr=0.02, eps=1e-4)),
    "lamb": row_optimizer(optim.LAMB(lr=0.02, eps=1e-4, weight_decay=0.1, clip_norm=1.0)),
    "ftrl": row_optimizer(optim.FTRL(lr=0.1, l1_regularization_strength=0.01, clip_value=0.1)),
    "rmsprop": row_optimizer(optim.RMSprop(lr=0.02, eps=1e-4, momentum=0.5, centered=True)),
    "catching up": row_optimizer(
        optim.AdamW(lr=0.02, eps=1e-4, weight_decay=0.5, catch_up=True, bias_correction="row")
    ),
}


TRAININGS = [
    ("adagrad_weighted", 4),
    ("adagrad", 4),
    ("sgd", 2),
    ("adagrad_weighted", 2),
    ("rowwise_adagrad", 2),
    ("adam", 2),
    ("adamw", 2),
    ("momentum", 1),
    ("partial_rowwise_adam", 2),
    ("lamb", 2),
    ("ftrl", 2),
    ("rmsprop", 2),
    ("catching up", 2),
    ("adam_defaults", 1),
]
"""Setups and numbers of ranks."""


@pytest.mark.parametrize(("name", "world_size"), TRAININGS if IS_CUDA else sampled(TRAININGS, 9))
def test_training_equals_the_cpu(npus: RankPool, name: str, world_size: int) -> None:
    world_size = npus.at_most(world_size)
    setup, sizes = with_room({**SETUPS, **MORE_SETUPS}[name]), sizes_for(world_size)
    results = npus.run(world_size, on_ranks.train, on_npu(setup), sizes)
    expected = reference.train_unsharded(setup, sizes)
    assert_rows_close(merged([r["rows"] for r in results]), expected["rows"])
    assert_outputs_close(results, expected["outputs"])
    for result in results:
        assert_dense_close(result["dense"], expected["dense"])
        assert result["has_grad"] == []
        assert set(result["counts"].values()) == {len(sizes)}


@pytest.mark.parametrize("name", ["rowwise_adagrad", "adagrad", "adam", "sgd"])
def test_without_feedback_nothing_drifts_from_the_cpu(npus: RankPool, name: str) -> None:
    setup = replace(SETUPS[name], options={"num_rows": 4000})
    both = [
        npus.run(1, on_npus.train_with_fixed_gradients, each, NUM_STEPS_APART)[0]
        for each in (setup, on_npu(setup))
    ]
    for table, rows in both[0].items():
        largest = max(float(np.abs(weight).max()) for weight, _ in rows.values())
        for key, (weight, _) in rows.items():
            apart = np.abs(both[1][table][key][0] - weight) / (largest * np.finfo(np.float32).eps)
            assert apart.max() <= ROUNDINGS_APART, (table, key)


@pytest.mark.parametrize("how", sampled(STOCK_PIPELINES, 7))
def test_torchrec_pipelines_give_the_same_bits(npus: RankPool, how: str) -> None:
    two = npus.at_most(2)
    setup, sizes = on_npu(with_room(SETUPS["adagrad_weighted"])), sizes_for(two)
    expected = npus.known(two, on_ranks.train, setup, sizes, STOCK_PIPELINES[how])
    assert_identical(npus.run(two, on_ranks.train, setup, sizes, how), expected)


@pytest.mark.parametrize(
    "how",
    [
        "PrefetchTrainPipelineSparseDist",
        *sampled([h for h in STOCK_PIPELINES if "Staged" in h], 2),
    ],
)
def test_pipelines_with_stages_map_each_batch_once(npus: RankPool, how: str) -> None:
    two = npus.at_most(2)
    setup, sizes = on_npu(with_room(SETUPS["adagrad"])), sizes_for(two)
    setup = replace(setup, options={**setup.options, "admission": Admit.count(2)})
    expected = npus.known(two, on_ranks.train, setup, sizes, STOCK_PIPELINES[how])
    assert_identical(npus.run(two, on_ranks.train, setup, sizes, how), expected)


@pytest.mark.parametrize("how", sampled(STOCK_PIPELINES, 5))
def test_torchrec_pipelines_run_sequences(npus: RankPool, how: str) -> None:
    two = npus.at_most(2)
    setup, sizes = on_npu(with_room(replace(SETUPS["adagrad"], is_sequence=True))), sizes_for(two)
    expected = npus.known(two, on_ranks.train, setup, sizes, STOCK_PIPELINES[how])
    assert_identical(npus.run(two, on_ranks.train, setup, sizes, how), expected)


def test_evaluation_by_a_torchrec_pipeline(npus: RankPool) -> None:
    """It is given the device of the setup, which has no index."""
    setup = on_npu(with_room(SETUPS["adagrad_weighted"]))
    two = npus.at_most(2)
    for result in npus.run(two, on_ranks.evaluate, setup, sizes_for(two)):
        assert_identical(result["piped"], result["plain"])
        assert_identical(result["after"], result["before"])


def test_a_thread_of_torchrec_loads_to_the_device_that_is_current_where_it_is_made(
    npus: RankPool,
) -> None:
    for loads_to, current in npus.run(1, on_npus.devices_of_a_loading_thread):
        assert loads_to == current


@pytest.mark.parametrize("processor", ["positions of all", "attention"])
def test_processors_train_as_on_the_cpu(npus: RankPool, processor: str) -> None:
    setup = with_room(replace(SETUPS["adagrad"], processor=processor))
    two = npus.at_most(2)
    sizes = sizes_for(two)[:4]
    results = npus.run(two, on_ranks.train, on_npu(setup), sizes)
    expected = reference.train_unsharded(setup, sizes)
    assert_rows_close(merged([r["rows"] for r in results]), expected["rows"])
    assert_outputs_close(results, expected["outputs"])
    for result in results:
        assert_dense_close(result["dense"], expected["dense"])
    if processor != "attention":  # the gradient of torchrec's own one is added atomically
        return
    for how in ("TrainPipelineSparseDist", "PrefetchTrainPipelineSparseDist"):
        assert_identical(npus.run(two, on_ranks.train, on_npu(setup), sizes, how), results)


def test_torchrec_pipelines_have_streams_of_the_device(npus: RankPool) -> None:
    for found in npus.run(1, on_npus.streams_of_pipelines):
        assert set(found.values()) == {DEVICE_TYPE}
        assert len(found) == 7


def test_looking_ahead_gives_the_same_bits_and_snapshots(npus: RankPool) -> None:
    two, looks_at = npus.at_most(2), [1, 3]
    setup, sizes = on_npu(with_room(SETUPS["adagrad"])), sizes_for(two)
    plain = npus.run(two, on_ranks.train_ahead, setup, sizes, 0, looks_at)
    ahead = npus.run(two, on_ranks.train_ahead, setup, sizes, 4, looks_at)
    for result, expected in zip(ahead, plain, strict=True):
        assert_identical(result, expected)


INITIALIZERS: dict[str, dict[str, Any]] = {
    "default": {},
    "normal": {"initializer": init.Normal(stddev=0.5)},
    "init_fn": {"init_fn": partial(torch.nn.init.normal_, std=2.0)},
    "custom init_fn": {"init_fn": torch.nn.init.xavier_uniform_},
}


@pytest.mark.parametrize(
    ("name", "run"), crossed(INITIALIZERS, [on_ranks.insert_only, on_npus.abandon], size=4)
)
def test_initial_rows_are_those_of_the_cpu(npus: RankPool, name: str, run: Any) -> None:
    setup = with_room(Setup(torch.optim.Adam, {"lr": 0.1}, options=INITIALIZERS[name]))
    two = npus.at_most(2)
    sizes = [row[:two] for row in ([4, 4], [3, 0])]
    rows = merged(npus.run(two, run, on_npu(setup), sizes))
    model = new_model(setup, "cpu")
    for batches in reference.batches_of(sizes, weighted=False):
        model(joined(batches))
    assert_identical(rows, rows_of(model.ebc.tables()))


@pytest.mark.parametrize("is_sequence", [False, True])
def test_every_optimizer_accumulates(npus: RankPool, is_sequence: bool) -> None:
    like = on_npu(with_room(Setup(is_sequence=is_sequence)))
    assert_equals_large_batches(npus, every_optimizer(like, is_odd=not is_sequence))


@pytest.mark.parametrize("name", CLASSES)
def test_accumulating_classes_equal_large_batches(npus: RankPool, name: str) -> None:
    accumulating, plain, arguments = CLASSES[name]
    large = on_npu(with_room(Setup(plain, arguments, weighted=True)))
    small = replace(large, optimizer=accumulating, arguments={**arguments, **ACCUMULATE})
    assert_equals_large_batches(npus, [(small, large)])


@pytest.mark.parametrize("device", ["cpu", DEVICE_TYPE])
@pytest.mark.parametrize("setup", [SETUPS["adagrad"], WEIGHTED], ids=["plain", "weighted"])
def test_tables_that_are_frozen_after_forward_do_not_train(
    ranks: RankPool, npus: RankPool, device: str, setup: Setup
) -> None:
    setup = replace(with_room(setup), device=device)
    pool = npus if device == DEVICE_TYPE else ranks
    [(untrained, _)] = pool.run(1, on_npus.freeze_after_forward, setup, [])
    assert all(untrained.values())
    every = range(len(untrained))
    for positions in (list(every), [0], [1], list(every[1:])):
        [(rows, error)] = pool.run(1, on_npus.freeze_after_forward, setup, positions)
        assert_identical(rows, untrained)
        if len(positions) == len(every):
            assert error is None
        else:
            assert "freeze all tables of a collection or none" in str(error)


@pytest.mark.parametrize("device", ["cpu", DEVICE_TYPE])
def test_a_rate_that_was_changed_goes_with_the_rows(
    ranks: RankPool, npus: RankPool, device: str
) -> None:
    setup = replace(with_room(SETUPS["adagrad"]), device=device)
    pool = npus if device == DEVICE_TYPE else ranks
    [rates] = pool.run(1, on_npus.rates_of_copies, setup)
    assert rates == {name: {0.25} for name in ("deepcopy", "pickle", "sharded", "moved")}


def test_refusals_are_those_of_the_cpu(npus: RankPool) -> None:
    setup = with_room(replace(SETUPS["adagrad"], options={"max_rows": 12}))
    sizes = [[6], [5], [4]]
    (result,) = npus.run(1, on_ranks.train, on_npu(setup), sizes)
    expected = reference.train_unsharded(setup, sizes)
    assert {len(rows) for rows in result["rows"].values()} == {12}
    assert_rows_close(result["rows"], expected["rows"])
    assert_outputs_close([result], expected["outputs"])


def test_a_full_table_refuses_and_goes_on(npus: RankPool) -> None:
    for result in npus.run(npus.at_most(2), on_npus.fill_up, 8):
        assert result["lengths"] == result["budgets"] == dict.fromkeys(result["lengths"], 8)
        assert all(count > 0 for count in result["refused"].values())
        for name, row in result["spare"].items():
            assert not any(row), f"{name}: the row that refused keys read has been written to"


def test_no_row_lies_beyond_the_store_while_a_lease_keeps_rows_back(npus: RankPool) -> None:
    (error,) = npus.run(1, on_npus.insert_beside_a_lease)
    assert "leases keep rows of erased keys back" in error


def test_of_equal_keys_the_last_is_written(npus: RankPool) -> None:
    (missed,) = npus.run(1, on_npus.upsert_equal_keys)
    assert [set(of_call) for of_call in missed] == [{0.0}] * 4


def test_keys_mapped_beside_an_upsert_get_their_initial_rows(npus: RankPool) -> None:
    assert npus.run(1, on_npus.map_beside_an_upsert) == [True]


def test_ids_that_cannot_be_read_are_not_counted(npus: RankPool) -> None:
    assert npus.run(1, on_npus.map_what_cannot_be_read) == [("no row for 99", 0, 1)]


def test_random_operations_are_those_of_the_cpu(npus: RankPool) -> None:
    seeds = range(NUM_MACHINES)
    found = npus.run(npus.at_most(2), device_machine.run_machines, list(seeds), NUM_OPERATIONS)
    for counts in found:
        assert set(counts) >= {each.__name__ for each in device_machine.OPERATIONS}
        assert set(counts) >= {"FOUND", "INSERTED", "REFUSED", "MISSING", "erased", "nonfinite"}
        assert counts["evicted"] > 0


def test_state_moves_between_devices_and_world_sizes(npus: RankPool) -> None:
    setup = with_room(Setup(torch.optim.Adam, {"lr": 0.02}))
    saved = npus.run(2, on_ranks.save, on_npu(setup), [[3, 1], [2, 2]])
    rows = merged([result["rows"] for result in saved])
    state = {name: value for result in saved for name, value in result["state"].items()}
    names = {name.rpartition(".")[2] for name in state if "embedding_bags" in name}
    assert names == {"keys", "weight", "exp_avg", "exp_avg_sq", "update_count", "seed", "ranks"}
    for world_size in (1, 4):
        loaded = npus.run(world_size, on_ranks.load, on_npu(setup), state)
        assert_identical(merged([result["rows"] for result in loaded]), rows)
        assert [result["problems"] for result in loaded] == [[]] * world_size
    on_cpu = new_model(setup, "cpu")
    on_cpu.load_state_dict({name: torch.from_numpy(np.asarray(v)) for name, v in state.items()})
    assert_identical(rows_of(on_cpu.ebc.tables()), rows)


def test_saver_copies_device_memory(npus: RankPool, tmp_path: Path) -> None:
    setup, folder = with_room(SETUPS["adam"]), str(tmp_path / "saved")
    results = npus.run(npus.at_most(2), on_npus.save_and_load, on_npu(setup), folder)
    for result in results:
        assert_identical(result["loaded"], result["saved"])
        assert result["counts"] == {2}
    on_cpu = new_model(setup, "cpu")
    Saver().load(on_cpu, folder)
    assert_identical(rows_of(on_cpu.ebc.tables()), merged([r["saved"] for r in results]))


def test_copies_that_lack_trained_rows_say_so(npus: RankPool, tmp_path: Path) -> None:
    setup = on_npu(with_room(SETUPS["adam"]))
    [(said, held)] = npus.run(1, on_npus.copies_beside_a_kept_output, setup, str(tmp_path / "0"))
    counts = [int(text.partition(": ")[2].split()[0]) for text in said]
    assert held > 0
    assert sum(counts) == 2 * held
    assert [("this save" in text, "this copy" in text) for text in said] == [
        *[(True, False)] * (len(said) // 2),
        *[(False, True)] * (len(said) // 2),
    ]


@pytest.mark.parametrize(
    ("name", "processor"),
    [("adagrad", None), ("adagrad_weighted", None), ("adagrad", "attention")],
)
def test_an_unsharded_module_trains_in_device_memory(
    npus: RankPool, name: str, processor: str | None
) -> None:
    setup = replace(with_room(SETUPS[name]), processor=processor)
    (result,) = npus.run(1, on_npus.train_unsharded, setup, 3)
    expected = reference.train_unsharded(setup, [[5]] * 3)
    assert_rows_close(result["rows"], expected["rows"])
    assert_dense_close(result["dense"], expected["dense"])
    assert_identical(result["loaded"], result["rows"])
    original, *copies = result["outputs of copies"]
    assert_identical(copies, [original, original])


def test_a_batch_keeps_its_memory_while_a_recorded_stream_reads_it(npus: RankPool) -> None:
    assert npus.run(1, on_npus.abandon_on_another_stream) == [True]


def test_every_table_and_every_dense_parameter_gets_a_gradient(npus: RankPool) -> None:
    setup = on_npu(with_room(Setup()))
    for learned in npus.run(npus.at_most(2), on_npus.everything_learns, setup):
        assert set(learned) >= {"user", "genre", "other"}
        assert len(learned) == 3 + 4
        assert all(learned.values()), learned


def test_registered_kernels_take_over(npus: RankPool) -> None:
    setup, sizes = on_npu(with_room(SETUPS["adagrad"])), sizes_for(1)
    (result,) = npus.run(1, on_npus.use_registered_kernels, setup, sizes)
    with_keys = 3 * sum(any(step) for step in sizes)  # tables, none of the width of another
    expected_calls = dict.fromkeys(result["calls"], with_keys) | {"pool_rows": 3 * len(sizes)}
    assert result["calls"] == expected_calls
    (expected,) = npus.run(1, on_ranks.train, setup, sizes)
    assert_identical(result["rows"], expected["rows"])


def test_each_rank_reads_its_own_bags_of_tables_that_all_have(npus: RankPool) -> None:
    plan = dict.fromkeys(("user", "genre", "other"), ("data_parallel",))
    setup = on_npu(with_room(replace(SETUPS["adagrad_weighted"], plan=plan)))
    for result in npus.run(2, on_npus.count_pooled_keys, setup, sizes_for(2)):
        assert result["pooled"] == result["own"]
        assert sum(result["own"])


def test_a_kernel_of_an_unknown_operation_is_refused() -> None:
    operations = ("pool_rows", "sum_gradients", "update_rows")
    with pytest.raises(ValueError, match=r"operation must be one of .*, got 'pool_row'") as raised:
        register_kernel(DEVICE_TYPE, "pool_row", lambda: None)  # type: ignore[arg-type]
    assert all(repr(operation) in str(raised.value) for operation in operations)
    assert kernel(DEVICE_TYPE, "pool_rows", operations.index) == operations.index


def test_an_optimizer_that_no_device_has_is_named() -> None:
    @dataclass(frozen=True)
    class Unknown:
        lr: float = 0.1

    with pytest.raises(ValueError, match="table 'user': optimizer Unknown is not supported"):
        check_optimizer(Unknown(), "user")  # type: ignore[arg-type]


def test_rows_of_16_bits_are_not_for_devices() -> None:
    config = HashEmbeddingBagConfig(
        name="user", embedding_dim=4, num_embeddings=10, data_type=DataType.BF16
    )
    with pytest.raises(ValueError, match="table 'user': data_type must be DataType.FP32 for rows"):
        DeviceTable(config, torch.zeros(11, 4), optim.SGD(), Shard.whole(4))


@pytest.mark.parametrize("kind", ["row_wise", "table_wise", "column_wise", "data_parallel"])
def test_planned_memory_is_what_tables_take(npus: RankPool, kind: str) -> None:
    config = HashEmbeddingBagConfig(
        name="user", embedding_dim=12, num_embeddings=30_000, feature_names=["user"]
    )
    constraints = {
        "user": HashParameterConstraints(
            expected_rows=20_000, sharding_types=[kind], min_partition=6
        )
    }
    optimizers = {"user": (torch.optim.Adam, {"lr": 0.1})}
    arguments = [config], optimizers, constraints, 20_000, DEVICE_TYPE
    for of_rank in npus.run(2, planning_on_ranks.fill, *arguments):
        host, on_device, measured_host, measured_on_device = of_rank["user"]
        assert measured_host / FACTOR - PIECE <= host <= measured_host * FACTOR + PIECE
        assert 0 <= on_device - measured_on_device < 4096  # what one batch of one id takes


def test_more_rows_than_the_device_has_room_for_are_refused(npus: RankPool) -> None:
    constraints = {"a": HashParameterConstraints(expected_rows=1000, growth=2)}
    topology = {"world_size": 1, "compute_device": DEVICE_TYPE}
    arguments = {"names": "a", "num_embeddings": 1500}, topology, constraints
    (found,) = npus.run(1, planning_on_ranks.choose, *arguments)
    assert "table 'a' is to have 2000 rows" in found["error"]
    assert "num_embeddings=1500 makes room for 1500" in found["error"]


@on_npus_alone
def test_tables_of_torchrec_say_which_kernel_fbgemm_lacks(npus: RankPool) -> None:
    (text,) = npus.run(1, on_npus.look_up_in_tables_of_torchrec)
    assert text.startswith(
        "torchrec's tables on npu need fbgemm's SplitTableBatchedEmbeddingBagsCodegen, whose "
        "operator torch.ops.fbgemm.split_embedding_codegen_lookup_*_function failed there"
    )
    assert "make these tables HashEmbeddingBagCollection" in text
