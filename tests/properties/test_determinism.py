"""No result depends on the index's seed, the number of threads, or the instruction set."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from recsdk_core import (
    Bags,
    Default,
    Outcome,
    Table,
    available_isas,
    init,
    isa,
    map_tables,
    num_threads,
    optim,
    pool_tables,
    set_isa,
    set_num_threads,
    update_tables,
)
from recsdk_core.testing import operations
from sampling import sampled

OPTIMIZERS = [
    optim.SGD(lr=0.1, weight_decay=0.01),
    optim.Adagrad(lr=0.1),
    optim.RowwiseAdagrad(lr=0.1),
    optim.Adam(lr=0.1),
    optim.Adam(lr=0.1, bias_correction="row"),
]
INITIALIZERS = [
    init.Uniform(low=-1.0, high=1.0),
    init.Normal(),
    init.TruncatedNormal(low=1.0, high=1.5),
]
WIDTHS = [1, 7, 16, 24, 65]
# (instruction set, threads of the pool, threads of the table, seed of the index)
MACHINES = list(itertools.product(available_isas(), [1, 2, 5], [None, 1, 3], [0, 2**63 + 12345]))
CASES = [
    (width, optimizer, initializer)
    for width, (optimizer, initializer) in itertools.product(
        WIDTHS, zip(OPTIMIZERS, itertools.cycle(INITIALIZERS), strict=False)
    )
]


@pytest.fixture(autouse=True)
def restored_process() -> Iterator[None]:
    """Puts instruction set and pool back."""
    before = isa(), num_threads()
    yield
    set_isa(before[0])
    set_num_threads(before[1])


def set_machine(name: str, threads: int) -> None:
    set_isa(name)
    set_num_threads(threads)


def big_batch() -> tuple[Any, Any, Any]:
    """(keys (N,), offsets (B + 1,), weights (N,)): long enough to be cut into pieces."""
    random = np.random.default_rng(1)
    keys = (random.zipf(1.3, 40_000) % 20_000) * np.int64(0x61C8864680B583EB)
    offsets = np.concatenate([[0], np.sort(random.integers(0, len(keys), 6000)), [len(keys)]])
    return keys, offsets, random.normal(size=len(keys)).astype(np.float32)


KEYS, OFFSETS, WEIGHTS = big_batch()


def everything(table: Table) -> list[bytes]:
    """All that one can see of a table in a few steps, as bytes."""
    random = np.random.default_rng(2)
    grad = random.normal(size=(len(OFFSETS) - 1, table.dim)).astype(np.float32)
    seen: list[Any] = []
    for step in range(2):
        rows, outcomes = table.map(KEYS[step:30_000].copy(), insert=True)
        seen += [np.where(outcomes <= Outcome.INSERTED, rows, -1), outcomes]
        seen += table.find_or_insert(KEYS, return_outcomes=True)
        seen.append(table.pool(KEYS, OFFSETS, WEIGHTS, "mean"))
        seen.append(
            table.pool_backward(KEYS, OFFSETS, grad, WEIGHTS, "mean", return_weights_grad=True)
        )
        table.pool_backward(KEYS, OFFSETS, grad)
        seen.append(table.erase(KEYS[step :: 3 + step].copy(), return_outcomes=True))
    for batch in table.export(5000):
        seen += [batch.keys, batch.weights, *batch.state.values()]
    return [part.tobytes() for part in seen]


@pytest.mark.parametrize(("width", "optimizer", "initializer"), sampled(CASES, 5), ids=str)
def test_a_big_workload_gives_the_same_bits_on_every_machine(
    width: int, optimizer: optim.Optimizer, initializer: init.Initializer
) -> None:
    config: dict[str, Any] = {"optimizer": optimizer, "initializer": initializer}
    config |= {"max_rows": 8000, "default": Default.constant(0.5)}
    expected: list[bytes] | None = None
    for name, threads, table_threads, hash_seed in sampled(MACHINES, 6):
        set_machine(name, threads)
        table = Table(width, num_threads=table_threads, hash_seed=hash_seed, **config)
        seen = everything(table)
        assert seen == (expected or seen), (name, threads, table_threads, hash_seed)
        expected = seen


@given(sequence=operations(9), optimizer=st.sampled_from(OPTIMIZERS), data=st.data())
def test_any_sequence_gives_the_same_bits_on_every_machine(
    sequence: list[Any], optimizer: optim.Optimizer, data: st.DataObject
) -> None:
    results = []
    for _ in range(2):
        name, threads, table_threads, hash_seed = data.draw(st.sampled_from(MACHINES))
        set_machine(name, threads)
        table = Table(9, optimizer=optimizer, num_threads=table_threads, hash_seed=hash_seed)
        seen: list[Any] = [operation.run(table) for operation in sequence]
        seen += [[b.keys, b.weights, *b.state.values()] for b in table.export(4)]
        results.append(repr(seen))
        table.check_invariants()
    assert results[0] == results[1]


def test_calls_over_many_tables_equal_calls_of_each() -> None:
    """And do not depend on the number of threads."""
    outs = []
    for threads in (1, 4):
        set_num_threads(threads)
        tables = [Table(width, name=f"t{width}", optimizer=optim.Adagrad()) for width in WIDTHS]
        mapped = map_tables([(table, KEYS) for table in tables], insert=True)
        bags = [Bags(rows, outcomes, OFFSETS, WEIGHTS) for rows, outcomes in mapped]
        columns = np.cumsum([0, *WIDTHS]).tolist()
        out = np.zeros((len(OFFSETS) - 1, columns[-1]), np.float32)
        calls = list(zip(tables, bags, columns, strict=False))
        pool_tables([(table, [(part, out, column)]) for table, part, column in calls])
        update_tables([(table, [(part, out, column)]) for table, part, column in calls])
        outs.append([out.tobytes(), *(b.weights.tobytes() for t in tables for b in t.export())])
    alone = []
    for width, column in zip(WIDTHS, columns, strict=False):
        table = Table(width, name=f"t{width}", optimizer=optim.Adagrad())
        pooled = table.pool(KEYS, OFFSETS, WEIGHTS, insert=True)
        np.testing.assert_array_equal(out[:, column : column + width], pooled)
        table.pool_backward(KEYS, OFFSETS, pooled, WEIGHTS)
        alone += [b.weights.tobytes() for b in table.export()]
    assert outs[0] == outs[1]
    assert outs[0][1:] == alone
