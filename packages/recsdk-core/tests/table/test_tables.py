"""Calls over many tables at once."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from recsdk_core import (
    Admit,
    Bags,
    Evict,
    KeyData,
    Outcome,
    Table,
    init,
    join_rows,
    lease_tables,
    map_joined,
    map_tables,
    optim,
    pool_tables,
    release_leases,
    update_tables,
)

KEYS = np.array([3, 4, 3])
OFFSETS = np.array([0, 2, 3])


def make(dim: int, name: str, **config: Any) -> Table:
    config = {"optimizer": optim.SGD(lr=1.0), "initializer": init.Constant(value=1.0), **config}
    return Table(dim, name=name, **config)


def test_map_pool_update() -> None:
    tables = [make(1, "a"), make(3, "b")]
    mapped = map_tables([(tables[0], KEYS), (tables[1], KEYS[:0])], insert=True)
    assert mapped[0][1].tolist() == [Outcome.INSERTED, Outcome.INSERTED, Outcome.FOUND]
    assert mapped[1][0].shape == (0,)
    out = np.full((2, 4), 9.0, np.float32)
    first = Bags(*mapped[0], OFFSETS)
    empty = Bags(*mapped[1], np.array([0, 0, 0]))
    assert (first.num_bags, first.num_keys, empty.num_bags, empty.num_keys) == (2, 3, 2, 0)
    pool_tables([(tables[0], [(first, out, 3)]), (tables[1], [(empty, out, 0)])])
    assert out.tolist() == [[0.0, 0.0, 0.0, 2.0], [0.0, 0.0, 0.0, 1.0]]
    update_tables([(tables[0], [(first, out, 3)]), (tables[1], [(empty, out, 0)])])
    assert tables[0].lookup(KEYS)[:, 0].tolist() == [-2.0, -1.0, -2.0]
    assert [table.update_count for table in tables] == [1, 1]


def test_leases_of_many_tables_are_those_of_each() -> None:
    tables = [make(1, "a"), make(2, "b")]
    leases = lease_tables(tables, 3)
    map_tables([(table, KEYS) for table in tables], insert=True, leases=leases)
    assert [lease.step for lease in leases] == [3, 3]
    assert [len(table) for table in tables] == [0, 0]
    release_leases([*leases, None])
    release_leases(leases)
    assert all(lease.is_released for lease in leases)
    assert [len(table) for table in tables] == [2, 2]
    assert [lease.step for lease in lease_tables(tables)] == [None, None]


def test_leases_are_taken_of_all_tables_or_of_none() -> None:
    tables = [make(1, "a"), make(1, "b")]
    tables[1].lease(5).release()
    with pytest.raises(ValueError, match="a lease for step 4 comes after one for step 5"):
        lease_tables(tables, 4)
    tables[0].clear()  # raises if a lease with a step were open
    with pytest.raises(TypeError, match="recsdk_core.Table or Index, got None"):
        lease_tables([tables[0], None])  # type: ignore[list-item]
    with pytest.raises(ValueError, match="step must be at most"):
        lease_tables(tables, 2**63)
    with pytest.raises(
        TypeError, match="a recsdk_core.Lease or None each, got recsdk_core.table.Table"
    ):
        release_leases([tables[0]])  # type: ignore[list-item]


def test_no_calls_and_no_blocks() -> None:
    table = make(1, "a")
    assert map_tables([], insert=True) == []
    pool_tables([])
    pool_tables([(table, [])])
    update_tables([])
    update_tables([(table, [])])
    assert table.update_count == 1


def test_several_blocks_of_a_table_make_one_update() -> None:
    table = make(1, "a", optimizer=optim.Adagrad(lr=1.0))
    bags = Bags(*table.map(KEYS, insert=True))
    grad = np.ones((3, 1), np.float32)
    update_tables([(table, [(bags, grad, 0), (bags, grad, 0)])])
    [batch] = table.export()
    assert batch.state["sum"].tolist() == [[16.0], [4.0]]
    assert table.update_count == 1


def test_weights_and_their_gradients() -> None:
    table = make(2, "a")
    weights = np.array([1, 2, 3], np.float32)
    bags = Bags(*table.map(KEYS, insert=True), OFFSETS, weights)
    grad, weights_grad = np.ones((2, 2), np.float32), np.empty(3, np.float32)
    update_tables([(table, [(bags, grad, 0, weights_grad)])])
    assert weights_grad.tolist() == [2.0, 2.0, 2.0]
    assert table.lookup(KEYS)[:, 0].tolist() == [-3.0, -1.0, -3.0]


def test_rows_of_one_table() -> None:
    table = make(2, "a")
    weights = np.array([1, 2, 3], np.float32)
    bags = Bags(*table.map(KEYS, insert=True), OFFSETS, weights, "mean")
    assert table.pool_rows(bags).tolist() == [[1.0, 1.0], [1.0, 1.0]]
    weights_grad = np.empty(3, np.float32)
    table.update_rows(bags, np.ones((2, 2), np.float32), weights_grad)
    assert weights_grad.tolist() == [0.0, 0.0, 0.0]
    assert table.update_count == 1


def test_bags_without_offsets_have_one_key_each() -> None:
    table = make(1, "a")
    bags = Bags(*table.map(KEYS, insert=True))
    assert bags.num_bags == 3
    assert table.pool_rows(bags).tolist() == [[1.0]] * 3


def test_bags_keep_their_arrays_alive() -> None:
    table = make(1, "a")
    bags = Bags(
        *(part.copy() for part in table.map(KEYS, insert=True)),
        OFFSETS.astype(np.int32),
        np.ones(3, np.float32),
    )
    trash = [np.full(3, -1, np.int64) for _ in range(100)]
    assert table.pool_rows(bags).tolist() == [[2.0], [1.0]]
    assert len(trash) == 100


def test_leases() -> None:
    tables = [make(1, "a"), make(1, "b")]
    lease = tables[0].lease(step=1)
    map_tables([(tables[0], KEYS), (tables[1], KEYS)], insert=True, leases=[lease, None])
    assert [len(table) for table in tables] == [0, 2]
    lease.release()
    assert [len(table) for table in tables] == [2, 2]
    with pytest.raises(ValueError, match="leases must have one element for each call, 1, got 0"):
        map_tables([(tables[0], KEYS)], insert=True, leases=[])
    with pytest.raises(TypeError, match="recsdk_core.Lease or None each, got 1"):
        map_tables([(tables[0], KEYS)], insert=True, leases=[1])  # type: ignore[list-item]


def test_a_table_occurs_once() -> None:
    table = make(1, "twice")
    with pytest.raises(ValueError, match="table 'twice' occurs twice"):
        map_tables([(table, KEYS), (table, KEYS)], insert=True)
    assert len(table) == 0
    bags, vectors = Bags(*table.map(KEYS, insert=True)), np.ones((3, 2), np.float32)
    with pytest.raises(ValueError, match="table 'twice' occurs twice"):
        pool_tables([(table, [(bags, vectors, column)]) for column in (0, 1)])
    with pytest.raises(ValueError, match="table 'twice' occurs twice"):
        update_tables([(table, [(bags, vectors, column)]) for column in (0, 1)])
    assert (vectors == 1).all()
    assert table.update_count == 0


def test_arguments_are_checked_before_any_table_changes() -> None:
    tables = [make(1, "a"), make(1, "b")]
    with pytest.raises(TypeError, match="keys must be int64"):
        map_tables([(tables[0], KEYS), (tables[1], KEYS.astype(float))], insert=True)
    assert len(tables[0]) == 0
    mapped = map_tables([(table, KEYS) for table in tables], insert=True)
    good, bad = (Bags(*part) for part in mapped)
    grad = np.ones((3, 1), np.float32)
    beyond = Bags(np.array([7]), np.array([Outcome.FOUND], np.uint8))
    with pytest.raises(ValueError, match="row"):
        update_tables([(tables[0], [(good, grad, 0)]), (tables[1], [(beyond, grad, 0)])])
    assert [table.update_count for table in tables] == [0, 0]
    assert bad.num_keys == 3


def test_one_tables_failure_leaves_the_others_done_whole() -> None:
    def fail(keys: Any, values: Any) -> None:
        raise KeyError("no")

    tables = [make(1, "a"), make(1, "b", initializer=init.Custom(fn=fail)), make(1, "c")]
    with pytest.raises(KeyError, match="no"):
        map_tables([(table, KEYS) for table in tables], insert=True)
    assert [len(table) for table in tables] == [2, 0, 2]
    for table in tables:
        table.check_invariants()


NUMBERS = st.sampled_from([np.int32, np.int64])


@given(data=st.data(), given_as=NUMBERS, number=NUMBERS)
def test_rows_of_tables_are_joined_as_lists_are(data: Any, given_as: Any, number: Any) -> None:
    sizes = data.draw(st.lists(st.sampled_from([0, 1, 5, 20_000]), max_size=4))
    order = data.draw(st.permutations(range(len(sizes))))
    has_outcomes = data.draw(st.booleans())
    random = np.random.default_rng(data.draw(st.integers(0, 99)))
    rows = random.integers(0, 10, sum(sizes))
    num_shared = data.draw(st.sampled_from([0, 10]))
    outcomes = random.integers(0, 5, len(rows)).astype(np.uint8)
    if num_shared == 0:
        rows[outcomes > Outcome.INSERTED] -= 5  # they mean nothing
    if not has_outcomes:
        rows, outcomes = np.abs(rows), np.zeros(len(rows), np.uint8)
    begins = np.cumsum([0, *sizes])[order]
    expected = [
        100 * table + (row if outcome <= Outcome.INSERTED else 77 + row * (num_shared > 0))
        for table in order
        for row, outcome in zip(
            *(np.split(array, np.cumsum(sizes))[table].tolist() for array in (rows, outcomes)),
            strict=True,
        )
    ]
    out = np.full(len(rows), -1, number)
    counts = np.array([sizes[table] for table in order], np.int64)
    firsts = 100 * np.array(order, np.int64)
    parts = begins.astype(np.int64), counts, firsts, firsts + 77, np.full_like(firsts, num_shared)
    join_rows(rows.astype(given_as), outcomes if has_outcomes else None, parts, out)
    assert out.tolist() == expected


@pytest.mark.parametrize(
    ("rows", "outcomes", "out", "error", "message"),
    [
        (
            [1, 2],
            [0, 0],
            np.zeros(3, np.int32),
            ValueError,
            "out must have one element per key, 2, got 3",
        ),
        ([1, 2], [0], np.zeros(2, np.int32), ValueError, "outcomes"),
        (
            [1, 2**31],
            [0, 0],
            np.zeros(2, np.int32),
            ValueError,
            "0 to 2147483647, and of shared rows .* pass int64",
        ),
        ([-1], [0], np.zeros(1, np.int64), ValueError, "must be 0 to"),
        ([2], [2], np.zeros(1, np.int64), ValueError, "of shared rows below num_shared"),
        ([-1], [3], np.zeros(1, np.int64), ValueError, "of shared rows below num_shared"),
        ([1], [0], np.zeros(1, np.float32), TypeError, "int32 or int64"),
        ([1, 2], [0, 0], np.zeros(4, np.int32)[::2], ValueError, "contiguous"),
    ],
)
def test_rows_that_cannot_be_joined_are_refused(
    rows: list[int], outcomes: list[int], out: Any, error: type[Exception], message: str
) -> None:
    parts: Any = tuple(np.array([number]) for number in (0, len(rows), 0, 0, 2))
    with pytest.raises(error, match=message):
        join_rows(np.array(rows), np.array(outcomes, np.uint8), parts, out)


@pytest.mark.parametrize(
    ("begins", "counts", "got"),
    [
        ([0, 1], [1, 3], "3 from 1 on"),
        ([-1], [1], "1 from -1 on"),
        ([0], [-1], "-1 from 0 on"),
        ([4], [1], "1 from 4 on"),
    ],
)
def test_parts_outside_of_the_rows_are_refused(
    begins: list[int], counts: list[int], got: str
) -> None:
    none = np.zeros(len(begins), np.int64)
    parts = np.array(begins), np.array(counts), none, none, none
    with pytest.raises(ValueError, match=f"each part must lie within rows, 0 to 3, got {got}"):
        join_rows(np.arange(3), None, parts, np.zeros(3, np.int64))


@pytest.mark.parametrize("name", ["counts", "first_rows", "default_rows", "num_shared"])
def test_parts_that_lack_a_number_are_refused(name: str) -> None:
    names = ("begins", "counts", "first_rows", "default_rows", "num_shared")
    parts: Any = tuple(np.zeros(1 if each == name else 2, np.int64) for each in names)
    message = f"{name} must have one element for each part of begins, 2, got 1"
    with pytest.raises(ValueError, match=message):
        join_rows(np.arange(3), None, parts, np.zeros(0, np.int64))


@given(data=st.data())
def test_keys_one_after_the_other_are_mapped_as_apart(data: Any) -> None:
    keys = data.draw(st.lists(st.lists(st.integers(0, 9), max_size=6), max_size=4))
    apart, joined = ([make(1, f"{i}") for i in range(len(keys))] for _ in range(2))
    for insert in (False, True, False):
        calls = list(zip(apart, [np.array(part, np.int64) for part in keys], strict=True))
        expected = map_tables(calls, insert=insert, leases=[None] * len(calls))
        flat = np.array([key for part in keys for key in part], np.int64)
        counts = np.array([len(part) for part in keys], np.int64)
        leases = [table.lease() for table in joined]
        rows, outcomes = map_joined(joined, flat, counts, insert=insert, leases=leases)
        assert outcomes.tolist() == [o for _, part in expected for o in part.tolist()]
        has_row = outcomes <= Outcome.INSERTED
        numbers = np.array([row for part, _ in expected for row in part.tolist()], np.int64)
        assert (rows[has_row] == numbers[has_row]).all()


@given(data=st.data())
def test_keys_in_pieces_are_mapped_as_side_by_side(data: Any) -> None:
    pieces = data.draw(
        st.lists(st.lists(st.lists(st.integers(0, 9), max_size=5), max_size=3), max_size=3)
    )
    of_tables = [[key for piece in of_table for key in piece] for of_table in pieces]
    flat = [(len(piece), piece) for of_table in pieces for piece in of_table]
    order = data.draw(st.permutations(range(len(flat))))
    lying, begins = [77] * data.draw(st.integers(0, 2)), [0] * len(flat)
    for place in order:  # what no piece has is not mapped
        begins[place] = len(lying)
        lying += flat[place][1] + [77] * data.draw(st.integers(0, 1))
    whole, cut = ([make(1, f"{i}") for i in range(len(pieces))] for _ in range(2))
    for insert in (False, True, False):
        expected = map_joined(
            whole,
            np.array([key for own in of_tables for key in own], np.int64),
            np.array([len(own) for own in of_tables], np.int64),
            insert=insert,
        )
        rows, outcomes = map_joined(
            cut,
            np.array(lying, np.int64),
            np.array([size for size, _ in flat], np.int64),
            insert=insert,
            begins=np.array(begins, np.int64),
            num_pieces=np.array([len(of_table) for of_table in pieces], np.int64),
        )
        assert outcomes.tolist() == expected[1].tolist()
        has_row = outcomes <= Outcome.INSERTED
        assert (rows[has_row] == expected[0][has_row]).all()
    assert all(77 not in table for table in cut)


@pytest.mark.parametrize(
    ("counts", "begins", "num_pieces", "message"),
    [
        ([1, 2], [0], [1, 1], "begins must have one element for each piece of counts, 2, got 1"),
        (
            [1, 2],
            [0, 2],
            [1, 1],
            "must lie within the keys, 0 to 3, got 2 from 2 on",
        ),
        ([1, 2], [0, -1], [1, 1], "must lie within the keys, 0 to 3, got 2 from -1 on"),
        ([1, -2], [0, 3], [1, 1], "each piece of counts must lie within the keys, 0 to"),
        ([1, 2], [0, 1], [1], "num_pieces must be 0 or more and add up"),
        ([1, 2], [0, 1], [3, -1], "num_pieces must be 0 or more and add up"),
        ([1, 2], None, [2], "num_pieces must have one element for each table, 2, got 1"),
        ([1, 1], None, [1, 1], "counts must be 0 or more and add up to the keys, "),
    ],
)
def test_pieces_that_do_not_fit_are_refused(
    counts: list[int], begins: list[int] | None, num_pieces: list[int], message: str
) -> None:
    tables = [make(1, "a"), make(1, "b")]
    given_ = None if begins is None else np.array(begins)
    with pytest.raises(ValueError, match=message):
        map_joined(
            tables,
            KEYS,
            np.array(counts),
            insert=True,
            begins=given_,
            num_pieces=np.array(num_pieces),
        )
    assert [len(table) for table in tables] == [0, 0]


RULES: list[dict[str, Any]] = [
    {"max_rows": 4, "eviction_groups": 1, "eviction": Evict.lru(by="time"), "admission": None},
    {"max_rows": 4, "eviction_groups": 1, "eviction": Evict.score(), "admission": None},
    {"max_rows": None, "eviction": None, "admission": Admit.count(3)},
    {"eviction": None, "admission": Admit.show_click(alpha=0.0, beta=1.0, threshold=3.0)},
    {"max_rows": None, "eviction": None, "admission": None},
]


@given(data=st.data())
def test_what_comes_with_keys_one_after_the_other_goes_to_their_tables(data: Any) -> None:
    apart, joined = ([Table(1, name=f"{i}", **r) for i, r in enumerate(RULES)] for _ in range(2))
    for _ in range(3):
        keys = [data.draw(st.lists(st.integers(0, 9), max_size=6)) for _ in RULES]
        numbers = [np.array([7 * key % 5 + 1 for key in part], np.int64) for part in keys]
        given_ = [
            KeyData(times=numbers[0]),
            KeyData(scores=numbers[1].astype(np.float32)),
            KeyData(counts=numbers[2]),
            KeyData(clicks=numbers[3] - 1),
            None,
        ]
        apart[0].time = joined[0].time = 3  # of a table without keys
        found = map_joined(
            joined,
            np.array([key for part in keys for key in part], np.int64),
            np.array([len(part) for part in keys], np.int64),
            insert=True,
            data=given_,
        )
        expected = [
            table.map(
                np.array(part, np.int64), insert=True, **({} if each is None else each._asdict())
            )
            for table, part, each in zip(apart, keys, given_, strict=True)
        ]
        assert found[1].tolist() == [o for _, outcomes in expected for o in outcomes.tolist()]
    for one, other in zip(apart, joined, strict=True):
        assert [key in one for key in range(10)] == [key in other for key in range(10)]


def test_data_that_a_generator_makes_is_held() -> None:
    size = 50_000  # of which no two lie in one place, if each is held
    tables = [make(1, f"{i}", admission=Admit.count(2)) for i in range(3)]
    keys, counts = np.tile(np.arange(size), 3), np.full(3, size)
    data = (KeyData(counts=np.full(size, count)) for count in (1, 2, 1))
    map_joined(tables, keys, counts, insert=True, data=data)  # type: ignore[arg-type]
    assert [len(table) for table in tables] == [0, size, 0]


def test_data_that_does_not_fit_its_table_is_refused() -> None:
    table = Table(1, admission=Admit.count(3))
    for data, message in (([], "each table, 1, got 0"), ([KeyData(times=KEYS)], "times are")):
        with pytest.raises(ValueError, match=message):
            map_joined([table], KEYS, np.array([3]), insert=True, data=data)
    assert table.stats().admission_records == 0


@pytest.mark.parametrize("counts", [[1], [1, 1], [4, -1], [1, 3], [1, 1, 1]])
def test_counts_that_do_not_fit_the_keys_are_refused(counts: list[int]) -> None:
    tables = [make(1, "a"), make(1, "b")]
    with pytest.raises(ValueError, match="counts must"):
        map_joined(tables, KEYS, np.array(counts), insert=True)
    assert [len(table) for table in tables] == [0, 0]
