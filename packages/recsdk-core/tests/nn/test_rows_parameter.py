"""What would write to a module's `weight` as to a matrix of rows says what to do instead."""

from __future__ import annotations

import copy
import inspect
import io
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.init import kaiming_normal_ as bound_early

from recsdk_core.nn import HashEmbedding, HashEmbeddingBag, RowOptimizer

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


X, IDS = torch.ones(2, 4), torch.tensor([[1, 2]])
COMPUTING: dict[str, Callable[[Any], Any]] = {
    "norm": lambda weight: weight.norm(p=2),
    "torch.norm": torch.norm,
    "linalg.norm": torch.linalg.norm,
    "pow": lambda weight: weight**2,
    "sum": lambda weight: weight.sum(),
    "torch.sum": torch.sum,
    "abs": lambda weight: weight.abs(),
    "square": torch.square,
    "mean": lambda weight: weight.mean(),
    "times": lambda weight: 2 * weight,
    "embedding": lambda weight: F.embedding(IDS, weight),
    "embedding_bag": lambda weight: F.embedding_bag(IDS, weight),
    "linear": lambda weight: F.linear(X, weight),
    "matmul": lambda weight: X @ weight.t(),
    "transposed": lambda weight: X @ weight.T,
    "mT": lambda weight: X @ weight.mT,
    "einsum": lambda weight: torch.einsum("bd,nd->bn", X, weight),
    "mse": lambda weight: F.mse_loss(weight, weight),
    "row": lambda weight: weight[0],
    "rows": list,
    "index_select": lambda weight: torch.index_select(weight, 0, IDS[0]),
    "foreach": lambda weight: torch._foreach_norm([weight]),
    "view": lambda weight: weight.view(-1).norm(),
    "flatten": lambda weight: torch.flatten(weight).norm(),
    "reshape": lambda weight: weight.reshape(-1).norm(),
    "cat": lambda weight: torch.cat([X, weight]).norm(),
    "stack": lambda weight: torch.stack([weight, weight]).norm(),
    "vector": lambda weight: nn.utils.parameters_to_vector([weight]).norm(),
    "clone": lambda weight: weight.clone().sum(),
    "detach": lambda weight: weight.detach().norm(),
    "to": lambda weight: weight.to(torch.float64).sum(),
    "float": lambda weight: weight.double().float().abs(),
    "data of data": lambda weight: weight.data.data.sum(),
    "copied": lambda weight: copy.deepcopy(weight.detach()).sum(),
    "out": lambda weight: X.copy_(weight),
    "numpy": lambda weight: weight.detach().numpy(),
    "tolist": lambda weight: weight.tolist(),
    "array": lambda weight: np.asarray(weight.data),
    "equal": lambda weight: torch.equal(weight, weight),
    "allclose": lambda weight: torch.allclose(weight, weight.clone()),
    "==": lambda weight: (weight == weight.detach()).all(),
    "chunk": lambda weight: weight.chunk(2),
    "where": lambda weight: torch.where(X[:, 0] > 0, weight, weight),
    "expand": lambda weight: weight.expand(3, -1, -1),
    "logsigmoid": F.logsigmoid,
    "real": lambda weight: weight.real,
    "in place": lambda weight: torch._foreach_add_([weight], 1.0),
    "hook": lambda weight: weight.register_hook(lambda grad: grad * 2),
    "later hook": lambda weight: weight.register_post_accumulate_grad_hook(lambda param: None),
    "autograd.grad": lambda weight: torch.autograd.grad(X.requires_grad_().sum(), [weight]),
    "weight_norm": lambda weight: torch._weight_norm(weight, weight, 0),
    "data": lambda weight: weight.data.normal_(),
    "init of data": lambda weight: nn.init.normal_(weight.data),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("how", COMPUTING)
def test_what_computes_with_weight_is_refused(how: str, kind: str) -> None:
    for module in (KINDS[kind](4, name="item"), copy.deepcopy(KINDS[kind](4, name="item"))):
        with pytest.raises(
            ValueError, match=r"table 'item': .* (cannot use|cannot set|would see no)"
        ):
            COMPUTING[how](module.weight)


PERMITTED = (
    "clone contiguous cpu cuda xpu detach detach_ double float half bfloat16 pin_memory "
    "to type type_as module_load requires_grad_ retain_grad rename_ as_subclass expand_as "
    "view_as data_ptr dense_dim dim dim_order element_size get_device has_names "
    "is_complex is_conj is_contiguous is_distributed is_floating_point is_inference "
    "is_neg is_pinned is_same_size is_set_to is_shared is_signed isfinite isinf isnan "
    "ndimension nelement numel size sparse_dim storage storage_offset storage_type stride "
    "untyped_storage new new_empty new_empty_strided new_full new_ones new_tensor "
    "new_zeros"
)


def test_no_other_method_answers_for_rows() -> None:
    """Also methods that come with a newer torch."""
    weight = HashEmbedding(4, name="item").weight
    num_refused = 0
    for name in dir(torch.Tensor):
        method = getattr(torch.Tensor, name)
        if name.startswith("_") or not callable(method) or name in PERMITTED.split():
            continue
        for arguments in ((), (1,), (1.0,), (X,), (0, 1), (1, X)):
            try:
                getattr(weight, name)(*arguments)
            except (TypeError, RuntimeError):  # it takes others, or is not for such tensors
                continue
            except ValueError as error:
                assert "table 'item'" in str(error)  # noqa: PT017
                num_refused += 1
                continue
            pytest.fail(f"{name}{arguments} answered")
    assert num_refused > 300


@pytest.mark.parametrize("kind", KINDS)
def test_rows_cannot_be_given_by_assignment(kind: str) -> None:
    module, other = KINDS[kind](4, name="item"), KINDS[kind](4, name="other")
    rows = torch.full((3, 4), 7.0)
    with pytest.raises(ValueError, match=r"'item': `weight.data` takes no rows.*from_pretrained"):
        module.weight.data = rows
    for each in (nn.Parameter(rows), other.weight, None):
        with pytest.raises(ValueError, match="'item': `weight` of .* cannot be replaced.*one mod"):
            module.weight = each  # type: ignore[assignment]
    module.weight = module.weight
    module.weight.data = torch.empty(0, 4)
    assert module.weight.data.shape == (0, 4)


def test_what_loops_do_with_parameters_goes_on() -> None:
    hashed = HashEmbedding(4, name="item", optimizer=torch.optim.SGD)
    model = nn.Sequential(hashed, nn.Linear(4, 1, bias=False))
    model(IDS).sum().backward()
    weight = model[0].weight
    for optimizer in (torch.optim.Adam(model.parameters()), torch.optim.SGD([weight], lr=1.0)):
        optimizer.step()
        optimizer.load_state_dict(optimizer.state_dict())
    assert nn.utils.clip_grad_norm_(model.parameters(), 1.0) > 0
    nn.utils.clip_grad_value_(model.parameters(), 1.0, foreach=True)
    assert torch.isfinite(weight).all()
    assert weight != None  # noqa: E711
    assert all(type(each) is torch.Tensor for each in (X.to(weight), X.type_as(weight)))
    assert weight.new(2, 3).zero_().sum() == torch.zeros_like(weight).sum() == 0
    with pytest.raises(ValueError, match="cannot use"):
        torch.clone(input=weight).sum()
    assert weight.view_as(weight).grad_fn.next_functions[0][0].variable is weight
    assert (weight.detach().shape, weight.dim(), weight.numel()) == ((0, 4), 2, 0)
    assert sum(each.numel() * each.element_size() for each in model.parameters()) == 16
    assert torch.load(io.BytesIO(saved(weight.detach())), weights_only=True).shape == (0, 4)
    assert copy.deepcopy([weight, weight])[0].shape == (0, 4)
    assert torch.isfinite(weight.data).all()
    assert model.to(torch.bfloat16).float().double().float()[0].weight is weight
    assert model.to("meta")[0].weight.is_meta
    assert "RowsParameter" in repr(weight)


def saved(value: Any) -> bytes:
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def by_meta_device(optimizer: Any) -> HashEmbedding:
    with torch.device("meta"):
        module = HashEmbedding(4, name="item", optimizer=optimizer)
    return module.to_empty(device="cpu").bfloat16()


def by_new_parameters(optimizer: Any) -> HashEmbedding:
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    try:
        return HashEmbedding(4, name="item", optimizer=optimizer).bfloat16()
    finally:
        torch.__future__.set_overwrite_module_params_on_conversion(False)


def by_swapped_tensors(optimizer: Any) -> HashEmbedding:
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        return HashEmbedding(4, name="item", optimizer=optimizer).bfloat16()
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)


@pytest.mark.parametrize("is_fused", [False, True])
@pytest.mark.parametrize("make", [by_meta_device, by_new_parameters, by_swapped_tensors])
def test_a_converted_weight_still_stands_for_the_rows(make: Any, is_fused: bool) -> None:
    module = make(torch.optim.SGD if is_fused else None)
    with pytest.raises(ValueError, match=SAID):
        nn.init.ones_(module.weight)
    optimizer = None if is_fused else RowOptimizer(module, torch.optim.SGD)
    vectors = module(torch.tensor([7]))
    assert vectors.dtype == torch.bfloat16
    vectors.sum().backward()
    if optimizer is not None:
        assert module.weight.grad.tolist() == [[1.0] * 4]
        optimizer.step()
    assert module.table.update_count == 1
