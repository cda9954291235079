"""An exception on one rank, wherever in a step it is, ends the work of all ranks at once.

The groups' timeout is minutes, after which the ranks would raise something else.
"""

from __future__ import annotations

import signal
import threading
from pathlib import Path
from typing import Any

import failures_on_ranks
import pytest
import times_on_ranks
import torch.distributed as dist
from failures_on_ranks import PLACES
from rank_pool import MODULES, RankPool

from ports import reserved_ports
from recsdk_sharding import failing_together
from recsdk_sharding.exchange.watcher import Watcher
from sampling import IS_FULL
from warm_scripts import start_scripts, statuses_of

SECONDS_TO_END = 120
LOOPS = ["plain", "TrainPipelineSparseDist"]
# Each place in each loop; without the full profile not with each number of ranks, and alike in one.
FAILING = [
    (place, loop, world_size)
    for number, place in enumerate(PLACES)
    for turn, loop in enumerate(LOOPS)
    for world_size in (2, 3)
    if IS_FULL or (number + turn + world_size) % 2
]
ALIKE = [
    (place, loop)
    for number, place in enumerate(PLACES)
    for turn, loop in enumerate(LOOPS)
    if IS_FULL or (number + turn) % 2
]


def assert_told(ends: list[Any], guilty: int, text: str) -> None:
    """The guilty rank raised its own, the others PeerError with its words."""
    for rank, end in enumerate(ends):
        assert end is not None, rank
        if rank == guilty:
            assert text == f"{end['type']}: {end['text']}"
        else:
            assert end["type"] == "PeerError"
            assert (end["rank"], end["message"], end["is_final"]) == (guilty, text, True)
            assert f"rank {guilty} failed: {text}" in end["text"]
            assert "restart the ranks" in end["text"]


@pytest.mark.parametrize(("place", "loop", "world_size"), FAILING)
def test_one_rank_fails(ranks: RankPool, place: str, loop: str, world_size: int) -> None:
    guilty = world_size - 1
    found = ranks.run(world_size, failures_on_ranks.fail, place, loop, [guilty])
    ranks.renew()
    assert_told([each["first"] for each in found], guilty, f"Trouble: rank {guilty} has trouble")
    assert found[0]["keeps_the_store"]  # which is the first rank's
    for each in found:  # and is told so again
        assert each["again"]["type"] == "PeerError"
        assert each["again"]["rank"] == guilty
        assert set(each["threads"]) <= {"MainThread", "recsdk-host-exchange"}


@pytest.mark.parametrize(("place", "loop"), ALIKE)
def test_all_ranks_fail_alike(ranks: RankPool, place: str, loop: str) -> None:
    found = ranks.run(2, failures_on_ranks.fail, place, loop, [0, 1])
    for rank, each in enumerate(found):
        assert each["first"] == {"type": "Trouble", "text": f"rank {rank} has trouble"}
        assert each["again"] is None  # the groups are as they were
    ranks.renew()  # their sharded modules were left in the middle of a step


@pytest.mark.parametrize("keeping", [[], [0], [1], [0, 1]])
def test_a_model_that_is_made_after_a_failure_trains(ranks: RankPool, keeping: list[int]) -> None:
    found = ranks.run(2, times_on_ranks.keys_of_a_bag_after_a_failure, keeping)
    assert all("must have the shape of keys" in text or "rank" in text for text, _ in found)
    assert sorted(found[0][1] + found[1][1]) == [5, 7, 8]


def test_the_tables_backward_tells_without_a_context_manager(ranks: RankPool) -> None:
    place = "the tables' backward"
    found = ranks.run(2, failures_on_ranks.fail, place, "plain", [1], "cpu", False)
    ranks.renew()
    assert_told([each["first"] for each in found], 1, "Trouble: rank 1 has trouble")


@pytest.mark.parametrize("loop", ["TrainPipelineSparseDist", "TrainPipelineFusedSparseDist"])
def test_a_rank_that_switches_modes_alone_tells_without_a_context_manager(
    ranks: RankPool, loop: str
) -> None:
    found = ranks.run(2, failures_on_ranks.fail, failures_on_ranks.MODE, loop, [0], "cpu", False)
    ranks.renew()
    said = found[0]["first"]
    assert said["type"] == "RuntimeError"
    assert "the model is now in eval mode" in said["text"]
    assert found[1]["first"] is not None  # of a closed group, where DistributedDataParallel waits
    assert_told([said, found[1]["again"]], 0, f"RuntimeError: {said['text']}")


def test_ranks_that_have_finished_are_told_in_their_next_collective(ranks: RankPool) -> None:
    last = len(failures_on_ranks.SIZES) - 1
    found = ranks.run(3, failures_on_ranks.fail, "optimizer", "plain", [1], "cpu", True, last)
    ranks.renew()
    for rank, each in enumerate(found):
        assert each["steps"] == last + (rank != 1)
        assert each["first"] is None or rank == 1
        assert each["again"]["type"] == "PeerError"
        assert each["again"]["message"] == "Trouble: rank 1 has trouble"


def test_a_rank_fails_while_others_save(ranks: RankPool, tmp_path: Path) -> None:
    found = ranks.run(3, failures_on_ranks.fail_while_others_save, str(tmp_path))
    ranks.renew()
    assert_told(found, 2, "Trouble: rank 2 has trouble")


@pytest.mark.parametrize("kind", ["Table", "Saver"])
def test_a_save_of_a_rank_s_own_tables_tells_the_others(
    ranks: RankPool, tmp_path: Path, kind: str
) -> None:
    (tmp_path / "file").touch()
    path = str(tmp_path / "file" / "saved")
    found = ranks.run(2, failures_on_ranks.fail_in_a_save_of_its_own, kind, path)
    ranks.renew()
    assert_told(found, 1, f"CheckpointError: {found[1]['text']}")


def test_a_sharded_model_of_one_rank_is_its_own(ranks: RankPool, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    path = str(tmp_path / "file" / "saved")
    first, last = ranks.run(2, failures_on_ranks.fail_with_a_model_of_its_own, path)
    assert first == [None]
    *own, collective = last
    assert [each["type"] for each in own] == ["ValueError", "CheckpointError", "KeyError"]
    assert collective is None


def test_a_save_that_is_refused_on_all_ranks_closes_nothing(
    ranks: RankPool, tmp_path: Path
) -> None:
    for second, collective in ranks.run(2, failures_on_ranks.save_twice, str(tmp_path)):
        assert second["type"] == "CheckpointError"
        assert collective is None


def test_an_exception_that_cannot_be_changed(ranks: RankPool) -> None:
    assert [each["type"] for each in ranks.run(2, failures_on_ranks.raise_frozen)] == ["Frozen"] * 2


def test_evaluation(ranks: RankPool) -> None:
    found = ranks.run(3, failures_on_ranks.fail_in_evaluation, 0)
    ranks.renew()
    assert_told(found, 0, "Trouble: rank 0 has trouble")


@pytest.mark.parametrize("place", [place for place in PLACES if place != "iterator"])
def test_on_a_device(npus: RankPool, place: str) -> None:
    found = npus.run(2, failures_on_ranks.fail, place, "TrainPipelineSparseDist", [1], "npu")
    npus.renew()
    assert_told([each["first"] for each in found], 1, "Trouble: rank 1 has trouble")


@pytest.mark.parametrize("device", ["cpu", "npu"])
def test_an_unsharded_model_is_its_rank_s_own(ranks: RankPool, npus: RankPool, device: str) -> None:
    pool = ranks if device == "cpu" else npus
    assert pool.run(2, failures_on_ranks.fail_in_an_unsharded_model, device) == [None, None]


def test_loops_that_end_in_good_order_are_no_failures(ranks: RankPool) -> None:
    kinds = ["StopIteration", "SystemExit 0", "GeneratorExit"]
    first, second = ranks.run(2, failures_on_ranks.raise_kinds, kinds)
    assert [each["type"] for each in first] == [kind.split()[0] for kind in kinds]
    assert second == [None] * len(kinds)


@pytest.mark.parametrize(
    ("kind", "text"),
    [("KeyboardInterrupt", "KeyboardInterrupt: "), ("SystemExit 1", "SystemExit: 1")],
)
def test_a_rank_that_is_interrupted_or_leaves(ranks: RankPool, kind: str, text: str) -> None:
    found = ranks.run(2, failures_on_ranks.raise_kinds, [kind])
    ranks.renew()
    assert_told([each[0] for each in found], 0, text)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("guilty", [0, 1])
def test_a_signal_to_one_rank_is_told_before_others_are_awaited(
    ranks: RankPool, number: signal.Signals, guilty: int
) -> None:
    """They are awaited for as long as it takes, if no signal has come."""
    found = ranks.run(2, failures_on_ranks.be_signalled, int(number), [guilty])
    ranks.renew()
    text = "KeyboardInterrupt: " if number == signal.SIGINT else "SystemExit: 143"
    assert_told(found, guilty, text)


def test_ranks_that_all_get_a_signal_end_alike(ranks: RankPool) -> None:
    found = ranks.run(2, failures_on_ranks.be_signalled, int(signal.SIGTERM), [0, 1])
    ranks.renew()
    assert [each["type"] for each in found] == ["SystemExit"] * 2


def test_ranks_that_fail_at_the_same_place_keep_their_groups(ranks: RankPool) -> None:
    found = ranks.run(3, failures_on_ranks.fail_alike_and_apart)
    ranks.renew()
    for rank, (together, keys, apart, later) in enumerate(found):
        assert together == [{"type": "Trouble", "text": f"rank {rank} has trouble"}] * 3
        assert keys[2] - keys[1] == 1  # the answer: what the ranks said is gone
        assert apart["type"] == ("KeyError" if rank else "Trouble")
        assert later["type"] == "PeerError"


TROUBLES = [f"rank {rank} has trouble" for rank in range(2)]


def test_ranks_of_a_group_that_fail_alike_concern_no_others(ranks: RankPool) -> None:
    steps = [[0, 1], [], [0, 1], [0, 1], [1]]
    first, second, third = ranks.run(3, failures_on_ranks.fail_in_a_part, steps, False)
    ranks.renew()
    for own, text in zip((first, second), TROUBLES, strict=True):
        told = {"type": "Trouble", "text": text}
        assert own[:4] == [(told, None), (None, None), (told, None), (told, None)]
    assert third[:4] == [(None, None)] * 4
    assert_told([first[4][0], second[4][0]], 1, f"Trouble: {TROUBLES[1]}")
    assert third[4][0] is None
    assert third[4][1]["type"] == "PeerError"  # as the others closed their groups
    assert third[4][1]["rank"] == 1


def test_what_a_group_raises_alike_is_told_to_the_others_who_do_more_together(
    ranks: RankPool,
) -> None:
    [first], [second], [third] = ranks.run(3, failures_on_ranks.fail_in_a_part, [[0, 1]], True)
    ranks.renew()
    for (own, after), text in zip((first, second), TROUBLES, strict=True):
        assert own == {"type": "Trouble", "text": text}
        assert after is not None
    assert third[0] is None
    assert (third[1]["type"], third[1]["rank"]) in [("PeerError", 0), ("PeerError", 1)]


@pytest.mark.parametrize("guilty", range(4))
def test_ranks_that_do_not_wait_for_the_one_that_failed_are_told(
    ranks: RankPool, guilty: int
) -> None:
    found = ranks.run(4, failures_on_ranks.fail_while_others_wait, guilty)
    ranks.renew()
    assert_told(found, guilty, f"Trouble: rank {guilty} has trouble")


@pytest.mark.parametrize("loop", ["plain", "TrainPipelineSparseDist"])
@pytest.mark.parametrize("is_guarded", [False, True])
def test_a_bad_batch_of_a_group(ranks: RankPool, loop: str, is_guarded: bool) -> None:
    run = failures_on_ranks.give_a_bad_batch_in_a_part
    (peer, _), (own, _), of_other = ranks.run(3, run, loop, is_guarded)
    ranks.renew()
    assert "nobody's" in own["text"]
    assert (peer["type"], peer["rank"]) == ("PeerError", 1)
    assert f"rank 1 failed in step 2: {own['type']}: " in peer["text"]
    if not is_guarded:  # it concerns no others
        assert of_other == [None, None]
    else:
        assert (of_other[0]["type"], of_other[0]["is_final"]) == ("PeerError", True)
        assert of_other[0]["rank"] in (0, 1)


def test_what_is_no_group_is_refused_before_anything_fails() -> None:
    with pytest.raises(TypeError, match="group must be a process group .* got -100"):
        failing_together(dist.GroupMember.NON_GROUP_MEMBER)


def test_an_error_that_is_raised_again_is_told_again(ranks: RankPool) -> None:
    found = ranks.run(3, failures_on_ranks.raise_one_error_twice)
    ranks.renew()
    assert [each[0] for each in found] == [{"type": "Trouble", "text": "that is kept"}] * 3
    assert_told([each[1] for each in found], 2, "Trouble: that is kept")


def test_it_costs_no_communication(ranks: RankPool) -> None:
    without = ranks.run(2, failures_on_ranks.count_communication, False)
    ranks.renew()
    with_guards = ranks.run(2, failures_on_ranks.count_communication, True)
    assert with_guards == without
    assert sum(without[0]) > 0
    assert without[0][-1] == 0


def test_the_watching_thread_acts_once_and_ends() -> None:
    has_failed, closed = threading.Event(), threading.Event()
    watcher = Watcher(has_failed.is_set, closed.set)
    assert not watcher.has_found
    has_failed.set()
    assert closed.wait(SECONDS_TO_END)
    watcher.stop()
    assert watcher.has_found
    assert "recsdk-failures" not in {thread.name for thread in threading.enumerate()}


def test_the_watching_thread_ends_with_the_world() -> None:
    def gone() -> bool:
        raise RuntimeError("the process group was destroyed")

    watcher = Watcher(gone, lambda: pytest.fail("nobody failed"))
    watcher._thread.join(SECONDS_TO_END)
    assert not watcher._thread.is_alive()
    assert not watcher.has_found


ALONE = """
import torch.distributed as dist
from recsdk_sharding import failing_together
from recsdk_sharding.exchange import failures
for _ in range(2):
    with failing_together():
        assert failures._world() is None
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    watched = failures._World(dist.GroupMember.WORLD)
    assert not watched._store.is_apart()
    try:
        with failing_together():
            raise ValueError
    except ValueError:
        pass
    assert failures._world() is None
    dist.destroy_process_group()
    try:
        watched._store.is_apart()
    except RuntimeError as error:
        assert "destroyed" in str(error)
    else:
        raise AssertionError("the watching thread would never end")
"""


def test_a_rank_that_is_alone_or_has_left_its_group_asks_nobody(tmp_path: Path) -> None:
    script, output = tmp_path / "script.py", tmp_path / "output"
    script.write_text(ALONE)
    output.touch()
    started = start_scripts([str(script)], output, [{}], modules=MODULES)
    assert statuses_of(started, SECONDS_TO_END) == [0], output.read_text()


SCRIPT = """
import os, socket, sys, time
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
import torch, torch.distributed as dist
from recsdk_sharding import failing_together
from recsdk_sharding.exchange import failure_store
from recsdk_sharding.exchange.failure_store import FailureStore
dist.set_debug_level_from_env()  # as torch does when it is imported
port, backend, ending = sys.argv[1:]
rank = int(os.environ["RANK"])
first, keep = Path("first"), Path("keeps")

def wait_until_seen(self, store, then=FailureStore._wait_until_seen):
    def sleep(seconds):
        keep.touch()
        time.sleep(seconds)
    failure_store.time = SimpleNamespace(monotonic=time.monotonic, sleep=sleep)
    then(self, store)

def read_late(self, then=FailureStore.first):
    # Once the other rank ends: it waits with the store, or is gone.
    while not keep.exists() and Path("/proc", first.read_text()).exists():
        time.sleep(0.01)
    return then(self)

if ending == "fails":
    if rank == 0:
        first.write_text(str(os.getpid()))
        FailureStore._wait_until_seen = wait_until_seen
    else:
        FailureStore.first = read_late
dist.init_process_group(
    backend, init_method="tcp://localhost:" + port, rank=rank, world_size=2,
    timeout=timedelta(minutes=30),
)
dist.new_group(backend="gloo")
if ending == "both fail":
    failure_store._SECONDS_AT_EXIT = 3600
with failing_together():
    if ending == "both fail":
        raise (KeyError if rank else ValueError)("not alike")
    if rank == 0 and ending == "fails":
        raise ValueError("the first rank has the store")
    if rank == 1 and ending == "last fails":
        raise ValueError("this rank is awaited")
    dist.all_reduce(torch.zeros(1, device="cpu" if backend == "gloo" else "npu"))
if ending == "destroys":
    dist.destroy_process_group()
    assert rank or socket.socket().connect_ex(("localhost", int(port))), "in use"
"""


def variables_of(rank: int, backend: str, **variables: str) -> dict[str, str]:
    """What a rank has in its environment. Its NPU is that of the fixture `npus`."""
    simulated = {"RECSDK_SIM_NPU": "1", "RECSDK_SIM_NPU_ASYNC": "1"} if backend == "hccl" else {}
    return {"RANK": str(rank), **simulated, **variables}


# Which are about what is left when the interpreter ends: the store, and threads of a device.
TO_THE_END_OF_PYTHON = [("gloo", "fails"), ("hccl", "ends")]


def run_script(
    folder: Path, backend: str, ending: str, **variables: str
) -> tuple[list[int | None], str]:
    """The statuses of two processes, and what they printed."""
    script, output = folder / "script.py", folder / "output"
    script.write_text(SCRIPT)
    output.touch()
    of_each = [variables_of(rank, backend, **variables) for rank in range(2)]
    with reserved_ports() as [port]:
        started = start_scripts(
            [str(script), str(port), backend, ending],
            output,
            of_each,
            modules=MODULES,
            folder=folder,
            has_end_of_python=(backend, ending) in TO_THE_END_OF_PYTHON,
        )
        statuses = statuses_of(started, SECONDS_TO_END)
    return statuses, output.read_text()


@pytest.mark.parametrize("backend", ["gloo", "hccl"])
def test_processes_end_although_the_store_is_in_the_one_that_failed(
    backend: str, tmp_path: Path
) -> None:
    statuses, text = run_script(tmp_path, backend, "fails")
    assert statuses == [1, 1]
    assert "\nValueError: the first rank has the store" in text
    assert "PeerError: rank 0 failed: ValueError: the first rank has the store" in text


def test_ranks_end_where_torch_checks_collectives(tmp_path: Path) -> None:
    statuses, text = run_script(tmp_path, "gloo", "last fails", TORCH_DISTRIBUTED_DEBUG="DETAIL")
    assert statuses == [1, 1]
    assert "PeerError: rank 1 failed: ValueError: this rank is awaited" in text


def test_the_store_is_not_kept_for_ranks_that_have_failed_themselves(tmp_path: Path) -> None:
    statuses, text = run_script(tmp_path, "gloo", "both fail")
    assert statuses == [1, 1], text


@pytest.mark.parametrize("backend", ["gloo", "hccl"])
def test_the_port_of_the_store_is_free_when_the_groups_are_destroyed(
    backend: str, tmp_path: Path
) -> None:
    statuses, text = run_script(tmp_path, backend, "destroys")
    assert statuses == [0, 0], text


def test_processes_with_a_watching_thread_end_in_good_order(tmp_path: Path) -> None:
    statuses, text = run_script(tmp_path, "hccl", "ends")
    assert statuses == [0, 0], text
