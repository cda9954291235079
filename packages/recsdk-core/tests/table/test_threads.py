"""Calls from many threads, and processes forked after a table exists."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from engine_threads import engine_threads

from recsdk_core import Table, init, num_threads, optim


def test_the_gil_is_released_and_taken_again_by_the_initializer() -> None:
    """Two inserting calls wait for each other inside their initializers: only without GIL and
    with a lock per table can both get there.
    """
    barrier = threading.Barrier(2, timeout=200)

    def meet(keys: Any, values: Any) -> None:
        barrier.wait()
        values[:] = 1.0

    tables = [Table(1, initializer=init.Custom(fn=meet)) for _ in range(2)]
    with ThreadPoolExecutor(2) as pool:
        rows = list(pool.map(lambda table: table.find_or_insert(np.arange(10)), tables))
    assert all((part == 1.0).all() for part in rows)


def test_readers_of_a_table_whose_initializer_runs_do_not_hang() -> None:
    """They wait for the table's lock, whose holder waits for the GIL."""
    inside, go_on = threading.Event(), threading.Event()

    def wait(keys: Any, values: Any) -> None:
        inside.set()
        go_on.wait(timeout=200)

    table = Table(1, initializer=init.Custom(fn=wait))
    lease = table.lease()
    with ThreadPoolExecutor(5) as pool:
        inserting = pool.submit(table.map, np.arange(3), insert=True)
        assert inside.wait(timeout=200)
        calls = (table.__len__, table.stats, table.decided, lease.release)
        readers = [pool.submit(call) for call in calls]
        go_on.set()
        inserting.result(timeout=200)
        assert readers[0].result(timeout=200) in (0, 3)
        assert readers[1].result(timeout=200).num_rows in (0, 3)
        assert readers[2].result(timeout=200) == (3, 0)


def test_many_threads_insert_read_and_train_one_table() -> None:
    table = Table(8, optimizer=optim.SGD(lr=1.0), initializer=init.Constant(value=0.0))
    keys = np.arange(3000)

    def work(worker: int) -> None:
        random = np.random.default_rng(worker)
        for _ in range(20):
            batch = random.permutation(keys)[:500]
            table.find_or_insert(batch)
            table.lookup(batch)
            table.apply_gradients(batch, np.full((500, 8), 1 / 16, np.float32))
            assert len(table) <= 3000

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))
    table.check_invariants()
    assert table.update_count == 80
    # Every update has been counted once: sums of sixteenths are exact.
    assert -table.lookup(keys).sum() == 4 * 20 * 500 * 8 / 16


@pytest.mark.parametrize("threads", [1, 3])
def test_a_forked_child_uses_its_tables(threads: int) -> None:
    with engine_threads(threads):
        table = Table(16, initializer=init.Normal())
        keys = np.arange(50_000)
        expected = table.find_or_insert(keys)
        child = os.fork()
        if child == 0:
            try:
                same = bool((table.find_or_insert(np.append(keys, -1))[:-1] == expected).all())
                os._exit(0 if same and num_threads() == threads else 1)
            finally:
                os._exit(2)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert len(table) == 50_000


def test_tables_alive_at_exit_do_no_harm() -> None:
    script = """
        import threading
        import numpy as np
        from recsdk_core import Table, init
        table = Table(2, initializer=init.Custom(fn=lambda keys, values: None))
        lease = table.lease(step=1)
        table.map(np.arange(10), insert=True, lease=lease)
        threading.Thread(target=table.lookup, args=(np.arange(10),)).start()
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, timeout=400
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_threads_in_calls_at_exit_do_no_harm() -> None:
    """Python ends such a thread where it asks for the GIL: after a call, and before and in one of
    Python's functions that the engine calls."""
    script = """
        import threading, time
        import numpy as np
        from recsdk_core import Evict, Table, init, optim

        def made(keys, values):
            time.sleep(0.001)

        def placed(step):
            time.sleep(0.001)
            return step

        trained = Table(16, optimizer=optim.Adagrad())
        custom = Table(2, initializer=init.Custom(fn=made))
        evicting = Table(2, max_rows=90, eviction=Evict.function(placed, every=1))
        ones = np.ones((5_000, 16), np.float32)
        rounds = [0, 0, 0]

        def run(number, call):
            while True:
                call(np.random.randint(0, 10**6, 5_000))
                rounds[number] += 1

        def train(keys):
            trained.find_or_insert(keys)
            trained.apply_gradients(keys, ones)

        calls = train, custom.find_or_insert, lambda keys: evicting.find_or_insert(keys[:60])
        for number, call in enumerate(calls):
            threading.Thread(target=run, args=(number, call), daemon=True).start()
        while min(rounds) < 3:
            time.sleep(0.01)
    """
    for _ in range(3):
        done = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(script)],
            capture_output=True,
            text=True,
            timeout=400,
        )
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_what_is_held_at_exit_waits_for_no_thread_that_has_ended() -> None:
    """A thread that ends in a function of Python's keeps the lock of the table that called it."""
    script = """
        import textwrap, threading, time
        import numpy as np
        from recsdk_core import Table, init

        is_inside = threading.Event()

        def made(keys, values):
            is_inside.set()
            time.sleep(0.1)

        table = Table(2, initializer=init.Custom(fn=made))
        # Of a module that is still there when the interpreter ends, in place of __main__, which the
        # thread keeps.
        textwrap.held = [table._engine.cut(False, None), table.lease(step=1)]
        lease = table.lease(step=2)
        insert = lambda: table.map(np.arange(10), insert=True, lease=lease)
        threading.Thread(target=insert, daemon=True).start()
        is_inside.wait()
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
