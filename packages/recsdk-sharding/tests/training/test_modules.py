"""The unsharded module on one process."""

from __future__ import annotations

import copy
import doctest
from importlib import import_module
from typing import Any

import numpy as np
import pytest
import torch
from comparing import assert_identical
from torch.distributed.optim import _apply_optimizer_in_backward
from torch.utils.checkpoint import checkpoint
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
from worlds import Model, Setup, make_batch, new_model, rows_of, tables

from recsdk_core import Evict, optim
from recsdk_sharding import (
    HashEmbeddingBagCollection,
    HashEmbeddingBagConfig,
    KeyedJaggedTensorWithData,
    RowOptimizer,
)


def collection(**options: Any) -> HashEmbeddingBagCollection:
    return new_model(Setup(**options), "cpu").ebc


def test_names_and_shapes_are_those_of_torchrecs_module() -> None:
    ours = collection()
    configs = ours.embedding_bag_configs()
    shared = {f.name for f in EmbeddingBagConfig.__dataclass_fields__.values()}
    plain = [EmbeddingBagConfig(**{n: getattr(c, n) for n in shared}) for c in configs]
    stock = EmbeddingBagCollection(tables=plain)
    batch = make_batch(1, 3).sparse
    batch.values().clamp_(0, 9)
    found, expected = ours(batch), stock(batch)
    assert found.keys() == expected.keys()
    assert found.length_per_key() == expected.length_per_key()
    assert found.values().shape == expected.values().shape
    names = [name for name, _ in stock.named_parameters()]
    assert [name for name, _ in ours.named_parameters()] == names
    assert isinstance(ours, EmbeddingBagCollection)


def test_handles_have_no_elements_and_no_gradient() -> None:
    ebc = collection()
    ebc(make_batch(1, 5).sparse).values().sum().backward()
    for config, handle in zip(ebc.embedding_bag_configs(), ebc.parameters(), strict=True):
        assert handle.shape == (0, config.embedding_dim)
        assert handle.layout == torch.strided
        assert handle.grad is None


def test_evaluation_writes_nothing_and_repeats_to_the_bit() -> None:
    ebc = collection()
    ebc(make_batch(1, 5).sparse).values().sum().backward()
    before = rows_of(ebc.tables())
    ebc.eval()
    with torch.no_grad():
        first = ebc(make_batch(2, 20).sparse).values()
        second = ebc(make_batch(2, 20).sparse).values()
    assert torch.equal(first, second)
    assert_identical(rows_of(ebc.tables()), before)


def test_training_decides_insertion_whatever_the_grad_mode() -> None:
    ebc = collection()
    with torch.no_grad():
        ebc(make_batch(1, 5).sparse)
    assert len(ebc.tables()["user"]) > 0
    assert ebc.tables()["user"].update_count == 0
    ebc(make_batch(2, 5).sparse)  # the batch before is not in flight any more


def test_unseen_ids_read_zeros_in_evaluation() -> None:
    ebc = collection().eval()
    assert not ebc(make_batch(2, 20).sparse).values().any()


def test_a_second_backward_through_one_forward_raises() -> None:
    loss = collection()(make_batch(1, 5).sparse).values().sum()
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="run forward again"):
        loss.backward()


def test_training_without_an_optimizer_says_what_to_call() -> None:
    ebc = HashEmbeddingBagCollection(tables=tables())
    with pytest.raises(RuntimeError, match="call torchrec's apply_optimizer_in_backward"):
        ebc(make_batch(1, 5).sparse)


def test_an_optimizer_may_come_after_the_first_look() -> None:
    ebc = HashEmbeddingBagCollection(tables=tables())
    ebc.eval()(make_batch(1, 5).sparse)
    _apply_optimizer_in_backward(torch.optim.Adagrad, ebc.parameters(), {"lr": 0.1})
    ebc.train()(make_batch(1, 5).sparse).values().sum().backward()
    assert ebc.tables()["user"].state_fields == (("sum", 8),)


def test_frozen_tables_insert_and_do_not_train() -> None:
    ebc = HashEmbeddingBagCollection(tables=tables())
    ebc.requires_grad_(False)
    out = ebc(make_batch(1, 5).sparse).values()
    assert not out.requires_grad
    assert len(ebc.tables()["user"]) > 0
    ebc.requires_grad_(True)
    with pytest.raises(RuntimeError, match="has no optimizer"):
        ebc(make_batch(1, 5).sparse)
    _apply_optimizer_in_backward(torch.optim.SGD, ebc.parameters(), {"lr": 0.1})
    ebc(make_batch(1, 5).sparse).values().sum().backward()
    assert {table.update_count for table in ebc.tables().values()} == {1}


def test_freezing_some_tables_of_a_collection_is_refused() -> None:
    ebc = collection()
    next(ebc.parameters()).requires_grad_(False)
    with pytest.raises(ValueError, match=r"tables \['user'\] are frozen"):
        ebc(make_batch(1, 5).sparse)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_looking_up_inside_of_a_checkpoint_is_refused_in_training(use_reentrant: bool) -> None:
    ebc, batch, factor = collection(), make_batch(1, 5).sparse, torch.ones(1, requires_grad=True)

    def squares(by: torch.Tensor) -> torch.Tensor:
        total: torch.Tensor = (ebc(batch).values() * by).square().sum()
        return total

    loss = checkpoint(squares, factor, use_reentrant=use_reentrant)
    seen = {name: table.stats().outcomes for name, table in ebc.tables().items()}
    with pytest.raises(RuntimeError, match=r"tables \['user', .*outside of the checkpoint"):
        loss.backward()
    assert {name: table.stats().outcomes for name, table in ebc.tables().items()} == seen
    assert {table.update_count for table in ebc.tables().values()} == {0}
    ebc.eval()
    checkpoint(squares, factor, use_reentrant=use_reentrant).backward()


@pytest.mark.parametrize(
    ("optimizer", "arguments", "text"),
    [
        (torch.optim.SGD, {"lr": 0.1, "maximize": True}, "maximize=True is not supported"),
        (torch.optim.Adam, {"amsgrad": True}, "amsgrad=True is not supported"),
        (torch.optim.Adagrad, {"maximize": True}, "maximize=True is not supported"),
        (torch.optim.NAdam, {}, "NAdam is not supported"),
    ],
)
def test_optimizers_that_are_not_supported(optimizer: type, arguments: dict, text: str) -> None:
    ebc = collection(optimizer=optimizer, arguments=arguments)
    with pytest.raises(ValueError, match=f"table 'user': .*{text}"):
        ebc(make_batch(1, 5).sparse)


def test_arguments_that_torchrecs_sharder_has_written_to_are_read() -> None:
    module = collection()
    given = next(module.parameters())._optimizer_kwargs[0]
    wanted = dict(given)
    given["optimizer"] = "what a stock sharder leaves"
    given["learning_rate"] = given.pop("lr")
    parameter = next(copy.deepcopy(module).parameters())
    assert parameter._optimizer_kwargs == [wanted]
    assert module.tables()["user"].optimizer.lr == wanted["lr"]


def test_an_optimizer_of_the_engine_is_taken_as_it_is() -> None:
    settings = optim.FTRL(lr=0.1, clip_norm=2.0)
    arguments = {"settings": settings}
    ebc = collection(optimizer=RowOptimizer, arguments=arguments)
    assert ebc.tables()["user"].optimizer == settings
    assert copy.deepcopy(ebc).tables()["user"].optimizer == settings
    ebc(make_batch(1, 5).sparse).values().sum().backward()
    assert ebc.tables()["user"].update_count == 1
    weight = torch.nn.Parameter(torch.zeros(1))
    weight.grad = torch.ones(1)
    with pytest.raises(RuntimeError, match="RowOptimizer trains hash tables only"):
        RowOptimizer([weight], settings=settings).step()
    with pytest.raises(TypeError, match="must be one of recsdk_core.optim, got 'sgd'"):
        RowOptimizer([weight], settings="sgd")  # type: ignore[arg-type]


def test_two_optimizers_on_one_table_are_refused() -> None:
    ebc = collection()
    _apply_optimizer_in_backward(torch.optim.Adam, ebc.parameters(), {})
    with pytest.raises(ValueError, match="called more than once"):
        ebc(make_batch(1, 5).sparse)


def test_a_class_alone_has_torchs_defaults() -> None:
    table = collection(optimizer=torch.optim.Adagrad, arguments={}).tables()["user"]
    assert (table.optimizer.lr, table.optimizer.eps) == (0.01, 1e-10)
    adam = collection(optimizer=torch.optim.Adam, arguments={}).tables()["user"].optimizer
    assert (adam.lr, adam.betas, adam.eps) == (0.001, (0.9, 0.999), 1e-8)


def test_weights_get_their_gradient() -> None:
    ebc = HashEmbeddingBagCollection(tables=tables(), is_weighted=True)
    _apply_optimizer_in_backward(torch.optim.SGD, ebc.parameters(), {"lr": 0.1})
    batch = make_batch(1, 5, weighted=True).sparse
    weights = batch.weights().clone().requires_grad_()
    sparse = KeyedJaggedTensor(batch.keys(), batch.values(), weights, batch.lengths())
    ebc(sparse).values().sum().backward()
    assert weights.grad is not None
    assert weights.grad.abs().sum() > 0


@pytest.mark.parametrize("of_lengths", [torch.int32, torch.uint8])
@pytest.mark.parametrize("dtype", [torch.int32, torch.uint64])
def test_other_integer_types_of_ids_and_lengths(
    dtype: torch.dtype, of_lengths: torch.dtype
) -> None:
    ids = torch.tensor([1, 2, 2]).to(dtype)
    lengths = torch.tensor([1, 2]).to(of_lengths)
    config = HashEmbeddingBagConfig(name="t", embedding_dim=2, num_embeddings=9)
    ebc = HashEmbeddingBagCollection(tables=[config])
    _apply_optimizer_in_backward(torch.optim.SGD, ebc.parameters(), {"lr": 0.1})
    with torch.no_grad():  # otherwise the new rows are hidden until the backward
        found = ebc(KeyedJaggedTensor(["t"], ids, lengths=lengths)).values()
    rows = torch.from_numpy(ebc.tables()["t"].lookup(np.array([1, 2])))
    assert torch.equal(found[0], rows[0])
    assert torch.equal(found[1], rows[1] * 2)


@pytest.mark.parametrize("name", ["values", "lengths", "weights", "times", "all"])
@pytest.mark.parametrize("dtype", [torch.int64, torch.uint64])
def test_parts_of_a_batch_may_be_columns_of_a_matrix(name: str, dtype: torch.dtype) -> None:
    parts = {
        "values": torch.tensor([3, 1, 3, 2]).to(dtype),
        "lengths": torch.tensor([1, 0, 3]),
        "weights": torch.tensor([0.5, 2.0, 1.0, -1.0]),
        "times": torch.tensor([5, 9, 3, 4]),
    }
    columns = {n: torch.stack([p, p], 1)[:, 0] for n, p in parts.items() if name in (n, "all")}
    eviction = Evict.lru(by="time").expiring(ttl=6, every=1)

    def train(given: dict[str, torch.Tensor]) -> list[Any]:
        config = HashEmbeddingBagConfig(
            name="t", embedding_dim=2, num_embeddings=9, eviction=eviction
        )
        ebc = HashEmbeddingBagCollection(tables=[config], is_weighted=True)
        _apply_optimizer_in_backward(torch.optim.SGD, ebc.parameters(), {"lr": 0.1})
        pooled = ebc(KeyedJaggedTensorWithData(["t"], **given)).values()
        pooled.square().sum().backward()
        return [pooled.detach().numpy(), rows_of(ebc.tables())]

    assert_identical(train({**parts, **columns}), train(parts))


@pytest.mark.parametrize(
    ("batch", "error", "text"),
    [
        (torch.zeros(3), TypeError, "features must be a KeyedJaggedTensor, got Tensor"),
        (
            KeyedJaggedTensor(["t"], torch.zeros(2), lengths=torch.tensor([2])),
            TypeError,
            "ids must be a 1-d tensor of int64, got 1-d torch.float32",
        ),
        (
            KeyedJaggedTensor(
                ["x", "t", "x", "t"], torch.arange(4), lengths=torch.tensor([1, 1, 1, 1])
            ),
            ValueError,
            r"the batch has the features \['t'\] more than once",
        ),
        (
            KeyedJaggedTensor(["x"], torch.zeros(2, dtype=torch.int64), torch.tensor([2])),
            ValueError,
            r"the batch lacks the features \['t'\]; it has \['x'\]",
        ),
        (
            KeyedJaggedTensor(["t"], torch.tensor([1]), lengths=torch.tensor([3, -2])),
            ValueError,
            "lengths must be 0 or more and add up to 1 key, got 1 in all and -2 as the least",
        ),
    ],
)
def test_batches_that_do_not_fit(batch: Any, error: type[Exception], text: str) -> None:
    config = HashEmbeddingBagConfig(name="t", embedding_dim=2, num_embeddings=9)
    ebc = HashEmbeddingBagCollection(tables=[config]).eval()
    with pytest.raises(error, match=text):
        ebc(batch)


def test_a_weighted_collection_needs_weights() -> None:
    ebc = HashEmbeddingBagCollection(tables=tables(), is_weighted=True).eval()
    with pytest.raises(ValueError, match="the batch has no weights"):
        ebc(make_batch(1, 2).sparse)


def test_a_module_on_meta_says_to_shard_it() -> None:
    model = Model(tables(), torch.device("meta"))
    with pytest.raises(RuntimeError, match="built on the meta device: shard it"):
        model.ebc(make_batch(1, 2).sparse)


@pytest.mark.parametrize(
    "name", ["_configs.configs", "_modules.unsharded", "_rows.optimizers", "placement.ranks"]
)
def test_examples_in_docstrings(name: str) -> None:
    result = doctest.testmod(import_module(f"recsdk_sharding.{name}"))
    assert result.attempted > 0
    assert result.failed == 0
