"""A new row is a function of seed, table, key and column: nothing else can be seen in it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from recsdk_core import Table, init
from recsdk_core.testing import EDGE_KEYS, ReferenceTable, key_arrays, keys

INITIALIZERS = [
    init.Constant(value=3.0),
    init.Uniform(low=-2.0, high=5.0),
    init.Uniform(low=0.5, high=0.5),
    init.Normal(mean=-1.0, stddev=0.5),
    init.Normal(mean=2.0, stddev=0.0),
    init.TruncatedNormal(mean=0.0, stddev=1.0, low=-0.5, high=2.0),
    init.TruncatedNormal(mean=0.0, stddev=1.0, low=3.0, high=4.0),
]
# The reference makes all but truncated normals.
MODELLED = [kind for kind in INITIALIZERS if not isinstance(kind, init.TruncatedNormal)]
DIMS = st.sampled_from([1, 2, 3, 4, 5, 16, 31, 64])


def by_key(table: Table) -> dict[int, bytes]:
    return {
        key: row.tobytes()
        for batch in table.export()
        for key, row in zip(batch.keys.tolist(), batch.weights, strict=True)
    }


@given(
    ids=key_arrays(max_size=40),
    dim=DIMS,
    initializer=st.sampled_from(INITIALIZERS),
    seed=st.integers(0, 2**64 - 1),
    data=st.data(),
)
def test_any_order_and_any_batches_give_the_same_rows(
    ids: Any, dim: int, initializer: init.Initializer, seed: int, data: st.DataObject
) -> None:
    first = Table(dim, initializer=initializer, seed=seed)
    second = Table(dim, initializer=initializer, seed=seed)
    first.find_or_insert(ids)
    shuffled = np.array(data.draw(st.permutations(ids.tolist())), np.int64)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(ids)), max_size=4)))
    for part in np.split(shuffled, cuts):
        second.find_or_insert(part)
    assert by_key(first) == by_key(second)


@given(
    ids=key_arrays(min_size=1),
    initializer=st.sampled_from(INITIALIZERS),
    extra=key_arrays(),
)
def test_a_key_that_leaves_and_returns_gets_the_same_row(
    ids: Any, initializer: init.Initializer, extra: Any
) -> None:
    table = Table(6, initializer=initializer)
    first = table.find_or_insert(ids)
    table.apply_gradients(ids, np.ones((len(ids), 6), np.float32))
    table.erase(ids)
    table.find_or_insert(extra)
    table.erase(extra)
    np.testing.assert_array_equal(table.find_or_insert(ids), first)


@given(
    ids=key_arrays(),
    dim=DIMS,
    initializer=st.sampled_from(MODELLED),
    seed=st.integers(0, 2**64 - 1),
    name=st.text(min_size=1, max_size=8).filter(lambda text: text.isprintable()),
)
def test_rows_equal_the_written_definition(
    ids: Any, dim: int, initializer: init.Initializer, seed: int, name: str
) -> None:
    config: dict[str, Any] = {"initializer": initializer, "seed": seed, "name": name}
    rows = Table(dim, **config).find_or_insert(ids)
    np.testing.assert_array_equal(rows, ReferenceTable(dim, **config).find_or_insert(ids))


@given(key=keys(), initializer=st.sampled_from(INITIALIZERS[1:2] + INITIALIZERS[3:4]))
def test_seed_name_key_and_column_all_matter(key: int, initializer: init.Initializer) -> None:
    def row(key: int = key, **config: Any) -> list[float]:
        made = Table(8, initializer=initializer, **config)
        return made.find_or_insert(np.array([key]))[0].tolist()  # type: ignore[no-any-return]

    assert len(set(row())) > 1
    assert row() == row()
    others = [row(seed=1), row(name="other"), row(key=key ^ 1), row(key=key ^ -(2**63))]
    assert all(other != row() for other in others)


@given(dim=st.integers(1, 40), initializer=st.sampled_from(INITIALIZERS))
def test_columns_do_not_depend_on_the_width(dim: int, initializer: init.Initializer) -> None:
    ids = np.array(EDGE_KEYS)
    wide = Table(64, initializer=initializer).find_or_insert(ids)
    narrow = Table(dim, initializer=initializer).find_or_insert(ids)
    np.testing.assert_array_equal(narrow, wide[:, :dim])


@pytest.mark.parametrize("initializer", INITIALIZERS, ids=repr)
def test_distribution(initializer: init.Initializer) -> None:
    values = Table(50, initializer=initializer).find_or_insert(np.arange(4000))
    assert np.isfinite(values).all()
    if isinstance(initializer, init.Constant):
        assert (values == initializer.value).all()
    elif isinstance(initializer, init.Uniform):
        low, high = initializer.low, initializer.high
        assert ((values >= low) & ((values < high) | (low == high))).all()
        assert values.mean() == pytest.approx((low + high) / 2, abs=0.02 * (high - low) + 1e-7)
    elif isinstance(initializer, init.Normal):
        assert values.mean() == pytest.approx(initializer.mean, abs=0.01)
        assert values.std() == pytest.approx(initializer.stddev, abs=0.01)
    else:
        assert ((values >= initializer.low) & (values <= initializer.high)).all()
