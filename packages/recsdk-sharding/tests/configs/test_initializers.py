"""Initial rows: torch.nn.init's functions in the engine, and any other function per key."""

from __future__ import annotations

import pickle
import random
import threading
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from recsdk_core import Table, init
from recsdk_sharding import HashEmbeddingBagConfig
from recsdk_sharding._configs.initializers import native_initializer, per_key_initializer

KEYS = np.array([5, -1, 2**63 - 1, -(2**63), 0, 77])


@pytest.mark.parametrize(
    ("init_fn", "expected"),
    [
        (torch.nn.init.uniform_, init.Uniform(low=0.0, high=1.0)),
        (partial(torch.nn.init.uniform_, a=-2.0, b=3.0), init.Uniform(low=-2.0, high=3.0)),
        (torch.nn.init.normal_, init.Normal(mean=0.0, stddev=1.0)),
        (
            partial(torch.nn.init.trunc_normal_, std=0.1, a=-0.2, b=0.2),
            init.TruncatedNormal(mean=0.0, stddev=0.1, low=-0.2, high=0.2),
        ),
        (partial(torch.nn.init.constant_, val=4.0), init.Constant(value=4.0)),
        (torch.nn.init.zeros_, init.Constant(value=0.0)),
        (torch.nn.init.ones_, init.Constant(value=1.0)),
        (partial(torch.nn.init.uniform_, -2.0), None),
        (partial(torch.nn.init.normal_, generator=torch.Generator()), None),
        (torch.nn.init.xavier_uniform_, None),
        (lambda tensor: tensor.zero_(), None),
    ],
)
def test_functions_of_torch_nn_init_run_in_the_engine(init_fn: Any, expected: Any) -> None:
    assert native_initializer(init_fn) == expected


def of_random_operators(row: torch.Tensor) -> None:
    """Draws in every way: in place, by factory, with and without overloads, by torch.nn.init."""
    torch.nn.init.xavier_normal_(row)
    row += torch.rand(row.shape) + torch.randn_like(row) + torch.randint(0, 9, row.shape)
    row += torch.bernoulli(torch.full_like(row, 0.5)) + torch.randperm(row.shape[1])
    row.add_(torch.empty_like(row).uniform_(-1, 1)).add_(torch.empty_like(row).exponential_())


def rows_for(init_fn: Any, keys: np.ndarray, seed: int = 3, table: str = "t") -> np.ndarray:
    made = Table(4, initializer=per_key_initializer(init_fn, seed, table))
    return made.find_or_insert(keys)


def test_rows_are_made_on_the_host_whatever_torchs_default_is() -> None:
    expected = rows_for(torch.nn.init.xavier_uniform_, KEYS)
    with torch.device("meta"):
        assert np.array_equal(rows_for(torch.nn.init.xavier_uniform_, KEYS), expected)


def test_rows_are_a_function_of_seed_table_and_key_alone() -> None:
    rows = rows_for(of_random_operators, KEYS)
    assert len({row.tobytes() for row in rows}) == len(KEYS)
    torch.manual_seed(123)
    order = [4, 2, 0]
    assert np.array_equal(rows_for(of_random_operators, KEYS[order]), rows[order])
    for other in (
        rows_for(of_random_operators, KEYS, seed=4),
        rows_for(of_random_operators, KEYS, table="u"),
    ):
        assert not (other == rows).all(axis=1).any()


def test_the_global_generator_is_neither_read_nor_moved() -> None:
    torch.manual_seed(9)
    expected = torch.rand(3)
    torch.manual_seed(9)
    rows_for(of_random_operators, KEYS)
    assert torch.equal(torch.rand(3), expected)


def test_rows_are_the_same_on_any_thread_while_others_draw() -> None:
    expected = rows_for(of_random_operators, KEYS)
    stop, found = threading.Event(), []

    def draw() -> None:
        while not stop.is_set():
            torch.rand(10)

    noise = threading.Thread(target=draw)
    worker = threading.Thread(target=lambda: found.append(rows_for(of_random_operators, KEYS)))
    noise.start()
    worker.start()
    worker.join()
    stop.set()
    noise.join()
    assert np.array_equal(found[0], expected)


def test_what_the_function_raises_reaches_the_caller_and_no_key_is_added() -> None:
    def fail(row: torch.Tensor) -> None:
        raise ValueError("not today")

    table = Table(4, initializer=per_key_initializer(fail, 0, "t"))
    with pytest.raises(ValueError, match="not today"):
        table.find_or_insert(KEYS)
    assert len(table) == 0


def test_a_config_with_any_function_makes_its_rows_and_can_be_pickled() -> None:
    config = HashEmbeddingBagConfig(
        name="t", embedding_dim=4, num_embeddings=9, init_fn=of_random_operators, seed=3
    )
    initializer = pickle.loads(pickle.dumps(config)).row_initializer()
    rows = Table(4, initializer=initializer).find_or_insert(KEYS)
    assert np.array_equal(rows, rows_for(of_random_operators, KEYS))


def of_one_seed(row: torch.Tensor) -> None:
    """As functions for tables of a fixed size are often written."""
    torch.manual_seed(row.shape[1])
    row.data.copy_(torch.randn(1, row.shape[1]))


def with_state_put_back(row: torch.Tensor) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        torch.nn.init.normal_(row)
    row += torch.rand(1)


def in_all_ways(row: torch.Tensor) -> None:
    torch.manual_seed(-5)
    of_random_operators(row)
    state = torch.get_rng_state()
    row += torch.rand(1) + (torch.initial_seed() % 7)
    torch.set_rng_state(state)
    row += torch.rand(1)
    row += torch.rand(1, generator=torch.default_generator)
    row += torch.rand(1, generator=torch.Generator().manual_seed(4))


def that_only_copies(row: torch.Tensor) -> None:
    row.copy_(torch.linspace(-1, 1, row.shape[1])[None])


def of_generator_inside(row: torch.Tensor) -> None:
    row.fill_(np.random.default_rng(int(torch.randint(2**31, ()))).random())


FUNCTIONS = [
    of_random_operators,
    of_one_seed,
    with_state_put_back,
    in_all_ways,
    that_only_copies,
    of_generator_inside,
]


@pytest.mark.filterwarnings("ignore:table 't'. init_fn seeds torch")
@pytest.mark.parametrize("init_fn", [of_one_seed, in_all_ways])
def test_a_seed_set_inside_gives_what_torch_gives(init_fn: Any) -> None:
    with torch.random.fork_rng():
        expected = torch.zeros(1, 4)
        init_fn(expected)
    assert np.array_equal(rows_for(init_fn, KEYS), expected.repeat(len(KEYS), 1).numpy())


def states() -> list[Any]:
    return [torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist()]


def all_functions() -> Iterator[Any]:
    """Of the modules with random numbers."""
    for module in (torch, torch.random, torch.cuda, np.random, random):
        yield from (each for each in vars(module).values() if callable(each))


@pytest.mark.filterwarnings("ignore:table 't'. init_fn seeds torch")
@pytest.mark.parametrize("init_fn", FUNCTIONS)
def test_no_caller_sees_what_the_function_does_to_random_numbers(init_fn: Any) -> None:
    functions = [*all_functions()]
    before = states()
    rows_for(init_fn, KEYS)
    assert states() == before
    seed = torch.initial_seed()
    assert torch.manual_seed(seed) is torch.default_generator
    assert [*all_functions()] == functions


@pytest.mark.filterwarnings("ignore:table 't'. init_fn seeds torch")
@pytest.mark.parametrize("init_fn", [of_one_seed, in_all_ways])
def test_other_threads_draw_on_while_the_function_runs(init_fn: Any) -> None:
    """Each call of the function waits until the main thread has drawn and seeded within it."""
    turn, answer = threading.Semaphore(0), threading.Semaphore(0)

    def slowly(row: torch.Tensor) -> None:
        init_fn(row)
        turn.release()
        assert answer.acquire(timeout=60)
        row += torch.rand(1)

    found: list[np.ndarray] = []
    worker = threading.Thread(target=lambda: found.append(rows_for(slowly, KEYS[:1])))
    torch.manual_seed(9)
    expected = [torch.rand(3) for _ in range(2)] + [torch.manual_seed(1), torch.rand(3)][1:]
    torch.manual_seed(9)
    worker.start()
    drawn = []
    for number in range(3):
        assert turn.acquire(timeout=60)
        if number == 2:
            torch.manual_seed(1)
        drawn.append(torch.rand(3))
        answer.release()
    worker.join()
    assert all(torch.equal(*pair) for pair in zip(drawn, expected, strict=True))
    with torch.random.fork_rng():
        row = torch.zeros(1, 4)
        init_fn(row)
        row += torch.rand(1)
    assert np.array_equal(found[0], row.numpy())


@pytest.mark.filterwarnings("ignore:table 't'. init_fn seeds torch")
@given(st.data())
@pytest.mark.parametrize("init_fn", FUNCTIONS)
def test_rows_are_the_same_for_any_ranks_and_batches(init_fn: Any, data: st.DataObject) -> None:
    keys = data.draw(st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1, unique=True))
    whole = rows_for(init_fn, np.array(keys))
    order = data.draw(st.permutations(range(len(keys))))
    cuts = sorted(data.draw(st.sets(st.integers(1, len(keys)))) | {0, len(keys)})
    ranks = [Table(4, initializer=per_key_initializer(init_fn, 3, "t")) for _ in range(3)]
    for first, last in pairwise(cuts):
        part = order[first:last]
        rank = ranks[data.draw(st.integers(0, 2))]
        assert np.array_equal(rank.find_or_insert(np.array([keys[i] for i in part])), whole[part])


def test_fork_rng_inside_leaves_devices_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = rows_for(with_state_put_back, KEYS)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)  # without one, its state raises
    assert np.array_equal(rows_for(with_state_put_back, KEYS), expected)


@pytest.mark.parametrize("init_fn", [of_one_seed, that_only_copies])
def test_a_function_without_the_ids_numbers_is_called_once_for_a_batch(init_fn: Any) -> None:
    calls = []

    def counted(row: torch.Tensor) -> None:
        calls.append(1)
        init_fn(row)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        table = Table(4, initializer=per_key_initializer(counted, 0, "t"))
        table.find_or_insert(np.arange(5000))
        num_calls = len(calls)
        table.find_or_insert(np.arange(5000, 9000))
    assert len(calls) == num_calls + 1
    assert num_calls == 3  # two of them to check it
    found = [str(warning.message) for warning in caught]
    expected = ["table 't': init_fn seeds torch itself"] if init_fn is of_one_seed else []
    assert [text[: len("table 't': init_fn seeds torch itself")] for text in found] == expected


def test_a_function_that_is_run_per_id_warns_once_and_names_what_is_quick() -> None:
    table = Table(1, initializer=per_key_initializer(torch.nn.init.xavier_uniform_, 0, "slow one"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        table.find_or_insert(np.arange(999))
    with pytest.warns(UserWarning, match=r"'slow one'.*1000 so far.*init.Uniform.*trunc_normal_"):
        table.find_or_insert(np.array([-1]))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        table.find_or_insert(np.arange(-1100, 0))


def of_python_random(row: torch.Tensor) -> None:
    row.fill_(random.uniform(0, 1))


def of_python_seed(row: torch.Tensor) -> None:
    random.seed(3)


def of_default_generator(row: torch.Tensor) -> None:
    torch.default_generator.manual_seed(4)


def of_numpy(row: torch.Tensor) -> None:
    row.copy_(torch.from_numpy(np.random.rand(*row.shape)))


def of_numpy_seed(row: torch.Tensor) -> None:
    np.random.seed(0)
    row.copy_(torch.from_numpy(np.random.standard_normal(row.shape)))


def of_numpy_only_later() -> Callable[[torch.Tensor], Any]:
    calls = iter(range(100))
    return lambda row: np.random.sample() if next(calls) > 4 else row.normal_()


def of_generator_outside() -> Callable[[torch.Tensor], Any]:
    generator = np.random.default_rng(0)
    return lambda row: row.fill_(generator.random())


def of_device_seed(row: torch.Tensor) -> None:
    torch.cuda.manual_seed_all(3)


def of_any_seed(row: torch.Tensor) -> None:
    torch.seed()


@pytest.mark.parametrize(
    ("init_fn", "message"),
    [
        (of_python_random, r"table 't': init_fn calls random\.random"),
        (of_python_seed, r"table 't': init_fn calls random\.seed"),
        (of_default_generator, r"calls torch\.default_generator\.manual_seed"),
        (of_numpy, r"init_fn calls numpy\.random\.rand,"),
        (of_numpy_seed, r"init_fn calls numpy\.random\.seed,"),
        (of_numpy_only_later(), r"init_fn calls numpy\.random\.sample,"),
        (of_generator_outside(), "gave two rows for one id"),
        (of_any_seed, r"init_fn calls torch\.seed\(\)"),
        (of_device_seed, r"init_fn calls torch\.cuda\.manual_seed_all,"),
    ],
)
def test_what_cannot_be_kept_apart_is_refused(
    init_fn: Callable[[torch.Tensor], Any], message: str
) -> None:
    before = states()
    table = Table(4, initializer=per_key_initializer(init_fn, 0, "t"))
    with pytest.raises(ValueError, match=message):
        table.find_or_insert(KEYS)
    assert len(table) == 0
    assert states() == before
