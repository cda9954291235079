"""Items of equal positions are added in a random order where devices add atomically."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

NPU = torch.device("npu")
NUM_ITEMS = 999
OF_ITEM = torch.arange(NUM_ITEMS).remainder(3)
"""Positions that repeat."""
ITEMS = torch.randn(NUM_ITEMS, 4, generator=torch.Generator().manual_seed(1))

Function = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def gradient_of(take: Function) -> Function:
    """What `take` of a (3, 4) matrix gives back to it."""

    def run(position: torch.Tensor, items: torch.Tensor) -> torch.Tensor:
        taken_from = torch.zeros(3, 4, device=items.device, requires_grad=True)
        take(taken_from, position).backward(items)
        assert taken_from.grad is not None
        return taken_from.grad

    return run


def zeros(items: torch.Tensor) -> torch.Tensor:
    return items.new_zeros(3, 4)


def as_wide(position: torch.Tensor) -> torch.Tensor:
    return position[:, None].expand(-1, 4)


ATOMIC: dict[str, Function] = {
    "index_add": lambda at, items: zeros(items).index_add(0, at, items),
    "index_add_": lambda at, items: zeros(items).index_add_(0, at, items),
    "index_add_ of columns": lambda at, items: zeros(items).t().index_add_(1, at, items.t()),
    "scatter_add": lambda at, items: zeros(items).scatter_add(0, as_wide(at), items),
    "scatter_add_": lambda at, items: zeros(items).scatter_add_(0, as_wide(at), items),
    "scatter_reduce": lambda at, items: zeros(items).scatter_reduce(0, as_wide(at), items, "mean"),
    "index_put": lambda at, items: zeros(items).index_put((at,), items, accumulate=True),
    "index_put_": lambda at, items: zeros(items).index_put_(
        (at[:, None], torch.arange(4, device=at.device)), items, accumulate=True
    ),
    "put_": lambda at, items: zeros(items).put_(at, items[:, 0], accumulate=True),
    "bincount": lambda at, items: torch.bincount(at, items[:, 0]),
    "index_select's gradient": gradient_of(lambda x, at: x.index_select(0, at)),
    "indexing's gradient": gradient_of(lambda x, at: x[at]),
    "gather's gradient": gradient_of(lambda x, at: x.gather(0, as_wide(at))),
    "repeat_interleave's gradient": gradient_of(
        lambda x, at: x.repeat_interleave(torch.bincount(at), dim=0)
    ),
    "embedding's gradient": gradient_of(lambda x, at: torch.nn.functional.embedding(at, x)),
}


def deterministic(function: Function) -> Function:
    """The same with deterministic computing on."""

    def run(position: torch.Tensor, items: torch.Tensor) -> torch.Tensor:
        torch.use_deterministic_algorithms(True)
        try:
            return function(position, items)
        finally:
            torch.use_deterministic_algorithms(False)

    return run


REPEATABLE: dict[str, Function] = {
    "embedding's gradient, deterministic": deterministic(ATOMIC["embedding's gradient"]),
    "sum": lambda _, items: items.sum(0),
}


def results(function: Function) -> list[torch.Tensor]:
    return [function(OF_ITEM.to(NPU), ITEMS.to(NPU)).cpu() for _ in range(10)]


@pytest.mark.parametrize("name", ATOMIC)
def test_sums_differ_from_run_to_run(name: str) -> None:
    found = results(ATOMIC[name])
    for each in found:
        torch.testing.assert_close(each, ATOMIC[name](OF_ITEM, ITEMS), rtol=1e-4, atol=1e-4)
    assert any(not torch.equal(each, found[0]) for each in found)


@pytest.mark.parametrize("name", REPEATABLE)
def test_what_is_not_atomic_repeats(name: str) -> None:
    found = results(REPEATABLE[name])
    assert all(torch.equal(each, found[0]) for each in found)


@pytest.mark.parametrize("name", ATOMIC)
def test_single_positions_give_the_bits_of_the_cpu(name: str) -> None:
    position, items = torch.tensor([2, 0, 1]), ITEMS[:3]
    expected = ATOMIC[name](position, items)
    assert torch.equal(ATOMIC[name](position.to(NPU), items.to(NPU)).cpu(), expected)


def test_any_of_several_writes_stays() -> None:
    at, items = OF_ITEM.to(NPU), ITEMS.to(NPU)
    stayed = {zeros(items).index_copy_(0, at, items)[0, 0].item() for _ in range(20)}
    assert len(stayed) > 1
    assert stayed <= set(ITEMS[OF_ITEM == 0, 0].tolist())


def test_random_numbers_of_the_program_stay_theirs() -> None:
    torch.manual_seed(3)
    expected = torch.rand(2), torch.rand(2, device=NPU).cpu()
    torch.manual_seed(3)
    results(ATOMIC["index_add"])
    assert torch.equal(torch.rand(2), expected[0])
    assert torch.equal(torch.rand(2, device=NPU).cpu(), expected[1])
