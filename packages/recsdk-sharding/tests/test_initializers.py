"""Initial rows: torch.nn.init's functions in the engine, and any other function per key."""

from __future__ import annotations

import pickle
import threading
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from recsdk_core import Table, init
from recsdk_sharding import HashEmbeddingBagConfig
from recsdk_sharding.initializers import native_initializer, per_key_initializer

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
