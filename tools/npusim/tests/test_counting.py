"""What is handed to a device is counted: operators, waits of the host, and bytes."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

from recsdk_npusim.counting import counting

NPU = torch.device("npu")


def test_operators_are_counted_by_name_and_views_are_not() -> None:
    data = torch.ones(6, device=NPU)
    with counting() as found:
        shape = data.view(2, 3).narrow(0, 0, 1).t()
        (shape + 1).mul_(2)
        torch.empty(4, device=NPU)
        data.clone()
    assert found.operators == {"aten::add": 1, "aten::mul": 1, "aten::copy_": 1}
    assert found.num_operators == 3
    assert (found.waits, found.bytes_to_device, found.bytes_to_host) == (0, 0, 0)


def test_what_the_host_reads_is_a_wait() -> None:
    data = torch.ones(6, device=NPU)
    pinned = torch.zeros(6).pin_memory()
    with counting() as found:
        data.sum().item()
        data.nonzero()
        data.cpu()
        pinned.copy_(data, non_blocking=True)
    assert found.waits == 3
    assert found.bytes_to_host == 2 * 24
    torch.npu.synchronize()


DATA = {
    "floats": torch.tensor([[4.0, 1.0], [1.0, 3.0]]),
    "numbers": torch.tensor([1, 0, 2]),
    "mask": torch.tensor([True, False]),
    "pinned": torch.zeros(2, 2).pin_memory(),
    "apart": torch.zeros(2, 4).pin_memory()[:, ::2],
}
F, N, M = "floats", "numbers", "mask"
WAITING: dict[str, tuple[Any, ...]] = {
    "item": (lambda f: f.sum().item(), F),
    "is_nonzero": (lambda f: bool(f.sum() > 0), F),
    "tolist": (lambda n: n.tolist(), N),
    "equal": (lambda f: torch.equal(f, f + 1), F),
    "allclose": (lambda f: torch.allclose(f, f), F),
    "nonzero": (lambda n: n.nonzero(), N),
    "argwhere": (lambda n: n.argwhere(), N),
    "where": (lambda m: torch.where(m), M),
    "masked_select": (lambda f, m: f.masked_select(m), F, M),
    "unique": (lambda n: n.unique(), N),
    "unique of rows": (lambda f: f.unique(dim=0), F),
    "unique_consecutive": (lambda n: n.unique_consecutive(), N),
    "bincount": (lambda n: n.bincount(), N),
    "bincount of at least": (lambda n: n.bincount(minlength=5), N),
    "repeat_interleave": (lambda n: torch.repeat_interleave(n), N),
    "repeat_interleave of rows": (lambda f, n: f.repeat_interleave(n[:2], dim=0), F, N),
    "a mask is read": (lambda f, m: f[m], F, M),
    "a mask of columns is read": (lambda f, m: f[:, m], F, M),
    "a mask is written": (lambda f, m: f.index_put_((m,), f[:1].clone()), F, M),
    "a mask is added to": (lambda f, m: f.index_put_((m,), torch.ones(()), True), F, M),
    "normal": (lambda f: torch.normal(0.0, f), F),
    "cholesky": (lambda f: torch.linalg.cholesky(f), F),
    "inv": (lambda f: torch.linalg.inv(f), F),
    "inv_ex": (lambda f: torch.linalg.inv_ex(f, check_errors=True), F),
    "solve": (lambda f: torch.linalg.solve(f, f), F),
    "eigh": (lambda f: torch.linalg.eigh(f), F),
    "svd": (lambda f: torch.linalg.svd(f), F),
    "to the cpu": (lambda f: f.cpu(), F),
    "to memory that is not pinned": (lambda f: torch.zeros(2, 2).copy_(f, non_blocking=True), F),
    "to pinned memory in pieces": (lambda f: DATA["apart"].copy_(f, non_blocking=True), F),
    "from memory that is not pinned": (lambda: torch.ones(3).to(NPU, non_blocking=True),),
    "from pinned memory, at once": (lambda: DATA["pinned"].to(NPU),),
    "to another type": (lambda f: f.copy_(DATA["pinned"].long().pin_memory(), True), F),
    "a list": (lambda: torch.tensor([1, 2], device=NPU),),
}
GOING_ON: dict[str, tuple[Any, ...]] = {
    "nonzero_static": (lambda n: n.nonzero_static(size=2), N),
    "repeat_interleave": (lambda n: torch.repeat_interleave(n, output_size=3), N),
    "repeat_interleave by a number": (lambda n: n.repeat_interleave(2), N),
    "positions are read": (lambda f, n: f[n[:2]], F, N),
    "positions are written": (lambda f, n: f.index_put_((n[:2],), f.clone()), F, N),
    "a mask takes a number": (lambda f, m: f.index_put_((m,), torch.tensor(2.0)), F, M),
    "masked_fill": (lambda f, m: f.masked_fill(m[:, None], 0.0), F, M),
    "normal of a number": (lambda f: torch.normal(f, 1.0), F),
    "inv_ex": (lambda f: torch.linalg.inv_ex(f), F),
    "norms": (lambda f: torch.linalg.vector_norm(f, dim=1), F),
    "sort": (lambda n: n.sort(stable=True), N),
    "to the cpu": (lambda f: f.to("cpu", non_blocking=True), F),  # to pinned memory
    "to pinned memory": (lambda f: DATA["pinned"].copy_(f, non_blocking=True), F),
    "from pinned memory": (lambda: DATA["pinned"].to(NPU, non_blocking=True),),
    "nothing": (lambda: torch.empty(0).to(NPU),),
}


@pytest.mark.parametrize(
    ("cases", "name"), [(WAITING, n) for n in WAITING] + [(GOING_ON, n) for n in GOING_ON]
)
def test_the_host_waits_where_it_does_on_cuda(cases: dict[str, tuple[Any, ...]], name: str) -> None:
    run, *wanted = cases[name]
    given = [DATA[each].to(NPU) for each in wanted]
    with counting() as found:
        run(*given)
    assert bool(found.waits) == (cases is WAITING), found
    torch.npu.synchronize()


def test_each_mask_is_a_wait() -> None:
    data, mask = DATA["floats"].to(NPU), DATA["mask"].to(NPU)
    with counting() as found:
        data[mask, mask]
        data.index_put_((mask, mask), data.new_ones(1))
    assert found.waits == 2 + 2


def test_bytes_that_go_over_are_counted() -> None:
    with counting() as found:
        torch.ones(5).pin_memory().to(NPU, non_blocking=True)
        torch.arange(3).to(NPU)
    assert found.bytes_to_device == 5 * 4 + 3 * 8
    assert found.waits == 1  # for the second, which blocks


def test_the_time_of_operators_is_counted_and_that_of_views_is_not() -> None:
    data = torch.rand(200_000, device=NPU)
    with counting() as views:
        data.view(2, -1)
    with counting() as found:
        data.sort()
        data.cpu()
    assert views.seconds == 0
    assert 0 < found.seconds <= time.process_time()


def test_nothing_is_counted_outside() -> None:
    with counting() as first:
        torch.ones(2, device=NPU)
    torch.ones(2, device=NPU)
    with counting() as second:
        pass
    assert first.num_operators == 1
    assert second.num_operators == 0
