"""What can be copied, pickled and referred to weakly, and what says that it cannot."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from recsdk_core import Admit, Bags, Default, Evict, Index, JoinedBags, Table, init, optim
from recsdk_core.checkpoint import open_checkpoint
from recsdk_core.predicates import Predicate

COPIES: list[Callable[[Any], Any]] = [
    copy.copy,
    copy.deepcopy,
    lambda one: pickle.loads(pickle.dumps(one)),
]


@pytest.mark.parametrize("again", COPIES)
def test_settings_are_equal_when_copied(again: Callable[[Any], Any]) -> None:
    settings = [
        *(kind() for kind in (optim.SGD, optim.Adam, optim.LAMB, optim.FTRL, optim.RMSprop)),
        init.Uniform(low=0.0, high=1.0),
        Default.shared_rows(4),
        Evict.lru().expiring(ttl=3),
        Admit.count(2) | Admit.probability(0.5),
    ]
    assert again(settings) == settings
    assert again(Predicate("idle > 3")).columns == {"idle"}


@pytest.mark.parametrize("again", COPIES)
def test_what_a_save_gives(again: Callable[[Any], Any], tmp_path: Path) -> None:
    table = Table(2)
    handle = table.save_async(tmp_path / "one")
    with pytest.raises(TypeError, match="a SaveHandle cannot be copied or pickled"):
        again(handle)
    assert again(handle.result()) == handle.result()
    assert again(open_checkpoint(tmp_path / "one")).manifest.tables[0].dim == 2


@pytest.mark.parametrize("again", COPIES)
@pytest.mark.parametrize(
    "make",
    [
        lambda: Table(2).lease(),
        lambda: Index().cut(),
        lambda: Bags(np.zeros(0, np.int64), np.zeros(0, np.uint8)),
    ],
)
def test_what_stands_for_a_moment_is_not_copied(again: Any, make: Callable[[], Any]) -> None:
    made = make()
    with pytest.raises(TypeError, match=f"{type(made).__name__}"):
        again(made)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Table(2).lease(),
        lambda: Index().cut(),
        lambda: Bags(np.zeros(0, np.int64), np.zeros(0, np.uint8)),
        lambda: JoinedBags(
            np.zeros(0, np.int64), np.zeros(0, np.uint8), *[np.zeros(0, np.int64)] * 3
        ),
        lambda: Table(2),
        lambda: Table(2).leavers(),
    ],
)
def test_weak_references_end_with_what_they_refer_to(make: Callable[[], Any]) -> None:
    made = make()
    weak = weakref.ref(made)
    assert weak() is made
    del made
    gc.collect()
    assert weak() is None
