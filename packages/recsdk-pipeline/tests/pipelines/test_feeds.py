"""Finding the part of a batch that a module reads."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from recsdk_pipeline._internal.feeds import Feed, FeedSpy, find_way


@dataclass
class Inner:
    ids: object


@dataclass
class Batch:
    ids: object
    inner: Inner
    parts: dict[str, Any] = field(default_factory=dict)


class Pair(NamedTuple):
    left: object
    right: object


class Slotted:
    __slots__ = ("ids",)

    def __init__(self, ids: object) -> None:
        self.ids = ids


def part_at(whole: Any, way: Any) -> Any:
    return Feed(name="", module=nn.Module(), way=way, exchange=None).part_of(whole)


def test_each_kind_of_container_is_searched() -> None:
    wanted = object()
    for whole in (
        Inner(wanted),
        {"ids": wanted, 3: 4},
        [1, wanted],
        (1, wanted),
        Pair(1, wanted),
        Slotted(wanted),
        Batch(1, Inner(wanted)),
        Batch(1, Inner(2), {"deep": [wanted]}),
        wanted,
    ):
        way = find_way(whole, wanted)
        assert way is not None
        assert part_at(whole, way) is wanted


def test_the_outermost_place_is_taken() -> None:
    wanted = object()
    assert find_way(Batch(wanted, Inner(wanted)), wanted) == (("attribute", "ids"),)


def test_equal_is_not_the_same() -> None:
    assert find_way([torch.ones(2), [1, 2]], [1, 2]) is None


def test_what_is_no_part_is_not_found() -> None:
    assert find_way(Batch(1, Inner(2)), object()) is None


containers = st.recursive(
    st.builds(object),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.integers(), inner, max_size=3)
        | st.builds(Inner, inner)
    ),
    max_leaves=8,
)


@given(containers, st.data())
def test_any_part_near_the_surface_is_found(whole: Any, data: st.DataObject) -> None:
    level = [whole]
    for _ in range(2):
        part = data.draw(st.sampled_from(level))
        way = find_way(whole, part)
        assert way is not None
        assert part_at(whole, way) is part
        if isinstance(part, Inner):
            level = [part.ids]
        elif isinstance(part, dict):
            level = list(part.values()) or [part]
        elif isinstance(part, list):
            level = part or [part]


def test_a_model_without_sharded_modules_can_look_ahead() -> None:
    model = nn.Linear(2, 2)
    batch = torch.ones(1, 2)
    with FeedSpy(model, batch) as spy:
        model(batch)
    learned = spy.feeds()
    assert learned.feeds == ()
    assert learned.can_look_ahead
