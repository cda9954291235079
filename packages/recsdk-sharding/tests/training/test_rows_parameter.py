"""What would write to a table's parameter as to a matrix of rows says what to do instead."""

from __future__ import annotations

import copy
import inspect
import io
from collections.abc import Callable
from typing import Any

import on_npus
import pytest
import torch
from rank_pool import RankPool
from torch import nn
from torch.nn.init import kaiming_normal_ as bound_early
from torch.optim.swa_utils import AveragedModel

from recsdk_sharding import (
    HashEmbeddingBagCollection,
    HashEmbeddingBagConfig,
    HashEmbeddingCollection,
    HashEmbeddingConfig,
)

SAID = "table 'user': .* cannot set its rows, which come as their ids show up; give the config init"
ARGUMENTS: dict[str, tuple[Any, ...]] = {"constant_": (1.0,), "sparse_": (0.5,)}
REFUSED_BY_TORCH = {"dirac_", "eye_"}
"""Of matrices: dirac_ takes none with two dimensions; eye_ writes an identity, of no rows here."""


def functions_of_init() -> dict[str, Callable[..., Any]]:
    """All functions of torch.nn.init that fill a tensor."""
    found = inspect.getmembers(torch.nn.init, inspect.isfunction)
    return {name: each for name, each in found if name.endswith("_") and name[0] != "_"}


def collection(kind: str = "bags") -> nn.Module:
    fields: dict[str, Any] = {"name": "user", "embedding_dim": 4, "num_embeddings": 10}
    if kind == "bags":
        return HashEmbeddingBagCollection([HashEmbeddingBagConfig(**fields)])
    return HashEmbeddingCollection([HashEmbeddingConfig(**fields)])


@pytest.mark.parametrize("kind", ["bags", "sequences"])
@pytest.mark.parametrize("name", sorted(functions_of_init().keys() - REFUSED_BY_TORCH))
def test_functions_of_torchs_init_are_refused(name: str, kind: str) -> None:
    (parameter,) = collection(kind).parameters()
    with pytest.raises(ValueError, match=SAID):
        functions_of_init()[name](parameter, *ARGUMENTS.get(name, ()))


def test_a_function_that_was_imported_before_is_refused() -> None:
    with pytest.raises(ValueError, match=SAID):
        collection().apply(lambda module: [bound_early(p) for p in module.parameters()])


@pytest.mark.parametrize(
    "write",
    [
        lambda p: p.fill_(1.0),
        lambda p: p.copy_(torch.ones(4)),
        lambda p: p.mul_(0.5).add_(1),
        lambda p: p.__setitem__(slice(None), 1.0),
        lambda p: p.__iadd__(1.0),
        lambda p: p.zero_(),
    ],
)
def test_writes_in_place_are_refused(write: Callable[[nn.Parameter], Any]) -> None:
    (parameter,) = collection().parameters()
    with torch.no_grad(), pytest.raises(ValueError, match=SAID):
        write(parameter)


def test_copies_refuse_as_the_original_does() -> None:
    module = collection()
    stream = io.BytesIO()
    torch.save(module, stream)
    stream.seek(0)
    for copied in (copy.deepcopy(module), torch.load(stream, weights_only=False)):
        (parameter,) = copied.parameters()
        assert isinstance(parameter, nn.Parameter)
        with pytest.raises(ValueError, match=SAID):
            nn.init.kaiming_normal_(parameter)


def test_what_does_not_write_goes_on_as_with_any_parameter() -> None:
    module = collection()
    (parameter,) = module.parameters()
    assert (parameter.shape, parameter.numel()) == (torch.Size([0, 4]), 0)
    module.requires_grad_(False)
    assert not parameter.requires_grad
    module.requires_grad_(True)
    with pytest.raises(RuntimeError, match="share_memory cannot share them"):
        module.share_memory()
    assert module.to("cpu").double() is module
    assert parameter.detach().clone().fill_(1.0).shape == (0, 4)


@pytest.mark.parametrize("kind", ["bags", "sequences"])
def test_averages_of_collections_are_refused_unless_frozen(kind: str) -> None:
    model = nn.Sequential(collection(kind), nn.Linear(4, 1))
    average = AveragedModel(model)
    with pytest.raises(RuntimeError, match="'user': AveragedModel averages rows of HashEmbedding"):
        average.update_parameters(model)
    assert average.n_averaged == 0
    model[0].requires_grad_(False)
    average.module[0].requires_grad_(False)
    average.update_parameters(model)
    assert average.n_averaged == 1


def test_rows_on_a_device_are_not_overwritten(npus: RankPool) -> None:
    ((text, is_same),) = npus.run(1, on_npus.initialize_rows)
    assert "table 'user': a function of torch.nn.init cannot set its rows" in text
    assert is_same
