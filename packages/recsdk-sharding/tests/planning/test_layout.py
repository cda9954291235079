"""What follows from where the shards of tables are."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from recsdk_sharding.placement.layout import GroupLayout


@dataclass(frozen=True)
class Placed:
    """A table: its width, features and groups of keys, and the ranks of each range of columns."""

    dim: int
    num_features: int
    num_groups: int | None
    ranges: dict[tuple[int, int], frozenset[int]]

    @property
    def way(self) -> tuple[object, ...]:
        """How it is cut, and its keys by which rule: a rank alone has all groups of them."""
        is_spread = any(len(ranks) > 1 for ranks in self.ranges.values())
        return self.dim, self.num_groups if is_spread else None, *self.ranges.items()


WORLD_SIZE = 3
RANKS = st.sampled_from([frozenset({0, 1, 2}), frozenset({0, 1, 2}), frozenset({2})])


@st.composite
def placed_tables(draw: st.DrawFn) -> Placed:
    dim = draw(st.sampled_from([4, 4, 4, 6]))
    ends = draw(st.sampled_from([[dim], [dim], [dim], [2, dim]]))
    ranges = {pair: draw(RANKS) for pair in zip([0, *ends], ends, strict=False)}
    num_groups = draw(st.sampled_from([None, None, None, 8]))
    return Placed(dim, draw(st.integers(1, 2)), num_groups, ranges)


def layout_of(tables: list[Placed], *, is_replicated: bool) -> GroupLayout:
    names = [f"t{number}" for number in range(len(tables))]
    return GroupLayout.of_columns(
        [
            (name, table.dim, [f"{name}_{i}" for i in range(table.num_features)], table.num_groups)
            for name, table in zip(names, tables, strict=True)
        ],
        {
            name: [(rank, columns) for columns, ranks in table.ranges.items() for rank in ranks]
            for name, table in zip(names, tables, strict=True)
        },
        WORLD_SIZE,
        "virtual_shard",
        is_replicated,
    )


@given(st.lists(placed_tables(), min_size=1, max_size=3), st.sampled_from([False, False, True]))
def test_vectors_travel_as_bags_are_cut_only_if_all_tables_are_cut_alike(
    tables: list[Placed], is_replicated: bool
) -> None:
    if is_replicated:
        everywhere = frozenset(range(WORLD_SIZE))
        tables = [Placed(t.dim, t.num_features, None, {(0, t.dim): everywhere}) for t in tables]
    layout = layout_of(tables, is_replicated=is_replicated)
    is_alike = len({table.way for table in tables}) == 1
    is_whole = all(len(table.ranges) == 1 for table in tables)
    assert layout.sends_as_cut == (is_alike and is_whole and not is_replicated)
    if layout.sends_as_cut:  # shard by shard, feature by feature
        features = list(range(sum(table.num_features for table in tables)))
        num_shards = len(tables[0].ranges[0, tables[0].dim])
        assert layout.sent.features_S.tolist() == features * num_shards
        assert layout.sent.ranks_S.tolist() == sorted(layout.sent.ranks_S.tolist())
