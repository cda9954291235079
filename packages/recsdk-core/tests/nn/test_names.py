"""Tables without a name have rows of their own, as two nn.Embedding have."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable

import pytest
import torch
from torch import nn

from recsdk_core import optim
from recsdk_core.errors import BusyError
from recsdk_core.nn import HashEmbedding, HashEmbeddingBag

KEYS = torch.arange(-3, 5)
NEW = torch.arange(100, 104)
MAKERS: dict[str, Callable[[], nn.Module]] = {
    "dense": lambda: nn.Embedding(8, 4),
    "hash": lambda: HashEmbedding(4),
    "bag": lambda: HashEmbeddingBag(4),
}


def rows_of(module: nn.Module) -> torch.Tensor:
    if isinstance(module, (HashEmbedding, HashEmbeddingBag)):
        rows: torch.Tensor = module.table.find_or_insert(KEYS)
        return rows
    return module(torch.arange(8))  # type: ignore[no-any-return]


@pytest.mark.parametrize("kind", MAKERS)
def test_two_have_different_rows_and_a_seed_repeats_them(kind: str) -> None:
    torch.manual_seed(7)
    first, second = MAKERS[kind](), MAKERS[kind]()
    assert not (rows_of(first) == rows_of(second)).any()
    torch.manual_seed(7)
    for made in (first, second):
        assert torch.equal(rows_of(MAKERS[kind]()), rows_of(made))


def test_copies_keep_their_rows() -> None:
    module = HashEmbedding(4)
    for copied in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert copied.table.name == module.table.name
        assert torch.equal(rows_of(copied), rows_of(module))


def test_named_ones_have_the_rows_of_their_name() -> None:
    first, second = HashEmbedding(4, name="item"), HashEmbedding(4, name="item")
    assert torch.equal(rows_of(first), rows_of(second))
    assert "drawn_name" not in first.state_dict()


def test_who_loads_a_state_dict_goes_on_with_the_same_new_rows() -> None:
    saved, other = (HashEmbedding(4, optimizer=optim.Adagrad()) for _ in range(2))
    saved(KEYS).sum().backward()
    other(KEYS[:2])
    other.load_state_dict(saved.state_dict())
    assert other.table.name == saved.table.name == other.weight.table_name
    for module in (saved, other):
        module(torch.cat([KEYS, NEW])).square().sum().backward()
    for mine, theirs in zip(other.state_dict().values(), saved.state_dict().values(), strict=True):
        assert torch.equal(mine, theirs)


def test_a_state_dict_of_a_table_that_has_a_name_since() -> None:
    unnamed, named = HashEmbedding(4), HashEmbedding(4, name="item")
    rows_of(unnamed)
    with pytest.raises(RuntimeError, match=r"drawn_name .the table had no name.*'item' now"):
        named.load_state_dict(unnamed.state_dict())
    assert named.load_state_dict(unnamed.state_dict(), strict=False).unexpected_keys
    assert torch.equal(rows_of(named), rows_of(unnamed))
    before = unnamed.table.name
    unnamed.load_state_dict(HashEmbedding(4, name="item").state_dict())
    assert unnamed.table.name == before


def test_what_does_not_load_gives_no_name() -> None:
    module, other = HashEmbedding(4), HashEmbedding(4)
    state = {**other.state_dict(), "keys": torch.tensor([1, 1]), "weight": torch.ones(2, 4)}
    before = module.table.name
    with pytest.raises(RuntimeError, match="keys: must not repeat"):
        module.load_state_dict(state)
    assert module.table.name == before


def test_no_name_is_taken_while_a_batch_is_in_flight() -> None:
    module, other = HashEmbedding(4), HashEmbedding(4)
    vectors = module(KEYS)
    with pytest.raises(BusyError, match="its name cannot be set while batches are in flight"):
        module.load_state_dict(other.state_dict())
    assert len(module.table) == len(KEYS)
    del vectors
    module.load_state_dict(other.state_dict())
    assert len(module.table) == 0


@pytest.mark.parametrize("bad", [7, torch.tensor([1, 2]), torch.tensor(1.0)])
def test_an_entry_that_is_no_draw(bad: object) -> None:
    module = HashEmbedding(4)
    with pytest.raises(RuntimeError, match="drawn_name: must be an int64 number"):
        module.load_state_dict({**module.state_dict(), "drawn_name": bad})
