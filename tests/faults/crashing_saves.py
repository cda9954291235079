"""Saves and loads that fail or die at every call; run with faulty_calls.c preloaded.

    LD_PRELOAD=faulty_calls.so python crashing_saves.py small FOLDER
    LD_PRELOAD=faulty_calls.so python crashing_saves.py made FOLDER COUNT
    LD_PRELOAD=faulty_calls.so python crashing_saves.py large FOLDER COUNT
    LD_PRELOAD=faulty_calls.so python crashing_saves.py loads FOLDER COUNT
    python crashing_saves.py moments FOLDER COUNT

Saves are made by forked processes, of what this one prepared; afterwards this one looks at what
they left. "made" is what is made of a chain: merged, cut anew, frozen, exported. Tables are small,
or so large that their files go past the page cache. COUNT is how many faults are drawn of all in a
profile that takes samples, and the number of moments. Ends with one line of JSON: how often what
came of it.
"""

from __future__ import annotations

import ctypes
import json
import os
import random
import resource
import shutil
import signal
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from recsdk_core import CheckpointError, Outcome, Table, optim
from recsdk_core.checkpoint import chain_of, compact, reshard
from recsdk_core.checkpoint.tabular import FORMATS, export_table, read_arrays
from recsdk_core.serving import ServingTable, freeze
from sampling import sampled

COUNT, KILL_BEFORE, KILL_WITHIN, KILL_AFTER = range(1, 5)
FAIL_EIO, FAIL_ENOSPC, FAIL_EINTR, FAIL_EINVAL, SHORT, SHORT_ODD, SHORT_PAGES = range(5, 12)
ANY, CHANGES, WRITES, READS, INTERRUPTIBLE, DIRECT = 0, 1, 2, 4, 8, 16
KINDS = ("save", "overwrite", "delta")
MADE_KINDS = ("compact", "reshard", "freeze", *FORMATS)
SAVED, FAILED, WRONG = 0, 3, 4


@dataclass(frozen=True)
class Fault:
    """What befalls calls of a kind, and what may come of that."""

    mode: int
    calls: int
    outcomes: tuple[str, ...]
    stays: bool = False
    """Whether it befalls all calls from one on."""
    spares: int = 0
    """Kinds of calls that it does not befall, since another fault does."""
    at_last: bool = False
    """Whether it befalls the last call alone."""
    share: float = 1.0
    """Of its cases, in a profile that takes samples."""


# A save goes well if only what it leaves over cannot be removed.
SAVE_FAULTS = (
    Fault(KILL_BEFORE, CHANGES, ("killed",)),
    Fault(KILL_WITHIN, WRITES, ("killed",)),
    Fault(KILL_AFTER, CHANGES, ("killed",), at_last=True),  # of others it is before the next
    Fault(FAIL_EIO, CHANGES, ("failed", "saved"), spares=WRITES),
    Fault(FAIL_ENOSPC, CHANGES, ("failed", "saved"), share=1 / 3),
    Fault(FAIL_EIO, WRITES, ("failed",)),
    Fault(SHORT, WRITES, ("failed",)),
    Fault(FAIL_EINTR, INTERRUPTIBLE, ("saved",)),
    Fault(SHORT_ODD, WRITES, ("saved",)),
    Fault(SHORT_PAGES, WRITES | DIRECT, ("saved",)),
    Fault(FAIL_EINVAL, DIRECT, ("saved",)),
)
# What cannot be read past the page cache is read through it.
LOAD_FAULTS = (
    Fault(FAIL_EIO, READS, ("failed", "loaded")),
    Fault(FAIL_EIO, READS, ("failed", "loaded"), stays=True),
    Fault(FAIL_EIO, READS | DIRECT, ("loaded",)),
    Fault(FAIL_EINTR, INTERRUPTIBLE, ("loaded",)),
    Fault(SHORT_ODD, READS, ("loaded",)),
    Fault(SHORT_PAGES, READS | DIRECT, ("loaded",)),
    Fault(FAIL_EINVAL, READS | DIRECT, ("loaded",), stays=True),
)


@dataclass(frozen=True)
class Size:
    """Of a table, and of its changes before it is saved again."""

    num_keys: int
    dim: int = 3
    stride: int = 3
    """Of the keys that change."""


SMALL = Size(40)
MEDIUM = Size(20_000, dim=16)
LARGE = Size(2600, dim=1024, stride=1)
"""A file of 21 MB: what follows the first 8 MiB goes past the page cache."""
MOST_BYTES = 1 << 28

Rows = dict[int, bytes]


def new_table(dim: int = 3) -> Table:
    return Table(dim=dim, name="user", optimizer=optim.Adagrad(lr=0.1))


def train(table: Table, keys: np.ndarray, step: int) -> None:
    table.find_or_insert(keys)
    grads = np.random.default_rng(step).normal(size=(len(keys), table.dim)).astype(np.float32)
    table.apply_gradients(keys, grads)


def rows_of(table: Table) -> Rows:
    found: Rows = {}
    for batch in table.export():
        for index, key in enumerate(batch.keys.tolist()):
            found[key] = batch.weights[index].tobytes() + batch.state["sum"][index].tobytes()
    return found


class Scene:
    """A folder with a checkpoint "base", one more where one is to be overwritten, and a table."""

    def __init__(self, folder: Path, kind: str, size: Size) -> None:
        self.kind = kind
        self.dim = size.dim
        self.template = folder / f"template_{kind}"
        self.folder = folder / f"run_{kind}"
        self.target = self.folder / ("base" if kind == "overwrite" else "target")
        self.table = new_table(size.dim)
        train(self.table, np.arange(size.num_keys), 0)
        self.folder.mkdir(parents=True)
        self.table.save(self.folder / "base", user_state=b"old")
        shutil.copytree(self.folder, self.template, copy_function=os.link)
        self.old = rows_of(self.table)
        train(self.table, np.arange(5, size.num_keys, size.stride), 1)
        self.table.erase(np.arange(7))
        self.new = rows_of(self.table)

    def reset(self) -> None:
        """Puts the folder as it was."""
        shutil.rmtree(self.folder)
        shutil.copytree(self.template, self.folder, copy_function=os.link)

    def save(self) -> None:
        if self.kind == "delta":
            self.table.save_delta(self.target, user_state=b"new")
        else:
            self.table.save(self.target, overwrite=self.kind == "overwrite", user_state=b"new")

    def _is_of_file(self, error: BaseException) -> bool:
        """Whether it says that the file, which is no checkpoint, cannot be written."""
        is_told = isinstance(error, OSError) and str(error).startswith(f"{self.target}: ")
        return is_told and self.kind in FORMATS

    def in_a_child(self, prepare: Callable[[], None]) -> int:
        """Starts a process that saves; its id."""
        child = os.fork()
        if child == 0:
            status = WRONG
            try:
                prepare()
                self.save()
                status = SAVED
            except CheckpointError:
                status = FAILED
            except BaseException as error:
                status = FAILED if self._is_of_file(error) else WRONG
                if status == WRONG:
                    traceback.print_exc()
            os._exit(status)
        return child

    def before(self) -> Rows | None:
        """What is there if a save comes to nothing. The source of what is made is there still."""
        if self.kind == "overwrite":
            return self.old
        assert load(self.folder / "base", self.dim) == self.old
        return None

    def found(self) -> Rows | None:
        """What is there, None if nothing. Whatever is broken would raise."""
        return load(self.target, self.dim)

    def save_again(self) -> Rows:
        """Replaces what is there without a fault; returns what must be there then."""
        again = new_table(self.dim)
        train(again, np.arange(4), 2)
        again.save(self.target, overwrite=True)
        return rows_of(again)

    def may_leave(self, outcome: str) -> bool:
        """Whether there may be a partial file or folder, until the next save."""
        return outcome == "killed"

    def check(self, outcome: str) -> None:
        """What is there loads completely, or is not there; the next save goes well."""
        before, found = self.before(), self.found()
        assert found == self.new or (outcome != "saved" and found == before), outcome
        hidden = [p for p in self.folder.iterdir() if p.name.startswith(".")]
        left = [p for p in hidden if p.suffix != ".recsdk-lock"]  # which nobody holds
        assert self.may_leave(outcome) or left == [], left
        wanted = self.save_again()
        assert self.found() == wanted
        assert not [p for p in self.folder.iterdir() if p.name.startswith(".")]
        assert self.target.is_file() or len(list(self.target.iterdir())) == 2


class MadeScene(Scene):
    """What is made of a chain of two: a folder replaces what was made of the first, a file is new.

    Of what is frozen or exported the weights are compared, and of a file that it is all there.
    """

    def __init__(self, folder: Path, kind: str, size: Size) -> None:
        super().__init__(folder / kind, "delta", size)
        super().save()
        self._source = self.target
        self._states = self.old, self.new
        self.kind = kind
        self.target = self.folder / "made"
        self.is_file = kind in FORMATS
        self._size = size
        if kind == "freeze" or self.is_file:
            width = 4 * size.dim
            self.old, self.new = (
                {key: row[:width] for key, row in rows.items()} for rows in self._states
            )
        if not self.is_file:
            self._make(self.folder / "base")
        shutil.rmtree(self.template)
        shutil.copytree(self.folder, self.template, copy_function=os.link)

    def _make(self, source: Path) -> None:
        if self.kind == "compact":
            compact(source, self.target, overwrite=True)
        elif self.kind == "reshard":
            reshard(source, self.target, world_size=3, overwrite=True)
        elif self.kind == "freeze":
            freeze(source, self.target, overwrite=True, num_shards=2)
        else:
            export_table(chain_of(source), "user", self.target, self.kind)

    def save(self) -> None:
        self._make(self._source)

    def may_leave(self, outcome: str) -> bool:
        return super().may_leave(outcome) or (self.is_file and outcome == "saved")

    def before(self) -> Rows | None:
        of_links = [load(place, self.dim) for place in (self.folder / "base", self._source)]
        assert of_links == list(self._states)
        return None if self.is_file else self.old

    def found(self) -> Rows | None:
        if self.kind == "freeze":
            return frozen_rows(self.target, self._size)
        return exported_rows(self.target, self.kind) if self.is_file else super().found()

    def save_again(self) -> Rows:
        if self.is_file:
            self.target.unlink(missing_ok=True)
        self._make(self.folder / "base")
        return self.old


def frozen_rows(path: Path, size: Size) -> Rows:
    served = ServingTable(path)
    served.verify()
    keys = np.arange(size.num_keys)
    rows, outcomes = served.lookup(keys, return_outcomes=True)
    found = {int(key): rows[key].tobytes() for key in keys[outcomes == Outcome.FOUND]}
    assert len(found) == len(served)
    return found


def exported_rows(path: Path, form: str) -> Rows | None:
    if not path.exists():
        return None
    named = path.with_suffix(f".{form}")
    os.link(path, named)  # by which it is read
    try:
        arrays = read_arrays(named)
    finally:
        named.unlink()
    assert len(arrays["sum"]) == len(arrays["key"])
    return {
        int(key): row.tobytes() for key, row in zip(arrays["key"], arrays["weight"], strict=True)
    }


def load(path: Path, dim: int) -> Rows | None:
    """The rows of a checkpoint; None if there is none. Whatever is broken would raise."""
    table = new_table(dim)
    try:
        table.load(path)
    except CheckpointError as error:
        if "there is no checkpoint" not in str(error):
            raise
        return None
    return rows_of(table)


def outcome_of(child: int) -> str:
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        assert os.WTERMSIG(status) == signal.SIGKILL, f"died of signal {os.WTERMSIG(status)}"
        return "killed"
    code = os.WEXITSTATUS(status)
    assert code in (SAVED, FAILED), (
        "it raised something else than CheckpointError, or OSError of a file"
    )
    return "saved" if code == SAVED else "failed"


class Faults:
    """The preloaded library."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL(None)
        self._library.faults_play_disk()

    def arm(self, fault: Fault, number: int) -> None:
        """Has a fault befall the call of this number among those of its kind."""
        end = ctypes.c_long(2**60 if fault.stays else number)
        self._library.faults_arm(fault.mode, fault.calls, ctypes.c_long(number), end)

    def trace(self, work: Callable[[], object]) -> list[int]:
        """The kinds of the calls that come while something goes on."""
        self.arm(Fault(COUNT, ANY, ()), 0)
        work()
        count = self._library.faults_disarm()
        return [self._library.faults_traced(ctypes.c_long(i)) for i in range(count)]

    def disarm(self) -> None:
        """No more faults."""
        self._library.faults_disarm()


def cases_of(faults: tuple[Fault, ...], trace: list[int]) -> Iterator[tuple[Fault, int]]:
    """Each fault at each call that it can befall."""
    for fault in faults:
        befallen = [kinds for kinds in trace if kinds & fault.calls == fault.calls]
        numbers = [number for number, kinds in enumerate(befallen) if not kinds & fault.spares]
        numbers = numbers[-1:] if fault.at_last else numbers
        for number in sampled(numbers, round(fault.share * len(numbers))):
            yield fault, number


def traced_save(faults: Faults, scene: Scene) -> list[int]:
    reader, writer = os.pipe()
    scene.reset()
    child = os.fork()
    if child == 0:
        trace = faults.trace(scene.save)
        os.write(writer, json.dumps(trace).encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as stream:
        trace = json.load(stream)
    assert outcome_of(child) == "saved"
    return list(trace)


def saves(scenes: Sequence[Scene], count: int | None) -> Counter[str]:
    """Every call that changes the file system fails, or kills, in turn; or a sample of them."""
    faults = Faults()
    traces = [traced_save(faults, scene) for scene in scenes]
    tally = Counter(calls=sum(map(len, traces)))
    tally["direct"] = sum(
        kinds & (WRITES | DIRECT) == WRITES | DIRECT for t in traces for kinds in t
    )
    cases = [
        (scene, fault, number)
        for scene, trace in zip(scenes, traces, strict=True)
        for fault, number in cases_of(SAVE_FAULTS, trace)
    ]
    for scene, fault, number in cases if count is None else sampled(cases, count):
        scene.reset()

        def arm(fault: Fault = fault, number: int = number) -> None:
            faults.arm(fault, number)

        outcome = outcome_of(scene.in_a_child(arm))
        tally[outcome] += 1
        try:
            assert outcome in fault.outcomes, outcome
            scene.check(outcome)
        except BaseException:
            print(f"{scene.kind}, {fault}, call {number}, {outcome}")
            raise
    return tally


def loads(folder: Path, count: int) -> Counter[str]:
    """Reads of a snapshot and its delta fail or are cut short, in turn; or a sample of them."""
    faults = Faults()
    scene = Scene(folder, "delta", LARGE)
    scene.save()
    trace = faults.trace(lambda: load(scene.target, scene.dim))
    tally = Counter(calls=len(trace), direct=sum(kinds & DIRECT != 0 for kinds in trace))
    table = new_table(scene.dim)
    for fault, number in sampled(list(cases_of(LOAD_FAULTS, trace)), count):
        train(table, np.arange(-9, 9), step=number)
        before = rows_of(table)
        outcome, expected = "loaded", scene.new
        faults.arm(fault, number)
        try:
            table.load(scene.target)
        except CheckpointError:
            outcome, expected = "failed", before
        finally:
            faults.disarm()
        tally[outcome] += 1
        assert outcome in fault.outcomes, f"{fault}, call {number}: {outcome}"
        assert rows_of(table) == expected, f"{fault}, call {number}: {outcome}"
    return tally


def seconds_of(scene: Scene) -> float:
    """How long a save takes that nothing befalls."""
    scene.reset()
    start = time.monotonic()
    assert outcome_of(scene.in_a_child(lambda: None)) == "saved"
    return time.monotonic() - start


def random_moments(folder: Path, count: int) -> Counter[str]:
    """Saves are killed after a random time."""
    tally: Counter[str] = Counter()
    draw = random.Random(0)
    scenes = [Scene(folder, kind, MEDIUM) for kind in KINDS]
    scenes.append(Scene(folder / "large", "overwrite", LARGE))
    scenes += [MadeScene(folder, kind, MEDIUM) for kind in MADE_KINDS]
    seconds = [seconds_of(scene) for scene in scenes]
    for number in range(count):
        scene = scenes[number % len(scenes)]
        scene.reset()
        child = scene.in_a_child(lambda: None)
        time.sleep(draw.uniform(0, 1.2 * seconds[number % len(scenes)]))
        os.kill(child, signal.SIGKILL)
        outcome = outcome_of(child)
        tally[outcome] += 1
        scene.check(outcome)
    return tally


def main(what: str, folder: Path, count: int | None) -> Counter[str]:
    # A save that writes on for ever must not fill the machine.
    resource.setrlimit(resource.RLIMIT_FSIZE, (MOST_BYTES, MOST_BYTES))
    if what == "loads":
        return loads(folder, count or 0)
    if what == "moments":
        return random_moments(folder, count or 0)
    if what == "made":
        return saves([MadeScene(folder, kind, SMALL) for kind in MADE_KINDS], count)
    size = SMALL if what == "small" else LARGE
    return saves([Scene(folder, kind, size) for kind in KINDS], count)


if __name__ == "__main__":
    found = main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]) if sys.argv[3:] else None)
    print(json.dumps(found))
