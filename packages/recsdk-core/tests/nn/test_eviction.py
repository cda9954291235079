"""Modules whose tables evict: each training forward is a step, and nothing else is.

`testing.Eviction` says in plain Python which keys stay; rows and their Adagrad sums are followed
key by key. Shape letter: N keys.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from evicting import RuledKeys
from torch.optim.swa_utils import AveragedModel
from torch.utils import checkpoint

from recsdk_core import Evict, LeaveCause, Table, init, optim
from recsdk_core.nn import HashEmbedding, HashEmbeddingBag, RowOptimizer
from recsdk_core.testing import KeyMeta

MAX_ROWS = 100
PADDING = 4
RULES = [
    Evict.lru(),
    Evict.lru(by="time"),
    Evict.lfu(),
    Evict.lfu(half_life=2.5, min_age=3),
    Evict.score(),
    Evict.show_click(alpha=0.5, beta=1.5, decay=0.8),
    Evict.show_click_totals(alpha=0.5, beta=1.5, decay=0.4),
]
Marks = dict[str, Any]
Batch = tuple[torch.Tensor, Marks]


def stream(rule: Evict, num_steps: int, seed: int = 7) -> list[Batch]:
    """Power-law keys (30, 2) whose popular ones drift, with what the rule takes."""
    random = np.random.default_rng(seed)
    batches = []
    for step in range(num_steps):
        keys = torch.from_numpy(random.zipf(1.2, (30, 2)) % 4000 + 9 * step)
        marks: Marks = {}
        if rule.by == "time":
            marks["times"] = torch.from_numpy(random.integers(0, 5, (30, 2)) + 3 * step)
        if rule.order == "score":
            scores = random.integers(-3, 3, (30, 2)).astype(np.float32)
            marks["scores"] = torch.from_numpy(scores)
        if rule.needs_clicks:
            marks["clicks"] = torch.from_numpy(random.integers(0, 3, (30, 2)))
        batches.append((keys, marks))
    return batches


class Model(RuledKeys):
    """Which keys have rows, and how often each row was trained by a gradient of 1."""

    def __init__(self, rule: Evict, padding: int | None = None) -> None:
        super().__init__(rule, MAX_ROWS)
        self.padding = padding
        self.trained: dict[int, list[int]] = {}

    def forward(self, batch: Batch) -> list[list[int]]:
        """A step; returns the rows of the batch that found room, each once for each occurrence."""
        keys, marks = batch
        kept = [i for i, key in enumerate(keys.reshape(-1).tolist()) if key != self.padding]
        flat = keys.reshape(-1)[kept].tolist()
        marks = {name: each.reshape(-1)[kept].tolist() for name, each in marks.items()}
        leaving, refused = self.call(flat, marks)
        for key in leaving:
            del self.trained[key]
        for key in set(flat) - refused:
            self.trained.setdefault(key, [0])
        return [self.trained[key] for key in flat if key not in refused]

    def backward(self, rows: list[list[int]]) -> None:
        for row in rows:  # also those whose key has left
            row[0] += 1


def assert_equal(module: Any, model: Model) -> None:
    """Keys and rows: each row began at 0, and lost 1 for each gradient."""
    rows = {
        key: row[0]
        for batch in module.table.export()
        for key, row in zip(batch.keys.tolist(), batch.weights.tolist(), strict=True)
    }
    assert rows == {key: -count[0] for key, count in model.trained.items()}


def content(module: Any) -> dict[str, Any]:
    """All that a module has, whatever its row numbers."""
    state = module.state_dict()
    order = state["keys"].argsort()
    return {
        name: (each[order] if each.dim() and len(each) == len(order) else each).tolist()
        for name, each in state.items()
    }


def embedding(rule: Evict, **kwargs: Any) -> HashEmbedding:
    kwargs = {"optimizer": optim.SGD(lr=1.0), "name": "item", "max_rows": MAX_ROWS, **kwargs}
    return HashEmbedding(2, initializer=init.Constant(value=0.0), eviction=rule, **kwargs)


def bag(rule: Evict, **kwargs: Any) -> HashEmbeddingBag:
    kwargs = {"optimizer": optim.SGD(lr=1.0), "name": "item", "max_rows": MAX_ROWS, **kwargs}
    return HashEmbeddingBag(2, initializer=init.Constant(value=0.0), eviction=rule, **kwargs)


@pytest.mark.parametrize("rule", RULES, ids=repr)
@pytest.mark.parametrize("make", [embedding, bag])
def test_a_training_forward_is_a_step(make: Callable[..., Any], rule: Evict) -> None:
    module, model = make(rule, padding_idx=PADDING), Model(rule, PADDING)
    frozen = make(rule, padding_idx=PADDING)
    frozen.weight.requires_grad_(False)
    for batch in stream(rule, 12):
        keys, marks = batch
        vectors = module(keys, **marks)
        frozen(keys, **marks)
        model.backward(model.forward(batch))
        vectors.sum().backward()
        assert_equal(module, model)
        assert {key for b in frozen.table.export() for key in b.keys.tolist()} == set(model.metas)
    assert module.table.stats().evicted > 100
    module.eval()
    before = module.table._image()
    for keys, marks in stream(rule, 2, seed=1):
        module(keys, **marks)
    assert module.table._image() == before


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("trains_in_step", [False, True])
def test_batches_in_flight_train_rows_that_left(trains_in_step: bool, accumulate: int) -> None:
    rule = Evict.lfu(half_life=1.0)
    how: dict[str, Any] = {"accumulate_steps": accumulate}
    module, model = embedding(rule, **({"optimizer": None} if trains_in_step else how)), Model(rule)
    optimizer = RowOptimizer(module, torch.optim.SGD, lr=1.0) if trains_in_step else None
    batches = stream(rule, 16)
    for pair in zip(batches[::2], batches[1::2], strict=True):
        # Both are looked up before either is trained, and what one evicts the other may train.
        flying = [(module(keys, **marks), model.forward((keys, marks))) for keys, marks in pair]
        for number, (vectors, rows) in enumerate(reversed(flying)):
            vectors.sum().backward()
            model.backward(rows)
            if optimizer is not None and (number + 1) % accumulate == 0:
                optimizer.step()
                optimizer.zero_grad()
        assert_equal(module, model)
    assert module.table.stats().evicted > 100
    module.table.check_invariants()


@pytest.mark.parametrize(
    ("rule", "dtype"),
    list(zip(RULES, ["float32", "bfloat16", "float16"] * 3, strict=False)),
    ids=repr,
)
def test_copies_go_on_as_the_module_would(rule: Evict, dtype: str, tmp_path: Any) -> None:
    def made(**kwargs: Any) -> HashEmbedding:
        kwargs = {"optimizer": optim.Adagrad(lr=0.5), "name": "item", **kwargs}
        return HashEmbedding(3, max_rows=MAX_ROWS, eviction=rule, dtype=dtype, **kwargs)

    def run(module: HashEmbedding, batches: list[Batch]) -> None:
        for keys, marks in batches:
            module(keys, **marks).square().sum().backward()

    def loaded(state: dict[str, Any], **kwargs: Any) -> HashEmbedding:
        module = made(**kwargs)
        module(first[0][0], **first[0][1])  # is replaced
        module.load_state_dict(state)
        return module

    first, rest = stream(rule, 6), stream(rule, 6, seed=2)
    module = made()
    if rule.by == "time":
        module.table.time = 3
    run(module, first)
    state = copy.deepcopy(module.state_dict())
    dcp.save(state, checkpoint_id=tmp_path)
    from_files = made()
    dcp.load(room := from_files.state_dict(), checkpoint_id=tmp_path)
    from_files.load_state_dict(room)
    given_later = loaded(state, optimizer=None)
    RowOptimizer(given_later, torch.optim.Adagrad, lr=0.5)
    copies = [
        copy.deepcopy(module),
        pickle.loads(pickle.dumps(module)),
        loaded(state),
        from_files,
    ]
    assert content(given_later) == content(module)
    run(module, rest)
    for each in copies:
        run(each, rest)
        assert content(each) == content(module)


def test_state_without_eviction_loads_and_state_of_another_rule_does_not() -> None:
    rule = Evict.lfu()
    plain = HashEmbedding(2, name="item", optimizer=optim.Adagrad())
    for keys, _ in stream(rule, 1):
        plain(keys).sum().backward()
    module, model = embedding(rule, optimizer=optim.Adagrad()), Model(rule)
    found = module.load_state_dict(plain.state_dict(), strict=False)
    assert found.missing_keys == ["evict_step", "evict_count", "evict_clock"]
    model.metas = {key: KeyMeta(-(2**63), -(2**63)) for key in module.state_dict()["keys"].tolist()}
    model.trained = {key: [0] for key in model.metas}
    for batch in stream(rule, 5, seed=3):
        module(batch[0])
        model.forward(batch)
    assert set(module.state_dict()["keys"].tolist()) == set(model.metas)
    state = module.state_dict()
    with pytest.raises(RuntimeError, match=r"Unexpected.*evict_step"):
        plain.load_state_dict(state)
    del state["evict_count"]
    with pytest.raises(RuntimeError, match=r"evict_count.*must be there as well"):
        module.load_state_dict(state, strict=False)
    bad = {**module.state_dict(), "evict_clock": torch.tensor([2, 0, 0, 0])}
    with pytest.raises(RuntimeError, match="evict_clock must be int64"):
        module.load_state_dict(bad)
    assert set(module.state_dict()["keys"].tolist()) == set(model.metas)


def test_state_that_does_not_fit_loses_its_lowest() -> None:
    wide, small = embedding(Evict.lru()), embedding(Evict.lru(), max_rows=10)
    for keys in torch.arange(60).reshape(6, 10):
        wide(keys)
    small.load_state_dict(wide.state_dict())
    assert small.state_dict()["keys"].tolist() == list(range(50, 60))


def test_a_checkpoint_in_the_model_is_no_further_step() -> None:
    rule = Evict.lfu()
    module, model = embedding(rule), Model(rule)
    for batch in stream(rule, 8):
        vectors = checkpoint.checkpoint(module, batch[0], use_reentrant=False)
        rows = model.forward(batch)
        (vectors * 1.0).sum().backward()
        model.backward(rows)
        assert_equal(module, model)
    full = embedding(Evict.lru(), max_rows=2)
    vectors = checkpoint.checkpoint(full, torch.tensor([1, 2]), use_reentrant=False)
    full(torch.tensor([3, 4]))
    with pytest.raises(RuntimeError, match="others took their room"):
        vectors.square().sum().backward()


def test_averages_have_the_keys_of_the_model() -> None:
    rule = Evict.lru(by="time")
    model = torch.nn.Sequential(embedding(rule))
    averaged = AveragedModel(model)
    for keys, marks in stream(rule, 6):
        model[0](keys, **marks).sum().backward()
        averaged.update_parameters(model)
        tables: list[Table] = [model[0].table, averaged.module[0].table]
        own, other = ({k for b in t.export() for k in b.keys.tolist()} for t in tables)
        assert own == other


def test_compiled_modules_evict_as_eager_ones() -> None:
    rule = Evict.lru(by="time")
    modules = [bag(rule, mode="mean") for _ in range(2)]
    calls = [modules[0], torch.compile(modules[1], fullgraph=True, backend="aot_eager")]
    for number, (keys, _) in enumerate(stream(rule, 6)):
        for module, call in zip(modules, calls, strict=True):
            module.table.time = number
            call(keys).sum().backward()
    assert modules[0].table._image() == modules[1].table._image()
    assert modules[0].table.stats().evicted > 50
    with pytest.raises(Exception, match="times, scores, counts and clicks cannot be recorded"):
        calls[1](keys, times=torch.zeros_like(keys))


def test_arguments_that_do_not_fit() -> None:
    with pytest.raises(ValueError, match="set max_rows"):
        HashEmbedding(2, eviction=Evict.lru())
    module = bag(Evict.score())
    keys = torch.tensor([[1, 2]])
    for marks, kind, message in (
        ({"scores": torch.tensor([1.0, 2.0])}, ValueError, r"scores must have the shape of keys"),
        ({"scores": torch.tensor([[1, 2]])}, TypeError, r"scores must be a tensor of torch.float"),
        ({"times": keys}, ValueError, "times"),
        ({"times": 1.5}, TypeError, "times must be a tensor of torch.int64"),
    ):
        with pytest.raises(kind, match=message):
            module(keys, **marks)
    assert len(module.table) == 0
    timed = embedding(Evict.lru(by="time"))
    with pytest.raises(ValueError, match="time"):
        timed(keys)
    pretrained = HashEmbedding.from_pretrained(
        torch.tensor([5, 6]), torch.ones(2, 2), max_rows=2, eviction=Evict.lru(by="time")
    )
    pretrained(torch.tensor([7]), times=-5)
    assert sorted(pretrained.state_dict()["keys"].tolist())[1] == 7
    with pytest.raises(ValueError, match="max_rows that holds"):
        HashEmbedding.from_pretrained(
            torch.tensor([5, 6, 7]), torch.ones(3, 2), max_rows=2, eviction=Evict.lru()
        )


def test_a_modules_table_evicts_by_a_predicate() -> None:
    bag = HashEmbeddingBag(2, name="item", max_rows=9, eviction=Evict.lru())
    for key in (1, 2):
        bag(torch.tensor([key]), torch.tensor([0]))
    assert bag.table.would_evict(where="idle >= 1") == {LeaveCause.EVICTED: 1}
    assert bag.table.evict(where="idle >= 1") == 1
    assert (1 in bag.table, 2 in bag.table) == (False, True)
