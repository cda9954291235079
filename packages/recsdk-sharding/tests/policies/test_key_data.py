"""Times, scores, counts and clicks that come with ids, and what is sent of them.

What tables do by them on any number of ranks is crossed with all else in test_crossed_policies.py.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import times_on_ranks
import torch
from device_type import DEVICE_TYPE
from plans import Spec
from policy_cases import TTL, WIDTH
from processors import PROCESSORS, processed
from rank_pool import RankPool
from torchrec.modules.feature_processor_ import FeatureProcessor
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

from recsdk_core import Admit, Evict
from recsdk_sharding import (
    HashEmbeddingBagCollection,
    HashEmbeddingBagConfig,
    KeyedJaggedTensorWithData,
    KeyedJaggedTensorWithTimestamp,
    with_clicks,
)
from sampling import SEED

SIZES = [1, 2, 1]
"""How many ranks go on with what the others saved."""
TIMED = Evict.lru(by="time").expiring(ttl=9, every=2)


def test_a_time_is_set_once_and_times_of_ids_move_it_on(ranks: RankPool) -> None:
    """As in unsharded tables; a time that is set may be earlier than the one before."""
    source = random.Random(SEED)
    times = [None, None, *range(10, 50, 3)]
    turns = [(5, 40), (None, None), (20, None), (None, None), (30, 25), (None, None), (10, 15)]
    turns += [(source.choice(times), source.choice(times)) for _ in range(40)]
    for found, unsharded in ranks.run(2, times_on_ranks.clocks, turns):
        assert found[:7] == [40, 40, 20, 20, 30, 30, 15]
        assert found == unsharded


def test_ids_of_unknown_time_need_no_time_of_the_table(ranks: RankPool) -> None:
    unknown = -(2**63)
    turns = [(None, unknown), (None, 30), (None, unknown)]
    for world_size in (1, 2):
        for found, unsharded in ranks.run(world_size, times_on_ranks.clocks, turns):
            assert found == unsharded == [None, 30, 30]


@pytest.mark.parametrize(
    ("times", "later", "expected"),
    [([5, 7], None, 7), ([5, None], None, 5), ([7, 5], None, 5), ([5, 7], 6, 6)],
)
def test_the_time_of_a_batch_that_came_to_nothing_is_the_next_ones(
    ranks: RankPool, times: list[int | None], later: int | None, expected: int
) -> None:
    run = times_on_ranks.time_after_batches_that_came_to_nothing
    assert ranks.run(2, run, times, later) == [expected] * 2


@pytest.mark.parametrize("world_size", [1, 2])
def test_the_time_of_a_batch_that_a_rank_could_not_map_is_the_next_ones(
    ranks: RankPool, world_size: int
) -> None:
    run = times_on_ranks.time_after_a_batch_that_was_not_mapped
    assert ranks.run(world_size, run) == [40] * world_size


@pytest.mark.parametrize("by", ["Saver", "state_dict", "Table"])
def test_a_save_has_no_time_of_a_batch_ahead(
    ranks: RankPool, npus: RankPool, tmp_path: Path, by: str
) -> None:
    pools = {"cpu": ranks} if by == "Table" else {"cpu": ranks, DEVICE_TYPE: npus}
    for device, pool in pools.items():
        for found in pool.run(2, times_on_ranks.times_saved, str(tmp_path / device), device, by):
            assert found == [7, 7, 40]


class Clock:
    """A table that evicts by time, of which no key is below an age: the time of each key."""

    def __init__(self) -> None:
        self.now: int | None = None
        self.times: dict[int, int] = {}
        self.step = 0
        self._set: int | None = None

    def turn(self, turn: dict[str, Any]) -> tuple[int, int, dict[int, bool]]:
        """What it says after a turn, as `turns_by_time` does."""
        is_set = [time for time in turn["set"] if time is not None]
        self._set = max(is_set, default=self._set)
        if turn["ids"] is not None:
            self._train(turn["ids"], turn["times"])
        assert self.now is not None
        expired = {key: self.now - time >= TTL for key, time in self.times.items()}
        if turn["expires"]:
            self.times = {key: time for key, time in self.times.items() if not expired[key]}
        return self.now, sum(expired.values()), expired

    def load(self) -> None:
        """What was set for a batch that did not come is in no save."""
        self._set = None

    def _train(self, ids: list[list[int]], times: list[list[int] | None]) -> None:
        latest = [time for of_rank in times for time in of_rank or []]
        known = [
            time for time in (self.now if self._set is None else self._set,) if time is not None
        ]
        now = self.now = max([*latest, *known])
        self._set, self.step = None, self.step + 1
        seen: dict[int, int] = {}
        for keys, of_rank in zip(ids, times, strict=True):
            for key, time in zip(keys, of_rank or [now] * len(keys), strict=True):
                seen[key] = max(time, seen.get(key, time))
        looks = self.step > 1 and self.step % 2 == 0
        for key, time in list(self.times.items()):
            if looks and key not in seen and now - time >= TTL:
                del self.times[key]
        for key, time in seen.items():
            self.times[key] = max(time, self.times.get(key, time))


def turns_of(source: random.Random, num_ranks: int, num_turns: int) -> list[dict[str, Any]]:
    """Ids with and without times, and times that are set, earlier ones too."""
    turns = []
    for number in range(num_turns):
        middle = 4 * number
        ids = [[source.randrange(12) for _ in range(source.randrange(4))] for _ in range(num_ranks)]
        times = [
            [middle + source.randrange(-9, 9) for _ in keys] if source.random() < 0.7 else None
            for keys in ids
        ]
        turns.append(
            {
                "set": [
                    middle + source.randrange(-12, 6) if source.random() < 0.3 else None
                    for _ in range(num_ranks)
                ],
                "ids": ids if source.random() < 0.8 else None,
                "times": times,
                "expires": source.random() < 0.2,
            }
        )
    return turns


@pytest.mark.parametrize(
    ("device", "by"), [("cpu", "Saver"), (DEVICE_TYPE, "Saver"), ("cpu", "state_dict")]
)
@pytest.mark.parametrize("seed", range(SEED, SEED + 3))
def test_all_ranks_parts_expire_by_one_clock_that_saves_keep(
    ranks: RankPool, npus: RankPool, tmp_path: Path, device: str, by: str, seed: int
) -> None:
    source, model, before = random.Random(seed), Clock(), None
    for number, size in enumerate(SIZES):
        turns = turns_of(source, size, 12)
        if number == 0:  # the first ids may have no times
            turns[0] |= {"set": [0] * size, "ids": [[1]] * size, "times": [None] * size}
        after = str(tmp_path / str(number))
        pool = ranks if device == "cpu" else npus
        of_ranks = pool.run(size, times_on_ranks.turns_by_time, turns, before, after, device, by)
        for turn, said in zip(turns, zip(*of_ranks, strict=True), strict=True):
            now, num_expired, expired = model.turn(turn)
            assert [time for time, _, _ in said] == [now] * size
            assert sum(would for _, would, _ in said) == num_expired
            assert {key: is_so for _, _, own in said for key, is_so in own.items()} == expired
        before = after
        model.load()


def test_a_table_needs_no_time_before_it_has_an_id() -> None:
    rule = Evict.lru(by="time").expiring(ttl=5, every=1)
    configs = [
        HashEmbeddingBagConfig(
            name=name, embedding_dim=2, num_embeddings=9, feature_names=[name], eviction=rule
        )
        for name in ("user", "item")
    ]
    collection = HashEmbeddingBagCollection(configs).requires_grad_(False)
    tables = collection.tables()
    for lengths, times in (([0, 0], []), ([2, 0], [10, 11]), ([1, 1], [12, 30])):
        ids = torch.arange(len(times))
        collection(
            KeyedJaggedTensorWithTimestamp(
                ["user", "item"],
                ids,
                torch.tensor(times, dtype=torch.int64),
                lengths=torch.tensor(lengths),
            )
        )
    assert (tables["user"].time, tables["item"].time) == (12, 30)
    assert (len(tables["user"]), len(tables["item"])) == (2, 1)
    plain = KeyedJaggedTensor(["user", "item"], torch.tensor([5]), lengths=torch.tensor([0, 1]))
    collection(plain)  # counts as seen at the table's clock
    fresh = HashEmbeddingBagCollection(configs).requires_grad_(False)
    with pytest.raises(ValueError, match="'item': .* needs the times of ids"):
        fresh(plain)


class Shortening(FeatureProcessor):
    """Leaves the last id out."""

    def forward(self, features: JaggedTensor) -> JaggedTensor:
        ids = features.values()[:-1]
        return JaggedTensor(ids, torch.ones(len(ids)), lengths=torch.tensor([len(ids)]))


@pytest.mark.parametrize("processor", [None, "positions of each", "in another order"])
def test_unsharded_tables_behind_processors_get_what_comes_with_ids(processor: str | None) -> None:
    config = HashEmbeddingBagConfig(
        name="t",
        embedding_dim=2,
        num_embeddings=9,
        feature_names=["a", "b"],
        eviction=Evict.lru(by="time").expiring(ttl=25, every=1),
        admission=Admit.show_click(threshold=2.0, beta=2.0),
    )
    made: Any = HashEmbeddingBagCollection([config], is_weighted=True).requires_grad_(False)
    collection, cpu = made, torch.device("cpu")
    clicks_B = torch.ones(1)
    collection.register_forward_pre_hook(lambda _, given: (with_clicks(given[0], clicks_B),))
    if processor is not None:
        made = processed(collection, PROCESSORS[processor](["a", "b"], cpu))
    for times in ([10, 20, 30], [31, 32, 33]):
        made(
            KeyedJaggedTensorWithData(
                ["b", "other", "a"],
                torch.tensor([7, 8, 9]),
                torch.ones(3),
                lengths=torch.ones(3, dtype=torch.int64),
                times=torch.tensor(times),
            )
        )
        [table] = collection.tables().values()
        keys = [key for batch in table.export() for key in batch.keys.tolist()]
        found = {key: table.explain(key).columns["time"] for key in keys}
        assert found == {7: times[0], 9: times[2]}
    short = {name: Shortening() for name in ("a", "b")}
    with pytest.raises(ValueError, match="its processor made 0 ids of 1, so that it is not known"):
        processed(collection, short)(
            KeyedJaggedTensorWithData(
                ["a", "b"],
                torch.tensor([7, 8]),
                lengths=torch.ones(2, dtype=torch.int64),
                times=torch.tensor([50, 51]),
            )
        )


@pytest.mark.parametrize("processor", ["positions of each", "in another order"])
def test_clicks_beside_ids_stay_behind_processors(processor: str) -> None:
    """As in collections without processors: clicks of samples take the place of none."""
    config = HashEmbeddingBagConfig(
        name="t", embedding_dim=2, num_embeddings=9, feature_names=["a", "b"]
    )
    collection = HashEmbeddingBagCollection([config], is_weighted=True).requires_grad_(False)
    got: list[Any] = []

    def add(_: Any, given: Any) -> Any:
        got.append(with_clicks(given[0], torch.ones(1)))
        return tuple(got[-1:])

    collection.register_forward_pre_hook(add)
    processed(collection, PROCESSORS[processor](["a", "b"], torch.device("cpu")))(
        KeyedJaggedTensorWithData(
            ["a", "b"],
            torch.tensor([7, 8]),
            torch.ones(2),
            lengths=torch.ones(2, dtype=torch.int64),
            clicks=torch.tensor([5, 6]),
        )
    )
    [features] = got
    clicks = dict(zip(features.values().tolist(), features.data["clicks"].tolist(), strict=True))
    assert clicks == {7: 5, 8: 6}


@pytest.mark.parametrize("is_sequence", [False, True])
@pytest.mark.parametrize("kind", ["row_wise", "data_parallel", "column_wise"])
def test_ids_of_a_rank_without_times_have_the_latest(
    ranks: RankPool, kind: str, is_sequence: bool
) -> None:
    plan: dict[str, Spec] = {"user": (kind,)}
    if kind == "column_wise":
        plan = {"user": ("column_wise", [(1, 0), (WIDTH - 1, 1)])}
    found = ranks.run(2, times_on_ranks.times_of_some_ranks, plan, is_sequence)
    assert [time for time, _ in found] == [60, 60]
    assert {**found[0][1], **found[1][1]} == {5: 60, 6: 40, 7: 60}


def test_a_plain_bag_over_ranks_takes_what_comes_with_ids(ranks: RankPool) -> None:
    found = ranks.run(2, times_on_ranks.times_of_a_bag)
    said = "counts must have the shape of keys, (1, 2)", "int64, must be an int, got True"
    said = (*said, "int64, must be an int, got 1.5", "scores must be a tensor of torch.float32")
    for texts, time, _ in found:
        assert all(text in of_rank for text, of_rank in zip(said, texts, strict=True))
        assert time == 40
    assert {**found[0][2], **found[1][2]} == {5: 35, 7: 40, 8: 40}


@pytest.mark.parametrize(
    ("rule", "has_data", "is_trained", "count"),
    [
        (None, True, True, 1),
        (Evict.lru(), True, True, 1),
        (TIMED, False, True, 1),
        (TIMED, True, False, 1),
        (TIMED, True, True, 2),
    ],
)
def test_nothing_is_sent_that_no_table_takes(
    ranks: RankPool, rule: Evict | None, has_data: bool, is_trained: bool, count: int
) -> None:
    given = {"user": rule}, has_data, is_trained
    assert ranks.run(2, times_on_ranks.exchanges_of_a_batch, *given) == [count, count]


def test_torchrecs_pipeline_sends_times_too(ranks: RankPool) -> None:
    batches = [([1, 1, 2], [10, 20, 30]), ([2, 5], [90, 5]), ([1], [100]), ([3, 3], [200, 170])]
    found = ranks.run(2, times_on_ranks.times_by_a_stock_pipeline, batches)
    assert [time for _, time in found] == [200, 200]
    assert sorted(key for keys, _ in found for key in keys) == [3]
