"""RowOptimizer beside nn.Embedding(Bag) and the loop's own optimizer, from equal first rows."""

from __future__ import annotations

import copy
import os
import pickle
from itertools import cycle, product
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from recsdk_core import optim
from recsdk_core.errors import BusyError
from recsdk_core.nn import HashEmbedding, HashEmbeddingBag, RowOptimizer

IS_FULL = os.environ.get("RECSDK_TEST_PROFILE", "ci") == "full"
NUM_KEYS, DIM = 6, 3
KEYS = torch.arange(NUM_KEYS)
OPTIMIZERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "sgd": (torch.optim.SGD, {"lr": 0.1}),
    "momentum": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    "decay": (torch.optim.SGD, {"lr": 0.1, "weight_decay": 0.01}),
    "adagrad": (torch.optim.Adagrad, {"lr": 0.1, "lr_decay": 0.01}),
    "adam": (torch.optim.Adam, {"lr": 0.1}),
    "adamw": (torch.optim.AdamW, {"lr": 0.1}),
    "rmsprop": (torch.optim.RMSprop, {"lr": 0.01, "momentum": 0.5, "centered": True}),
}
HABITS = [
    "",
    "scaler",
    "clip",
    "clip_value scheduler",
    "scaler clip",
    "ema",
    "scaler clip scheduler ema",
]
TOLERANCE: dict[str, float] = {"rtol": 2e-5, "atol": 2e-6}


def make_pair(is_bag: bool = False) -> tuple[Any, Any]:
    """A hash module, and a dense twin with the same rows."""
    hashed: Any = HashEmbeddingBag(DIM) if is_bag else HashEmbedding(DIM)
    hashed(KEYS.reshape(1, -1))
    dense: Any = nn.EmbeddingBag(NUM_KEYS, DIM, mode="sum") if is_bag else nn.Embedding(NUM_KEYS, 3)
    with torch.no_grad():
        dense.weight.copy_(hashed.table.lookup(KEYS) * 50)
    hashed.table.upsert(KEYS, dense.weight.detach().clone())
    return hashed, dense


def rows_of(module: Any) -> torch.Tensor:
    if isinstance(module, (HashEmbedding, HashEmbeddingBag)):
        rows: torch.Tensor = module.table.lookup(KEYS)
        return rows
    return module.weight.detach()  # type: ignore[no-any-return]


class Loop:
    """One user's loop: all its habits, for either kind of module."""

    def __init__(self, module: Any, optimizer: torch.optim.Optimizer, habits: set[str]) -> None:
        self.module, self.optimizer, self.habits = module, optimizer, habits
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**14, enabled="scaler" in habits)
        gamma = 0.8 if "scheduler" in habits else 1.0
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma)
        average = get_ema_multi_avg_fn(0.8)
        self.average = AveragedModel(module, multi_avg_fn=average) if "ema" in habits else None

    def step(self, micro_batches: list[list[torch.Tensor]], factor: float = 1.0) -> None:
        """Each micro-batch is the keys of its lookups."""
        self.optimizer.zero_grad()
        for lookups in micro_batches:
            sums = [(self.module(keys) - 0.3).square().sum() for keys in lookups]
            loss = torch.stack(sums).sum() * factor / len(micro_batches)
            self.scaler.scale(loss).backward()
        self.scaler.unscale_(self.optimizer)
        self._finish()

    def train_model(self, micro_batches: list[Any], what: str, is_evaluated: bool) -> None:
        """Each micro-batch is what a forward of a `Model` takes."""
        for lookups in micro_batches:
            factor = 1e38 if what == "overflow" else 0.1
            self.scaler.scale(self.module(lookups) * factor).backward()
            if is_evaluated:
                self.module.eval()
                self.module(lookups)
                self.module.train()
        if what != "skip":
            self.scaler.unscale_(self.optimizer)
            self._finish()
            self.optimizer.zero_grad()

    def _finish(self) -> None:
        if "clip" in self.habits:
            nn.utils.clip_grad_norm_(self.module.parameters(), 0.5)
        if "clip_value" in self.habits:
            nn.utils.clip_grad_value_(self.module.parameters(), 0.05)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.scheduler.step()
        if self.average is not None:
            self.average.update_parameters(self.module)


def make_loops(name: str, habits: set[str], is_bag: bool = False) -> tuple[Loop, Loop]:
    hashed, dense = make_pair(is_bag)
    kind, options = OPTIMIZERS[name]
    return (
        Loop(hashed, RowOptimizer(hashed, kind, **options), habits),
        Loop(dense, kind(dense.parameters(), **options), habits),
    )


KINDS = list(product(OPTIMIZERS, HABITS))
STEPS = list(product([False, True], [1, 4]))


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
@pytest.mark.parametrize(  # every two of them together; all four in the full profile
    ("name", "habits", "is_bag", "num_micro_batches"),
    [(*a, *b) for a, b in (product(KINDS, STEPS) if IS_FULL else zip(KINDS, cycle(STEPS)))],
)
def test_equals_the_dense_twin(
    name: str, habits: str, is_bag: bool, num_micro_batches: int
) -> None:
    loops = make_loops(name, set(habits.split()), is_bag)
    torch.manual_seed(0)
    for number in range(6):
        drawn = [[torch.randint(NUM_KEYS, (4, 3))] for _ in range(num_micro_batches)]
        drawn[-1].append(KEYS.reshape(2, 3))  # all rows: torch moves untouched ones by momentum
        factor = 1e38 if number == 3 and "scaler" in habits else 1.0  # overflows once scaled
        for loop in loops:
            loop.step(drawn, factor)
        torch.testing.assert_close(rows_of(loops[0].module), rows_of(loops[1].module), **TOLERANCE)
        if "ema" in habits:
            averages = [rows_of(loop.average.module) for loop in loops]  # type: ignore[union-attr]
            torch.testing.assert_close(*averages, **TOLERANCE)
    expected = 6 - ("scaler" in habits)
    assert loops[0].module.table.update_count == expected


lookups = st.lists(st.lists(st.integers(0, NUM_KEYS - 1), max_size=5), min_size=1, max_size=3)
steps = st.lists(
    st.tuples(st.lists(lookups, min_size=1, max_size=3), st.booleans(), st.booleans()), max_size=5
)


@given(steps, st.sampled_from(["sgd", "adagrad"]), st.booleans())
def test_any_loop_equals_the_dense_twin(drawn: Any, name: str, clips: bool) -> None:
    """Steps of micro-batches of lookups; some are left out, some have evaluation in between."""
    loops = make_loops(name, set())
    for micro_batches, is_stepped, is_evaluated in drawn:
        for loop in loops:
            for each in micro_batches:
                made = [loop.module(torch.tensor(keys, dtype=torch.int64)) for keys in each]
                torch.cat(made).square().sum().backward()
                if is_evaluated:
                    loop.module.eval()
                    loop.module(KEYS)
                    loop.module.train()
            if clips:
                nn.utils.clip_grad_norm_(loop.module.parameters(), 0.1)
            if is_stepped:
                loop.optimizer.step()
                loop.optimizer.zero_grad()
        torch.testing.assert_close(rows_of(loops[0].module), rows_of(loops[1].module), **TOLERANCE)


class Model(nn.Module):
    """Two tables and a dense layer behind both; a forward looks up either, any number of times."""

    def __init__(self, tables: list[Any]) -> None:
        super().__init__()
        self.tables, self.head = nn.ModuleList(tables), nn.Linear(DIM, 2)
        with torch.no_grad():
            self.head.weight.copy_(torch.linspace(-1, 1, 2 * DIM).view(2, DIM))
            self.head.bias.fill_(0.1)

    def forward(self, looked_up: list[tuple[int, list[int]]]) -> torch.Tensor:
        keys = [(table, torch.tensor(each, dtype=torch.int64)) for table, each in looked_up]
        vectors = torch.cat([self.tables[table](each) for table, each in keys])
        return self.head(vectors).square().sum() + (vectors - 0.3).square().sum()  # type: ignore[no-any-return]


key_lists = st.lists(st.integers(0, NUM_KEYS - 1), max_size=5)
forwards = st.lists(st.tuples(st.integers(0, 1), key_lists), min_size=1, max_size=4)
model_steps = st.lists(
    st.tuples(
        st.lists(forwards, min_size=1, max_size=4),
        st.sampled_from(["step", "step", "skip", "overflow"]),
        st.booleans(),
    ),
    min_size=1,
    max_size=6,
)


@given(
    model_steps,
    st.sampled_from(["sgd", "adagrad"]),
    st.sets(st.sampled_from(["clip", "scheduler"])),
)
@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
def test_any_loop_over_a_model_equals_the_dense_twin(
    drawn: Any, name: str, habits: set[str]
) -> None:
    """Tables shared by lookups, accumulated and skipped steps, evaluation in between, averages.

    A step that is left out keeps its gradients; one that overflows is skipped by the scaler.
    """
    kind, options = OPTIMIZERS[name]
    tables = [make_pair() for _ in range(2)]
    hashed, dense = (Model([pair[i] for pair in tables]) for i in range(2))
    loops = [
        Loop(hashed, RowOptimizer(hashed, kind, **options), {*habits, "scaler", "ema"}),
        Loop(dense, kind(dense.parameters(), **options), {*habits, "scaler", "ema"}),
    ]
    for micro_batches, what, is_evaluated in drawn:
        for loop in loops:
            loop.train_model(micro_batches, what, is_evaluated)
        for index in range(2):
            own, other = (loop.module.tables[index] for loop in loops)
            torch.testing.assert_close(rows_of(own), rows_of(other), **TOLERANCE)
    averages: list[Any] = [loop.average.module for loop in loops]  # type: ignore[union-attr]
    for index in range(2):
        own, other = (average.tables[index] for average in averages)
        torch.testing.assert_close(rows_of(own), rows_of(other), **TOLERANCE)
    for own, other in zip(hashed.head.parameters(), dense.head.parameters(), strict=True):
        torch.testing.assert_close(own, other, **TOLERANCE)


def test_the_gradient_has_the_touched_rows_only_and_the_rows_wait() -> None:
    module = HashEmbedding(2)
    module(KEYS)
    optimizer = RowOptimizer(module.parameters(), torch.optim.SGD, lr=1.0)
    first = module.table.lookup(KEYS)
    for _ in range(2):
        module(torch.tensor([5, 2, 5])).sum().backward()
    assert module.weight.grad is not None
    assert module.weight.grad.tolist() == [[4.0, 4.0], [2.0, 2.0]]
    assert torch.equal(module.table.lookup(KEYS), first)
    optimizer.step()
    assert (first - module.table.lookup(KEYS))[:, 0].round().tolist() == [0, 0, 2, 0, 0, 4]
    optimizer.zero_grad()
    assert module.weight.grad is None
    optimizer.step()
    assert module.table.update_count == 1  # without gradients, none, as torch does


parts = st.lists(
    st.tuples(
        st.lists(st.lists(st.integers(0, NUM_KEYS - 1), max_size=3), min_size=1, max_size=3),
        st.sampled_from(["sum", "mean"]),
        st.booleans(),
    ),
    min_size=1,
    max_size=5,
)


@given(parts, st.integers(0, 2**6), st.integers(0, 2**10))
def test_bits_do_not_depend_on_when_gradients_are_added_up(
    drawn: Any, read: int, most_bytes: int
) -> None:
    """Of bags of either pooling, with and without weights; `read` has a bit for each backward."""
    module = HashEmbeddingBag(DIM, include_last_offset=True, max_rows=4)
    optimizer = RowOptimizer(module, torch.optim.SGD, lr=1.0)
    twin = copy.deepcopy(module)
    others = RowOptimizer(twin, torch.optim.SGD, lr=1.0)
    module.weight.gradients.most_bytes = most_bytes
    torch.manual_seed(0)
    for number, (bags, mode, is_weighted) in enumerate(drawn):
        keys = torch.tensor([key for bag in bags for key in bag], dtype=torch.int64)
        lengths = torch.tensor([0, *map(len, bags)])
        weights = torch.rand(keys.shape) if is_weighted else None
        grad, offsets = torch.randn(len(bags), DIM), lengths.cumsum(0)
        module.mode = twin.mode = mode
        twin(keys, offsets.clone(), weights).backward(grad.clone())
        given = None if weights is None else weights.clone()
        module(keys, offsets, given).backward(grad)
        for buffer in (
            offsets,
            grad,
            *([] if given is None else [given]),
        ):  # as a caller who reuses them
            buffer.fill_(0)
        if read >> number & 1:
            assert module.weight.grad is not None
    grad_of = others.param_groups[0]["params"][0].grad
    assert torch.equal(module.weight.grad, grad_of)
    for each in (optimizer, others):
        each.step()
    assert torch.equal(module.table.lookup(KEYS), twin.table.lookup(KEYS))


@pytest.mark.parametrize(("mode", "is_weighted"), [("sum", True), ("sum", False), ("mean", False)])
@pytest.mark.parametrize("reads", [False, True])
def test_bags_equal_the_dense_twin(mode: str, is_weighted: bool, reads: bool) -> None:
    hashed, dense = make_pair(is_bag=True)
    hashed.mode = dense.mode = mode
    optimizers = [RowOptimizer(hashed, torch.optim.Adam), torch.optim.Adam(dense.parameters())]
    torch.manual_seed(0)
    for _ in range(4):
        keys, weights = torch.randint(NUM_KEYS, (5, 4)), torch.rand(5, 4)
        keys[0] = torch.arange(4)
        keys[1] = torch.arange(2, 6)
        for module, optimizer in zip((hashed, dense), optimizers, strict=True):
            optimizer.zero_grad()
            for sign in (1.0, -0.5):
                given = weights.clone().requires_grad_() if is_weighted else None
                module(keys, per_sample_weights=given).square().sum().mul(sign).backward()
                if is_weighted:
                    assert given is not None
                    assert given.grad is not None
                    assert given.grad.abs().sum() > 0
                if reads and module is hashed:
                    assert module.weight.grad is not None
            optimizer.step()
    torch.testing.assert_close(rows_of(hashed), rows_of(dense), **TOLERANCE)


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("is_grouped", [False, True])
def test_dense_parameters_train_beside_the_tables(name: str, is_grouped: bool) -> None:
    """One optimizer over a whole model, as torch's own has; resumed in the middle."""
    kind, options = OPTIMIZERS[name]
    pair = make_pair()
    models: list[Any] = [nn.Sequential(each, nn.Linear(DIM, 1)) for each in pair]
    models[0][1].load_state_dict(models[1][1].state_dict())

    def made(kind: Any, model: Any, *more: Any) -> Any:
        if not is_grouped:
            return kind(model.parameters(), *more, **options)
        groups = [
            {"params": [model[0].weight, model[1].bias], "lr": 0.05},
            {"params": [model[1].weight]},
        ]
        return kind(groups, *more, **options)

    optimizers = [made(RowOptimizer, models[0], kind), made(kind, models[1])]
    schedulers = [torch.optim.lr_scheduler.ExponentialLR(each, 0.9) for each in optimizers]
    for number in range(4):
        for model, optimizer, scheduler in zip(models, optimizers, schedulers, strict=True):
            optimizer.zero_grad()
            (model(KEYS) - KEYS[:, None]).square().sum().backward()
            nn.utils.clip_grad_norm_(model.parameters(), 10.0)
            optimizer.step()
            scheduler.step()
        if number == 1:
            states = copy.deepcopy((models[0].state_dict(), optimizers[0].state_dict()))
            models[0] = nn.Sequential(HashEmbedding(DIM), nn.Linear(DIM, 1))
            optimizers[0] = made(RowOptimizer, models[0], kind)
            models[0].load_state_dict(states[0])
            schedulers[0] = torch.optim.lr_scheduler.ExponentialLR(optimizers[0], 0.9)
            optimizers[0].load_state_dict(states[1])
            schedulers[0].last_epoch = schedulers[1].last_epoch
    torch.testing.assert_close(rows_of(models[0][0]), rows_of(models[1][0]), **TOLERANCE)
    for own, other in zip(models[0][1].parameters(), models[1][1].parameters(), strict=True):
        torch.testing.assert_close(own, other, **TOLERANCE)


def test_options_of_a_group_are_taken() -> None:
    module = HashEmbedding(2)
    group = {"params": [module.weight], "weight_decay": 0.25}
    RowOptimizer([group], torch.optim.SGD, lr=0.1)
    assert module.table.optimizer.weight_decay == 0.25  # type: ignore[union-attr]
    with pytest.raises(ValueError, match="amsgrad=True is not supported"):
        RowOptimizer([{"params": [HashEmbedding(2).weight], "amsgrad": True}], torch.optim.Adam)


def test_foreach_utilities_take_gradients_of_rows() -> None:
    hashed, dense = make_pair()
    optimizers = [RowOptimizer(hashed, torch.optim.SGD), torch.optim.SGD(dense.parameters())]
    found = []
    for module, optimizer in zip((hashed, dense), optimizers, strict=True):
        module(KEYS).square().sum().backward()
        for is_foreach in (True, False):
            norm = nn.utils.clip_grad_norm_(module.parameters(), 0.5, foreach=is_foreach)
            nn.utils.clip_grad_value_(module.parameters(), 0.1, foreach=is_foreach)
            found.append(norm)
        grads = [each.grad for each in module.parameters()]
        found += torch._foreach_norm(grads)
        torch._foreach_mul_(grads, 0.5)
        nn.utils.clip_grads_with_norm_(module.parameters(), 0.01, nn.utils.get_total_norm(grads))
        optimizer.step()
    torch.testing.assert_close(found[:3], found[3:], **TOLERANCE)
    torch.testing.assert_close(rows_of(hashed), rows_of(dense), **TOLERANCE)


def test_keys_without_a_row_get_no_gradient() -> None:
    module = HashEmbedding(2, max_rows=2)
    RowOptimizer(module, torch.optim.SGD, lr=1.0)
    module(KEYS).sum().backward()
    assert module.weight.grad is not None
    assert module.weight.grad.shape == (2, 2)


def test_erased_rows_are_not_given_to_others_while_they_have_a_gradient() -> None:
    module = HashEmbedding(1)
    optimizer = RowOptimizer(module, torch.optim.SGD, lr=1.0)
    module(torch.tensor([1])).sum().backward()
    module.table.erase(torch.tensor([1]))
    module(torch.tensor([2]))
    before = module.table.lookup(torch.tensor([2]))
    optimizer.step()
    assert torch.equal(module.table.lookup(torch.tensor([2])), before)


@pytest.mark.parametrize("how", [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))])
def test_a_copy_needs_an_optimizer_of_its_own(how: Any) -> None:
    module = HashEmbedding(2, name="item")
    RowOptimizer(module, torch.optim.SGD, lr=1.0)
    module(KEYS).sum().backward()
    copied = how(module)
    assert copied.weight.grad is None
    with pytest.raises(RuntimeError, match=r"'item' is a copy.*make a RowOptimizer"):
        copied(KEYS)
    copied.eval()
    vectors = copied(KEYS)
    assert torch.equal(vectors, module.table.lookup(KEYS))
    with pytest.raises(RuntimeError, match=r"'item' is a copy.*make a RowOptimizer"):
        vectors.sum().backward()
    optimizer = RowOptimizer(copied.train(), torch.optim.SGD, lr=1.0)
    copied(KEYS).sum().backward()
    optimizer.step()
    assert copied.table.update_count == 1
    assert module.table.update_count == 0


def test_another_modules_table_is_refused() -> None:
    one, other = HashEmbedding(2, name="one"), HashEmbedding(2, name="other")
    other.table = one.table
    RowOptimizer(nn.ModuleList([one, other]), torch.optim.SGD)
    with pytest.raises(ValueError, match=r"'one' was put into a module.* 'other'"):
        other(KEYS)
    assert len(one.table) == 0


def test_what_is_refused() -> None:
    fused = HashEmbedding(2, name="item", optimizer=torch.optim.SGD)
    with pytest.raises(ValueError, match="'item' was given an optimizer"):
        RowOptimizer(fused, torch.optim.SGD)
    with pytest.raises(ValueError, match=r"found no table.*in what it was given, Linear;"):
        RowOptimizer(nn.Linear(2, 4), torch.optim.SGD)
    with pytest.raises(ValueError, match="amsgrad=True is not supported"):
        RowOptimizer(HashEmbedding(2), torch.optim.Adam, amsgrad=True)


def test_options_other_than_the_rate_may_not_change() -> None:
    module = HashEmbedding(2, name="item")
    optimizer = RowOptimizer(module, torch.optim.SGD, lr=1.0, momentum=0.5)
    module(KEYS).sum().backward()
    optimizer.param_groups[0]["momentum"] = 0.6
    with pytest.raises(ValueError, match="'item'.*only lr may change"):
        optimizer.step()
    assert module.table.update_count == 0
    with pytest.raises(BusyError, match="'item'.*zero_grad"):
        RowOptimizer(module, torch.optim.SGD)
    optimizer.zero_grad()
    RowOptimizer(module, torch.optim.SGD)
    with pytest.raises(RuntimeError, match="another RowOptimizer"):
        optimizer.step()


def test_resume_continues_as_if_never_stopped() -> None:
    def make() -> tuple[HashEmbedding, RowOptimizer]:
        module = HashEmbedding(2)
        return module, RowOptimizer(module, torch.optim.Adam, lr=0.1)

    def train(module: HashEmbedding, optimizer: RowOptimizer) -> None:
        optimizer.zero_grad()
        module(KEYS).square().sum().backward()
        optimizer.step()

    whole = make()
    train(*whole)
    whole[1].param_groups[0]["lr"] = 0.05
    states = copy.deepcopy((whole[0].state_dict(), whole[1].state_dict()))
    resumed = make()
    resumed[0].load_state_dict(states[0])
    resumed[1].load_state_dict(states[1])
    for each in (whole, resumed):
        train(*each)
    assert torch.equal(rows_of(whole[0]), rows_of(resumed[0]))
    assert resumed[0].table.learning_rate == 0.05


@pytest.mark.parametrize("how", [lambda module: module, copy.deepcopy])
def test_state_that_is_loaded_first_waits_for_the_optimizer(how: Any) -> None:
    def make() -> Any:
        return nn.Sequential(HashEmbedding(2, name="item"), nn.Linear(2, 1))

    def train(model: Any, optimizer: Any) -> None:
        optimizer.zero_grad()
        model(KEYS).square().sum().backward()
        optimizer.step()

    model = make()
    optimizer = RowOptimizer(model, torch.optim.Adam, lr=0.1)
    train(model, optimizer)
    states = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    resumed = make()
    resumed.load_state_dict(states[0])
    with pytest.raises(ValueError, match=r"'item': state \{'exp_avg': 2.*which has \{'sum': 2\}"):
        RowOptimizer(resumed, torch.optim.Adagrad)
    resumed = how(resumed)
    resumed[0].table.erase(torch.tensor([3]))  # what is gone does not come back
    model[0].table.erase(torch.tensor([3]))
    resumed[0](torch.tensor([77]))
    second = RowOptimizer(resumed, torch.optim.Adam, lr=0.1)
    second.load_state_dict(states[1])
    for each in ((model, optimizer), (resumed, second)):
        train(*each)
    assert torch.equal(rows_of(resumed[0]), rows_of(model[0]))
    assert torch.equal(resumed[1].weight, model[1].weight)


@pytest.mark.parametrize("norm_type", [2.0, float("inf")])
@pytest.mark.parametrize("num_backwards", [0, 1])
def test_a_step_of_empty_batches_only(num_backwards: int, norm_type: float) -> None:
    """Clipping and unscaling find nothing, as in a dense table whose gradient is zeros."""
    hashed, dense = HashEmbedding(DIM), nn.Embedding(NUM_KEYS, DIM)
    hashed.table.upsert(KEYS, dense.weight.detach().clone())
    optimizers = [
        RowOptimizer(hashed, torch.optim.Adagrad, lr=0.1),
        torch.optim.Adagrad(dense.parameters(), lr=0.1),
    ]
    nothing, norms = torch.empty(0, dtype=torch.int64), []
    for module, optimizer in zip((hashed, dense), optimizers, strict=True):
        scaler = torch.amp.GradScaler("cpu")
        for _ in range(num_backwards):
            scaler.scale(module(nothing).sum()).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_value_(module.parameters(), 0.5)
        norms.append(nn.utils.clip_grad_norm_(module.parameters(), 1.0, norm_type))
        optimizer.step()
    assert norms[0] == norms[1] == 0.0
    assert torch.equal(hashed.table.lookup(KEYS), dense.weight.detach())
    assert hashed.table.update_count == num_backwards
    (hashed(KEYS[:2]).sum() + hashed(nothing).sum()).backward()
    assert hashed.weight.grad is not None
    assert hashed.weight.grad.shape == (2, DIM)


@pytest.mark.parametrize("kind", [optim.SGD, torch.optim.SGD])
def test_a_rate_may_be_a_tensor_and_a_closure_gives_the_loss(kind: type) -> None:
    module, twin = make_pair()
    rate = torch.tensor(0.5)
    ours, theirs = (
        RowOptimizer(module.parameters(), kind, lr=rate),
        torch.optim.SGD(twin.parameters(), lr=rate),
    )
    for _ in range(2):
        losses = []
        for model, optimizer in ((module, ours), (twin, theirs)):

            def closure(model: Any = model, optimizer: Any = optimizer) -> torch.Tensor:
                optimizer.zero_grad()
                loss = model(KEYS).square().sum()
                loss.backward()
                return loss

            with torch.no_grad():
                losses.append(optimizer.step(closure))
        torch.testing.assert_close(*losses, **TOLERANCE)
        torch.testing.assert_close(rows_of(module), rows_of(twin), **TOLERANCE)
        rate.fill_(0.25)  # as schedulers do
