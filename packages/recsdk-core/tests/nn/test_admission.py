"""Modules that keep new keys out: each training forward is a step, and nothing else is.

`testing.ReferenceTable` says in plain Python which keys get a row and how they are trained. Shape
letter: N keys.
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
from torch.optim.swa_utils import AveragedModel
from torch.utils import checkpoint

from recsdk_core import Admit, Default, Evict, Outcome, init, optim
from recsdk_core.nn import HashEmbedding, HashEmbeddingBag, RowOptimizer
from recsdk_core.testing import ReferenceTable

PADDING = 4
RULES = [
    Admit.count(3, max_records=600),
    Admit.probability(0.3),
    Admit.count_sketch(3, max_bytes=2**19),
    (Admit.count(4) & Admit.probability(0.5)) | Admit.count(9),
]
CLICKS = Admit.show_click(alpha=0.25, beta=0.5, threshold=1.25)
OF_STEP = Admit.show_click_of_step(alpha=0.25, beta=0.5, threshold=0.75)
ROOMS: list[dict[str, Any]] = [{}, {"max_rows": 60, "eviction": Evict.lru()}]
PLAIN: dict[str, Any] = {
    "optimizer": optim.SGD(lr=1.0),
    "name": "item",
    "initializer": init.Constant(value=0.0),
    "default": Default.constant(2.5),
}
Batch = tuple[torch.Tensor, dict[str, Any]]


def stream(num_steps: int, seed: int = 7) -> list[Batch]:
    """Power-law keys (30, 2) whose popular ones drift; of every second step with counts."""
    random = np.random.default_rng(seed)
    batches = []
    for step in range(num_steps):
        keys = torch.from_numpy(random.zipf(1.3, (30, 2)) % 4000 + 9 * step)
        counts = torch.from_numpy(random.integers(1, 3, (30, 2)))
        batches.append((keys, {"counts": counts} if step % 2 else {}))
    return batches


def embedding(rule: Admit, **kwargs: Any) -> HashEmbedding:
    return HashEmbedding(2, admission=rule, **{**PLAIN, **kwargs})


def bag(rule: Admit, **kwargs: Any) -> HashEmbeddingBag:
    return HashEmbeddingBag(2, admission=rule, **{**PLAIN, **kwargs})


def content(module: Any) -> dict[str, Any]:
    """All that a module has, whatever its row numbers."""
    state = module.state_dict()
    order = state["keys"].argsort()
    of_rows = ("weight", "keys", "state.", "evict_")
    return {
        name: (each[order] if name.startswith(of_rows) and name != "evict_clock" else each).tolist()
        for name, each in state.items()
    }


@pytest.mark.parametrize("room", ROOMS, ids=["stays", "lru"])
@pytest.mark.parametrize("rule", RULES, ids=["count", "probability", "sketch", "or"])
@pytest.mark.parametrize("make", [embedding, bag])
def test_a_training_forward_is_a_step(
    make: Callable[..., Any], rule: Admit, room: dict[str, Any]
) -> None:
    module = make(rule, padding_idx=PADDING, **room)
    model = ReferenceTable(2, admission=rule, **PLAIN, **room)
    for keys, marks in stream(10):
        kept = (keys != PADDING).reshape(-1).numpy()
        flat = keys.reshape(-1).numpy()[kept]
        counts = {name: each.reshape(-1).numpy()[kept] for name, each in marks.items()}
        expected = model.find_or_insert(flat, **counts)
        vectors = module(keys, **marks)
        if make is embedding:
            assert (vectors.detach().reshape(-1, 2).numpy()[kept] == expected).all()
        vectors.sum().backward()
        model.apply_gradients(flat, np.ones((len(flat), 2), np.float32))
    rows = {
        key: row
        for batch in model.export()
        for key, row in zip(batch.keys.tolist(), batch.weights.tolist(), strict=True)
    }
    found = content(module)
    assert dict(zip(found["keys"], found["weight"], strict=True)) == rows
    records = model.visible_records()
    assert found["admit_keys"] == sorted(records)
    assert found["admit_counts"] == [records[key].count for key in sorted(records)]
    stats = module.table.stats()
    assert stats.outcomes[Outcome.NOT_ADMITTED] > 100
    assert stats.outcomes[Outcome.INSERTED] > 20
    module.eval()
    for keys, _ in stream(2, seed=1):
        module(keys)
    assert content(module) == found
    module.table.check_invariants()


@pytest.mark.parametrize("room", ROOMS, ids=["stays", "lru"])
@pytest.mark.parametrize(
    "rule",
    [*RULES, CLICKS, OF_STEP],
    ids=["count", "probability", "sketch", "or", "clicks", "of_step"],
)
def test_copies_go_on_as_the_module_would(rule: Admit, room: dict[str, Any], tmp_path: Any) -> None:
    def made(**kwargs: Any) -> HashEmbedding:
        kwargs = {"optimizer": optim.Adagrad(lr=0.5), "name": "item", **kwargs}
        return HashEmbedding(3, admission=rule, **room, **kwargs)

    def run(module: HashEmbedding, batches: list[Batch]) -> None:
        for keys, marks in batches:
            clicked = {"clicks": (keys % 3 == 0).long()} if rule.needs_clicks else {}
            module(keys, **marks, **clicked).square().sum().backward()

    def loaded(state: dict[str, Any], **kwargs: Any) -> HashEmbedding:
        module = made(**kwargs)
        module(first[0][0], clicks=0 if rule.needs_clicks else None)  # is replaced
        module.load_state_dict(state)
        return module

    first, rest = stream(6), stream(6, seed=2)
    module = made()
    run(module, first)
    state = copy.deepcopy(module.state_dict())
    assert (len(state["admit_keys"]) > 50) == (rule not in (RULES[1], OF_STEP))
    assert ("admit_clicks" in state) == rule.keeps_clicks
    dcp.save(state, checkpoint_id=tmp_path)
    from_files = made()
    dcp.load(to_fill := from_files.state_dict(), checkpoint_id=tmp_path)
    from_files.load_state_dict(to_fill)
    given_later = loaded(state, optimizer=None)
    RowOptimizer(given_later, torch.optim.Adagrad, lr=0.5)
    assert content(given_later) == content(module)
    copies = [copy.deepcopy(module), pickle.loads(pickle.dumps(module)), loaded(state), from_files]
    run(module, rest)
    for each in copies:
        run(each, rest)
        assert content(each) == content(module)


def test_state_without_counts_loads_and_bad_counts_do_not() -> None:
    plain = HashEmbedding(2, name="item", optimizer=optim.SGD(lr=1.0))
    plain(torch.arange(5)).sum().backward()
    module = embedding(RULES[0])
    module(torch.tensor([7, 8]))
    found = module.load_state_dict(plain.state_dict(), strict=False)
    assert found.missing_keys == ["admit_keys", "admit_counts", "admit_steps", "evict_clock"]
    assert content(module)["keys"] == list(range(5))
    assert content(module)["admit_keys"] == []
    module(torch.tensor([8, 9]))
    state = module.state_dict()
    with pytest.raises(RuntimeError, match=r"Unexpected.*admit_keys"):
        plain.load_state_dict(state)
    before = content(module)
    for name, value, message in (
        ("admit_counts", torch.tensor([1]), r"admit_counts: must be int64 \(2,\)"),
        ("admit_counts", torch.tensor([1, 0]), "admit_counts: must be 1 or more, got 0"),
        ("admit_keys", torch.tensor([8, 4]), "must not repeat, nor be among keys, got"),
        ("admit_keys", torch.tensor([8, 8]), "must not repeat, nor be among keys, got 8 again"),
        ("evict_clock", torch.tensor([2, 0, 0, 0]), "evict_clock must be int64"),
    ):
        with pytest.raises(RuntimeError, match=message):
            module.load_state_dict({**state, name: value})
    del state["admit_steps"]
    with pytest.raises(RuntimeError, match=r"admit_steps.*must be there as well"):
        module.load_state_dict(state, strict=False)
    assert content(module) == before


def test_a_checkpoint_in_the_model_is_no_further_step() -> None:
    module, other = embedding(RULES[2]), embedding(RULES[2])
    for keys, _ in stream(6):
        vectors = checkpoint.checkpoint(module, keys, use_reentrant=False)
        (vectors * 1.0).sum().backward()
        other(keys).sum().backward()
        assert content(module) == content(other)
    evicting = embedding(RULES[0], max_rows=2, eviction=Evict.lru())
    vectors = checkpoint.checkpoint(evicting, torch.tensor([1, 2]), use_reentrant=False)
    with pytest.raises(RuntimeError, match=r"or they got none; look the table up outside"):
        vectors.square().sum().backward()


def test_averages_have_the_rows_of_the_model() -> None:
    model = torch.nn.Sequential(embedding(RULES[0], initializer=init.Uniform(low=-1.0, high=1.0)))
    averaged = AveragedModel(model)
    for keys, marks in stream(6):
        model[0](keys, **marks).sum().backward()
        averaged.update_parameters(model)
    own, other = content(model[0]), content(averaged.module[0])
    assert own["keys"] == other["keys"]
    # A key's first row counts for the averages before it came.
    first = HashEmbedding(2, name="item", initializer=init.Uniform(low=-1.0, high=1.0))
    rows = np.array(other["weight"], np.float32)
    began = first.table.find_or_insert(np.array(own["keys"]))
    trained = np.array(own["weight"], np.float32) - began
    assert (np.abs(rows - began) <= np.abs(trained) + 1e-5).all()
    assert (trained < -0.5).all()


def test_compiled_modules_count_as_eager_ones() -> None:
    modules = [bag(RULES[0], mode="mean") for _ in range(2)]
    calls = [modules[0], torch.compile(modules[1], fullgraph=True, backend="aot_eager")]
    for keys, _ in stream(5):
        for call in calls:
            call(keys).sum().backward()
    assert content(modules[0]) == content(modules[1])
    with pytest.raises(Exception, match="counts and clicks cannot be recorded"):
        calls[1](keys, counts=3)


def test_arguments_that_do_not_fit() -> None:
    keys = torch.tensor([[1, 2]])
    module = bag(RULES[0])
    for counts, kind, message in (
        (torch.tensor([1, 2]), ValueError, "counts must have the shape of keys"),
        (torch.tensor([[1.0, 2.0]]), TypeError, "counts must be a tensor of torch.int64"),
        (torch.tensor([[1, 0]]), ValueError, "counts must be 1 or more, got 0"),
        (True, TypeError, "counts must be a tensor of torch.int64"),
    ):
        with pytest.raises(kind, match=message):
            module(keys, counts=counts)
    with pytest.raises(ValueError, match="counts are given, and only calls that insert"):
        HashEmbedding(2)(keys, counts=1)
    module.eval()(keys, counts=9)  # checked, and not used
    assert (len(module.table), content(module)["admit_keys"]) == (0, [])
    with pytest.raises(TypeError, match="admission must be an Admit"):
        HashEmbedding(2, admission=3)  # type: ignore[arg-type]
    pretrained = HashEmbedding.from_pretrained(
        torch.tensor([5, 6]), torch.ones(2, 2), admission=RULES[0]
    )
    assert pretrained(torch.tensor([5, 7])).tolist() == [[1.0, 1.0], [0.0, 0.0]]
