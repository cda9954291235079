"""One rank alone is wrong in a call that all ranks make together: all raise, and can go on.

Its argument is bad, or another than the others', or it meets an error at one of the functions that
the call runs.
"""

from __future__ import annotations

from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import alone_on_ranks
import pytest
from rank_pool import RankPool

from one_rank_alone import ERRORS, Outcome, is_well
from recsdk_sharding.exchange import calls
from sampling import sampled

STEPS_OF_EACH = 5


def outcomes_of(
    ranks: RankPool, size: int, name: str, cases: list[str], guilty: int, folder: Path
) -> list[list[Outcome]]:
    """By case, how it ended on each rank."""
    found: list[list[Outcome]] = []
    for number in count():
        if len(found) == len(cases):
            return found
        place = folder / str(number)
        place.mkdir()
        left = cases[len(found) :]
        of_ranks = ranks.run(size, alone_on_ranks.fail, name, str(place), left, guilty)
        found += map(list, zip(*of_ranks, strict=False))
        if any(each.is_last for each in found[-1]):
            ranks.renew()
    return found


@pytest.mark.parametrize("name", alone_on_ranks.CALLS)
def test_one_rank_alone(ranks: RankPool, name: str, tmp_path: Path) -> None:
    size = 2 + list(alone_on_ranks.CALLS).index(name) % 2
    guilty = size - 1
    (tmp_path / "first").mkdir()
    of_ranks = ranks.run(size, alone_on_ranks.cases_of, name, str(tmp_path / "first"))
    wrong, steps = of_ranks[guilty]
    at_steps = [f"{list(ERRORS)[n % len(ERRORS)]} at {step}" for n, step in enumerate(steps)]
    cases = [*wrong, *sampled(at_steps, STEPS_OF_EACH)]
    faults = {
        ended[0].case: fault
        for ended in outcomes_of(ranks, size, name, cases, guilty, tmp_path)
        if (fault := is_well(ended, guilty)) is not None
    }
    assert not faults, "\n".join(f"{case}: {fault}" for case, fault in faults.items())


def test_ranks_that_made_unequally_many_modules_go_on(ranks: RankPool, tmp_path: Path) -> None:
    name, guilty = "DistributedModelParallel", 1
    (tmp_path / "first").mkdir()
    _, steps = ranks.run(2, alone_on_ranks.cases_of, name, str(tmp_path / "first"))[guilty]
    [step] = [each for each in steps if "HostExchange.note_module" in each]
    [ended] = outcomes_of(ranks, 2, name, [f"OSError at {step}"], guilty, tmp_path)
    assert is_well(ended, guilty) is None


def test_a_plan_may_have_its_tables_in_any_order(ranks: RankPool) -> None:
    found = ranks.run(3, alone_on_ranks.make_with_tables_in_another_order)
    assert sum(len(rows["user"]) for rows in found) > 3


def test_ranks_save_that_are_not_in_equally_many_groups(ranks: RankPool, tmp_path: Path) -> None:
    ranks.renew()  # groups that are there are used again
    assert all(ranks.run(2, alone_on_ranks.save_from_other_numbers_of_groups, str(tmp_path)))


def test_a_rank_that_saves_while_others_make_a_model(ranks: RankPool, tmp_path: Path) -> None:
    ranks.renew()  # the first save of a world is one in which the ranks meet
    for text in ranks.run(2, alone_on_ranks.make_while_another_saves, str(tmp_path)):
        assert "ranks [0] save, load or move rows while the others make a model" in text


def test_a_rank_that_saves_while_others_train(ranks: RankPool, tmp_path: Path) -> None:
    ranks.renew()
    texts = ranks.run(2, alone_on_ranks.train_while_another_saves, str(tmp_path))
    assert texts[0] == ""
    assert "rank 0 makes a model or saves one, rank 1 trains at step" in texts[1]


def test_a_call_that_cannot_begin_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def closed(group: object) -> NoReturn:
        raise ValueError("closed")

    monkeypatch.setattr(calls, "failing_together", closed)
    exchange: Any = SimpleNamespace(group=None)
    with pytest.raises(ValueError, match="closed"), calls.calling("load", exchange):
        pass
    assert calls.open_call() is None
