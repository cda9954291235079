"""Compiled modules against eager ones, bit for bit: outputs, gradients, rows and counts."""

from __future__ import annotations

import copy
import functools
import gc
import os
from collections.abc import Callable, Iterator, Sequence
from itertools import cycle, product
from typing import Any

import pytest
import torch
import torch._dynamo.compiled_autograd
import torch._dynamo.testing
from torch import nn
from torch.utils import checkpoint

from recsdk_core import init, optim
from recsdk_core.nn import HashEmbedding, HashEmbeddingBag, RowOptimizer, l2

IS_FULL = os.environ.get("RECSDK_TEST_PROFILE", "ci") == "full"
KEYS = torch.tensor([[5, 6], [-1, 5]])


@pytest.fixture(autouse=True)
def _no_compiled_code() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def compiled(model: Any, backend: str = "aot_eager", **kwargs: Any) -> Any:
    return torch.compile(model, fullgraph=True, backend=backend, **kwargs)


def embedding(dim: int = 4, **kwargs: Any) -> HashEmbedding:
    kwargs = {"optimizer": optim.Adagrad(lr=0.5), "name": "item", **kwargs}
    return HashEmbedding(dim, initializer=init.Normal(), **kwargs)


def bag(dim: int = 4, **kwargs: Any) -> HashEmbeddingBag:
    kwargs = {"optimizer": optim.Adagrad(lr=0.5), "name": "bag", **kwargs}
    return HashEmbeddingBag(dim, initializer=init.Normal(), **kwargs)


def state(module: nn.Module) -> dict[str, Any]:
    """All that a table has: rows, optimizer state and counts."""
    found: dict[str, Any] = {}
    for name, each in module.named_modules():
        if isinstance(each, HashEmbedding | HashEmbeddingBag):
            found[name] = {
                "update_count": each.table.update_count,
                "outcomes": dict(each.table.stats().outcomes),
                **{
                    key: [row.tolist(), *(values[i].tolist() for values in batch.state.values())]
                    for batch in each.table.export()
                    for i, (key, row) in enumerate(
                        zip(batch.keys.tolist(), batch.weights, strict=True)
                    )
                },
            }
    assert found
    return found


class Model(nn.Module):
    """Looks up each table twice, so that the order of updates shows in Adagrad's rows."""

    def __init__(self, mode: Any = "sum", has_last: bool = False, **kwargs: Any) -> None:
        super().__init__()
        self.items = embedding(**kwargs)
        self.bags = bag(mode=mode, include_last_offset=has_last, **kwargs)
        self.scale = nn.Parameter(torch.full((4,), 0.5))

    def forward(
        self, keys: torch.Tensor, offsets: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        items = self.items(keys).sum(1) * self.scale
        again = self.items(keys.flip(0) + 1)
        pooled = self.bags(keys, per_sample_weights=weights)
        by_offsets = self.bags(keys.reshape(-1), offsets, weights.reshape(-1) * 2)
        unweighted = self.bags(keys.reshape(-1) + 1, offsets)
        return items + again[:, 0] + pooled + (by_offsets + unweighted).sum(0)


def batches(has_last: bool) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Of several sizes, with equal keys, empty bags, and all that comes of a generator's seed."""
    made = torch.Generator().manual_seed(3)
    for num_bags, length in ((3, 2), (5, 3), (4, 2), (2, 4)):
        keys = torch.randint(-4, 4, (num_bags, length), generator=made)
        ends = torch.tensor([0, 1, 1, 4, *([keys.numel()] if has_last else [])])
        weights = torch.randint(-4, 4, keys.shape, generator=made) / 4
        yield keys, ends, weights


def step(model: Any, batch: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Runs forward and backward; returns the output and the gradient of the weights."""
    keys, offsets, weights = batch
    weights = weights.clone().requires_grad_()
    out = model(keys, offsets, weights)
    out.square().sum().backward()
    assert weights.grad is not None
    return [out.detach(), weights.grad]


@pytest.mark.parametrize(  # each of them, or every two of them together
    ("is_fused", "has_last", "mode"),
    [
        (False, False, "sum"),
        (True, True, "mean"),
        *([(False, True, "mean"), (True, False, "mean"), (True, True, "sum")] if IS_FULL else []),
    ],
)
def test_training_and_evaluation(is_fused: bool, has_last: bool, mode: str) -> None:
    """Two backwards make one step of a RowOptimizer."""
    model = Model(mode, has_last, **({} if is_fused else {"optimizer": None}))
    twin = copy.deepcopy(model)
    fast = compiled(twin, dynamic=True)
    optimizers = (
        []
        if is_fused
        else [RowOptimizer([each.items.weight, each.bags.weight], torch.optim.Adagrad, lr=0.5)]
        for each in (model, twin)
    )
    steps = list(zip((model, fast), optimizers, strict=True))
    for number, batch in enumerate(batches(has_last)):
        results = []
        for each, of_each in steps:
            results.append(step(each, batch))
            for optimizer in of_each if number % 2 else []:
                optimizer.step()
                optimizer.zero_grad()
        assert all(torch.equal(*pair) for pair in zip(*results, strict=True))
        assert model.scale.grad is not None
        assert torch.equal(model.scale.grad, twin.scale.grad)
        assert state(model) == state(twin)
    assert model.items.table.update_count == (8 if is_fused else 2)
    before = state(twin)
    for each in (model, twin):
        each.eval()
    for keys, offsets, weights in batches(has_last):
        with torch.no_grad():
            asked = (keys + 2, offsets, weights)
            assert torch.equal(model(*asked), fast(*asked))
    assert [list(of.items())[2:] for of in state(twin).values()] == [
        list(of.items())[2:] for of in before.values()
    ]
    assert state(model) == state(twin)


def test_inductor() -> None:
    """Sums of small numbers of quarters, so that no order of additions can round.

    Each kernel takes a compiler a second: one is before an operator and one behind, and backward.
    """

    class Exact(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            kwargs: dict[str, Any] = {"optimizer": optim.SGD(lr=0.25)}
            self.items, self.bags = embedding(**kwargs), bag(**kwargs)
            for table in (self.items.table, self.bags.table):
                keys = torch.arange(-4, 5)
                table.upsert(keys, (keys[:, None] * torch.ones(4)).float())

        def forward(self, keys: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
            return self.items(keys + 1).sum(1) * 2 + self.bags(keys, per_sample_weights=weights)

    model = Exact()
    twin = copy.deepcopy(model)
    fast = compiled(twin, "inductor", dynamic=True)
    for keys, _, weights in batches(False):
        results = []
        for each in (model, fast):
            given = weights.clone().requires_grad_()
            out = each(keys, given)
            (out * 0.5).sum().backward()
            results.append((out.detach(), given.grad))
        assert all(torch.equal(*pair) for pair in zip(*results, strict=True))
        assert state(model) == state(twin)


@pytest.mark.parametrize(
    "shape", [(), (2, 0), (2, 1, 2), *([(3,), (2, 3), (0,)] if IS_FULL else [])]
)
def test_keys_of_any_shape(shape: tuple[int, ...]) -> None:
    module, twin = embedding(), embedding()
    keys = torch.arange(24)[: torch.Size(shape).numel()].reshape(shape)
    out, expected = compiled(twin)(keys), module(keys)
    assert out.shape == (*shape, 4)
    assert torch.equal(out, expected)
    for each in (out, expected):
        each.sum().backward()
    assert state(module) == state(twin)


def test_one_compiled_function_serves_many_modules() -> None:
    modules = [embedding(name=f"table {i}") for i in range(12)]
    counted = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    call = torch.compile(lambda module, keys: module(keys), fullgraph=True, backend=counted)
    for module in modules:
        twin = embedding(name=module.table.name)
        assert torch.equal(call(module, KEYS), twin(KEYS))
    assert counted.frame_count == 1


def test_a_second_backward_raises() -> None:
    module = embedding()
    out = compiled(module)(KEYS).sum()
    out.backward(retain_graph=True)
    before = state(module)
    with pytest.raises(RuntimeError, match="each forward takes one backward"):
        out.backward()
    assert state(module) == before


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_forward_without_backward_leaks_no_lease(backend: str) -> None:
    module = embedding()
    fast = compiled(module, backend)
    for _ in range(3):
        out = fast(KEYS)
    del out
    gc.collect()
    module.table.check_idle()


def test_a_call_whose_vectors_nobody_reads_inserts() -> None:
    module = embedding()

    def call(keys: torch.Tensor) -> torch.Tensor:
        module(keys)
        module(keys)
        return keys + 1

    compiled(call)(KEYS)
    assert len(module.table) == 3
    assert sum(module.table.stats().outcomes.values()) == 8


def test_freezing_and_modes_are_followed() -> None:
    module = embedding()
    fast = compiled(module)
    fast(KEYS).sum().backward()
    module.weight.requires_grad_(False)
    out = fast(KEYS)
    if out.requires_grad:  # torch 2.11
        with pytest.raises(RuntimeError, match="a table was frozen after its lookup was compiled"):
            out.sum().backward()
    assert module.table.update_count == 1
    module.weight.requires_grad_(True)
    module.eval()
    fast(KEYS + 20).sum().backward()
    assert len(module.table) == 3
    assert module.table.update_count == 2


def test_a_table_that_nobody_trains_raises() -> None:
    module = embedding(optimizer=None)
    with pytest.raises(RuntimeError, match="pass optimizer= to its module"):
        compiled(module)(KEYS).sum().backward()


def test_a_scaled_loss_is_refused() -> None:
    module = embedding()
    with pytest.raises(RuntimeError, match="a GradScaler has scaled the loss"):
        torch.amp.GradScaler("cpu").scale(compiled(module)(KEYS).sum()).backward()
    assert module.table.update_count == 0


def test_under_autocast() -> None:
    model = nn.Sequential(embedding(), nn.Linear(4, 4))
    twin = copy.deepcopy(model)
    for each in (model, compiled(twin)):
        with torch.autocast("cpu", torch.bfloat16):
            out = each(KEYS)
        assert out.dtype == torch.bfloat16
        out.float().square().sum().backward()
    assert state(model) == state(twin)


class Checkpointed(nn.Module):
    def __init__(self, is_checkpointed: bool = True, **kwargs: Any) -> None:
        super().__init__()
        self.items, self.kwargs, self.is_checkpointed = embedding(), kwargs, is_checkpointed
        self.scale = nn.Parameter(torch.full((4,), 0.5))

    def forward(self, keys: torch.Tensor) -> torch.Tensor:
        def vectors(keys: torch.Tensor) -> torch.Tensor:
            return (self.items(keys) * self.scale).sin() + self.items(keys + 1)

        if not self.is_checkpointed:
            return vectors(keys)
        out: torch.Tensor = checkpoint.checkpoint(vectors, keys, use_reentrant=False, **self.kwargs)
        return out


def rows_of(module: nn.Module) -> list[dict[str, Any]]:
    """All that the tables have but for counts of outcomes."""
    return [
        {name: value for name, value in of_table.items() if name != "outcomes"}
        for of_table in state(module).values()
    ]


def test_a_checkpoint_in_a_compiled_model() -> None:
    """What was looked up is kept, not looked up again."""
    model, plain = Checkpointed(), Checkpointed(is_checkpointed=False)
    fast = compiled(model)
    for keys in (KEYS, KEYS + 1):
        for each in (plain, fast):
            each(keys).sum().backward()
    assert state(model) == state(plain)


def test_a_checkpoint_around_a_compiled_model() -> None:
    module, plain = embedding(), embedding()
    fast = compiled(module)
    for keys in (KEYS, KEYS + 1):
        checkpoint.checkpoint(fast, keys, use_reentrant=False).square().sum().backward()
        plain(keys).square().sum().backward()
    assert rows_of(module) == rows_of(plain)
    module.table.check_idle()


def test_a_selective_checkpoint() -> None:
    def policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> Any:
        return checkpoint.CheckpointPolicy.PREFER_RECOMPUTE

    contexts = functools.partial(checkpoint.create_selective_checkpoint_contexts, policy)
    model, plain = Checkpointed(context_fn=contexts), Checkpointed(is_checkpointed=False)
    for each in (model, plain):
        each(KEYS).sum().backward()
    assert rows_of(model) == rows_of(plain)


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("is_compiled", [False, True])
def test_two_lookups_in_one_checkpoint(is_compiled: bool, use_reentrant: bool) -> None:
    """The first update comes before anything else in the checkpoint asks for what it saved."""
    model, plain = embedding(), embedding()
    start = torch.ones(4, requires_grad=True)

    def vectors(keys: torch.Tensor, start: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = (call(keys) * start).exp() + call(keys.flip(0))
        return out

    for number in range(2):
        for call in (compiled(model) if is_compiled else model, plain):
            if call is plain:
                out = vectors(KEYS + number, start)
            else:
                out = checkpoint.checkpoint(
                    vectors, KEYS + number, start, use_reentrant=use_reentrant
                )
            out.sum().backward()
        assert rows_of(model) == rows_of(plain)
    model.table.check_idle()


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("is_fused", [False, True])
def test_a_checkpoint_after_an_update_is_refused(is_fused: bool, use_reentrant: bool) -> None:
    """What it would look up again is no longer what it looked up; with a RowOptimizer it is."""
    module = embedding(**({} if is_fused else {"optimizer": None}))
    if not is_fused:
        RowOptimizer(module, torch.optim.SGD, lr=0.5)
    start = torch.ones(4, requires_grad=True)

    def vectors(keys: torch.Tensor, start: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = (module(keys) * start).exp()
        return out

    first = checkpoint.checkpoint(vectors, KEYS, start, use_reentrant=use_reentrant)
    total = (first + checkpoint.checkpoint(vectors, KEYS, start, use_reentrant=use_reentrant)).sum()
    if is_fused:
        with pytest.raises(RuntimeError, match="table 'item': a checkpoint looks it up again"):
            total.backward()
    else:
        total.backward()
    module(KEYS).sum().backward()  # another pass


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace the builtin")
@pytest.mark.parametrize("is_forward_compiled", [False, True])
def test_compiled_autograd_updates_rows(is_forward_compiled: bool) -> None:
    """It breaks its graph at an operator with effects, and must not drop it."""
    model = nn.Sequential(embedding(), nn.Linear(4, 1))
    twin = copy.deepcopy(model)
    fast = compiled(twin) if is_forward_compiled else twin
    for keys in (KEYS, KEYS + 1):
        model(keys).sum().backward()
        with torch._dynamo.compiled_autograd._enable(torch.compile(backend="aot_eager")):
            fast(keys).sum().backward()
    assert state(model) == state(twin)


def test_copies_are_compiled_for_themselves() -> None:
    fast = compiled(embedding())
    copied = copy.deepcopy(fast)
    fast(KEYS).sum().backward()
    copied(KEYS + 50)
    assert (len(fast.table), len(copied.table)) == (3, 3)
    assert copied.table.update_count == 0


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ((KEYS[0], torch.tensor([0, 5])), "offsets must ascend from 0 to the number of keys, 2"),
        ((KEYS.float(), None), r"keys.to\(torch.int64\)"),
    ],
)
def test_bad_numbers_raise_as_they_do_eagerly(args: tuple[Any, ...], message: str) -> None:
    module = bag()
    with pytest.raises((ValueError, TypeError), match=message):
        compiled(module)(*args)
    assert (module.table.update_count, len(module.table)) == (0, 0)


def test_bad_shapes_raise_as_they_do_eagerly() -> None:
    module = bag()
    fast = torch.compile(module, backend="aot_eager")
    for args, message in (
        ((KEYS[0],), "together with offsets; got shape .2,. and no offsets"),
        ((KEYS, torch.tensor([0])), "offsets must be None"),
        ((KEYS, None, torch.ones(3)), "per_sample_weights must have the shape"),
    ):
        with pytest.raises(ValueError, match=message):
            fast(*args)
    assert len(module.table) == 0


@pytest.mark.parametrize("kwargs", [{"padding_idx": 5}, {"mode": "mean", "padding_idx": -1}])
def test_padding(kwargs: dict[str, Any]) -> None:
    made: Any = bag if "mode" in kwargs else embedding
    module = made(**kwargs)
    twin = copy.deepcopy(module)
    for each in (module, compiled(twin, dynamic=True)):
        for keys in (KEYS, KEYS.repeat(2, 1) + 1):
            each(keys).sum().backward()
    assert state(module) == state(twin)
    assert kwargs["padding_idx"] not in module.table


ARGUMENTS: dict[str, dict[str, Any]] = {
    "max": {"mode": "max", "padding_idx": 5},
    "frequency": {"mode": "mean", "scale_grad_by_freq": True, "padding_idx": 5},
    "norm": {"mode": "mean", "max_norm": 0.5},
    "both": {"max_norm": 0.5, "norm_type": 1.0, "scale_grad_by_freq": True},
}


@pytest.mark.parametrize(
    ("name", "is_fused"),
    list(product(ARGUMENTS, [False, True]) if IS_FULL else zip(ARGUMENTS, cycle([False, True]))),
)
def test_arguments_of_nn_embedding(name: str, is_fused: bool) -> None:
    """Also a penalty on the rows of the batch, where a RowOptimizer trains."""
    kwargs = ARGUMENTS[name]
    make: Any = bag if "mode" in kwargs else embedding
    model = make(**kwargs, **({} if is_fused else {"optimizer": None}))
    twin = copy.deepcopy(model)
    steps = []
    for module in (model, twin):

        def loss(keys: torch.Tensor, module: Any = module) -> torch.Tensor:
            total: torch.Tensor = (module(keys) - 0.5).pow(3).sum()
            return total if is_fused or not module.training else total + 0.3 * l2(module)

        optimizer = None if is_fused else RowOptimizer(module, torch.optim.Adagrad, lr=0.5)
        steps.append((loss if module is model else compiled(loss, dynamic=True), optimizer))
    for number, keys in enumerate((KEYS, KEYS.repeat(2, 2) + 1, KEYS.repeat(3, 1))):
        for module in (model, twin):
            module.train(number != 2)
        losses = []
        for loss, optimizer in steps:
            losses.append(loss(keys))
            losses[-1].backward()
            if optimizer is not None:
                optimizer.step()
                optimizer.zero_grad()
        assert torch.equal(*losses)
        assert state(model) == state(twin)
    assert model.table.update_count == 3
    model.table.check_idle()
    twin.table.check_idle()


def test_accumulated_backwards() -> None:
    model, twin = embedding(accumulate_steps=2), embedding(accumulate_steps=2)
    fast = compiled(twin)
    for keys in (KEYS, KEYS + 1, KEYS, KEYS):
        for each in (model, fast):
            each(keys).square().sum().backward()
    assert state(model) == state(twin)
    assert twin.table.update_count == 2


def test_a_compiled_step_of_the_optimizer() -> None:
    model = nn.Sequential(embedding(optimizer=None), nn.Linear(4, 1))
    eager = copy.deepcopy(model)
    optimizer = RowOptimizer(model, torch.optim.Adagrad, lr=0.5)
    eagerly = RowOptimizer(eager, torch.optim.Adagrad, lr=0.5)

    @torch.compile(backend="eager")
    def train() -> None:
        optimizer.zero_grad()
        model(KEYS).square().mean().backward()
        optimizer.step()

    for _ in range(2):
        train()
        eagerly.zero_grad()
        eager(KEYS).square().mean().backward()
        eagerly.step()
    assert state(model) == state(eager)
    assert torch.equal(model[1].weight, eager[1].weight)


COMPUTED: list[Callable[[torch.Tensor], torch.Tensor]] = [
    lambda weight: weight.square(),
    lambda weight: weight * 2.0,
    lambda weight: torch.stack([weight.pow(2)]),
    lambda weight: nn.functional.linear(torch.ones(1, 4), weight),
    lambda weight: nn.functional.embedding(KEYS, weight),
]


@pytest.mark.parametrize(  # the last two of them together; all three in the full profile
    ("compute", "looks_up", "backend"),
    [
        (COMPUTED[i], bool(j), ("eager", "aot_eager")[k])
        for i, j, k in product(range(len(COMPUTED)), range(2), range(2))
        if IS_FULL or (j, k) == (i % 2, i // 2 % 2)
    ],
)
def test_computing_with_weight_is_refused(
    compute: Callable[[torch.Tensor], torch.Tensor], looks_up: bool, backend: str
) -> None:
    module = embedding()

    def loss() -> torch.Tensor:
        vectors = module(KEYS).sum() if looks_up else torch.zeros(())
        return vectors + compute(module.weight).sum()

    with pytest.raises(ValueError, match="cannot use `weight` of its module"):
        torch.compile(loss, backend=backend)()
