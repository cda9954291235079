"""Saves in forked processes that fail or die at every call; run with faulty_calls.c preloaded.

    LD_PRELOAD=faulty_calls.so python crashing_saves.py calls FOLDER
    python crashing_saves.py moments FOLDER COUNT

Each process saves what this one prepared; afterwards this one looks at what it left. Ends with one
line of JSON: how many processes saved, failed and were killed.
"""

from __future__ import annotations

import ctypes
import json
import os
import random
import shutil
import signal
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np

from recsdk_core import CheckpointError, Table, optim

COUNT, KILL_BEFORE, KILL_AFTER, FAIL_EIO, FAIL_ENOSPC, SHORT = range(1, 7)
KINDS = ("save", "overwrite", "delta")
SAVED, FAILED, WRONG = 0, 3, 4

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

    def __init__(self, folder: Path, kind: str, num_keys: int, dim: int = 3) -> None:
        self.kind = kind
        self.dim = dim
        self.template = folder / f"template_{kind}"
        self.folder = folder / f"run_{kind}"
        self.target = self.folder / ("base" if kind == "overwrite" else "target")
        self.table = new_table(dim)
        train(self.table, np.arange(num_keys), 0)
        self.reset()
        self.folder.mkdir()
        self.table.save(self.folder / "base", user_state=b"old")
        self.old = rows_of(self.table)
        train(self.table, np.arange(5, num_keys, 3), 1)
        self.table.erase(np.arange(7))
        self.new = rows_of(self.table)
        shutil.copytree(self.folder, self.template)

    def reset(self) -> None:
        """Puts the folder as it was."""
        shutil.rmtree(self.folder, ignore_errors=True)
        if self.template.exists():
            shutil.copytree(self.template, self.folder)

    def save(self) -> None:
        if self.kind == "delta":
            self.table.save_delta(self.target, user_state=b"new")
        else:
            self.table.save(self.target, overwrite=self.kind == "overwrite", user_state=b"new")

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
            except BaseException:
                traceback.print_exc()
            os._exit(status)
        return child

    def check(self, outcome: str) -> None:
        """What is there loads completely, or is not there; the next save goes well."""
        if self.kind != "overwrite":
            assert load(self.folder / "base", self.dim) == self.old
        found = load(self.target, self.dim)
        before = self.old if self.kind == "overwrite" else None
        assert found == self.new or (outcome != "saved" and found == before), outcome
        left = [p for p in self.folder.iterdir() if p.name.startswith(".")]
        assert outcome == "killed" or left == [], left
        again = new_table(self.dim)
        train(again, np.arange(4), 2)
        again.save(self.target, overwrite=True)
        assert load(self.target, self.dim) == rows_of(again)
        assert not [p for p in self.folder.iterdir() if p.name.startswith(".")]
        assert len(list(self.target.iterdir())) == 2


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
    assert code in (SAVED, FAILED), "a save raised something else than CheckpointError"
    return "saved" if code == SAVED else "failed"


def every_call(folder: Path) -> Counter[str]:
    """Every call that changes the file system fails, or kills, in turn."""
    faults = ctypes.CDLL(None)
    tally: Counter[str] = Counter()
    for kind in KINDS:
        scene = Scene(folder, kind, num_keys=40)
        scene.reset()
        reader, writer = os.pipe()

        def count() -> None:
            faults.faults_arm(COUNT, ctypes.c_long(-1))

        child = os.fork()
        if child == 0:
            count()
            scene.save()
            os.write(writer, str(faults.faults_disarm()).encode())
            os._exit(0)
        assert outcome_of(child) == "saved"
        num_calls = int(os.read(reader, 100))
        assert num_calls > 15
        tally["calls"] += num_calls
        for mode in (KILL_BEFORE, KILL_AFTER, FAIL_EIO, FAIL_ENOSPC, SHORT):
            for number in range(num_calls):
                scene.reset()

                def arm(mode: int = mode, number: int = number) -> None:
                    faults.faults_arm(mode, ctypes.c_long(number))

                outcome = outcome_of(scene.in_a_child(arm))
                tally[outcome] += 1
                try:
                    scene.check(outcome)
                except BaseException:
                    print(f"{kind}, mode {mode}, call {number} of {num_calls}, {outcome}")
                    raise
    return tally


def random_moments(folder: Path, count: int) -> Counter[str]:
    """Saves are killed after a random time."""
    tally: Counter[str] = Counter()
    draw = random.Random(0)
    scenes = [Scene(folder, kind, num_keys=20_000, dim=16) for kind in KINDS]
    start = time.monotonic()
    for scene in scenes:
        scene.reset()
        assert outcome_of(scene.in_a_child(lambda: None)) == "saved"
    seconds = (time.monotonic() - start) / len(scenes)
    for number in range(count):
        scene = scenes[number % len(scenes)]
        scene.reset()
        child = scene.in_a_child(lambda: None)
        time.sleep(draw.uniform(0, 1.2 * seconds))
        os.kill(child, signal.SIGKILL)
        outcome = outcome_of(child)
        tally[outcome] += 1
        scene.check(outcome)
    return tally


if __name__ == "__main__":
    place = Path(sys.argv[2])
    found = every_call(place) if sys.argv[1] == "calls" else random_moments(place, int(sys.argv[3]))
    print(json.dumps(found))
