"""Arguments of nn.Embedding and nn.EmbeddingBag mean the same here, or are refused by name."""

from __future__ import annotations

import copy
from random import Random
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from hypothesis import example, given
from hypothesis import strategies as st
from torch import nn

from recsdk_core import Bags, Default, Evict, Table, init, optim
from recsdk_core.nn import HashEmbedding, HashEmbeddingBag, RowOptimizer

NUM_KEYS, DIM = 6, 3
KEYS = torch.arange(NUM_KEYS)
TOLERANCE: dict[str, float] = {"rtol": 1e-5, "atol": 1e-6}
limits = st.sampled_from(
    [{}, {"max_norm": 0.7}, {"max_norm": 1.2, "norm_type": 1.0}]
    + [{"max_norm": 0.6, "norm_type": each} for each in (3.0, float("inf"))]
)
keys_of_bag = st.lists(st.integers(0, NUM_KEYS - 1), max_size=5)


class ScaledBag(nn.Module):
    """nn.EmbeddingBag with scale_grad_by_freq, from parts that do what torch says.

    torch 2.13's own divides on the cpu by how often another key is there: of [0, 0, 1] it halves
    the gradient of 1.
    """

    def __init__(self, *sizes: int, mode: str, include_last_offset: bool, **options: Any) -> None:
        super().__init__()
        self.rows = nn.Embedding(*sizes, **options)
        self.weight = self.rows.weight
        self.mode, self.include_last_offset = mode, include_last_offset

    def forward(self, keys: torch.Tensor, offsets: torch.Tensor, _: None) -> torch.Tensor:
        ends = offsets
        if not self.include_last_offset:
            ends = torch.cat([offsets, torch.tensor([len(keys)])])
        kept = keys != self.rows.padding_idx if self.rows.padding_idx is not None else keys >= 0
        before = F.pad(kept.cumsum(0), (1, 0))
        vectors = self.rows(keys)[kept]
        return F.embedding_bag(
            torch.arange(len(vectors)),
            vectors,
            before[ends],
            mode=self.mode,
            include_last_offset=True,
        )


def make_pair(kind: str, padding: int | None, dtype: torch.dtype, **options: Any) -> Any:
    """A hash module and a dense twin with equal rows, but of the padding, and their optimizers."""
    dense_kind = getattr(nn, kind)
    if kind == "EmbeddingBag" and options.get("scale_grad_by_freq"):
        dense_kind = ScaledBag
    dense = dense_kind(NUM_KEYS, DIM, padding_idx=padding, **options)
    made = HashEmbedding if kind == "Embedding" else HashEmbeddingBag
    hashed: Any = made(NUM_KEYS, DIM, padding_idx=padding, default=Default.constant(7.0), **options)
    kept = [key for key in KEYS.tolist() if key != padding]
    hashed.table.upsert(torch.tensor(kept), dense.weight.detach()[kept].contiguous())
    optimizers = [
        RowOptimizer(hashed, torch.optim.SGD, lr=0.1),
        torch.optim.SGD(dense.parameters(), lr=0.1),
    ]
    return [hashed.to(dtype), dense], optimizers, kept


def step(optimizer: torch.optim.Optimizer, pooled: torch.Tensor) -> None:
    optimizer.zero_grad()
    (pooled.float() - 0.3).pow(3).sum().backward()
    optimizer.step()


def assert_rows_equal(modules: Any, kept: list[int]) -> None:
    hashed, dense = modules
    rows = hashed.table.lookup(torch.tensor(kept))
    torch.testing.assert_close(rows, dense.weight.detach()[kept], **TOLERANCE)
    assert sorted(hashed.state_dict()["keys"].tolist()) == kept


@given(
    st.lists(keys_of_bag, min_size=1, max_size=4),
    st.sampled_from([None, 0, 4]),
    st.booleans(),
    limits,
)
@example([[4, 4], []], 4, True, {"max_norm": 0.7})
def test_embedding(
    batches: list[list[int]], padding: int | None, is_scaled: bool, limit: dict[str, float]
) -> None:
    modules, optimizers, kept = make_pair(
        "Embedding", padding, torch.float32, scale_grad_by_freq=is_scaled, **limit
    )
    for keys in batches:
        made = []
        for module, optimizer in zip(modules, optimizers, strict=True):
            made.append(module(torch.tensor([keys, keys], dtype=torch.int64)))
            step(optimizer, made[-1])
        torch.testing.assert_close(made[0], made[1], **TOLERANCE)
    assert_rows_equal(modules, kept)


@given(
    st.lists(keys_of_bag, min_size=1, max_size=4),
    st.sampled_from([None, 0, 4]),
    st.sampled_from(["sum", "mean", "max"]),
    st.sampled_from(["", "scaled", "weighted", "last_offset"]),
    limits,
    st.randoms(use_true_random=False),
)
@example([[4, 4], [], [1, 1, 4]], 4, "max", "", {"max_norm": 0.7}, Random(0))
@example([[4, 4], [], [1, 1, 4]], 4, "mean", "scaled", {}, Random(0))
@example([[4, 4], [], [1, 1, 4]], 4, "mean", "", {"max_norm": 0.7}, Random(0))
@example([[0, 4], [], [1, 1, 4]], None, "sum", "weighted", {"max_norm": 0.7}, Random(0))
def test_embedding_bag(
    bags: list[list[int]],
    padding: int | None,
    mode: str,
    extra: str,
    limit: dict[str, float],
    random: Any,
) -> None:
    """Also the gradient of weights, and again in evaluation."""
    if (mode == "max" and extra == "scaled") or (mode != "sum" and extra == "weighted"):
        return  # torch has neither
    modules, optimizers, kept = make_pair(
        "EmbeddingBag",
        padding,
        torch.float32,
        mode=mode,
        scale_grad_by_freq=extra == "scaled",
        include_last_offset=extra == "last_offset",
        **limit,
    )
    flat = [key for bag in bags for key in bag]
    ends = torch.tensor([0, *map(len, bags)]).cumsum(0)
    offsets = ends if extra == "last_offset" else ends[:-1]
    given = torch.tensor([random.uniform(-2, 2) for _ in flat])
    for is_training in (True, True, False):
        pooled, grads = [], []
        for module, optimizer in zip(modules, optimizers, strict=True):
            module.train(is_training)
            weights = given.clone().requires_grad_() if extra == "weighted" else None
            pooled.append(module(torch.tensor(flat, dtype=torch.int64), offsets, weights))
            step(optimizer, pooled[-1])
            grads.append(None if weights is None else weights.grad)
        torch.testing.assert_close(pooled[0], pooled[1], **TOLERANCE)
        if grads[0] is not None:
            torch.testing.assert_close(grads[0], grads[1], **TOLERANCE)
    assert_rows_equal(modules, kept)


@pytest.mark.parametrize("kind", ["Embedding", "EmbeddingBag"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_outputs_have_the_dtype_of_the_model(kind: str, dtype: torch.dtype) -> None:
    modules, optimizers, _ = make_pair(kind, 1, dtype)
    dense = copy.deepcopy(modules[1]).to(dtype)
    keys = torch.tensor([[0, 1, 5, 5]])
    made = modules[0](keys)
    assert made.dtype == dense(keys).dtype == dtype
    tolerance = {"rtol": 2e-2, "atol": 2e-2}
    if kind == "Embedding":
        torch.testing.assert_close(made, dense(keys), **tolerance)
    step(optimizers[0], made)
    assert modules[0].table.update_count == 1
    assert modules[0].table.lookup(KEYS).dtype == torch.float32


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_a_model_in_16_bits_trains_under_a_default_dtype(mode: Any) -> None:
    module = HashEmbeddingBag(DIM, mode=mode, padding_idx=2).to(torch.bfloat16)
    optimizer = RowOptimizer(module, torch.optim.Adagrad, lr=0.1)
    weights = torch.ones(1, 3, dtype=torch.bfloat16, requires_grad=mode == "sum")
    torch.set_default_dtype(torch.bfloat16)
    try:
        made = module(torch.tensor([[1, 2, 3]]), None, weights if mode == "sum" else None)
        step(optimizer, made)
    finally:
        torch.set_default_dtype(torch.float32)
    assert made.dtype == torch.bfloat16
    assert sorted(module.state_dict()["keys"].tolist()) == [1, 3]
    if mode == "sum":
        assert weights.grad is not None
        assert weights.grad.dtype == torch.bfloat16


def test_sizes() -> None:
    for made in (
        HashEmbedding(100, 8),
        HashEmbedding(100, embedding_dim=8),
        HashEmbeddingBag(num_embeddings=100, embedding_dim=8),
    ):
        assert (made.num_embeddings, made.embedding_dim, made.table.dim) == (100, 8, 8)
    assert (HashEmbedding(8).num_embeddings, HashEmbedding(8).embedding_dim) == (None, 8)
    assert HashEmbedding(embedding_dim=8).table.max_rows is None
    for sizes, names in [((), {}), ((1, 2, 3), {}), ((1, 2), {"embedding_dim": 2})]:
        with pytest.raises(TypeError, match=r"embedding_dim"):
            HashEmbedding(*sizes, **names)  # type: ignore[arg-type]
    for bad in (0, -1):
        with pytest.raises(ValueError, match="must be at least 1"):
            HashEmbedding(bad, 4)


@pytest.mark.parametrize("kind", [HashEmbedding, HashEmbeddingBag])
def test_what_cannot_be_honoured_is_refused_with_the_reason(kind: Any) -> None:
    kind(4, max_norm=None, norm_type=2, sparse=False, device="cpu")
    for name, value, reason in [
        ("sparse", True, "touched rows in any case"),
        ("device", "meta", "memory of the host"),
        ("_weight", torch.ones(1, 4), "from_pretrained"),
        ("_freeze", True, "from_pretrained"),
    ]:
        with pytest.raises(ValueError, match=f"{name}=.* is not supported: .*{reason}"):
            kind(4, **{name: value})
    for wrong, error, text in [
        ({"max_norm": -1.0}, ValueError, "max_norm must be 0 or more, got -1.0"),
        ({"max_norm": "x"}, TypeError, "max_norm must be a number"),
        ({"max_norm": 1.0, "norm_type": 0}, ValueError, "norm_type must be above 0"),
    ]:
        with pytest.raises(error, match=text):
            kind(4, **wrong)
    with pytest.raises(TypeError, match="no argument 'colour'"):
        kind(4, colour=1)
    with pytest.raises(TypeError, match="padding_idx must be an int"):
        kind(4, padding_idx="x")


@pytest.mark.parametrize("padding", [-1, 2**64 - 1])
def test_any_key_may_be_the_padding(padding: int) -> None:
    module = HashEmbedding(2, padding_idx=padding, initializer=init.Constant(value=1.0))
    assert module(torch.tensor([-1, 5])).tolist() == [[0.0, 0.0], [1.0, 1.0]]
    assert module(torch.tensor([5], dtype=torch.uint64)).tolist() == [[1.0, 1.0]]
    assert -1 not in module.table
    module.table.upsert(torch.tensor([-1]), torch.ones(1, 2))
    assert module(torch.tensor([-1])).tolist() == [[0.0, 0.0]]


def test_modes_that_torch_refuses() -> None:
    with pytest.raises(ValueError, match="mode='max' does not go with scale_grad_by_freq"):
        HashEmbeddingBag(2, mode="max", scale_grad_by_freq=True)
    weights = torch.ones(1, 2)
    for options in ({"mode": "max"}, {"mode": "mean", "scale_grad_by_freq": True}):
        module = HashEmbeddingBag(2, **options)
        with pytest.raises(ValueError, match="per_sample_weights go with mode='sum'"):
            module(torch.tensor([[1, 2]]), None, weights)
        assert len(module.table) == 0


@pytest.mark.parametrize("options", [{}, {"mode": "max"}, {"max_norm": 1.0}])
@pytest.mark.parametrize("offsets", [[1], [0, 3], [0, 2, 1]])
def test_bad_offsets_insert_nothing(offsets: list[int], options: Any) -> None:
    module = HashEmbeddingBag(2, **options)
    with pytest.raises(ValueError, match="offsets must ascend from 0") as caught:
        module(torch.tensor([1, 2]), torch.tensor(offsets))
    assert len(module.table) == 0
    module.table.check_idle()  # though the error and its traceback are still there
    assert caught.traceback


class TestMaxNorm:
    options: ClassVar[Any] = {"max_norm": 0.7, "norm_type": 2.0}

    @pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adagrad])
    def test_rows_that_backward_updates(self, kind: Any) -> None:
        dense = nn.Embedding(NUM_KEYS, DIM, **self.options)
        hashed = HashEmbedding(
            DIM, optimizer=kind, optimizer_kwargs={"lr": 0.5}, name="item", **self.options
        )
        hashed.table.upsert(KEYS, dense.weight.detach().clone())
        optimizer = kind(dense.parameters(), lr=0.5)
        for keys in ([0, 1, 1], [5, 0], [1, 2, 0]):
            hashed(torch.tensor(keys)).square().sum().backward()
            step_of_dense = dense(torch.tensor(keys)).square().sum()
            optimizer.zero_grad()
            step_of_dense.backward()
            optimizer.step()
            torch.testing.assert_close(hashed.table.lookup(KEYS), dense.weight.detach())

    @pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
    def test_evaluation_reads_scaled_rows_and_writes_none(self, dtype: Any) -> None:
        module = HashEmbedding(
            DIM, dtype=dtype, default=Default.constant(9.0), **self.options
        ).eval()
        rows = torch.linspace(-2.0, 2.0, 2 * DIM).reshape(2, DIM).contiguous()
        module.table.upsert(KEYS[:2], rows)
        before = module.table.lookup(KEYS[:2])
        read = module(KEYS[:3]).detach()
        assert torch.equal(module.table.lookup(KEYS[:2]), before)
        torch.testing.assert_close(read[:2].norm(dim=1), torch.full((2,), 0.7))
        assert read[2].tolist() == [9.0] * DIM
        written = module.train()(KEYS[:2]).detach()
        assert torch.equal(module.table.lookup(KEYS[:2]), written)
        tolerance = {"rtol": 1e-2, "atol": 1e-2} if dtype == "bfloat16" else {"rtol": 0, "atol": 0}
        torch.testing.assert_close(written, read[:2], **tolerance)

    def test_a_frozen_table_is_scaled_in_training_as_a_dense_one_is(self) -> None:
        module = HashEmbedding(DIM, **self.options).requires_grad_(False)
        module.table.upsert(KEYS, torch.ones(NUM_KEYS, DIM))
        module(KEYS[:1])
        assert module.table.lookup(KEYS).norm(dim=1).gt(0.71).tolist() == [False] + [True] * 5

    def test_weights_of_a_frozen_table_in_evaluation(self) -> None:
        """Their gradient is of the rows that were read."""
        hashed, dense = HashEmbeddingBag(DIM, **self.options), nn.EmbeddingBag(6, DIM, mode="sum")
        rows = torch.linspace(-2.0, 2.0, NUM_KEYS * DIM).reshape(NUM_KEYS, DIM)
        hashed.table.upsert(KEYS, rows)
        norms = rows.norm(dim=1, keepdim=True)
        dense.weight.data = torch.where(norms > 0.7, rows * 0.7 / norms, rows)
        grads = []
        for module in (hashed, dense):
            module.requires_grad_(False).eval()
            weights = torch.ones(2, 3, requires_grad=True)
            module(KEYS.reshape(2, 3), per_sample_weights=weights).square().sum().backward()
            grads.append(weights.grad)
        torch.testing.assert_close(*grads)

    @given(
        st.lists(st.integers(0, 8), max_size=8),
        st.floats(0.0, 3.0),
        st.sampled_from([0.5, 1.0, 2.0, 3.5, float("inf")]),
    )
    def test_limit_norms_equals_torch(self, keys: list[int], most: float, norm_type: float) -> None:
        rows = torch.linspace(-2.0, 2.0, NUM_KEYS * DIM).reshape(NUM_KEYS, DIM).contiguous()
        table = Table(DIM, optimizer=optim.Adagrad(lr=0.5))
        table.upsert(KEYS, rows)
        table.apply_gradients(KEYS, torch.ones(NUM_KEYS, DIM))
        expected, state = table.lookup(KEYS), next(iter(table.export())).state["sum"]
        mapped = Bags(*table.map(torch.tensor(keys, dtype=torch.int64), insert=False))
        factors = table.norm_factors(mapped, most, norm_type)
        known = torch.tensor([key for key in keys if key < NUM_KEYS], dtype=torch.int64)
        before = expected.clone()
        torch.embedding_renorm_(expected, known, most, norm_type)
        num_scaled = int((expected != before).any(1).sum())
        assert table.limit_norms(mapped, most, norm_type) == num_scaled or most == 0.0
        torch.testing.assert_close(table.lookup(KEYS), expected)
        for key, factor in zip(keys, factors, strict=True):
            if key < NUM_KEYS:
                torch.testing.assert_close(expected[key], before[key] * factor)
            else:
                assert factor == 1.0
        assert next(iter(table.export())).state["sum"].tolist() == state.tolist()
        assert table.update_count == 1


class TestFromPretrained:
    keys, rows = torch.tensor([7, -2]), torch.arange(6.0).reshape(2, 3)

    @pytest.mark.parametrize("freeze", [True, False])
    def test_equals_a_dense_one(self, freeze: bool) -> None:
        hashed = HashEmbedding.from_pretrained(self.keys, self.rows, freeze, name="item")
        dense = nn.Embedding.from_pretrained(self.rows.clone(), freeze)
        assert torch.equal(hashed(self.keys), dense(torch.tensor([0, 1])))
        assert hashed.weight.requires_grad == dense.weight.requires_grad == (not freeze)
        if freeze:
            return
        step(RowOptimizer(hashed, torch.optim.SGD, lr=0.1), hashed(self.keys))
        step(torch.optim.SGD(dense.parameters(), lr=0.1), dense(torch.tensor([0, 1])))
        torch.testing.assert_close(hashed(self.keys), dense(torch.tensor([0, 1])))

    def test_bag_with_options(self) -> None:
        bag = HashEmbeddingBag.from_pretrained(self.keys, self.rows, mode="mean", padding_idx=0)
        assert bag(torch.tensor([[7, -2, 0]])).tolist() == [[1.5, 2.5, 3.5]]

    @pytest.mark.parametrize(
        ("keys", "options", "text"),
        [
            ([7, 7], {}, "2 keys made 1 rows"),
            ([7, 8], {"max_rows": 1}, "2 keys made 1 rows.*max_rows"),
            ([7, 8], {"padding_idx": 8}, "padding_idx 8 has no row"),
            ([7], {}, "a row for each of 1 keys"),
        ],
    )
    def test_what_does_not_fit(self, keys: list[int], options: Any, text: str) -> None:
        with pytest.raises(ValueError, match=text):
            HashEmbedding.from_pretrained(torch.tensor(keys), self.rows, **options)


def test_backwards_accumulate_into_one_update() -> None:
    options: Any = {"optimizer": torch.optim.Adagrad, "name": "item"}
    one, four = HashEmbedding(3, **options), HashEmbedding(3, accumulate_steps=4, **options)
    batches = torch.randint(6, (4, 5), generator=torch.Generator().manual_seed(0))
    one(batches).square().sum().backward()
    for number, keys in enumerate(batches):
        four(keys).square().sum().backward()
        copied = copy.deepcopy(four) if number == 1 else None
        if copied is not None:  # the copy has none of the gradients
            for _ in range(3):
                copied(keys).square().sum().backward()
            assert copied.table.update_count == 0
    assert one.table.update_count == four.table.update_count == 1
    torch.testing.assert_close(one.table.lookup(KEYS), four.table.lookup(KEYS))
    four(batches[0]).sum().backward()
    four.load_state_dict(one.state_dict())
    for _ in range(3):
        four(batches[0]).sum().backward()
    assert four.table.update_count == 1
    with pytest.raises(ValueError, match="accumulate_steps=4 goes with optimizer="):
        HashEmbedding(3, accumulate_steps=4)


@pytest.mark.parametrize("eviction", [None, Evict.lru()])
def test_gradients_that_add_up_go_with_their_rows(eviction: Evict | None) -> None:
    """A load or a reset drops them, once it is known to succeed."""
    room: dict[str, Any] = {} if eviction is None else {"max_rows": 8, "eviction": eviction}
    module = HashEmbedding(3, name="u", optimizer=optim.SGD(lr=0.5), accumulate_steps=2, **room)
    keys = torch.arange(5)

    def backward() -> None:
        module(keys).sum().backward()

    backward()
    backward()
    state, rows = module.state_dict(), module.table.lookup(keys.numpy())
    for replace in (module.reset_parameters, lambda: module.load_state_dict(state)):
        backward()
        replace()
        count = module.table.update_count
        backward()
        assert module.table.update_count == count
        backward()
        assert module.table.update_count == count + 1
    torch.testing.assert_close(module.table.lookup(keys.numpy()), rows - 1.0)
    module.load_state_dict(state)
    backward()
    with pytest.raises(RuntimeError, match="weight: must have shape"):
        module.load_state_dict(state | {"weight": torch.zeros(5, 2)})
    backward()  # the first one has waited
    torch.testing.assert_close(module.table.lookup(keys.numpy()), rows - 1.0)
