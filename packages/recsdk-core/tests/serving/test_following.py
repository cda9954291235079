"""A frozen table that follows a chain serves what freezing its end would serve."""

from __future__ import annotations

import copy
import gc
import os
import pickle
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recsdk_core import CheckpointError, Default, Table, init, optim
from recsdk_core.serving import ServingTable, freeze, freeze_tables, open_frozen
from recsdk_core.serving.chain_folder import ChainFolder, Look, Place

ALL = np.arange(-30, 400)
LIVE, LIVE_ENDS = np.arange(128), np.array([0, 64, 128])
"""Keys that each delta changes, in two bags."""
NUM_CALLS = 1_000_000 if os.environ.get("RECSDK_TEST_PROFILE") == "full" else 4_000
LINKS = st.lists(
    st.tuples(st.lists(st.sampled_from(ALL.tolist())), st.lists(st.sampled_from(ALL.tolist()))),
    min_size=1,
    max_size=6,
)


def wait_until(is_so: Callable[[], bool]) -> None:
    """Waits as long as it takes; a minute means that it never is."""
    end = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < end
        time.sleep(0.002)


def wait_for(served: ServingTable, sequence: int) -> None:
    wait_until(lambda: served.stats().sequence == sequence)


def wait_for_problem(served: ServingTable) -> None:
    wait_until(lambda: served.stats().problem is not None)


def bits(values: Any) -> bytes:
    return np.ascontiguousarray(values).tobytes()


def answers(served: ServingTable, keys: np.ndarray = ALL) -> tuple[bytes, ...]:
    values, outcomes = served.lookup(keys, return_outcomes=True)
    pooled = served.pool(keys, np.array([0, 3, 3, len(keys)]), pooling="mean")
    return bits(values), bits(outcomes), bits(pooled)


def place_of(frozen: Path) -> Place:
    """Where in a chain it was made."""
    source = open_frozen(frozen).source
    assert source is not None
    return Place(**asdict(source))


def new_table(default: Default = Default.constant(-0.5)) -> Table:
    return Table(
        dim=5,
        name="items",
        optimizer=optim.Adagrad(lr=0.1),
        initializer=init.Normal(mean=0.0, stddev=0.5),
        default=default,
    )


class Training:
    """A table whose chain grows, link by link, in a folder."""

    def __init__(self, folder: Path, default: Default = Default.constant(-0.5)) -> None:
        self.folder, self.sequence = folder, 0
        self.table = new_table(default)
        self.rng = np.random.default_rng(5)
        self.table.find_or_insert(np.arange(300))
        self.table.save(folder / "link_0", step=0)

    def save(self, trained: Any = (), erased: Any = (), step: int | None = None) -> Path:
        keys = np.array(trained, dtype=np.int64)
        self.table.find_or_insert(keys)
        grads = self.rng.normal(size=(len(keys), self.table.dim)).astype(np.float32)
        self.table.apply_gradients(keys, grads)
        if self.table.default.kind == "shared_rows":
            others = self.rng.integers(10_000, 2**62, 5)
            self.table.apply_gradients(others, np.ones((5, self.table.dim), np.float32))
        self.table.erase(np.array(erased, dtype=np.int64))
        self.sequence += 1
        path = self.folder / f"link_{self.sequence}"
        self.table.save_delta(path, step=self.sequence if step is None else step)
        return path

    def freeze(self, sequence: int, to: str, **options: Any) -> Path:
        freeze(self.folder / f"link_{sequence}", self.folder.parent / to, **options)
        return self.folder.parent / to


@pytest.fixture
def training(tmp_path: Path) -> Training:
    return Training(tmp_path / "chain")


@pytest.fixture
def followed(training: Training) -> Iterator[ServingTable]:
    """Its first link, frozen, which follows the others."""
    served = ServingTable(training.freeze(0, "served"))
    served.follow(training.folder, interval_seconds=0.005)
    yield served
    served.stop_following()


@settings(max_examples=12)
@given(
    links=LINKS,
    data=st.data(),
    dtype=st.sampled_from(["float32", "bfloat16", "float16", "int8", "int4"]),
    num_shards=st.sampled_from([1, 3]),
    default=st.sampled_from([Default.constant(-0.5), Default.shared_rows(6)]),
)
def test_a_chain_taken_live_is_its_end_frozen_bit_for_bit(
    tmp_path_factory: pytest.TempPathFactory,
    links: list[tuple[list[int], list[int]]],
    data: st.DataObject,
    dtype: Any,
    num_shards: int,
    default: Default,
) -> None:
    """Whenever it is frozen, and whenever it begins to follow; keys leave, and come back."""
    training = Training(tmp_path_factory.mktemp("live") / "chain", default)
    frozen_at = data.draw(st.integers(0, len(links) - 1), "frozen at")
    begins_at = data.draw(st.integers(frozen_at, len(links) - 1), "follows from")
    waits_at = data.draw(st.sets(st.integers(begins_at, len(links))), "waits for")
    options: dict[str, Any] = {"dtype": dtype, "num_shards": num_shards}
    served = []
    for sequence in range(len(links) + 1):
        if sequence:
            training.save(*links[sequence - 1])
        if sequence == frozen_at:
            path = training.freeze(sequence, "served", **options)
        if sequence == begins_at:
            served = [ServingTable(path), ServingTable(path, shards=[num_shards - 1])]
            for table in served:
                table.follow(training.folder, interval_seconds=0.001)
        if sequence in waits_at:
            wait_for(served[0], sequence)
    wait_until(lambda: all(each.stats().sequence == len(links) for each in served))
    end = training.freeze(len(links), "end", **options)
    whole, part = ServingTable(end), ServingTable(end, shards=[num_shards - 1])
    assert answers(served[0]) == answers(whole)
    assert (len(served[0]), len(served[1])) == (len(whole), len(part))
    for key in ALL:
        try:
            wanted = bits(part.lookup(np.array([key])))
        except ValueError:
            continue
        assert bits(served[1].lookup(np.array([key]))) == wanted
    stats = served[0].stats()
    assert (stats.num_behind, stats.problem, stats.seconds_behind) == (0, None, 0.0)
    assert (stats.num_deltas, stats.step) == (len(links) - frozen_at, len(links))
    for table in served:
        table.stop_following()


def damaged(path: Path, kind: str, rng: np.random.Generator) -> None:
    """Cuts, flips or removes something of a checkpoint."""
    [file] = path.rglob("*.rows")
    target = path / "manifest.json" if kind.startswith("manifest") else file
    raw = bytearray(target.read_bytes())
    if kind.endswith("cut"):
        target.write_bytes(raw[: int(rng.integers(0, len(raw)))])
    elif kind.endswith("flip"):
        raw[int(rng.integers(0, len(raw)))] ^= 1 << int(rng.integers(0, 8))
        target.write_bytes(raw)
    else:
        target.unlink()


@pytest.mark.parametrize("kind", ["cut", "flip", "gone", "manifest cut", "manifest flip"])
def test_a_damaged_delta_leaves_the_last_version_and_is_named(
    training: Training, followed: ServingTable, kind: str
) -> None:
    training.save([1, 2, 350], [3])
    wait_for(followed, 1)
    before = answers(followed)
    aside = training.folder.parent / "aside"
    good = training.save([4, 350, 351], [1])
    training.save([5], [2])
    followed.stop_following()
    # Written beside the chain and then moved, so that it is never seen whole.
    again = ServingTable(training.freeze(1, "again"))
    shutil.copytree(good, aside)
    damaged(good, kind, np.random.default_rng(len(kind)))
    again.follow(training.folder, interval_seconds=0.005)
    wait_for_problem(again)
    stats = again.stats()
    assert "link_2" in str(stats.problem)
    assert (stats.sequence, stats.num_deltas, answers(again)) == (1, 0, before)
    if kind in ("cut", "flip", "gone"):
        assert (stats.num_behind, stats.num_failures > 0) == (2, True)
    shutil.rmtree(good)
    aside.rename(good)
    wait_for(again, 3)
    assert again.stats().problem is None
    assert answers(again) == answers(ServingTable(training.freeze(3, "end")))
    again.stop_following()


def test_a_gap_is_said_and_closed(training: Training, followed: ServingTable) -> None:
    before = answers(followed)
    followed.stop_following()
    missing = training.save([7, 399])
    training.save([8], [7])
    missing.rename(training.folder.parent / "missing")
    followed.follow(training.folder, interval_seconds=0.005)
    wait_for_problem(followed)
    assert "link_2 is delta 2, and no delta builds on delta 0" in str(followed.stats().problem)
    assert answers(followed) == before
    (training.folder.parent / "missing").rename(missing)
    wait_for(followed, 2)
    assert followed.stats().problem is None


def test_two_deltas_on_one_place_and_newer_chains_are_said(
    training: Training, followed: ServingTable
) -> None:
    followed.stop_following()
    training.save([1])
    other = new_table()
    other.load(training.folder / "link_0")
    other.find_or_insert(np.array([399]))
    other.save_delta(training.folder / "other")
    followed.follow(training.folder, interval_seconds=0.005)
    wait_for_problem(followed)
    assert "2 deltas build on delta 0" in str(followed.stats().problem)
    shutil.rmtree(training.folder / "other")
    wait_for(followed, 1)
    training.table.save(training.folder / "new_chain", step=77)
    wait_for_problem(followed)
    assert "of step 77 and is of another chain" in str(followed.stats().problem)


@pytest.mark.parametrize("steps", [(None, None), (50, 7), (50, 50)], ids=["none", "back", "same"])
def test_a_newer_chain_of_no_later_step_is_said_when_its_delta_comes(
    steps: tuple[int | None, int | None], tmp_path: Path
) -> None:
    chain, table = tmp_path / "chain", new_table()
    before, after = steps
    table.save(chain / "old", step=before)
    freeze(chain / "old", tmp_path / "served")
    place, folder = place_of(tmp_path / "served"), ChainFolder(chain, "items")
    assert folder.look(place).problem is None
    table.save(chain / "new", step=after)
    assert folder.look(place).problem is None  # it may be the old one, compacted
    table.save_delta(chain / "new_1", step=after)
    came = "has come" if after is None else f"is of step {after}"
    assert f"new_1 {came} and is of another chain" in str(folder.look(place).problem)
    assert ChainFolder(chain, "items").look(place).problem is None  # which was first, nothing tells


def test_what_is_frozen_beside_the_chain_is_no_part_of_it(tmp_path: Path) -> None:
    """Its manifest may be damaged; that of a checkpoint may not, which could be the next delta."""
    chain, table = tmp_path / "chain", new_table()
    table.save(chain / "full")
    freeze(chain / "full", chain / "served")
    place, folder = place_of(chain / "served"), ChainFolder(chain, "items")
    assert folder.look(place).problem is None
    manifest = chain / "served" / "manifest.json"
    manifest.write_bytes(manifest.read_bytes()[:-9])
    assert folder.look(place).problem is None
    (chain / "other").mkdir()
    (chain / "other" / "manifest.json").write_text("{}")
    assert "other/manifest.json" in str(folder.look(place).problem)


@pytest.mark.parametrize("knows_all", [True, False])
def test_a_training_that_went_back_in_its_chain_is_said(tmp_path: Path, knows_all: bool) -> None:
    chain, table = tmp_path / "chain", new_table()
    table.save(chain / "full")
    freeze(chain / "full", tmp_path / "served")
    place, folder = place_of(tmp_path / "served"), ChainFolder(chain, "items")
    for number in (1, 2, 3):
        if knows_all:
            assert folder.look(place).problem is None
        table.find_or_insert(np.array([number]))
        table.save_delta(chain / f"delta_{number}")
        found = ChainFolder(chain, "items").look(place).next
        assert found is not None
        place = Place(hash=found.hash, base=place.base, sequence=number, step=None)
    assert folder.look(place).problem is None
    table.load(chain / "delta_1")
    table.find_or_insert(np.array([100]))
    for number in (2, 3, 4):
        table.save_delta(chain / f"other_{number}")
        assert "other_2 has come and is not the delta 2 that was" in str(folder.look(place).problem)


def test_steps_that_go_back_are_no_problem(training: Training) -> None:
    training.save([1], step=50)
    training.save([2], step=7)
    place = place_of(training.freeze(2, "served"))
    assert ChainFolder(training.folder, "items").look(place).problem is None


def test_chains_of_other_tables_in_the_folder_are_no_problem(training: Training) -> None:
    Table(dim=2, name="users").save(training.folder / "users", step=50)
    training.save([1])
    place = place_of(training.freeze(1, "served"))
    look = ChainFolder(training.folder, "items").look(place)
    assert look == Look(next=None, behind=0, problem=None)


FOLLOWER = """
import sys, time
from recsdk_core.serving import ServingTable
served = ServingTable(sys.argv[1])
served.follow(sys.argv[2], interval_seconds=0.005)
while True:
    print(served.stats().sequence, flush=True)
    time.sleep(0.005)
"""


def test_a_follower_that_was_killed_starts_again(training: Training) -> None:
    path = training.freeze(0, "served")
    command = [sys.executable, "-c", FOLLOWER, str(path), str(training.folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        process.stdout.readline()
        for _ in range(5):
            training.save(np.arange(200), [250])
        while process.stdout.readline().strip() == "0":
            pass
        process.send_signal(signal.SIGKILL)
    training.save([320])
    served = ServingTable(path)
    served.verify()
    served.follow(training.folder, interval_seconds=0.005)
    wait_for(served, 6)
    assert answers(served) == answers(ServingTable(training.freeze(6, "end")))
    served.stop_following()


def version_of(served: ServingTable, call: int) -> float:
    """Of an answer by `lookup` or `pool`, the version; NaN if it is of several."""
    if call % 2:
        lasting, coming = served.pool(LIVE, LIVE_ENDS, pooling="mean")
        rows = np.stack([lasting, coming])
    else:
        rows = served.lookup(LIVE)
    value = float(rows[0, 0])
    wanted = value if value % 2 == 0 else served.default_value
    half = len(rows) // 2
    is_one = (rows[:half] == value).all() and (rows[half:] == wanted).all()
    return value if is_one else float("nan")


def test_every_answer_is_of_one_version(training: Training, followed: ServingTable) -> None:
    """Under constant deltas eight threads read.

    In version v keys 0 to 63 have rows of v, and keys 64 to 127 only if v is even.
    """
    wrong: list[tuple[float, float]] = []
    counts = [0] * 8

    def read(thread: int) -> None:
        last = 0.0
        while counts[thread] < NUM_CALLS // 8 or training.sequence < 8:
            version = version_of(followed, counts[thread])
            if not version >= last:  # nor back in time
                wrong.append((last, version))
            last = version
            counts[thread] += 1

    def take(value: int) -> None:
        alive = LIVE[: len(LIVE) if value % 2 == 0 else len(LIVE) // 2]
        rows = np.full((len(alive), 5), value, dtype=np.float32)
        training.table.upsert(alive, rows)
        training.save(erased=np.setdiff1d(LIVE, alive))

    take(0)
    wait_for(followed, 1)
    threads = [threading.Thread(target=read, args=(thread,)) for thread in range(8)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        take(training.sequence)
    for thread in threads:
        thread.join()
    wait_for(followed, training.sequence)
    assert wrong == []
    assert sum(counts) >= NUM_CALLS
    assert version_of(followed, 0) == training.sequence - 1


def test_a_url_is_followed(training: Training) -> None:
    """The chain appears in a store, object by object."""
    import fsspec

    files = fsspec.filesystem("memory")
    served = ServingTable(training.freeze(0, "served"))
    with pytest.raises(CheckpointError, match="listing"):
        served.follow("memory://nowhere/chain")
    files.put(str(training.folder / "link_0"), "/follow/link_0", recursive=True)
    served.follow("memory://follow", interval_seconds=0.005)
    for sequence in (1, 2):
        path = training.save([sequence, 320 + sequence], [10 * sequence])
        manifest = (path / "manifest.json").read_bytes()
        (path / "manifest.json").unlink()
        files.put(str(path), f"/follow/link_{sequence}", recursive=True)
        files.pipe(f"/follow/link_{sequence}/manifest.json", manifest)
        (path / "manifest.json").write_bytes(manifest)
        wait_for(served, sequence)
    served.stop_following()
    assert answers(served) == answers(ServingTable(training.freeze(2, "end")))
    files.rm("/follow", recursive=True)


def test_what_cannot_be_followed_is_refused(training: Training, followed: ServingTable) -> None:
    with pytest.raises(ValueError, match="follows already"):
        followed.follow(training.folder)
    followed.stop_following()
    with pytest.raises(CheckpointError, match="is itself a checkpoint"):
        followed.follow(training.folder / "link_0")
    with pytest.raises(CheckpointError, match="listing"):
        followed.follow(training.folder / "nothing")
    for seconds in (0, -1.0):
        with pytest.raises(ValueError, match="interval_seconds must be above 0"):
            followed.follow(training.folder, interval_seconds=seconds)
    with pytest.raises(ValueError, match="must be finite"):
        followed.follow(training.folder, interval_seconds=float("nan"))
    freeze_tables([training.table], training.folder.parent / "memory")
    with pytest.raises(ValueError, match="frozen from memory"):
        ServingTable(training.folder.parent / "memory").follow(training.folder)
    stats = ServingTable(training.folder.parent / "memory").stats()
    assert (stats.sequence, stats.num_deltas, stats.is_following) == (None, 0, False)


def test_following_stops_goes_on_and_ends_with_the_table(
    training: Training, followed: ServingTable
) -> None:
    followed.stop_following()
    training.save([333])
    assert not followed.stats().is_following
    assert followed.stats().sequence == 0
    followed.follow(training.folder, interval_seconds=0.005)
    wait_for(followed, 1)
    assert copy.deepcopy(followed) is followed
    assert pickle.loads(pickle.dumps(followed)).stats().sequence == 0
    passing = ServingTable(followed.path)
    passing.follow(training.folder, interval_seconds=0.005)
    count = threading.active_count()
    del passing
    gc.collect()
    wait_until(lambda: threading.active_count() < count)


def test_a_forked_process_follows_for_itself(training: Training, followed: ServingTable) -> None:
    training.save([333])
    wait_for(followed, 1)
    child = os.fork()
    if child == 0:
        status = 1
        try:
            assert not followed.stats().is_following
            followed.follow(training.folder, interval_seconds=0.005)
            wait_for(followed, 2)
            status = 0
        finally:
            os._exit(status)
    training.save([334])
    assert os.waitpid(child, 0)[1] == 0
    wait_for(followed, 2)


def test_a_forked_process_stops_following_whatever_the_thread_held(followed: ServingTable) -> None:
    follower = followed._follower
    assert follower is not None
    with follower._stop._cond:  # type: ignore[attr-defined]
        child = os.fork()
        if child == 0:
            signal.alarm(60)
            followed.stop_following()
            os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert followed.stats().is_following


def test_rows_that_the_dtype_cannot_hold_stop_it_by_name(training: Training) -> None:
    served = ServingTable(training.freeze(0, "served", dtype="float16"))
    served.follow(training.folder, interval_seconds=0.005)
    training.table.upsert(np.array([5]), np.full((1, 5), 7e4, dtype=np.float32))
    training.save()
    wait_for_problem(served)
    assert "float16 cannot hold the row of key 5" in str(served.stats().problem)
    assert (served.stats().sequence, served.stats().num_behind) == (0, 1)
    served.stop_following()
