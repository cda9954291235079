"""HashEmbedding and HashEmbeddingBag as users of torch see them."""

from __future__ import annotations

import copy
import gc
import io
import pickle
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.optim import _apply_optimizer_in_backward

from recsdk_core import Default, init, optim
from recsdk_core.nn import HashEmbedding, HashEmbeddingBag

KEYS = torch.tensor([3, -3, 2**62, 3])


def rows_of(module: HashEmbedding | HashEmbeddingBag) -> dict[int, list[float]]:
    return {
        key: values
        for batch in module.table.export()
        for key, values in zip(batch.keys.tolist(), batch.weights.tolist(), strict=True)
    }


@pytest.mark.parametrize("shape", [(), (0,), (4,), (2, 2), (1, 2, 2), (3, 0)])
def test_output_has_the_shape_of_the_keys_and_the_width(shape: tuple[int, ...]) -> None:
    keys = torch.arange(24)[: torch.Size(shape).numel()].reshape(shape)
    assert HashEmbedding(5)(keys).shape == (*shape, 5)


def test_int32_and_non_contiguous_keys() -> None:
    module = HashEmbedding(2)
    expected = module(KEYS[::2])
    assert torch.equal(module(KEYS.reshape(2, 2).T[0]), expected)
    assert torch.equal(module(torch.tensor([3], dtype=torch.int32)), expected[:1])


def test_training_mode_inserts_and_evaluation_mode_does_not() -> None:
    module = HashEmbedding(2, default=Default.constant(0.5), initializer=init.Constant(value=1.0))
    module.eval()
    assert module(KEYS).tolist() == [[0.5, 0.5]] * 4
    assert len(module.table) == 0
    module.train()
    with torch.no_grad():
        assert module(KEYS).tolist() == [[1.0, 1.0]] * 4
    assert len(module.table) == 3


def test_evaluation_is_bit_equal_and_changes_nothing() -> None:
    module = HashEmbeddingBag(4, optimizer=optim.SGD())
    module(KEYS.reshape(2, 2)).sum().backward()
    before = rows_of(module)
    module.eval()
    keys = torch.tensor([[3, 100], [200, -3]])
    first = module(keys)
    assert torch.equal(module(keys), first)
    assert rows_of(module) == before
    assert module.table.update_count == 1


def test_a_backward_in_evaluation_mode_trains_the_rows_that_were_found() -> None:
    module = HashEmbedding(1, optimizer=optim.SGD(lr=1.0), initializer=init.Constant(value=0.0))
    module(torch.tensor([3]))
    module.eval()
    module(torch.tensor([3, 4])).sum().backward()
    assert rows_of(module) == {3: [-1.0]}


def test_a_frozen_module_inserts_but_does_not_train() -> None:
    module = HashEmbedding(2)
    module.weight.requires_grad_(False)
    out = module(KEYS)
    assert not out.requires_grad
    assert len(module.table) == 3


def test_one_update_per_backward() -> None:
    module = HashEmbedding(2, optimizer=optim.SGD())
    loss = module(KEYS).sum()
    assert module.table.update_count == 0
    loss.backward()
    assert module.table.update_count == 1
    with pytest.raises(RuntimeError, match="second time|run forward again"):
        loss.backward()


def test_forwards_without_backward_hold_no_rows_back() -> None:
    module = HashEmbedding(1)
    for _ in range(3):
        module(KEYS)
    gc.collect()
    module.table.erase(KEYS)
    module(KEYS)
    assert module.table.map(KEYS, insert=False)[0].max() < 3


def test_the_parameter_is_an_empty_handle_that_gets_no_gradient() -> None:
    module = HashEmbedding(3, optimizer=optim.SGD())
    assert [name for name, _ in module.named_parameters()] == ["weight"]
    assert module.weight.shape == (0, 3)
    module(KEYS).sum().backward()
    assert module.weight.grad is None
    torch.optim.SGD(module.parameters(), lr=1.0).step()


def test_trains_inside_a_model() -> None:
    torch.manual_seed(0)
    bag = HashEmbeddingBag(4, optimizer=torch.optim.Adagrad, optimizer_kwargs={"lr": 0.1})
    model = nn.Sequential(bag, nn.Linear(4, 1))
    dense = torch.optim.SGD(model[1].parameters(), lr=0.1)
    keys, target = torch.tensor([[1, -1], [2, -2]]), torch.tensor([[1.0], [-1.0]])
    losses = []
    for _ in range(50):
        dense.zero_grad()
        loss = nn.functional.mse_loss(model(keys), target)
        loss.backward()
        dense.step()
        losses.append(loss.item())
    assert losses[-1] < 0.01 * losses[0]


def test_optimizer_given_as_a_torch_class() -> None:
    module = HashEmbedding(
        2, optimizer=torch.optim.Adam, optimizer_kwargs={"lr": 0.5, "betas": (0.5, 0.6)}
    )
    assert module.table.optimizer == optim.Adam(lr=0.5, betas=(0.5, 0.6))


def test_optimizer_kwargs_need_a_class() -> None:
    with pytest.raises(ValueError, match="optimizer_kwargs"):
        HashEmbedding(2, optimizer=optim.SGD(), optimizer_kwargs={"lr": 1.0})


def test_weight_gradients_reach_per_sample_weights() -> None:
    module = HashEmbeddingBag(2, initializer=init.Constant(value=2.0), optimizer=optim.SGD())
    weights = torch.ones(1, 2, requires_grad=True)
    module(torch.tensor([[1, 2]]), per_sample_weights=weights).sum().backward()
    assert weights.grad is not None
    assert weights.grad.tolist() == [[4.0, 4.0]]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ((KEYS,), "together with offsets; got shape .4,. and no offsets"),
        ((KEYS.reshape(2, 2), torch.tensor([0])), "offsets must be None"),
        ((KEYS.reshape(1, 2, 2), torch.tensor([0])), "must have shape"),
        ((KEYS, torch.tensor([0]), torch.ones(3)), "per_sample_weights must have the shape"),
        ((KEYS, torch.tensor([0, 5])), "offset"),
        ((KEYS, torch.tensor([1, 2])), "offset"),
    ],
)
def test_bad_bags_raise_and_insert_nothing(args: tuple[Any, ...], message: str) -> None:
    module = HashEmbeddingBag(2)
    with pytest.raises(ValueError, match=message):
        module(*args)


def test_bad_mode() -> None:
    with pytest.raises(ValueError, match="'sum', 'mean' or 'max', got 'min'"):
        HashEmbeddingBag(2, mode="min")  # type: ignore[arg-type]


def test_keys_of_a_wrong_dtype() -> None:
    with pytest.raises(TypeError, match=r"keys must be int64 or uint64.*keys.to\(torch.int64\)"):
        HashEmbedding(2)(torch.tensor([1.0]))


def test_a_batch_may_be_empty() -> None:
    module = HashEmbeddingBag(3, optimizer=optim.SGD())
    out = module(torch.empty(0, dtype=torch.int64), torch.empty(0, dtype=torch.int64))
    assert out.shape == (0, 3)
    out.sum().backward()
    out = module(torch.empty(0, dtype=torch.int64), torch.tensor([0, 0]))
    assert out.tolist() == [[0.0] * 3] * 2


@pytest.mark.parametrize("how", ["deepcopy", "pickle", "torch.save"])
def test_copies_have_rows_of_their_own(how: str) -> None:
    module = HashEmbeddingBag(2, mode="mean", optimizer=optim.Adam(), name="copied")
    module(KEYS.reshape(2, 2)).sum().backward()
    if how == "deepcopy":
        copied = copy.deepcopy(module)
    elif how == "pickle":
        copied = pickle.loads(pickle.dumps(module))
    else:
        buffer = io.BytesIO()
        torch.save(module, buffer)
        buffer.seek(0)
        copied = torch.load(buffer, weights_only=False)
    assert rows_of(copied) == rows_of(module)
    before = rows_of(module)
    for trained in (module, copied):
        trained(KEYS.reshape(2, 2)).sum().backward()
    assert rows_of(copied) == rows_of(module) != before
    assert copied.mode == "mean"
    assert copied.table.update_count == 2


class TestStateDict:
    def trained(self, optimizer: optim.Optimizer) -> HashEmbedding:
        module = HashEmbedding(2, optimizer=optimizer)
        module(KEYS).sum().backward()
        return module

    def test_decay_that_is_to_be_caught_up_travels_along(self) -> None:
        optimizer = optim.AdamW(lr=0.1, weight_decay=0.5, catch_up=True)
        module, restored = self.trained(optimizer), HashEmbedding(2, optimizer=optimizer)
        module(KEYS[:0]).sum().backward()
        state = module.state_dict()
        assert state["log_decay"].item() == module.table.log_decay < 0
        restored.load_state_dict(state)
        assert restored.table.log_decay == module.table.log_decay
        for bad in (torch.tensor(0.5), torch.tensor([0.0, 0.0]), float("nan")):
            with pytest.raises(RuntimeError, match="log_decay: must be a finite number"):
                restored.load_state_dict({**state, "log_decay": bad})
        assert restored.table.log_decay == module.table.log_decay

    @pytest.mark.parametrize(
        "optimizer",
        [
            optim.SGD(momentum=0.5, dampening=0.5),
            optim.Adagrad(),
            optim.RowwiseAdagrad(),
            optim.Adam(bias_correction="row"),
            optim.AdamW(lr=0.1, weight_decay=0.5, catch_up=True),
            optim.FTRL(),
        ],
        ids=lambda optimizer: type(optimizer).__name__,
    )
    def test_restores_rows_state_and_update_count(self, optimizer: optim.Optimizer) -> None:
        module = self.trained(optimizer)
        restored = HashEmbedding(2, optimizer=optimizer)
        restored(torch.tensor([99]))
        restored.load_state_dict(module.state_dict())
        assert rows_of(restored) == rows_of(module)
        for trained in (module, restored):
            trained(KEYS).sum().backward()
        assert rows_of(restored) == rows_of(module)

    def test_entries(self) -> None:
        model = nn.ModuleDict({"user": self.trained(optim.Adagrad())})
        state = model.state_dict()
        shapes = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in state.items()}
        assert shapes == {
            "user.keys": (torch.int64, (3,)),
            "user.weight": (torch.float32, (3, 2)),
            "user.state.sum": (torch.float32, (3, 2)),
            "user.update_count": (torch.int64, ()),
            "user.drawn_name": (torch.int64, ()),
        }
        assert state["user.update_count"].item() == 1
        fresh = nn.ModuleDict({"user": HashEmbedding(2, optimizer=optim.Adagrad())})
        fresh.load_state_dict(state)
        assert rows_of(fresh["user"]) == rows_of(model["user"])  # type: ignore[arg-type]

    def test_rows_of_16_bits_are_saved_as_float32_without_loss(self) -> None:
        module, restored = (
            HashEmbedding(2, dtype="bfloat16", rounding="nearest", optimizer=optim.SGD())
            for _ in "12"
        )
        module(KEYS).sum().backward()
        restored.load_state_dict(module.state_dict())
        assert (restored.table.dtype, restored.table.rounding) == ("bfloat16", "nearest")
        assert rows_of(restored) == rows_of(module)

    def test_of_an_empty_module(self) -> None:
        module = HashEmbedding(2)
        module.load_state_dict(HashEmbedding(2).state_dict())
        assert len(module.table) == 0

    def test_missing_and_unexpected_entries(self) -> None:
        module = self.trained(optim.Adagrad())
        state = module.state_dict()
        del state["state.sum"]
        state["other"] = torch.zeros(1)
        with pytest.raises(RuntimeError, match=r"(?s)Missing.*state.sum.*Unexpected.*other"):
            HashEmbedding(2, optimizer=optim.Adagrad()).load_state_dict(state)

    def test_weights_of_a_dense_table_are_named_as_not_used(self) -> None:
        module = torch.nn.Sequential(HashEmbeddingBag(2, name="item", optimizer=optim.SGD(lr=0.1)))
        state = {"0.weight": torch.ones(3, 2)}
        result = module.load_state_dict(state, strict=False)
        assert result.unexpected_keys == ["0.weight"]
        with pytest.raises(RuntimeError, match=r"use table.upsert\(ids, weights\) of table 'item'"):
            module.load_state_dict(state)
        assert len(module[0].table) == 0

    def test_not_strict_makes_missing_state_fresh(self) -> None:
        module = HashEmbedding(2, optimizer=optim.Adagrad(initial_accumulator_value=0.5))
        state = self.trained(optim.SGD()).state_dict()
        result = module.load_state_dict(state, strict=False)
        assert result.missing_keys == ["state.sum"]
        [batch] = module.table.export()
        assert batch.state["sum"].tolist() == [[0.5, 0.5]] * 3

    @pytest.mark.parametrize(
        ("entry", "value", "message"),
        [
            ("weight", torch.zeros(3, 3), r"weight: must have shape .3, 2., got .3, 3."),
            ("keys", torch.tensor([1, 1, 2]), "keys: must not repeat"),
            ("state.sum", torch.zeros(2, 2), "state.sum: must have shape"),
            ("weight", torch.zeros(3, 2).double(), "weight: must be torch.float32, got .*float64"),
            ("weight", torch.zeros(3, 2).half(), "weight: must be torch.float32, got .*float16"),
            ("state.sum", torch.zeros(3, 2).double(), "state.sum: must be torch.float32"),
            ("keys", torch.tensor([1.0, 2.0, 3.0]), "keys: must be torch.int64, got .*float32"),
            ("keys", torch.tensor(1), r"keys: must have shape .'n',., got .."),
            ("keys", [1, 2, 3], "keys: must be a tensor, got list"),
            ("update_count", torch.tensor(-1), "update_count: must be a whole number"),
            ("update_count", torch.tensor(1.5), "update_count: must be a whole number"),
            ("update_count", 2**63, "update_count: must be a whole number"),
        ],
    )
    def test_entries_that_do_not_fit_change_nothing(
        self, entry: str, value: Any, message: str
    ) -> None:
        module = self.trained(optim.Adagrad())
        before, count = rows_of(module), module.table.update_count
        state = module.state_dict()
        state[entry] = value
        with pytest.raises(RuntimeError, match=message):
            module.load_state_dict(state)
        assert rows_of(module) == before
        assert module.table.update_count == count

    def test_more_rows_than_max_rows(self) -> None:
        module = HashEmbedding(2, max_rows=2)
        with pytest.raises(RuntimeError, match="3 rows do not fit into max_rows=2"):
            module.load_state_dict(self.trained(optim.SGD()).state_dict())


def test_inside_a_compiled_model() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(HashEmbeddingBag(4, optimizer=optim.SGD(lr=1.0)), nn.Linear(4, 1))
    compiled = torch.compile(copy.deepcopy(model), backend="eager")
    for keys in (torch.arange(6).reshape(3, 2), torch.arange(12).reshape(6, 2)):
        for run in (model, compiled):
            run(keys).sum().backward()
    trained = compiled.get_submodule("0")  # type: ignore[union-attr]
    assert isinstance(trained, HashEmbeddingBag)
    assert rows_of(trained) == rows_of(model[0])  # type: ignore[arg-type]
    assert trained.table.update_count == 2


def test_repr_names_the_table() -> None:
    assert "name='user'" in repr(HashEmbedding(2, name="user"))


@pytest.mark.parametrize("module_type", [HashEmbedding, HashEmbeddingBag])
@pytest.mark.parametrize("is_used", [False, True])
def test_an_optimizer_on_the_parameter_is_refused_beside_another(
    module_type: Any, is_used: bool
) -> None:
    module = module_type(2, name="item", optimizer=optim.Adagrad(lr=0.1))
    keys = KEYS.reshape(2, 2)
    if is_used:
        module(keys)
    _apply_optimizer_in_backward(torch.optim.Adam, module.parameters(), {"lr": 0.1})
    with pytest.raises(ValueError, match=r"'item'.*gave \['Adam'\].*Adagrad\(.*already"):
        module(keys)


@pytest.mark.parametrize("module_type", [HashEmbedding, HashEmbeddingBag])
@pytest.mark.parametrize("is_used", [False, True])
def test_an_optimizer_on_the_parameter_trains_as_one_of_the_constructor(
    module_type: Any, is_used: bool
) -> None:
    kwargs = {"lr": 0.1, "eps": 1e-3}
    told = module_type(2, name="item", optimizer=torch.optim.Adagrad, optimizer_kwargs=kwargs)
    module = module_type(2, name="item")
    keys = KEYS.reshape(2, 2)
    for each in (module, told):
        if is_used:
            each(keys)
    _apply_optimizer_in_backward(torch.optim.Adagrad, module.parameters(), kwargs)
    for each in (module, told):
        each(keys).square().sum().backward()
    assert rows_of(module) == rows_of(told)
    assert module.table.optimizer == told.table.optimizer
    copies = [copy.deepcopy(module), pickle.loads(pickle.dumps(module)), told]
    for each in copies:
        each(keys).square().sum().backward()
    assert rows_of(copies[0]) == rows_of(copies[1]) == rows_of(told)
    _apply_optimizer_in_backward(torch.optim.SGD, module.parameters(), {"lr": 0.1})
    with pytest.raises(ValueError, match=r"gave \['Adagrad', 'SGD'\].*already"):
        module(keys)


def test_a_shallow_copy_knows_the_optimizer_of_its_table() -> None:
    module = HashEmbedding(2)
    module.table.set_optimizer(optim.SGD(lr=0.1))
    copy.copy(module)(KEYS).sum().backward()
    assert module.table.update_count == 1


@pytest.mark.parametrize("keys", [None, 5, [1, 2], KEYS.numpy()])
def test_what_is_no_tensor_is_named(keys: Any) -> None:
    for call in (HashEmbedding(4), HashEmbeddingBag(4)):
        with pytest.raises(TypeError, match="keys must be a torch.Tensor, got "):
            call(keys)
    bag, offsets = HashEmbeddingBag(4), torch.tensor([0])
    with pytest.raises(TypeError, match="offsets must be a torch.Tensor, got list"):
        bag(KEYS, [0])
    with pytest.raises(TypeError, match="per_sample_weights must be a torch.Tensor, got list"):
        bag(KEYS, offsets, [1.0] * 4)
    with pytest.raises(TypeError, match="optimizer_kwargs must be a dict, got"):
        HashEmbedding(4, optimizer=torch.optim.SGD, optimizer_kwargs=[1])  # type: ignore[arg-type]


def test_nested_keys_are_refused_and_their_parts_are_taken() -> None:
    keys = torch.nested.nested_tensor([KEYS[:1], KEYS[:3]], layout=torch.jagged)
    embedding, bag = HashEmbedding(4), HashEmbeddingBag(4)
    for module in (embedding, bag):
        with pytest.raises(TypeError, match=r"must not be a nested tensor: look up its values\(\)"):
            module(keys)
        assert len(module.table) == 0
    assert bag(keys.values(), keys.offsets()[:-1]).shape == (2, 4)
    nested = torch.nested.nested_tensor_from_jagged(embedding(keys.values()), keys.offsets())
    assert nested[1].shape == (3, 4)
