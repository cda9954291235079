"""Tables that are trained together count their updates together: beside a count for each."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from hypothesis import example, given
from hypothesis import strategies as st

from recsdk_core import optim
from recsdk_sharding.device.clocks import UpdateClock, alike
from recsdk_sharding.device.optimizers import Step

NUM_TABLES = 4
numbers = st.integers(0, NUM_TABLES - 1)
some = st.sets(numbers, min_size=1).map(sorted)
rates = st.sampled_from([0.1, 0.2])
calls = st.one_of(
    st.tuples(st.just("train"), some),
    st.tuples(st.just("rate"), st.tuples(some, rates)),
    st.tuples(st.just("restore"), st.tuples(numbers, st.integers(0, 2))),
    st.tuples(st.just("replace"), numbers),
)


class _Store:
    """One block of state for tables of an even number, another for the others."""

    def block_of(self, stored: int) -> Any:
        return (self, "even")[stored % 2]


def _table(number: int, store: _Store) -> Any:
    settings = optim.SGD(lr=0.1), "skip"
    table = SimpleNamespace(clock=UpdateClock(), settings=settings, stored=number, store=store)
    table.clock.num_tables = 1
    return table


@given(st.lists(calls, max_size=12))
@example([("train", [0, 2]), ("rate", ([2], 0.2)), ("train", [0]), ("train", [2])])
@example([("train", [0, 2]), ("replace", 2), ("train", [0, 2])])
@example([("train", [0, 2]), ("train", [0]), ("restore", (0, 1)), ("train", [0, 2])])
def test_each_table_counts_its_own_updates(steps: list[tuple[str, Any]]) -> None:
    store = _Store()
    tables = [_table(number, store) for number in range(NUM_TABLES)]
    counts, rates = [0] * NUM_TABLES, [0.1] * NUM_TABLES
    for what, given_ in steps:
        if what == "train":
            groups = alike([tables[number] for number in given_])
            for own in groups:
                numbers = [each.stored for each in own]
                assert len({(rates[n], counts[n], n % 2) for n in numbers}) == 1
                step = Step(own[0].settings[0], own[0].clock.count + 1, own[0].clock.log_decay)
                own[0].clock.take(step)
                own[0].clock.take(step)
            assert sorted(each.stored for own in groups for each in own) == given_
            wanted = {(rates[n], counts[n], n % 2) for n in given_}
            assert len(groups) == len(wanted), "no more updates than there must be"
            for number in given_:
                counts[number] += 1
        elif what == "rate":
            for number in given_[0]:
                rates[number] = given_[1]
                tables[number].settings = optim.SGD(lr=given_[1]), "skip"
        elif what == "restore":
            number, counts[given_[0]] = given_
            UpdateClock(counts[number]).give_to([tables[number]])
        else:
            tables[given_], counts[given_], rates[given_] = _table(given_, store), 0, 0.1
        assert [each.clock.count for each in tables] == counts
