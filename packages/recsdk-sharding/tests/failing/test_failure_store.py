"""What ranks that fail write into a store, and what the others find there, beside a plain rule."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from hypothesis import example, given
from hypothesis import strategies as st
from torch.distributed import HashStore

from recsdk_sharding.exchange.failure_store import Failure, FailureStore

SIZE = 4
AT_ONCE, LONG = 0.02, 60.0
"""Seconds: for ranks that wait for one that does not fail, and for all others."""

places = st.sampled_from(["here", "here", "there", None])
"""Where a rank fails; None: it does not."""
rounds = st.lists(st.lists(places, min_size=SIZE, max_size=SIZE), min_size=1, max_size=3)


def told(
    stores: Sequence[FailureStore],
    owns: Sequence[Failure],
    seconds: float,
    ranks: tuple[int, ...] | None,
) -> set[bool]:
    """What the ranks that fail, all at the same time, are told."""

    def tell(own: Failure) -> bool:
        return stores[own.rank].tell(own, seconds, ranks)

    with ThreadPoolExecutor(SIZE) as pool:
        return set(pool.map(tell, owns))


@given(rounds=rounds, ranks=st.sampled_from([None, (0, 1), (1, 3), (0, 1, 2)]))
@example(rounds=[["here"] * 4] * 3, ranks=(1, 3))
@example(rounds=[["here"] * 4, ["here", "there", "here", "here"]], ranks=None)
@example(rounds=[["here", None, None, None]], ranks=(0, 1))
def test_ranks_fail_together_or_all_are_told_of_the_first(
    rounds: list[list[str | None]], ranks: tuple[int, ...] | None
) -> None:
    store = HashStore()
    stores = [FailureStore(lambda: store, SIZE) for _ in range(SIZE)]
    involved = range(SIZE) if ranks is None else ranks
    for of_ranks in rounds:
        failing = [rank for rank in involved if of_ranks[rank] is not None]
        owns = [Failure(rank, f"rank {rank}", f"{of_ranks[rank]}") for rank in failing]
        is_together = len(owns) == len(involved) and len({own.where for own in owns}) == 1
        seconds = LONG if len(owns) == len(involved) else AT_ONCE
        assert told(stores, owns, seconds, ranks) == ({is_together} if owns else set())
        is_told = bool(owns) and not is_together
        for each in stores:
            assert each.first() in (owns if is_told else [None])
            assert each.is_apart() == is_told
        if is_told:
            return
