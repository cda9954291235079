"""pool_features, gather_features and pool_joined_bags: one node over many tables."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch

from recsdk_core import (
    Bags,
    CombineBlock,
    JoinedBags,
    Lease,
    Table,
    distinct_keys,
    init,
    lease_tables,
    map_joined,
    map_tables,
    optim,
)
from recsdk_core.nn import (
    FeatureBags,
    HashEmbedding,
    HashEmbeddingBag,
    SharedTraining,
    TableBags,
    gather_features,
    pool_features,
)
from recsdk_core.nn.function import pack_features
from recsdk_core.nn.joined import pool_joined_bags

KEYS = torch.tensor([5, -5, 5, 7])
OFFSETS = torch.tensor([0, 2, 2, 4])


def make_table(dim: int, name: str = "table") -> Table:
    return Table(dim, name=name, optimizer=optim.SGD(lr=1.0), initializer=init.Constant(value=1.0))


def make_anchor(dim: int = 1) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.empty(0, dim))


def feature_of(table: Table, keys: torch.Tensor = KEYS, **kwargs: object) -> FeatureBags:
    rows, outcomes = table.map(keys, insert=True)
    return FeatureBags(rows=rows, outcomes=outcomes, **kwargs)  # type: ignore[arg-type]


def pooled_entry(table: Table, column: int = 0, **kwargs: object) -> TableBags:
    feature = feature_of(table, offsets=OFFSETS, column=column, **kwargs)
    return TableBags(table=table, features=[feature], lease=table.lease())


def test_many_tables_of_mixed_widths_fill_their_columns() -> None:
    narrow, wide = make_table(2, "narrow"), make_table(3, "wide")
    anchor = make_anchor()
    out = pool_features([pooled_entry(wide, 2), pooled_entry(narrow, 0)], 3, 5, anchor)
    assert out.tolist() == [[2.0] * 5, [0.0] * 5, [2.0] * 5]
    out.sum().backward()
    assert anchor.grad is None
    for table in (narrow, wide):
        assert table.update_count == 1
        assert table.lookup(KEYS)[:, 0].tolist() == [-1.0, 0.0, -1.0, 0.0]


def test_columns_that_no_feature_fills_are_zero() -> None:
    out = pool_features([pooled_entry(make_table(2), column=1)], 4, 4, make_anchor())
    assert out[:3].tolist() == [[0.0, 2.0, 2.0, 0.0], [0.0] * 4, [0.0, 2.0, 2.0, 0.0]]
    assert out[3].tolist() == [0.0] * 4


def test_all_features_of_a_table_make_one_update() -> None:
    table = Table(1, optimizer=optim.Adagrad(lr=1.0), initializer=init.Constant(value=0.0))
    features = [feature_of(table, column=0), feature_of(table, torch.tensor([5]), column=1)]
    entry = TableBags(table=table, features=features)
    pool_features([entry], 4, 2, make_anchor()).sum().backward()
    [batch] = table.export()
    assert table.update_count == 1
    assert dict(zip(batch.keys.tolist(), batch.state["sum"][:, 0].tolist(), strict=True)) == {
        5: 9.0,
        -5: 1.0,
        7: 1.0,
    }


def test_gather_concatenates_features_in_order() -> None:
    first, second = make_table(2, "first"), make_table(2, "second")
    second.upsert(torch.tensor([9]), torch.full((1, 2), 3.0))
    entries = [
        TableBags(table=first, features=[feature_of(first), feature_of(first, KEYS[:1])]),
        TableBags(table=second, features=[feature_of(second, torch.tensor([9]))]),
    ]
    out = gather_features(entries, make_anchor(2))
    assert out.shape == (6, 2)
    assert out[:, 0].tolist() == [1.0, 1.0, 1.0, 1.0, 1.0, 3.0]
    out[4:].sum().backward()
    assert first.lookup(KEYS)[:, 0].tolist() == [0.0, 1.0, 0.0, 1.0]
    assert second.lookup(torch.tensor([9])).tolist() == [[2.0, 2.0]]


def test_gather_refuses_mixed_widths() -> None:
    entries = [
        TableBags(table=table, features=[feature_of(table)])
        for table in (make_table(2, "a"), make_table(3, "b"))
    ]
    with pytest.raises(ValueError, match=r"one width, got \[2, 3\]"):
        gather_features(entries, make_anchor())


def test_empty_input_gives_empty_output_and_advances_the_update_count() -> None:
    table = make_table(3)
    feature = feature_of(table, torch.empty(0, dtype=torch.int64))
    out = gather_features([TableBags(table=table, features=[feature])], make_anchor(3))
    assert out.shape == (0, 3)
    out.sum().backward()
    assert table.update_count == 1


def test_no_bags() -> None:
    table = make_table(3)
    empty = torch.empty(0, dtype=torch.int64)
    feature = feature_of(table, empty, offsets=torch.tensor([0]))
    out = pool_features([TableBags(table=table, features=[feature])], 0, 3, make_anchor())
    assert out.shape == (0, 3)


def test_a_second_backward_raises_and_changes_nothing() -> None:
    table = make_table(2)
    out = pool_features([pooled_entry(table)], 3, 2, make_anchor())
    out.sum().backward(retain_graph=True)
    trained = table.lookup(KEYS)
    with pytest.raises(RuntimeError, match="run forward again"):
        out.sum().backward()
    assert torch.equal(table.lookup(KEYS), trained)
    assert table.update_count == 1


@pytest.mark.parametrize("grad_mode", [True, False])
def test_without_gradients_the_lease_ends_at_once(grad_mode: bool) -> None:
    entry = pooled_entry(make_table(2))
    with torch.set_grad_enabled(grad_mode):
        out = pool_features([entry], 3, 2, make_anchor().requires_grad_(not grad_mode))
    assert not out.requires_grad
    assert entry.lease is not None
    assert entry.lease.is_released


def test_the_lease_ends_after_backward() -> None:
    entry = pooled_entry(make_table(2))
    out = pool_features([entry], 3, 2, make_anchor())
    assert entry.lease is not None
    assert not entry.lease.is_released
    out.sum().backward()
    assert entry.lease.is_released


def test_a_forward_without_backward_leaks_no_lease() -> None:
    table = make_table(1)
    lease = table.lease(step=1)
    rows, outcomes = table.map(KEYS, insert=True, lease=lease)
    features = [FeatureBags(rows=rows, outcomes=outcomes)]
    entry = TableBags(table=table, features=features, lease=lease)
    out = gather_features([entry], make_anchor())
    del lease, entry
    gc.collect()
    assert len(table) == 0
    del out
    gc.collect()
    assert len(table) == 3


def test_a_failing_update_ends_the_leases_and_changes_nothing() -> None:
    table = Table(1, optimizer=optim.SGD(lr=1.0), on_nonfinite="raise")
    entry = pooled_entry(table)
    before = table.lookup(KEYS)
    out = pool_features([entry], 3, 1, make_anchor())
    with pytest.raises(RuntimeError, match="finite"):
        out.backward(torch.full((3, 1), float("nan")))
    assert torch.equal(table.lookup(KEYS), before)
    assert entry.lease is not None
    assert entry.lease.is_released
    with pytest.raises(RuntimeError, match="has run already, whether it ended or raised"):
        out.backward(torch.ones(3, 1))
    assert table.update_count == 0


@pytest.mark.parametrize("pooling", ["sum", "mean"])
@pytest.mark.parametrize("frozen", [False, True])
def test_gradients_of_weights(pooling: str, frozen: bool) -> None:
    """As torch computes them, with the table trained and with it frozen."""
    table = Table(4, initializer=init.Normal())
    weights = torch.tensor([0.5, -1.0, 2.0, 0.25], requires_grad=True)
    entry = pooled_entry(table, weights=weights, pooling=pooling)
    rows_ND, upstream = table.lookup(KEYS), torch.randn(3, 4)
    anchor = make_anchor().requires_grad_(not frozen)
    pool_features([entry], 3, 4, anchor).backward(upstream)

    expected = weights.detach().clone().requires_grad_()
    bag_N = torch.tensor([0, 0, 2, 2])
    pooled = torch.zeros(3, 4).index_add(0, bag_N, expected[:, None] * rows_ND)
    if pooling == "mean":
        pooled = (
            pooled
            / torch.ones(3)
            .index_put((bag_N,), torch.tensor(0.0))
            .index_add(0, bag_N, expected)[:, None]
        )
    pooled.backward(upstream)
    torch.testing.assert_close(weights.grad, expected.grad)
    assert table.update_count == (0 if frozen else 1)
    assert torch.equal(table.lookup(KEYS), rows_ND) == frozen


def test_weights_may_be_reused_between_forward_and_backward() -> None:
    trained = []
    for reuses in (False, True):
        table = make_table(1)
        weights = torch.tensor([0.5, -1.0, 2.0, 0.25])
        out = pool_features([pooled_entry(table, weights=weights)], 3, 1, make_anchor())
        if reuses:
            weights.zero_()
        out.sum().backward()
        trained.append(table.lookup(KEYS))
    assert torch.equal(*trained)


def test_a_mean_over_weights_of_sum_zero_is_zero_with_gradient_zero() -> None:
    table = make_table(2)
    weights = torch.tensor([1.0, -1.0, 1.0, -1.0], requires_grad=True)
    entry = pooled_entry(table, weights=weights, pooling="mean")
    out = pool_features([entry], 3, 2, make_anchor())
    assert out.count_nonzero() == 0
    out.sum().backward()
    assert weights.grad is not None
    assert weights.grad.count_nonzero() == 0


def test_an_expanded_gradient() -> None:
    """sum() sends back one number seen as a matrix."""
    table = make_table(2)
    out = pool_features([pooled_entry(table)], 3, 2, make_anchor())
    (out.sum() * 2).backward()
    assert table.lookup(torch.tensor([7])).tolist() == [[-1.0, -1.0]]


def test_map_tables_feeds_pool_features() -> None:
    tables = [make_table(2, "a"), make_table(2, "b")]
    leases = [table.lease(step=1) for table in tables]
    mapped = map_tables([(table, KEYS) for table in tables], insert=True, leases=leases)
    entries = [
        TableBags(
            table=table,
            features=[FeatureBags(rows=rows, outcomes=outcomes, offsets=OFFSETS, column=2 * i)],
            lease=lease,
        )
        for i, (table, (rows, outcomes), lease) in enumerate(
            zip(tables, mapped, leases, strict=True)
        )
    ]
    pool_features(entries, 3, 4, make_anchor()).sum().backward()
    assert [len(table) for table in tables] == [3, 3]


def test_numbers_that_nobody_reads_are_trained_all_the_same() -> None:
    table = make_table(2)
    features = [feature_of(table, offsets=OFFSETS), feature_of(table, offsets=OFFSETS, column=6)]
    entry = TableBags(table=table, features=features)
    out = pack_features([entry], 12, make_anchor(), pooled=range(6, 12))
    assert out.tolist() == [0.0] * 6 + [2.0, 2.0, 0.0, 0.0, 2.0, 2.0]
    out.sum().backward()
    assert table.lookup(KEYS)[:, 0].tolist() == [-3.0, -1.0, -3.0, -1.0]


@pytest.mark.parametrize("pooling", ["sum", "mean"])
def test_processes_with_the_same_table_train_alike(pooling: str) -> None:
    batches = [KEYS, torch.tensor([7, 7, 7, 5])]
    alone = make_table(2, "alone")
    pairs = [
        feature_of(alone, keys, offsets=OFFSETS, pooling=pooling, column=2 * process)
        for process, keys in enumerate(batches)
    ]
    expected = pool_features([TableBags(table=alone, features=pairs)], 3, 4, make_anchor())
    expected.square().sum().backward()

    distinct = [distinct_keys(keys) for keys in batches]
    sizes = [2 * len(keys_U) for keys_U, _ in distinct]
    sent = [torch.zeros(size) for size in sizes]

    def train(process: int, table: Table) -> None:
        own = feature_of(table, batches[process], offsets=OFFSETS, pooling=pooling)
        keys_U, which_N = distinct[process]
        bags = Bags(which_N, own.outcomes, OFFSETS, None, pooling)

        def swap(grad: torch.Tensor, _: object) -> list[torch.Tensor]:
            sent[process] = grad
            return sent

        shared = SharedTraining(
            sums=[CombineBlock(bags=bags, column=0, width=2, start=0, num_sums=len(keys_U))],
            sizes=sizes,
            process=process,
            swap=swap,
            bags=[[feature_of(table, each) for each, _ in distinct]],
        )
        entry = TableBags(table=table, features=[own])
        out = pool_features([entry], 3, 2, make_anchor(), shared)
        out.square().sum().backward()
        assert torch.equal(out, expected[:, 2 * process : 2 * process + 2])

    for process in range(2):  # so that each gradient is known to the other process below
        train(process, make_table(2, "tried"))
    tables = [make_table(2, f"of_{process}") for process in range(2)]
    for process, table in enumerate(tables):
        train(process, table)
    for table in tables:
        torch.testing.assert_close(table.lookup(KEYS), alone.lookup(KEYS))
        assert table.update_count == 1


def test_what_is_shared_is_trained_once() -> None:
    table = make_table(2)
    entry = pooled_entry(table)
    empty = feature_of(table, torch.zeros(0, dtype=torch.int64))
    shared = SharedTraining(
        sums=[], sizes=[0], process=0, swap=lambda own, _: [own], bags=[[empty]]
    )
    out = pool_features([entry], 3, 2, make_anchor(), shared)
    out.sum().backward()
    assert table.lookup(KEYS)[:, 0].tolist() == [1.0] * 4
    with pytest.raises(RuntimeError, match="backward has run already"):
        out.sum().backward()


@pytest.mark.parametrize("kind", [HashEmbedding, HashEmbeddingBag])
def test_an_error_in_forward_holds_no_lease(kind: Any) -> None:
    module = kind(2)
    with pytest.raises(TypeError, match="keys") as caught:
        module(torch.tensor([[1.5]]))
    module.table.check_idle()  # though the error and its traceback are still there
    assert caught.traceback


def test_an_error_in_anothers_backward_holds_no_lease() -> None:
    module = HashEmbedding(2, optimizer=torch.optim.SGD)

    def fail(grad: torch.Tensor) -> None:
        raise ValueError("somebody's hook")

    def step() -> None:
        vectors = module(torch.tensor([1, 2]))
        vectors.register_hook(fail)
        vectors.sum().backward()

    with pytest.raises(ValueError, match="somebody's hook"):
        step()
    module.table.check_idle()
    assert module.table.update_count == 0


# ---- bags of many tables in one array of each kind ----------------------------------------------

COUNTS = torch.tensor([3, 1])


def two_tables() -> list[Table]:
    return [make_table(1, "one"), make_table(2, "two")]


def mapped_jointly(tables: list[Table]) -> tuple[list[Lease], JoinedBags]:
    """Three bags of one key and one, a number after the other."""
    leases = lease_tables(tables, 1)
    rows, outcomes = map_joined(tables, KEYS, COUNTS, insert=True, leases=leases)
    ones, starts = torch.tensor([1, 1]), torch.tensor([0, 3])
    return leases, JoinedBags(rows, outcomes, ones, COUNTS, starts)


def test_joined_bags_are_read_and_give_one_update() -> None:
    tables, anchor = two_tables(), make_anchor()
    leases, bags = mapped_jointly(tables)
    out = pool_joined_bags(tables, leases, bags, (5,), anchor)
    assert out.tolist() == [1.0] * 5
    assert [len(table) for table in tables] == [0, 0]
    (out * torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0])).sum().backward()
    assert anchor.grad is None
    assert tables[0].lookup(KEYS[:3])[:, 0].tolist() == [-3.0, -1.0, -3.0]
    assert tables[1].lookup(KEYS[3:]).tolist() == [[-3.0, -4.0]]
    assert [table.update_count for table in tables] == [1, 1]
    assert all(lease.is_released for lease in leases)


def test_joined_bags_that_nobody_reads_are_trained_all_the_same() -> None:
    tables = two_tables()
    out = pool_joined_bags(tables, *mapped_jointly(tables), (5,), make_anchor(), pooled=range(3))
    assert out.tolist() == [1.0, 1.0, 1.0, 0.0, 0.0]
    out.sum().backward()
    assert tables[1].lookup(KEYS[3:]).tolist() == [[0.0, 0.0]]


def test_a_second_backward_of_joined_bags_raises_and_changes_nothing() -> None:
    tables = two_tables()
    out = pool_joined_bags(tables, *mapped_jointly(tables), (5,), make_anchor()).sum()
    out.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="this forward's backward has run already"):
        out.backward()
    assert [table.update_count for table in tables] == [1, 1]


@pytest.mark.parametrize("requires_grad", [False, True])
def test_without_gradients_the_leases_of_joined_bags_end_at_once(requires_grad: bool) -> None:
    tables, anchor = two_tables(), make_anchor()
    anchor.requires_grad_(requires_grad)
    leases, bags = mapped_jointly(tables)
    with torch.set_grad_enabled(not requires_grad):
        pool_joined_bags(tables, leases, bags, (5,), anchor)
    assert all(lease.is_released for lease in leases)


def test_an_error_in_forward_of_joined_bags_holds_no_lease() -> None:
    tables = two_tables()
    leases, bags = mapped_jointly(tables)
    with pytest.raises(ValueError, match="do not lie within the array"):
        pool_joined_bags(tables, leases, bags, (4,), make_anchor())
    assert all(lease.is_released for lease in leases)


def test_joined_arrays_that_were_resized_are_refused() -> None:
    tables = two_tables()
    rows = torch.tensor([0, 0, 0, 0])
    outcomes = torch.zeros(4, dtype=torch.uint8)
    bags = JoinedBags(rows, outcomes, torch.tensor([1, 1]), COUNTS, torch.tensor([0, 3]))
    rows.resize_(0)
    with pytest.raises(ValueError, match="rows"):
        pool_joined_bags(tables, lease_tables(tables), bags, (5,), make_anchor())
