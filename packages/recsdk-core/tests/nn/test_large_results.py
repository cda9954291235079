"""Results that are so large that the system gives them memory of their own each time."""

from __future__ import annotations

import mmap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch._subclasses import FakeTensorMode

import recsdk_core as rc
from recsdk_core import in_huge_pages

WIDTH = 64
NUM_LARGE = (33 << 20) // (4 * WIDTH)


def may_be_huge(tensor: torch.Tensor) -> bool:
    """Whether the system was told that it may back the middle of a tensor by huge pages."""
    address = tensor.data_ptr() + tensor.nbytes // 2
    is_own = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        name, *rest = line.split()
        if "-" in name and not name.endswith(":"):
            begin, end = (int(part, 16) for part in name.split("-"))
            is_own = begin <= address < end
        elif is_own and name == "VmFlags:":
            return "hg" in rest
    raise AssertionError("the tensor is in no mapping")


def table() -> rc.Table:
    made = rc.Table(WIDTH, optimizer=rc.optim.SGD(lr=0.1), name="table", seed=3)
    made.find_or_insert(np.arange(100))
    return made


def of_lookup(num_rows: int) -> torch.Tensor:
    found: torch.Tensor = table().lookup(torch.arange(num_rows) % 100)
    return found


def of_pooling(num_rows: int) -> torch.Tensor:
    own = table()
    counts = np.array([num_rows])
    rows_N, outcomes_N = rc.map_joined([own], torch.arange(num_rows) % 100, counts, insert=False)
    bags = rc.JoinedBags(rows_N, outcomes_N, np.array([1]), counts, np.array([0]))
    found: torch.Tensor = rc.pool_joined([own], bags, (num_rows, WIDTH))
    return found


def of_torch(num_rows: int) -> torch.Tensor:
    return in_huge_pages(torch.empty(num_rows, WIDTH))


def of_bfloat16(num_rows: int) -> torch.Tensor:
    return in_huge_pages(torch.empty(2 * num_rows, WIDTH, dtype=torch.bfloat16))


@pytest.mark.skipif(not hasattr(mmap, "MADV_HUGEPAGE"), reason="Linux only")
@pytest.mark.parametrize("made", [of_lookup, of_pooling, of_torch, of_bfloat16])
def test_large_results_may_be_in_huge_pages(made: Callable[[int], torch.Tensor]) -> None:
    assert may_be_huge(made(NUM_LARGE))


@pytest.mark.parametrize("made", [of_lookup, of_pooling])
def test_large_results_are_those_of_their_parts(made: Callable[[int], torch.Tensor]) -> None:
    assert torch.equal(made(NUM_LARGE), made(100).repeat(NUM_LARGE // 100 + 1, 1)[:NUM_LARGE])


@pytest.mark.parametrize("size", [0, 1, 100, 33 << 20])
@pytest.mark.parametrize("make", [np.ones, torch.ones], ids=["numpy", "torch"])
def test_arrays_are_the_same(make: Callable[..., Any], size: int) -> None:
    array = make(size)
    assert in_huge_pages(array) is array
    assert bool((array == 1).all())


def test_what_has_gaps_or_is_not_written_is_refused() -> None:
    large = np.zeros((2, 5 << 20))
    with pytest.raises(ValueError, match="contiguous"):
        in_huge_pages(large[:, : 5 << 19][:, ::1])
    with pytest.raises(ValueError, match="columns"):
        in_huge_pages(large.reshape(2, 5, 1 << 20))
    large.flags.writeable = False
    with pytest.raises(ValueError, match="written"):
        in_huge_pages(large)


def test_tensors_without_memory_stay_as_they_are() -> None:
    with FakeTensorMode():
        fake = torch.empty(33 << 20)
        assert in_huge_pages(fake) is fake
    meta = torch.empty(33 << 20, device="meta")
    assert in_huge_pages(meta) is meta


@pytest.mark.parametrize("value", [None, [1.0], "1", 1.0])
def test_what_is_no_array_is_refused(value: Any) -> None:
    with pytest.raises(TypeError, match="array must be a numpy array or a torch tensor, got"):
        in_huge_pages(value)
