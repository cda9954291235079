"""What a table decides does not depend on when leases end."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from recsdk_core import Admit, Default, Evict, Index, Lease, Table

RULES: dict[str, Callable[[], Evict | None]] = {
    "none": lambda: None,
    "lru": Evict.lru,
    "lfu": lambda: Evict.lfu(half_life=3, min_age=2),
    "ttl": lambda: Evict.lru().expiring(ttl=4, every=2),
    "share": lambda: Evict.lfu().expiring(share=0.3, every=3),
    "function": lambda: Evict.function(lambda step, count: step + count, every=3),
}
ADMISSIONS = (None, Admit.count(2), Admit.probability(0.5), Admit.count(2, max_records=16))
DEFAULTS = (
    Default.constant(0.0),
    Default.shared_rows(2),
    Default.shared_rows(4, begin_with="shared_row"),
)
STEPS = st.lists(
    st.tuples(
        st.lists(st.integers(0, 80), min_size=1, max_size=20),
        st.tuples(st.integers(0, 3), st.integers(0, 3)),
    ),
    min_size=1,
    max_size=25,
)


@pytest.mark.parametrize("rule", RULES)
@given(
    steps=STEPS,
    admission=st.sampled_from(ADMISSIONS),
    default=st.sampled_from(DEFAULTS),
    max_rows=st.sampled_from([8, 40]),
)
def test_tables_that_are_given_the_same_calls_decide_alike(
    rule: str,
    steps: list[tuple[list[int], tuple[int, int]]],
    admission: Admit | None,
    default: Default,
    max_rows: int,
) -> None:
    """One ends its leases oldest first, the other newest first, and each when it likes."""
    tables = [
        Table(
            2,
            max_rows=max_rows,
            eviction_groups=2,
            eviction=RULES[rule](),
            admission=admission,
            default=default,
        )
        for _ in range(2)
    ]
    leases: list[list[Lease]] = [[], []]
    for step, (keys, ends) in enumerate(steps):
        found = []
        for table, own, num_ended, place in zip(tables, leases, ends, (0, -1), strict=True):
            own.append(table.lease(step=step))
            _, outcomes = table.map(np.array(keys), insert=True, lease=own[-1])
            found.append(outcomes.tolist())
            for _ in range(min(num_ended, len(own))):
                own.pop(place).release()
        assert found[0] == found[1]
        assert tables[0].decided() == tables[1].decided()
    for lease in [*leases[0], *leases[1]]:
        lease.release()
    first, second = ({k for batch in t.export() for k in batch.keys.tolist()} for t in tables)
    assert first == second
    assert tables[0].decided()[0] == len(first)


def test_what_is_decided_counts_batches_in_flight() -> None:
    table = Table(2, max_rows=4, eviction=Evict.lru())
    lease = table.lease(step=1)
    table.map(np.array([1, 2]), insert=True, lease=lease)
    assert (len(table), *table.decided()) == (0, 2, 1)
    lease.release()
    assert (len(table), *table.decided()) == (2, 2, 1)
    index = Index()
    index.map(np.array([1, 2, 3]), insert=True)
    assert index.decided() == (3, 0)
