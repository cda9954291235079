"""Rows of the page for loops of one's own, beside nn.Embedding and the loop's own optimizer."""

from __future__ import annotations

import copy
import io
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import distribute_module
from torch.func import functional_call
from torch.nn import functional
from torch.optim.swa_utils import AveragedModel
from torch.utils.checkpoint import checkpoint

from claims import Page, assert_all_are_held, holds
from recsdk_core import Admit, Default, Evict, optim
from recsdk_core.nn import HashEmbedding, HashEmbeddingBag, RowOptimizer, l2

HERE = Path(__file__).parent
PAGE = Page(HERE.parents[1] / "docs" / "howto" / "train_in_your_own_loop.md")
HABITS, ARGUMENTS = "Habits", "Arguments of nn.Embedding and nn.EmbeddingBag"
NUM_KEYS, DIM = 6, 3
KEYS = torch.arange(NUM_KEYS)
RATE = 0.1


def test_every_row_is_held_by_a_test() -> None:
    assert_all_are_held(PAGE, [Path(__file__)])


class Twin:
    """An embedding, its optimizer, and what loops do with both."""

    def __init__(self, module: Any, optimizer: torch.optim.Optimizer) -> None:
        self.module, self.optimizer = module, optimizer

    def rows(self) -> torch.Tensor:
        if isinstance(self.module, nn.Embedding):
            return self.module.weight.detach().clone()
        found: torch.Tensor = self.module.table.lookup(KEYS)
        return found

    def loss(self, *keys: int) -> torch.Tensor:
        loss: torch.Tensor = (self.module(torch.tensor(keys)) - 0.5).square().sum()
        return loss


def twins(kind: Any = torch.optim.Adagrad, **options: Any) -> tuple[Twin, Twin]:
    """A table that a RowOptimizer trains, and a dense one with equal rows."""
    hashed, dense = HashEmbedding(DIM), nn.Embedding(NUM_KEYS, DIM)
    hashed.table.upsert(KEYS, dense.weight.detach().clone())
    return (
        Twin(hashed, RowOptimizer(hashed, kind, lr=RATE, **options)),
        Twin(dense, kind(dense.parameters(), lr=RATE, **options)),
    )


def fused(**options: Any) -> HashEmbedding:
    """A table whose optimizer is in backward."""
    settings = {"optimizer": torch.optim.SGD, "optimizer_kwargs": {"lr": RATE}, **options}
    return HashEmbedding(DIM, **settings)


def assert_equal(loop: Callable[[Twin], None], **options: Any) -> None:
    """Both twins have equal rows after the same loop."""
    pair = twins(**options)
    before = pair[0].rows()
    for twin in pair:
        loop(twin)
    torch.testing.assert_close(pair[0].rows(), pair[1].rows(), rtol=1e-5, atol=1e-6)
    assert not torch.equal(pair[0].rows(), before)


@holds(HABITS, "same", "several backwards before a step")
def test_accumulation() -> None:
    def loop(twin: Twin) -> None:
        for _ in range(3):
            for keys in ([0, 1], [1, 1], [5]):
                twin.loss(*keys).backward()
            twin.optimizer.step()
            twin.optimizer.zero_grad()

    assert_equal(loop)
    module, one = fused(), fused(accumulate_steps=2)
    for _ in range(2):
        module(KEYS).sum().backward()
        one(KEYS).sum().backward()
    assert (module.table.update_count, one.table.update_count) == (2, 1)


TWO_BACKWARDS = "two backwards through one forward (`retain_graph=True`)"


@holds(HABITS, "same", TWO_BACKWARDS)
def test_two_backwards_through_one_forward() -> None:
    def loop(twin: Twin) -> None:
        loss = twin.loss(0, 1, 1)
        loss.backward(retain_graph=True)
        loss.backward(retain_graph=True)
        twin.optimizer.step()
        twin.optimizer.zero_grad()
        loss.sum().backward()
        twin.optimizer.step()

    assert_equal(loop)
    loss = fused()(KEYS).sum()
    loss.backward(retain_graph=True)
    with pytest.raises(PAGE.error(HABITS, TWO_BACKWARDS), match="RowOptimizer"):
        loss.backward()


@holds(HABITS, "same", "one table looked up twice in a forward")
def test_two_lookups() -> None:
    def loop(twin: Twin) -> None:
        (twin.loss(0, 1) * twin.loss(1, 2)).backward()
        twin.optimizer.step()

    assert_equal(loop)
    module = fused()
    (module(KEYS[:2]).sum() + module(KEYS).sum()).backward()
    assert module.table.update_count == 2
    one = fused(accumulate_steps=2)
    for expected in (0, 1):
        (one(KEYS[:2]).sum() + one(KEYS).sum()).backward()
        assert one.table.update_count == expected


@holds(HABITS, "same", "GradScaler")
def test_scaler() -> None:
    def loop(twin: Twin) -> None:
        scaler = torch.amp.GradScaler("cpu", init_scale=65536.0)
        for factor in (1.0, 1e38, 1.0):
            twin.optimizer.zero_grad()
            scaler.scale(twin.loss(0, 0, 3) * factor).backward()
            scaler.step(twin.optimizer)
            scaler.update()
        assert scaler.get_scale() == 32768.0

    assert_equal(loop)
    loss = torch.amp.GradScaler("cpu").scale(fused()(KEYS).sum())
    with pytest.raises(RuntimeError, match="GradScaler has scaled"):
        loss.backward()


@pytest.mark.parametrize("clip", [nn.utils.clip_grad_norm_, nn.utils.clip_grad_value_])
@holds(HABITS, "same", "clip_grad_norm_", "clip_grad_value_")
def test_clipping(clip: Callable[..., Any]) -> None:
    def loop(twin: Twin) -> None:
        twin.loss(0, 0, 3).backward()
        clip(twin.module.parameters(), 0.01)
        twin.optimizer.step()

    assert_equal(loop, kind=torch.optim.SGD)
    module = fused(optimizer=optim.SGD(lr=1.0, clip_norm=0.5), optimizer_kwargs=None)
    first = module(KEYS).detach()
    (module(KEYS) * 100).sum().backward()
    assert nn.utils.clip_grad_norm_(module.parameters(), 1.0) == 0
    moved = (first - module(KEYS).detach()).norm(dim=1)
    torch.testing.assert_close(moved, torch.full((NUM_KEYS,), 0.5))


@holds(HABITS, "same", "a scheduler of the learning rate")
def test_schedulers() -> None:
    def loop(twin: Twin) -> None:
        scheduler = torch.optim.lr_scheduler.StepLR(twin.optimizer, 1, gamma=0.1)
        for _ in range(3):
            twin.optimizer.zero_grad()
            twin.loss(0, 4).backward()
            twin.optimizer.step()
            scheduler.step()

    assert_equal(loop)
    module = fused()
    module.table.learning_rate = 0.25
    assert module.table.optimizer == optim.SGD(lr=0.25)


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
@holds(HABITS, "refused", "a scheduler of momentum or betas")
def test_schedulers_of_momentum() -> None:
    module = HashEmbedding(DIM)
    optimizer = RowOptimizer(module, torch.optim.SGD, lr=RATE, momentum=0.9)
    torch.optim.lr_scheduler.OneCycleLR(optimizer, 1.0, total_steps=9)
    with pytest.raises(PAGE.error(HABITS, "a scheduler of momentum or betas"), match="only lr may"):
        optimizer.step()


@holds(HABITS, "same", "add_param_group")
def test_groups_that_are_added() -> None:
    pair = twins()
    for twin in pair:
        later = copy.deepcopy(pair[1].module)
        if twin is pair[0]:
            rows, later = later.weight.detach().clone(), HashEmbedding(DIM)
            later.table.upsert(KEYS, rows)
        twin.optimizer.add_param_group({"params": later.parameters(), "lr": 0.01})
        if twin is pair[1]:  # torch's Adagrad gives what is added no state
            twin.optimizer = torch.optim.Adagrad(later.parameters(), lr=0.01)
        twin.module = later
        twin.loss(0, 1, 1).backward()
        twin.optimizer.step()
    torch.testing.assert_close(pair[0].rows(), pair[1].rows(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("set_to_none", [True, False])
@holds(HABITS, "same", "zero_grad")
def test_zero_grad(set_to_none: bool) -> None:
    def loop(twin: Twin) -> None:
        twin.loss(0, 1).backward()
        twin.optimizer.zero_grad(set_to_none)
        twin.loss(0, 4).backward()
        twin.optimizer.step()

    assert_equal(loop, kind=torch.optim.SGD)


@holds(HABITS, "differs", "weight decay of the optimizer")
def test_weight_decay_is_of_touched_rows() -> None:
    pair = twins(torch.optim.SGD, weight_decay=0.5)
    before = pair[0].rows()
    for twin in pair:
        twin.loss(0, 1).backward()
        twin.optimizer.step()
    hashed, dense = (twin.rows() for twin in pair)
    torch.testing.assert_close(hashed[:2], dense[:2])
    assert torch.equal(hashed[2:], before[2:])
    torch.testing.assert_close(dense[2:], before[2:] * (1 - RATE * 0.5))


@holds(HABITS, "same", "a penalty on all rows")
def test_penalties() -> None:
    def loop(twin: Twin) -> None:
        dense = isinstance(twin.module, nn.Embedding)
        for _ in range(3):
            twin.optimizer.zero_grad()
            penalty = (
                twin.module.weight.square().sum() if dense else l2(twin.module, last_batch=False)
            )
            (twin.loss(0, 1) + 0.2 * penalty).backward()
            twin.optimizer.step()

    assert_equal(loop)
    module = fused()
    module(KEYS)
    with pytest.raises(PAGE.error(HABITS, "a penalty on all rows"), match="weight_decay"):
        l2(module)
    twin, _ = twins()
    twin.loss(0, 1)
    torch.testing.assert_close(l2(twin.module).detach(), twin.rows()[:2].square().sum())


@holds(HABITS, "same", "freezing with `requires_grad_(False)` between forward and backward")
def test_freezing_after_the_forward() -> None:
    def loop(twin: Twin) -> None:
        for is_frozen in (False, True, False):
            twin.optimizer.zero_grad()
            loss = twin.loss(0, 1, 1)
            twin.module.weight.requires_grad_(not is_frozen)
            loss.backward()
            twin.module.weight.requires_grad_()
            twin.optimizer.step()

    assert_equal(loop)
    module = fused()
    loss = module(KEYS).sum()
    module.weight.requires_grad_(False)
    loss.backward()
    assert module.table.update_count == 0


NEW_OPTIMIZER = "a new optimizer for the same model"


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adagrad, torch.optim.Adam])
@holds(HABITS, "same", NEW_OPTIMIZER)
def test_new_optimizers(kind: Any) -> None:
    def loop(twin: Twin) -> None:
        for number in range(3):
            if number and twin is pair[0]:
                twin.optimizer = RowOptimizer(twin.module, kind, lr=RATE / number)
            elif number:
                twin.optimizer = kind(twin.module.parameters(), lr=RATE / number)
            for _ in range(2):  # ends with a step, as most loops do
                twin.optimizer.zero_grad()
                twin.loss(*range(NUM_KEYS)).backward()
                twin.optimizer.step()

    pair = twins(kind)
    for twin in pair:
        loop(twin)
    torch.testing.assert_close(pair[0].rows(), pair[1].rows(), rtol=1e-5, atol=1e-6)
    module = pair[0].module
    pair[0].optimizer.zero_grad()
    waiting = module(KEYS)
    for _ in range(2):
        with pytest.raises(PAGE.error(HABITS, NEW_OPTIMIZER), match="step.*or zero_grad"):
            RowOptimizer(module, kind, lr=RATE)
        waiting.sum().backward()
        waiting = module(KEYS)


@holds(HABITS, "differs", "a model's `state_dict` loaded without the optimizer's")
def test_state_of_a_model_alone() -> None:
    twin, _ = twins()
    twin.loss(0, 1).backward()
    twin.optimizer.step()
    state = copy.deepcopy(twin.module.state_dict())
    left = {name: each for name, each in state.items() if not name.startswith("state.")}
    module = HashEmbedding(DIM)
    for loaded, is_kept in ((state, True), (left, False)):
        module.load_state_dict(loaded, strict=is_kept)
        RowOptimizer(module, torch.optim.Adagrad, lr=RATE)
        assert bool(module.state_dict()["state.sum"].any()) == is_kept
    other = fused(optimizer=torch.optim.Adagrad)
    other.load_state_dict(twin.module.state_dict())
    assert other.state_dict()["state.sum"].any()


STATE_ALONE = "an optimizer's `state_dict` loaded without the model's"


@holds(HABITS, "refused", STATE_ALONE)
def test_state_of_an_optimizer_alone() -> None:
    twin, _ = twins()
    twin.loss(0, 1).backward()
    twin.optimizer.step()
    states = copy.deepcopy((twin.module.state_dict(), twin.optimizer.state_dict()))
    copied = copy.deepcopy(twin.module)
    optimizer = RowOptimizer(copied, torch.optim.Adagrad, lr=RATE)
    optimizer.load_state_dict(states[1])
    with pytest.raises(PAGE.error(HABITS, STATE_ALONE), match="load_state_dict the model's too"):
        optimizer.step()
    copied.load_state_dict(states[0])
    for each in (twin, Twin(copied, optimizer)):
        each.optimizer.zero_grad()
        each.loss(0, 1).backward()
        each.optimizer.step()
    assert torch.equal(twin.rows(), copied.table.lookup(KEYS))


@holds(HABITS, "same", "AveragedModel")
def test_averages() -> None:
    pair = twins()
    averages = [AveragedModel(twin.module) for twin in pair]
    for number in range(3):
        for twin, average in zip(pair, averages, strict=True):
            twin.optimizer.zero_grad()
            twin.loss(number, 4).backward()
            twin.optimizer.step()
            average.update_parameters(twin.module)
    rows = averages[0].module.table.lookup(KEYS)
    torch.testing.assert_close(rows, averages[1].module.weight.detach(), rtol=1e-5, atol=1e-6)
    assert not torch.equal(rows, pair[0].rows())


@holds(HABITS, "refused", "an average of `parameters()` made by hand")
def test_averages_of_parameters() -> None:
    twin, _ = twins()
    copied = copy.deepcopy(twin.module)
    calls: list[Callable[[torch.Tensor, torch.Tensor], Any]] = [
        lambda mine, theirs: mine.mul_(0.9).add_(theirs, alpha=0.1),
        lambda mine, theirs: mine.detach().lerp_(theirs.detach(), 0.1),
        lambda mine, theirs: mine.data.copy_(theirs.data),
    ]
    for call in calls:
        for mine, theirs in zip(copied.parameters(), twin.module.parameters(), strict=True):
            with (
                torch.no_grad(),
                pytest.raises(PAGE.error(HABITS, "an average of `parameters()` made by hand")),
            ):
                call(mine, theirs)


@holds(HABITS, "differs", "an average of a `state_dict` made by hand")
def test_averages_of_states() -> None:
    twin, _ = twins()
    copied, before = copy.deepcopy(twin.module), twin.rows()
    twin.loss(0, 1).backward()
    twin.optimizer.step()
    state = copied.state_dict()
    for name, value in state.items():
        value.copy_(twin.module.state_dict()[name])
    assert torch.equal(copied.table.lookup(KEYS), before)
    copied.load_state_dict(state)
    assert torch.equal(copied.table.lookup(KEYS), twin.rows())


COMPUTING = (
    "computing with `weight`, its copies or `detach()`: norms, sums, products, parts, comparisons, "
    "`F.embedding`"
)
HOOKS = "hooks on `weight`, `torch.autograd.grad` of it"
INITIALIZING = "first values by `torch.nn.init` or `weight.data`"


@pytest.mark.parametrize("is_fused", [True, False])
@holds(HABITS, "refused", COMPUTING)
def test_computing_with_weight(is_fused: bool) -> None:
    weight = (fused() if is_fused else twins()[0].module).weight
    calls: list[Callable[[], Any]] = [
        weight.norm,
        lambda: weight.pow(2).sum(),
        lambda: torch.ones(1, DIM) @ weight.T,
        lambda: torch.cat([weight.view(-1)]).norm(),
        lambda: functional.embedding(KEYS, weight),
        lambda: weight.detach().sum(),
        lambda: weight.clone().to(torch.float64).abs(),
        lambda: weight.chunk(2),
        lambda: torch.equal(weight, weight),
    ]
    for call in calls:
        with pytest.raises(PAGE.error(HABITS, COMPUTING), match="cannot use `weight`"):
            call()


@pytest.mark.parametrize("is_fused", [True, False])
@holds(HABITS, "refused", HOOKS)
def test_hooks_and_gradients_of_weight(is_fused: bool) -> None:
    module = fused() if is_fused else twins()[0].module
    head = nn.Linear(DIM, 1)
    loss = head(module(KEYS)).sum()
    calls: list[Callable[[], Any]] = [
        lambda: module.weight.register_hook(lambda grad: grad * 2),
        lambda: module.weight.register_post_accumulate_grad_hook(print),
        lambda: torch.autograd.grad(loss, [*head.parameters(), module.weight], allow_unused=True),
    ]
    for call in calls:
        with pytest.raises(PAGE.error(HABITS, HOOKS), match="would see no gradient"):
            call()
    before = module.table.lookup(KEYS)
    of_head, _ = torch.autograd.grad(loss, list(head.parameters()))
    torch.testing.assert_close(of_head[0], before.sum(0))
    assert module.weight.grad is None
    assert torch.equal(module.table.lookup(KEYS), before)


CALLING = "calls with copies of `weight`, by `functional_call`"


@pytest.mark.parametrize("is_fused", [True, False])
@holds(HABITS, "refused", CALLING)
def test_calls_with_copies_of_weight(is_fused: bool) -> None:
    model = nn.Sequential(fused() if is_fused else twins()[0].module, nn.Linear(DIM, 1))
    weight = model[0].weight
    others = [
        weight.clone(),
        weight.detach().requires_grad_(),
        nn.Parameter(weight.detach().clone()),
        copy.deepcopy(weight),
        torch.zeros(NUM_KEYS, DIM),
    ]
    for other in others:
        with pytest.raises(PAGE.error(HABITS, CALLING), match="leave `weight` out"):
            functional_call(model, {"0.weight": other}, (KEYS,))
    read = functional_call(model, {"0.weight": weight.detach()}, (KEYS,))
    assert torch.equal(read, model(KEYS))
    read.sum().backward()
    assert model[0].table.update_count == 0
    assert model[0].weight.grad is None
    assert model[1].weight.grad is not None


@holds(HABITS, "refused", INITIALIZING)
def test_first_values() -> None:
    weight = HashEmbedding(DIM).weight
    calls: list[Callable[[], Any]] = [
        lambda: nn.init.xavier_uniform_(weight),
        lambda: weight.data.normal_(),
    ]
    for call in calls:
        with pytest.raises(PAGE.error(HABITS, INITIALIZING), match="cannot set its rows"):
            call()


@pytest.mark.parametrize("is_fused", [True, False])
@pytest.mark.parametrize("name", [None, "item"])
@pytest.mark.parametrize(
    "rule",
    [
        {},
        {"max_rows": 64, "eviction": Evict.lru()},
        {"max_rows": 2, "default": Default.shared_rows(2)},
        {"admission": Admit.count(2, max_records=64)},
    ],
)
@holds(HABITS, "same", "reset_parameters")
def test_reset_parameters(rule: dict[str, Any], name: str | None, is_fused: bool) -> None:
    options: dict[str, Any] = {"name": name, **rule}
    module = fused(**options) if is_fused else HashEmbedding(DIM, **options)
    optimizer = None if is_fused else RowOptimizer(module, torch.optim.Adagrad, lr=RATE)
    first = module(KEYS).detach()
    module(KEYS)
    if optimizer is not None:
        module(KEYS).sum().backward()
        with pytest.raises(PAGE.error(HABITS, "reset_parameters"), match="gradients of rows"):
            module.reset_parameters()
        optimizer.step()
    module.reset_parameters()
    assert len(module.table) == 0
    assert torch.equal(module(KEYS), first) == (name is not None or "admission" in rule)
    module(KEYS).sum().backward()
    if optimizer is not None:
        optimizer.step()
    assert not torch.equal(module(KEYS), first)


SETTING = "setting `weight` or `weight.data`, tying `a.weight = b.weight`"


@holds(HABITS, "refused", SETTING)
def test_setting_weight() -> None:
    module, other = HashEmbedding(DIM), HashEmbedding(DIM)
    calls: list[Callable[[], Any]] = [
        lambda: setattr(module, "weight", nn.Parameter(torch.ones(NUM_KEYS, DIM))),
        lambda: setattr(module.weight, "data", torch.ones(NUM_KEYS, DIM)),
        lambda: setattr(module, "weight", other.weight),
    ]
    for call in calls:
        with pytest.raises(PAGE.error(HABITS, SETTING), match=r"table\.upsert"):
            call()


@holds(HABITS, "same", "two modules without `name=`")
def test_two_modules_without_names() -> None:
    for one, other in (
        [HashEmbedding(DIM)(KEYS) for _ in range(2)],
        [nn.Embedding(NUM_KEYS, DIM)(KEYS) for _ in range(2)],
    ):
        assert not (one == other).any()


@holds(HABITS, "refused", "no optimizer at all")
def test_no_optimizer() -> None:
    loss = HashEmbedding(DIM)(KEYS).sum()
    with pytest.raises(PAGE.error(HABITS, "no optimizer at all"), match="optimizer=.*RowOptimizer"):
        loss.backward()


LOADING = "a `load_state_dict` between backward and step"


@holds(HABITS, "refused", LOADING)
def test_loading_between_backward_and_step() -> None:
    twin, _ = twins()
    saved = twin.module.state_dict()
    twin.loss(0, 1).backward()
    with pytest.raises(PAGE.error(HABITS, LOADING), match="wait for a RowOptimizer"):
        twin.module.load_state_dict(saved, strict=False)
    twin.optimizer.step()
    twin.module.load_state_dict(saved)
    module = fused()
    module(KEYS).sum().backward()
    module.load_state_dict(module.state_dict())


@holds(HABITS, "refused", "FullyShardedDataParallel", "fully_shard", "distribute_module")
def test_parameters_taken_apart(world: None) -> None:
    mesh = init_device_mesh("cpu", (1,))
    for call in (
        lambda: fully_shard(fused(), mesh=mesh),
        lambda: FullyShardedDataParallel(fused(), device_id=torch.device("cpu")),
        lambda: distribute_module(fused(), mesh),
    ):
        with pytest.raises(PAGE.error(HABITS, "fully_shard"), match="as FSDP does"):
            call()


@holds(HABITS, "differs", "copy.deepcopy")
def test_copies() -> None:
    twin, _ = twins()
    with pytest.raises(RuntimeError, match="make a RowOptimizer for the copy"):
        copy.deepcopy(twin.module)(KEYS)
    copied = copy.deepcopy(fused())
    copied(KEYS).sum().backward()
    assert copied.table.update_count == 1


@holds(HABITS, "refused", "a copy or pickle of the optimizer")
def test_copies_of_optimizers() -> None:
    for copied in (copy.deepcopy, pickle.dumps):
        with pytest.raises(PAGE.error(HABITS, "a copy or pickle of the optimizer")):
            copied(twins()[0].optimizer)


@holds(HABITS, "same", "model.to(torch.bfloat16)")
def test_models_in_16_bits() -> None:
    twin, dense = twins()
    for each in (twin, dense):
        assert each.module.to(torch.bfloat16)(KEYS).dtype == torch.bfloat16
    twin.loss(0, 1).backward()
    assert twin.module.weight.grad.dtype == twin.rows().dtype == torch.float32


@pytest.mark.filterwarnings("ignore:You are using the legacy TorchScript-based ONNX export")
@holds(
    HABITS,
    "refused",
    "torch.jit.trace",
    "torch.jit.script",
    "share_memory",
    "torch.onnx.export(dynamo=False)",
)
def test_what_cannot_be_recorded_or_shared() -> None:
    calls: dict[str, Callable[[], Any]] = {
        "torch.jit.trace": lambda: torch.jit.trace(fused(), (KEYS,)),
        "torch.jit.script": lambda: torch.jit.script(fused()),
        "share_memory": fused().share_memory,
        "torch.onnx.export(dynamo=False)": lambda: torch.onnx.export(
            fused(), (KEYS,), io.BytesIO(), dynamo=False
        ),
    }
    for name, call in calls.items():
        with pytest.raises(PAGE.error(HABITS, name)):
            call()


# ---- arguments ---------------------------------------------------------------------------------


def bags_of(dense: nn.EmbeddingBag, **options: Any) -> HashEmbeddingBag:
    """A bag with the rows of a dense one."""
    made = HashEmbeddingBag(NUM_KEYS, DIM, **options)
    made.table.upsert(KEYS, dense.weight.detach().clone())
    return made


@pytest.mark.parametrize("use_reentrant", [False, True])
@holds(HABITS, "same", "torch.utils.checkpoint")
def test_checkpoints(use_reentrant: bool) -> None:
    def loop(twin: Twin) -> None:
        factor = torch.ones(DIM, requires_grad=True)
        for _ in range(2):
            twin.optimizer.zero_grad()
            losses = [
                checkpoint(
                    lambda keys, by: (twin.module(keys) * by).exp().sum(),
                    KEYS[begin:],
                    factor,
                    use_reentrant=use_reentrant,
                )
                for begin in (0, 2)
            ]
            sum(losses).backward()  # type: ignore[union-attr]
            twin.optimizer.step()

    assert_equal(loop)
    module, factor = fused(), torch.ones(DIM, requires_grad=True)

    def squares(by: torch.Tensor) -> torch.Tensor:
        total: torch.Tensor = (module(KEYS) * by).square().sum()
        return total

    losses = [checkpoint(squares, factor, use_reentrant=use_reentrant) for _ in range(2)]
    with pytest.raises(RuntimeError, match="a checkpoint looks it up again"):
        sum(losses).backward()


@holds(HABITS, "same", "get_state_dict", "set_state_dict")
def test_states_of_model_and_optimizer() -> None:
    def loop(twin: Twin) -> None:
        for number in range(2):
            twin.optimizer.zero_grad()
            twin.loss(0, 0, 3).backward()
            twin.optimizer.step()
            if number == 0:
                rows, state = get_state_dict(twin.module, twin.optimizer)
                saved = copy.deepcopy((rows, state))
                twin.loss(4).backward()
                twin.optimizer.step()
                set_state_dict(
                    twin.module,
                    twin.optimizer,
                    model_state_dict=saved[0],
                    optim_state_dict=saved[1],
                )

    assert_equal(loop)
    module = fused()
    module(KEYS)
    rows, _ = get_state_dict(module, [])
    assert rows["keys"].tolist() == KEYS.tolist()


@holds(ARGUMENTS, "looser", "num_embeddings", "embedding_dim")
def test_sizes() -> None:
    made, dense = HashEmbedding(2, DIM), nn.Embedding(2, DIM)
    assert made.num_embeddings == dense.num_embeddings
    assert made.embedding_dim == dense.embedding_dim == HashEmbedding(DIM).embedding_dim
    made(KEYS)
    assert len(made.table) == NUM_KEYS > 2
    limited = HashEmbedding(DIM, max_rows=2)
    limited(KEYS)
    assert len(limited.table) == 2


@holds(ARGUMENTS, "looser", "padding_idx")
def test_padding() -> None:
    module = HashEmbedding(DIM, padding_idx=-1)
    assert (module(torch.tensor([-1, NUM_KEYS])) == 0).all(dim=1).tolist() == [True, False]
    assert -1 not in module.table
    dense = nn.EmbeddingBag(NUM_KEYS, DIM, padding_idx=2, mode="mean")
    keys = torch.tensor([[0, 2, 1], [2, 2, 2]])
    torch.testing.assert_close(bags_of(dense, padding_idx=2, mode="mean")(keys), dense(keys))


@holds(ARGUMENTS, "same", "scale_grad_by_freq")
def test_scaled_gradients() -> None:
    keys = torch.tensor([0, 0, 0, 5])
    hashed = HashEmbedding(DIM, scale_grad_by_freq=True)
    RowOptimizer(hashed, torch.optim.SGD, lr=RATE)
    dense = nn.Embedding(NUM_KEYS, DIM, scale_grad_by_freq=True)
    for module in (hashed, dense):
        module(keys).sum().backward()
    assert dense.weight.grad is not None
    torch.testing.assert_close(hashed.weight.grad, dense.weight.grad[[0, 5]])


@holds(ARGUMENTS, "differs", "mode")
def test_modes() -> None:
    dense = nn.EmbeddingBag(NUM_KEYS, DIM)
    assert (HashEmbeddingBag(DIM).mode, dense.mode) == ("sum", "mean")
    keys = torch.tensor([[0, 2, 1], [4, 4, 2]])
    for mode in ("sum", "mean", "max"):
        dense.mode = mode
        torch.testing.assert_close(bags_of(dense, mode=mode)(keys), dense(keys))


@holds(ARGUMENTS, "same", "include_last_offset")
def test_last_offsets() -> None:
    dense = nn.EmbeddingBag(NUM_KEYS, DIM, mode="sum", include_last_offset=True)
    offsets = torch.tensor([0, 2, 2, 6])
    hashed = bags_of(dense, include_last_offset=True)
    torch.testing.assert_close(hashed(KEYS, offsets), dense(KEYS, offsets))


@holds(ARGUMENTS, "looser", "per_sample_weights")
def test_weights() -> None:
    dense = nn.EmbeddingBag(NUM_KEYS, DIM, mode="sum")
    weights = torch.tensor([[1.0, 3.0]])
    summed = dense(KEYS[:2].reshape(1, 2), per_sample_weights=weights)
    for mode, divisor in (("sum", 1.0), ("mean", 4.0)):
        made = bags_of(dense, mode=mode)(KEYS[:2].reshape(1, 2), per_sample_weights=weights)
        torch.testing.assert_close(made, summed / divisor)


@holds(ARGUMENTS, "differs", "max_norm", "norm_type")
def test_limited_norms() -> None:
    limit = {"max_norm": 0.5, "norm_type": 1.0}
    hashed, dense = HashEmbedding(DIM, **limit), nn.Embedding(NUM_KEYS, DIM, **limit)
    hashed.table.upsert(KEYS, dense.weight.detach().clone())
    optimizers = [
        RowOptimizer(hashed, torch.optim.SGD, lr=RATE),
        torch.optim.SGD(dense.parameters(), lr=RATE),
    ]
    for module, optimizer in zip((hashed, dense), optimizers, strict=True):
        module(KEYS[:3]).square().sum().backward()
        optimizer.step()
    torch.testing.assert_close(hashed.table.lookup(KEYS), dense.weight.detach())
    before, read = hashed.table.lookup(KEYS), hashed.eval()(KEYS)
    torch.testing.assert_close(read, dense.eval()(KEYS))
    assert torch.equal(hashed.table.lookup(KEYS), before)
    assert not torch.equal(read, before)
    read.sum().backward()
    torch.testing.assert_close(hashed.table.lookup(KEYS), read.detach())


@holds(ARGUMENTS, "refused", "sparse", "device")
def test_refused_arguments() -> None:
    asked = {"sparse": True, "device": "meta"}
    for name, value in asked.items():
        with pytest.raises(PAGE.error(ARGUMENTS, name), match=f"{name}=.* is not supported"):
            HashEmbedding(DIM, **{name: value})  # type: ignore[arg-type]
    HashEmbedding(DIM, device="cpu", sparse=False)


@holds(ARGUMENTS, "differs", "dtype")
def test_dtypes() -> None:
    module = HashEmbedding(DIM, dtype="bfloat16")
    assert module(KEYS).dtype == module.weight.dtype == torch.float32
    rows = module.table.lookup(KEYS)
    assert torch.equal(rows, rows.bfloat16().float())


@holds(ARGUMENTS, "differs", "from_pretrained")
def test_pretrained() -> None:
    rows = torch.rand(NUM_KEYS, DIM)
    dense, hashed = nn.Embedding.from_pretrained(rows), HashEmbedding.from_pretrained(KEYS, rows)
    assert torch.equal(dense(KEYS), hashed(KEYS))
    assert not dense.weight.requires_grad
    assert not hashed.weight.requires_grad


def test_habits_say_it_in_the_words_that_the_page_explains() -> None:
    habits = {claim.here for claim in PAGE.claims if claim.table == HABITS}
    assert habits == set(re.findall(r"\*\*([a-z]+)\*\*", PAGE.path.read_text()))
