"""The order in which a set's pieces go to the device, which is kept from batch to batch."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
from hypothesis import example, given
from hypothesis import strategies as st

from recsdk_sharding.device.sets import SetLayout


def layout_of(num_tables: int, members: list[int]) -> SetLayout:
    """Of some of a group's tables, whose places in the store do not matter here."""
    store = SimpleNamespace(weight_RD=np.zeros((1, 1)))
    tables = [
        SimpleNamespace(
            store=store,
            spare_row_of_store=number,
            begins_with_shared=False,
            reads_initial_rows=False,
            placing=(number, number, 0),
        )
        for number in range(num_tables)
    ]
    group = SimpleNamespace(tables=tables, accumulations=[None] * num_tables)
    return SetLayout(group, members)


@st.composite
def batches(draw: Any) -> tuple[int, list[int], list[tuple[list[int], list[int]]]]:
    """A group's tables, which of them are a set, and of each batch pieces and their starts."""
    num_tables = draw(st.integers(1, 4))
    members = draw(st.sets(st.integers(0, num_tables - 1), min_size=1))
    found = []
    for _ in range(draw(st.integers(1, 6))):
        num_pieces = draw(st.lists(st.integers(0, 2), min_size=num_tables, max_size=num_tables))
        size = sum(num_pieces)
        found.append((num_pieces, draw(st.lists(st.integers(0, 3), min_size=size, max_size=size))))
    return num_tables, sorted(members), found


@given(batches())
@example((2, [0, 1], [([1, 1], [0, 8]), ([1, 1], [8, 0])]))  # they change places
@example((2, [0, 1], [([1, 1], [0, 0]), ([1, 1], [8, 0])]))  # where none had bags
@example((2, [0, 1], [([2, 1], [0, 1, 2]), ([1, 2], [0, 1, 2])]))  # of other tables
@example((2, [1], [([1, 2], [0, 1, 2]), ([2, 1], [0, 1, 2])]))
def test_pieces_are_in_the_order_of_their_vectors_in_every_batch(
    given_: tuple[int, list[int], list[tuple[list[int], list[int]]]],
) -> None:
    num_tables, members, found = given_
    layout = layout_of(num_tables, members)
    for num_pieces, starts in found:
        starts_P = np.array(starts, np.int64)
        order = layout.order_of(np.array(num_pieces, np.int64), starts_P)
        table_of_piece = np.repeat(np.arange(num_tables), num_pieces)
        own = np.flatnonzero(np.isin(table_of_piece, members))
        assert sorted(order.pieces_P.tolist()) == own.tolist()
        assert (np.diff(starts_P[order.pieces_P]) >= 0).all()
        tables = [members[number] for number in order.tables_P.tolist()]
        assert tables == table_of_piece[order.pieces_P].tolist()


def test_an_order_that_fits_is_used_again() -> None:
    layout, num_pieces_T = layout_of(2, [0, 1]), np.array([1, 2])
    order = layout.order_of(num_pieces_T, np.array([0, 8, 4]))
    assert layout.order_of(np.array([1, 2]), np.array([0, 0, 0])) is order
    assert layout.order_of(num_pieces_T, np.array([0, 4, 8])) is not order
