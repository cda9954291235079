"""Optimizer state of rows over resumes in one process: who loads, copies and trains when."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.optim import _apply_optimizer_in_backward as apply_in_backward

from recsdk_core import Admit, Default, Evict, optim
from recsdk_core.nn import HashEmbedding, RowOptimizer

NUM_KEYS, DIM = 5, 2
KEYS = torch.arange(NUM_KEYS)
KINDS: dict[str, tuple[Any, dict[str, Any]]] = {
    "sgd": (torch.optim.SGD, {"lr": 0.1}),
    "momentum": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    "adagrad": (torch.optim.Adagrad, {"lr": 0.1}),
    "adam": (torch.optim.Adam, {"lr": 0.1}),
}


def saved(*parts: Any) -> Any:
    """What torch.save and torch.load give back."""
    file = io.BytesIO()
    torch.save(parts, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda module: pickle.loads(pickle.dumps(module)),
    "made anew": lambda _: None,
}
TABLES: dict[str, dict[str, Any]] = {
    "named": {"name": "item"},
    "unnamed": {},
    "evicting": {"name": "item", "max_rows": 64, "eviction": Evict.lru()},
    "admitting": {"name": "item", "admission": Admit.count(1, max_records=64)},
    "sharing": {"name": "item", "max_rows": 64, "default": Default.shared_rows(2)},
}


class Twins:
    """One model of raw keys and its dense twin, with a state that a RowOptimizer would keep."""

    def __init__(self, kind: str, table: str) -> None:
        self.kind, self.options = KINDS[kind]
        self.table = TABLES[table]
        self.hashed = nn.ModuleList([HashEmbedding(DIM, **self.table)])
        self.dense = nn.ModuleList([nn.Embedding(NUM_KEYS, DIM)])
        rows = self.dense[0].weight.detach().clone()
        self.hashed[0].table.upsert(KEYS, rows)  # type: ignore[union-attr, operator]
        self.kept: Any = None
        """The dense optimizer's state that was loaded with rows, and not trained since."""
        self.num_updates = 0
        """Of the state that rows have."""
        self.make_optimizers()

    def make_optimizers(self) -> None:
        self.optimizer = RowOptimizer(self.hashed, self.kind, **self.options)
        self.dense_optimizer = self.kind(self.dense.parameters(), **self.options)
        self.num_claimed = 0
        """Of the state that the RowOptimizer's state_dict is of, until a step."""
        if self.kept is not None:
            self.dense_optimizer.load_state_dict(copy.deepcopy(self.kept))
        else:
            self.num_updates = 0

    def save(self) -> Any:
        parts = (self.hashed, self.optimizer, self.dense, self.dense_optimizer)
        return saved(*(each.state_dict() for each in parts), self.num_updates)

    def load(self, states: Any) -> None:
        self.num_updates = states[4]
        self.hashed.load_state_dict(states[0])
        self.dense.load_state_dict(states[2])
        self.dense_optimizer.load_state_dict(copy.deepcopy(states[3]))
        self.kept = states[3]

    def do(self, act: str, states: Any) -> None:
        """Anything that a loop may do between two steps."""
        if act == "load the model":
            self.load(states)
        elif act == "load the optimizer":
            self.optimizer.load_state_dict(states[1])  # rows' state comes with the model
            self.num_claimed = states[4]
        elif act == "make an optimizer":
            self.make_optimizers()
        elif act == "load nothing":
            self.hashed.load_state_dict({}, strict=False)
        elif act == "evaluate":
            self.hashed.eval()[0](KEYS)
            self.hashed.train()
        elif act == "zero_grad":
            self.hashed.zero_grad()

    def copy(self, how: str, acts: list[str]) -> None:
        """A copy needs an optimizer, and one that is made anew rows before it is trained."""
        made = nn.ModuleList([HashEmbedding(DIM, **self.table)])
        self.hashed = COPIES[how](self.hashed) or made
        if how == "made anew" and "load the model" not in acts:
            acts.insert(0, "load the model")
        if "make an optimizer" not in acts:
            acts.append("make an optimizer")

    @property
    def lacks_state(self) -> bool:
        """Whether the optimizer's state was loaded, and that of its rows was not."""
        return bool(self.num_claimed and not self.num_updates and self.hashed[0].table.state_fields)

    def train(self, num_steps: int, by: float, zeroes: bool) -> None:
        for _ in range(num_steps):
            self.optimizer.zero_grad()
            (self.hashed[0](KEYS) - by).square().sum().backward()
            if self.lacks_state:
                with pytest.raises(RuntimeError, match="rows have fresh state: load_state_dict"):
                    self.optimizer.step()
                self.optimizer.zero_grad()
                self.make_optimizers()
                (self.hashed[0](KEYS) - by).square().sum().backward()
            self.optimizer.step()
            self.dense_optimizer.zero_grad()
            (self.dense[0](KEYS) - by).square().sum().backward()
            self.dense_optimizer.step()
            if zeroes:  # else the gradients that were applied are there when others come
                self.optimizer.zero_grad()
            self.kept, self.num_claimed = None, 0
            self.num_updates += 1

    def check(self) -> None:
        rows = self.hashed[0].table.lookup(KEYS)  # type: ignore[union-attr, operator]
        torch.testing.assert_close(rows, self.dense[0].weight.detach(), rtol=2e-5, atol=2e-6)


ACTS = [
    "load the model",
    "make an optimizer",
    "load the optimizer",
    "load nothing",
    "evaluate",
    "zero_grad",
]
ROUNDS = st.lists(
    st.tuples(
        st.sampled_from([None, *COPIES]),
        st.lists(st.sampled_from(ACTS), max_size=5),
        st.integers(0, 2),
        st.sampled_from([-0.5, 0.3]),
        st.booleans(),
    ),
    min_size=1,
    max_size=4,
)


@given(
    rounds=ROUNDS,
    kind=st.sampled_from(sorted(KINDS)),
    table=st.sampled_from(sorted(TABLES)),
    which=st.randoms(use_true_random=False),
)
def test_any_order_of_loads_equals_the_dense_twin(
    rounds: Any, kind: str, table: str, which: Any
) -> None:
    twins = Twins(kind, table)
    twins.train(1, 0.1, True)
    states = [twins.save()]
    for how, drawn, num_steps, by, zeroes in rounds:
        acts = list(drawn)
        if how is not None:
            twins.copy(how, acts)
        for act in acts:
            twins.do(act, which.choice(states))
        twins.train(num_steps, by, zeroes)
        twins.check()
        states.append(twins.save())


def train(module: HashEmbedding, optimizer: RowOptimizer | None) -> None:
    (module(KEYS) - 0.3).square().sum().backward()
    if optimizer is not None:
        optimizer.step()
        optimizer.zero_grad()


def told_by_itself(module: HashEmbedding) -> None:
    module.table.set_optimizer(optim.Adagrad(lr=0.1))


def told_by_weight(module: HashEmbedding) -> None:
    apply_in_backward(torch.optim.Adagrad, [module.weight], {"lr": 0.1})


def told_by_optimizer(module: HashEmbedding) -> RowOptimizer:
    return RowOptimizer(module, torch.optim.Adagrad, lr=0.1)


def make(**options: Any) -> HashEmbedding:
    return HashEmbedding(DIM, name="item", **options)


@pytest.mark.parametrize("how", COPIES)
@pytest.mark.parametrize("is_told_first", [False, True])
@pytest.mark.parametrize("tell", [told_by_itself, told_by_weight, told_by_optimizer])
def test_state_survives_whoever_says_how_to_train(
    tell: Callable[[HashEmbedding], Any], is_told_first: bool, how: str
) -> None:
    module = make()
    optimizer = tell(module)
    train(module, optimizer)
    (state,) = saved(module.state_dict())
    train(module, optimizer)
    resumed = make()
    if is_told_first:
        tell(resumed)
    resumed.load_state_dict(state)
    resumed.load_state_dict({}, strict=False)  # as for other modules of a model
    resumed = COPIES[how](resumed) or resumed
    # torch's own copies too forget what apply_optimizer_in_backward gave to a parameter.
    forgot = tell is told_by_optimizer or (tell is told_by_weight and how != "made anew")
    second = tell(resumed) if forgot or not is_told_first else None
    train(resumed, second)
    assert_equal(resumed.state_dict(), module.state_dict())


@pytest.mark.parametrize("options", [{"accumulate_steps": 2}, {}])
@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_state_survives_in_modules_with_an_optimizer(how: str, options: dict[str, int]) -> None:
    module = make(optimizer=optim.Adam(lr=0.1), **options)
    for _ in range(2):
        train(module, None)
    (state,) = saved(module.state_dict())
    resumed = COPIES[how](module)
    train(resumed, None)
    resumed.load_state_dict(state)
    for each in (module, resumed):
        train(each, None)
        train(each, None)
    assert_equal(resumed.state_dict(), module.state_dict())


@pytest.mark.parametrize(
    "rule", [{"eviction": Evict.lru()}, {"admission": Admit.count(2, max_records=64)}, {}]
)
def test_state_survives_with_rules(rule: dict[str, Any]) -> None:
    module = make(**rule, max_rows=64)
    optimizer = told_by_optimizer(module)
    for _ in range(3):
        train(module, optimizer)
    (state,) = saved(module.state_dict())
    resumed = COPIES["deepcopy"](module)
    resumed.load_state_dict(state)
    second = told_by_optimizer(resumed)
    assert_equal(resumed.state_dict(), state)
    train(module, optimizer)
    train(resumed, second)
    assert_equal(resumed.state_dict(), module.state_dict())


def test_a_new_optimizer_begins_anew_once_loaded_state_was_trained() -> None:
    module = make()
    optimizer = told_by_optimizer(module)
    train(module, optimizer)
    (state,) = saved(module.state_dict())
    for is_loaded in (False, True):
        if is_loaded:
            module.load_state_dict(state)
            train(module, optimizer)
        optimizer = told_by_optimizer(module)
        assert not module.state_dict()["state.sum"].any()


def test_state_of_another_optimizer_is_refused_until_it_is_left_out() -> None:
    module = make()
    optimizer = told_by_optimizer(module)
    train(module, optimizer)
    (state,) = saved(module.state_dict())
    module.load_state_dict(state)
    with pytest.raises(ValueError, match=r"'item': state \{'sum': 2\}.*which has \{\}.*leave"):
        RowOptimizer(module, torch.optim.SGD, lr=0.1)
    assert_equal(module.state_dict(), state)
    told_by_optimizer(module)  # the optimizer that was saved, any number of times
    told_by_optimizer(module)
    assert_equal(module.state_dict(), state)
    without = {name: each for name, each in state.items() if not name.startswith("state.")}
    module.load_state_dict(without, strict=False)
    RowOptimizer(module, torch.optim.SGD, lr=0.1)


def assert_equal(given: dict[str, Any], wanted: dict[str, Any]) -> None:
    assert given.keys() == wanted.keys()
    for name, value in wanted.items():
        torch.testing.assert_close(given[name], value, rtol=0, atol=0, msg=name)


@pytest.mark.parametrize("table", TABLES)
def test_rows_load_after_a_loop_that_ended_with_a_step(table: str) -> None:
    twins = Twins("adagrad", table)
    twins.train(1, 0.1, False)
    states = twins.save()
    twins.train(1, 0.3, False)
    twins.load(states)
    assert twins.hashed[0].weight.grad is None  # its rows are no more
    twins.train(2, -0.5, False)
    twins.check()
    other = nn.ModuleList([HashEmbedding(DIM, **TABLES[table])])
    other[0](KEYS + 1)
    twins.hashed.load_state_dict(other.state_dict(), strict=False)  # and its drawn name
    assert torch.equal(twins.hashed[0](KEYS + 9), other[0](KEYS + 9))
