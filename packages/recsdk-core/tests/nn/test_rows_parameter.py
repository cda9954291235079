"""What would write to a module's `weight` as to a matrix of rows says what to do instead."""

from __future__ import annotations

import copy
import inspect
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.init import kaiming_normal_ as bound_early

from recsdk_core.nn import HashEmbedding, HashEmbeddingBag

KINDS: dict[str, type[HashEmbedding | HashEmbeddingBag]] = {
    "HashEmbedding": HashEmbedding,
    "HashEmbeddingBag": HashEmbeddingBag,
}
SAID = "table 'item': .* cannot set its rows, .* or the module an initializer"
ARGUMENTS: dict[str, tuple[Any, ...]] = {"constant_": (1.0,), "sparse_": (0.5,)}
REFUSED_BY_TORCH = {"dirac_", "eye_"}
"""Of matrices: dirac_ takes none with two dimensions; eye_ writes an identity, of no rows here."""


def functions_of_init() -> dict[str, Callable[..., Any]]:
    """All functions of torch.nn.init that fill a tensor."""
    found = inspect.getmembers(torch.nn.init, inspect.isfunction)
    return {name: each for name, each in found if name.endswith("_") and name[0] != "_"}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", sorted(functions_of_init().keys() - REFUSED_BY_TORCH))
def test_functions_of_torchs_init_are_refused(name: str, kind: str) -> None:
    module = KINDS[kind](4, name="item")
    with pytest.raises(ValueError, match=SAID):
        functions_of_init()[name](module.weight, *ARGUMENTS.get(name, ()))


def test_a_function_over_all_parameters_of_a_model_is_refused() -> None:
    model = nn.Sequential(HashEmbedding(4, name="item"), nn.Linear(4, 4, bias=False))
    with pytest.raises(ValueError, match=SAID):
        model.apply(lambda module: [bound_early(p) for p in module.parameters(recurse=False)])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("how", ["itself", "deepcopy", "pickle"])
def test_writes_in_place_are_refused_by_copies_too(how: str, kind: str) -> None:
    module = KINDS[kind](4, name="item")
    module.weight.requires_grad_(False)
    if how == "deepcopy":
        module = copy.deepcopy(module)
    elif how == "pickle":
        module = pickle.loads(pickle.dumps(module))
    assert not module.weight.requires_grad
    for write in (module.weight.zero_, module.weight.normal_):
        with pytest.raises(ValueError, match=SAID):
            write()
