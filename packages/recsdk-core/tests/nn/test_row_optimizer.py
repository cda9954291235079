"""RowOptimizer beside nn.Embedding(Bag) and the loop's own optimizer, from equal first rows."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from recsdk_core.errors import BusyError
from recsdk_core.nn import HashEmbedding, HashEmbeddingBag, RowOptimizer

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

    def step(self, micro_batches: list[list[torch.Tensor]], factor: float = 1.0) -> None:
        """Each micro-batch is the keys of its lookups."""
        self.optimizer.zero_grad()
        for lookups in micro_batches:
            sums = [(self.module(keys) - 0.3).square().sum() for keys in lookups]
            loss = torch.stack(sums).sum() * factor / len(micro_batches)
            self.scaler.scale(loss).backward()
        self.scaler.unscale_(self.optimizer)
        if "clip" in self.habits:
            nn.utils.clip_grad_norm_(self.module.parameters(), 0.5)
        if "clip_value" in self.habits:
            nn.utils.clip_grad_value_(self.module.parameters(), 0.05)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.scheduler.step()


def make_loops(name: str, habits: set[str], is_bag: bool = False) -> tuple[Loop, Loop]:
    hashed, dense = make_pair(is_bag)
    kind, options = OPTIMIZERS[name]
    return (
        Loop(hashed, RowOptimizer(hashed, kind, **options), habits),
        Loop(dense, kind(dense.parameters(), **options), habits),
    )


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
@pytest.mark.parametrize("habits", ["", "scaler", "clip", "clip_value scheduler", "scaler clip"])
@pytest.mark.parametrize("num_micro_batches", [1, 4])
@pytest.mark.parametrize("is_bag", [False, True])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_equals_the_dense_twin(
    name: str, is_bag: bool, num_micro_batches: int, habits: str
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
    with torch.no_grad():
        copied(KEYS)
    optimizer = RowOptimizer(copied.train(), torch.optim.SGD, lr=1.0)
    copied(KEYS).sum().backward()
    optimizer.step()
    assert copied.table.update_count == 1
    assert module.table.update_count == 0


def test_what_is_refused() -> None:
    fused = HashEmbedding(2, name="item", optimizer=torch.optim.SGD)
    with pytest.raises(ValueError, match="'item' was given an optimizer"):
        RowOptimizer(fused, torch.optim.SGD)
    with pytest.raises(ValueError, match=r"got Parameter \(4, 2\)"):
        RowOptimizer(nn.Linear(2, 4).parameters(), torch.optim.SGD)
    with pytest.raises(ValueError, match="found no table in Linear"):
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
    with pytest.raises(ValueError, match="no further group"):
        optimizer.add_param_group({"params": [module.weight]})
    with pytest.raises(BusyError, match="'item'"):
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
