"""The operators by themselves, and the transforms and tracers that meet them."""

from __future__ import annotations

import copy
import gc
import itertools
import os
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx

from recsdk_core import BusyError, init, optim
from recsdk_core.nn import (
    FeatureBags,
    HashEmbedding,
    HashEmbeddingBag,
    RowOptimizer,
    TableBags,
    l2,
    pool_features,
)

IS_FULL = os.environ.get("RECSDK_TEST_PROFILE", "ci") == "full"
KEYS = torch.tensor([[5, 6], [-1, 5]])
FLAT, OFFSETS = KEYS.reshape(-1), torch.tensor([0, 1, 1])
OPS = torch.ops.recsdk


def embedding(**kwargs: Any) -> HashEmbedding:
    kwargs = {"optimizer": optim.SGD(lr=0.5), "name": "item", **kwargs}
    return HashEmbedding(4, initializer=init.Normal(), **kwargs)


def bag(**kwargs: Any) -> HashEmbeddingBag:
    kwargs = {"optimizer": optim.SGD(lr=0.5), "name": "item", **kwargs}
    return HashEmbeddingBag(4, initializer=init.Normal(), **kwargs)


def frozen(module: Any) -> Any:
    module.weight.requires_grad_(False)
    return module


def place(module: Any, insert: bool = True, trains: bool = True) -> tuple[Any, ...]:
    return None, module.number_1, module.kind, insert, trains


def every_two(*settings: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Combinations in which every two values occur together; all in the full profile."""
    places = itertools.product(*(range(len(values)) for values in settings))
    return [
        tuple(values[place] for values, place in zip(settings, row, strict=True))
        for row in places
        if IS_FULL or sum(row) % 2 == 0
    ]


ALL_BUT_COMPILED = ("test_schema", "test_autograd_registration", "test_faketensor")


class TestOpcheck:
    """Rows must not move, since opcheck compares several runs: the learning rate is 0."""

    @pytest.mark.parametrize(
        ("keys", "trains", "insert"),
        every_two([KEYS, FLAT[:0], FLAT[0]], [False, True], [False, True]),
    )
    def test_lookup(self, keys: torch.Tensor, insert: bool, trains: bool) -> None:
        module = embedding(optimizer=optim.SGD(lr=0.0))
        anchor = torch.empty(0, 4, requires_grad=trains)
        result = torch.library.opcheck(
            OPS.lookup.default, (anchor, keys, *place(module, insert, trains))
        )
        assert set(result.values()) == {"SUCCESS"}
        assert (module.table.update_count > 0) == trains

    @pytest.mark.parametrize("trains", [False, True])
    @pytest.mark.parametrize("last_batch", [False, True])
    def test_l2(self, last_batch: bool, trains: bool) -> None:
        module = embedding(optimizer=None)
        RowOptimizer(module, torch.optim.SGD, lr=0.0)
        module(KEYS)
        anchor = torch.empty(0, 4, requires_grad=trains)
        args = (anchor, last_batch, None, module.number_1, module.kind, trains)
        assert set(torch.library.opcheck(OPS.l2.default, args).values()) == {"SUCCESS"}
        assert torch.equal(OPS.l2(*args)[0].detach(), l2(module, last_batch=last_batch).detach())

    @pytest.mark.parametrize(
        ("mode", "weighted", "trains"),
        [
            *every_two(["sum", "mean"], ["no", "constant", "learned"], [False, True]),
            ("max", "no", False),
            ("max", "no", True),
        ],
    )
    def test_pool(self, mode: Any, weighted: str, trains: bool) -> None:
        limit = {"max_norm": 0.5} if mode == "max" else {}
        module = bag(mode=mode, optimizer=optim.SGD(lr=0.0), **limit)
        anchor = torch.empty(0, 4, requires_grad=trains)
        weights = None
        if weighted != "no":
            weights = torch.tensor([1.0, 2.0, 0.5, -1.0], requires_grad=weighted == "learned")
        for keys, offsets, num_bags in ((KEYS, None, 2), (FLAT, OFFSETS, 3)):
            given = None if weights is None else weights.detach().view(keys.shape)
            if given is not None:
                given.requires_grad_(weights is not None and weights.requires_grad)
            args = (anchor, keys, offsets, given, num_bags, *place(module, True, trains))
            result = torch.library.opcheck(OPS.pool.default, args)
            assert set(result.values()) == {"SUCCESS"}

    @pytest.mark.parametrize("trains", [False, True])
    @pytest.mark.parametrize("weights", [None, [2, 2]])
    def test_update(self, trains: bool, weights: list[int] | None) -> None:
        """A forward takes one backward, so the check that runs it twice is part of those above."""
        module = bag(optimizer=optim.SGD(lr=0.0))
        anchor = torch.empty(0, 4, requires_grad=True)
        for check in ALL_BUT_COMPILED:
            args = (anchor, KEYS, None, torch.ones(2, 2), 2, *place(module))
            pooled, ticket = OPS.pool(*args)
            grad = torch.ones_like(pooled)
            result = torch.library.opcheck(
                OPS.update.default, (grad, ticket, trains, weights), test_utils=check
            )
            assert result == {check: "SUCCESS"}


class TestTickets:
    def test_rows_are_held_until_the_ticket_goes(self) -> None:
        module = embedding()
        anchor = torch.empty(0, 4)
        vectors, ticket = OPS.lookup(anchor, KEYS, *place(module))
        del vectors
        with pytest.raises(BusyError, match="leases or a cut are open"):
            module.table.check_idle()
        del ticket
        gc.collect()
        module.table.check_idle()

    def test_a_ticket_without_its_forward_is_refused(self) -> None:
        module = embedding()
        vectors, ticket = OPS.lookup(torch.empty(0, 4), KEYS, *place(module))
        copied = ticket.clone()
        del ticket
        with pytest.raises(RuntimeError, match="what the forward saved was copied"):
            OPS.update(torch.ones_like(vectors), copied, True, None)
        assert module.table.update_count == 0

    def test_a_table_that_was_frozen_since_is_not_trained(self) -> None:
        module = embedding()
        vectors, ticket = OPS.lookup(torch.empty(0, 4), KEYS, *place(module))
        frozen(module)
        with pytest.raises(RuntimeError, match="a table was frozen after its lookup was compiled"):
            OPS.update(torch.ones_like(vectors), ticket, True, None)
        assert module.table.update_count == 0

    def test_two_tickets_differ_though_they_compare_as_close(self) -> None:
        module = embedding()
        tickets = [OPS.lookup(torch.empty(0, 4), KEYS, *place(module))[1] for _ in "12"]
        assert not torch.equal(tickets[0].view(torch.int64), tickets[1].view(torch.int64))
        torch.testing.assert_close(*tickets)

    def test_a_backward_is_not_differentiated(self) -> None:
        module, weights = bag(), torch.ones(2, 2)
        args = (torch.empty(0, 4), KEYS, None, weights, 2, *place(module))
        pooled, ticket = OPS.pool(*args)
        grad = torch.ones_like(pooled, requires_grad=True)
        of_weights = OPS.update(grad, ticket, False, weights.shape)
        with pytest.raises(RuntimeError, match="cannot be differentiated"):
            of_weights.sum().backward()


class TestModules:
    def test_a_module_that_is_gone(self) -> None:
        module = embedding()
        args = place(module)
        del module
        gc.collect()
        with pytest.raises(RuntimeError, match="the HashEmbedding for which this was compiled is"):
            OPS.lookup(torch.empty(0, 4), KEYS, *args)

    def test_another_width(self) -> None:
        module = embedding()
        with pytest.raises(ValueError, match="'item' has width 4, and the program was .* for 3"):
            OPS.lookup(torch.empty(0, 3), KEYS, *place(module))

    def test_copies_have_numbers_of_their_own(self) -> None:
        module = embedding()
        copied = copy.deepcopy(module)
        assert copied.number != module.number
        OPS.lookup(torch.empty(0, 4), KEYS, *place(copied))
        assert (len(module.table), len(copied.table)) == (0, 3)


class TestTransforms:
    @pytest.mark.parametrize("keep", ["all", "dense"])
    def test_gradients_of_a_table_are_refused(self, keep: str) -> None:
        model = nn.Sequential(embedding(), nn.Linear(4, 1))
        given = {
            name: value
            for name, value in model.named_parameters()
            if keep == "all" or name != "0.weight"
        }

        def loss(parameters: dict[str, torch.Tensor]) -> torch.Tensor:
            result: torch.Tensor = torch.func.functional_call(model, parameters, (KEYS,)).sum()
            return result

        for transform in (torch.func.grad, torch.func.jacrev):
            with pytest.raises(RuntimeError, match="torch.func cannot differentiate a lookup"):
                transform(loss)(given)
        assert len(model[0].table) == 0

    def test_dense_gradients_beside_a_frozen_table(self) -> None:
        model = nn.Sequential(frozen(embedding()), nn.Linear(4, 1))
        given = {k: v.detach() for k, v in model.named_parameters() if k != "0.weight"}
        made = torch.func.grad(lambda p: torch.func.functional_call(model, p, (KEYS,)).sum())(given)
        model(KEYS).sum().backward()
        assert torch.equal(made["1.weight"], model[1].weight.grad)

    def test_functional_call_trains_as_a_call_does(self) -> None:
        called, functional = embedding(), embedding()
        called(KEYS).sum().backward()
        torch.func.functional_call(
            functional, dict(functional.named_parameters()), (KEYS,)
        ).sum().backward()
        assert torch.equal(called.table.lookup(FLAT), functional.table.lookup(FLAT))
        assert functional.table.update_count == 1

    @pytest.mark.parametrize("make", [embedding, bag])
    def test_vmap_is_refused(self, make: Callable[[], Any]) -> None:
        for module in (frozen(make()), make()):
            with pytest.raises(RuntimeError, match="vmap cannot map over a lookup"):
                torch.vmap(module)(KEYS.reshape(1, 2, 2))
            assert len(module.table) == 0

    def test_forward_mode_is_refused(self) -> None:
        module = frozen(bag())
        ones = torch.ones(2, 2)
        with pytest.raises(RuntimeError, match="torch.func does not reach per_sample_weights"):
            torch.func.jvp(lambda w: module(KEYS, per_sample_weights=w), (ones,), (ones,))
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(ones, ones)
            with pytest.raises(RuntimeError, match="forward-mode differentiation does not reach"):
                module(KEYS, per_sample_weights=dual)


class TestFakeTensors:
    def test_of_keys_have_the_shape_and_touch_no_row(self) -> None:
        for module, shape in ((embedding(), (2, 2, 4)), (bag(), (2, 4))):
            with FakeTensorMode(allow_non_fake_inputs=True) as mode:
                out = module(mode.from_tensor(KEYS))
            assert isinstance(out, FakeTensor)
            assert (tuple(out.shape), out.dtype) == (shape, torch.float32)
            assert len(module.table) == 0

    @pytest.mark.parametrize("mode", ["real", "fake", "symbolic"])
    def test_make_fx_records_the_call(self, mode: str) -> None:
        module = embedding()
        graph = make_fx(module, tracing_mode=mode)(KEYS)
        expected = embedding()(KEYS + 1)
        assert torch.equal(graph(KEYS + 1), expected)
        assert len(module.table) == (5 if mode == "real" else 3)

    def test_make_fx_refuses_rows_that_were_mapped_before(self) -> None:
        table = embedding().table

        def pooled(keys: torch.Tensor) -> torch.Tensor:
            rows, outcomes = table.map(keys, insert=True)
            feature = FeatureBags(rows=rows, outcomes=outcomes)
            entry = TableBags(table=table, features=[feature])
            return pool_features([entry], 4, 4, torch.empty(0, 4))

        for trace in (make_fx(pooled), lambda keys: torch.jit.trace(pooled, (keys,))):
            with pytest.raises(RuntimeError, match="a tracer cannot record a lookup of rows"):
                trace(FLAT)


class TestFx:
    def test_a_traced_model_keeps_the_module(self) -> None:
        model = nn.Sequential(embedding(), nn.Linear(4, 1))
        graph = torch.fx.symbolic_trace(model)
        graph(KEYS).sum().backward()
        assert model[0].table.update_count == 1
        graph.eval()
        graph(KEYS + 10)
        assert len(model[0].table) == 3

    def test_a_bag_with_all_arguments(self) -> None:
        class Model(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.bag = bag()

            def forward(self, keys: Any, offsets: Any, weights: Any) -> Any:
                return self.bag(keys, offsets, per_sample_weights=weights) * 2

        model, weights = Model(), torch.rand(4)
        graph = torch.fx.symbolic_trace(model)
        assert torch.equal(graph(FLAT, OFFSETS, weights), model(FLAT, OFFSETS, weights))

    def test_a_module_by_itself_is_refused(self) -> None:
        with pytest.raises(TypeError, match="trace the model around it"):
            torch.fx.symbolic_trace(embedding())

    def test_a_penalty_is_refused(self) -> None:
        module = embedding().requires_grad_(False)
        module(KEYS)
        with pytest.raises(RuntimeError, match="torch.fx cannot trace l2"):
            torch.fx.symbolic_trace(lambda scale: scale * l2(module))


def test_dispatch_modes_see_one_call_and_rows_train() -> None:
    from torch.utils.flop_counter import FlopCounterMode

    model, plain = (nn.Sequential(embedding(), nn.Linear(4, 1)) for _ in "12")
    plain.load_state_dict(model.state_dict())
    with FlopCounterMode(display=False):
        model(KEYS).sum().backward()
    plain(KEYS).sum().backward()
    assert torch.equal(model[0].table.lookup(FLAT), plain[0].table.lookup(FLAT))
