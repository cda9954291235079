"""Exported programs, which find their table by its name."""

from __future__ import annotations

import copy
import gc
import io
import os
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import warm_processes
from torch import nn
from torch.export import Dim, ExportedProgram, export

from recsdk_core import Default, init, optim
from recsdk_core.nn import HashEmbedding, HashEmbeddingBag, RowOptimizer, l2

IS_FULL = os.environ.get("RECSDK_TEST_PROFILE", "ci") == "full"
KEYS = torch.tensor([[5, 6, 7], [-1, 5, 2**62]])
WEIGHTS = torch.tensor([[1.0, 2.0, 0.5], [-1.0, 0.0, 3.0]])
ENDS = torch.tensor([0, 2, 2, 6])


class Model(nn.Module):
    def __init__(self, mode: Any = "sum", name: str = "item") -> None:
        super().__init__()
        kwargs: dict[str, Any] = {"optimizer": optim.SGD(lr=0.5), "initializer": init.Normal()}
        self.items = HashEmbedding(4, name=name, **kwargs)
        self.bags = HashEmbeddingBag(
            4, name=f"{name} bags", mode=mode, include_last_offset=True, **kwargs
        )
        self.head = nn.Linear(4, 1)

    def forward(
        self, keys: torch.Tensor, weights: torch.Tensor, ends: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        pooled = self.bags(keys, per_sample_weights=weights)
        return self.head(self.items(keys).sum(1) + pooled), self.bags(keys.reshape(-1), ends)


def exported(model: nn.Module, strict: bool) -> ExportedProgram:
    auto = Dim.DYNAMIC
    shapes = ({0: auto, 1: auto}, {0: auto, 1: auto}, {0: auto})
    return export(model, (KEYS, WEIGHTS, ENDS), dynamic_shapes=shapes, strict=strict)


OTHER = (KEYS.repeat(2, 1)[1:, :2] + 1, WEIGHTS.repeat(2, 1)[1:, :2], torch.tensor([0, 2, 6]))


def equal(one: tuple[torch.Tensor, ...], other: tuple[torch.Tensor, ...]) -> bool:
    return all(torch.equal(*pair) for pair in zip(one, other, strict=True))


@pytest.mark.parametrize(
    ("strict", "mode"),
    list(product([False, True], ["sum", "mean"])) if IS_FULL else [(False, "mean"), (True, "sum")],
)
def test_a_program_reads_the_rows_and_writes_none(strict: bool, mode: str) -> None:
    model = Model(mode)
    model(KEYS, WEIGHTS, ENDS)
    program = exported(model.eval(), strict)
    assert len(model.items.table) == 5
    for each in (program, program.run_decompositions()):
        assert equal(each.module()(*OTHER), model(*OTHER))
    assert len(model.items.table) == 5


@pytest.mark.parametrize("strict", [False, True])
def test_programs_with_arguments_of_nn_embedding(strict: bool) -> None:
    """One that pools by the largest numbers, limits norms and weights by frequency; and l2."""

    class Asked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bags = HashEmbeddingBag(4, name="max", mode="max", max_norm=0.004, padding_idx=7)
            self.items = HashEmbedding(4, name="often", scale_grad_by_freq=True)
            RowOptimizer(self, torch.optim.SGD, lr=0.5)

        def forward(self, keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return self.bags(keys) + self.items(keys).sum(1), l2(self)

    model = Asked()
    model(KEYS)
    shapes = ({0: Dim.DYNAMIC, 1: Dim.DYNAMIC},)
    program = export(model, (KEYS,), dynamic_shapes=shapes, strict=strict)
    asked = OTHER[0]
    found = program.module()(asked)
    assert equal(tuple(each.detach() for each in found), tuple(e.detach() for e in model(asked)))
    sum(each.sum() for each in found).backward()
    once = [each.weight.grad for each in (model.bags, model.items)]
    model.bags.weight.grad = model.items.weight.grad = None
    sum(each.sum() for each in model(asked)).backward()
    again = [each.weight.grad for each in (model.bags, model.items)]
    assert all(torch.equal(*pair) for pair in zip(once, again, strict=True))


@pytest.mark.parametrize("strict", [False, True])
def test_a_program_of_a_model_in_training_inserts(strict: bool) -> None:
    model, twin = Model(), Model(name="twin")
    program = exported(model, strict)
    assert len(model.items.table) == 0
    assert program.module()(*OTHER)[0].shape == (3, 1)
    twin(*OTHER)
    assert len(model.items.table) == len(twin.items.table) > 0


def test_a_program_trains() -> None:
    """Rows update in the backward of the program's module, as in the model's."""
    model = Model()
    twin = copy.deepcopy(model)
    twin(*OTHER)[0].square().sum().backward()
    keys = OTHER[0].reshape(-1)
    expected = [each.table.lookup(keys) for each in (twin.items, twin.bags)]
    del twin
    gc.collect()
    exported(model, strict=False).module()(*OTHER)[0].square().sum().backward()
    assert equal((model.items.table.lookup(keys), model.bags.table.lookup(keys)), tuple(expected))
    assert model.items.table.update_count == 1


def saved(program: ExportedProgram) -> io.BytesIO:
    buffer = io.BytesIO()
    torch.export.save(program, buffer)
    buffer.seek(0)
    return buffer


LOADED = """
import sys, torch
from recsdk_core.nn import HashEmbedding, HashEmbeddingBag
program = torch.export.load(sys.argv[1]).module()
inputs, expected, rows = torch.load(sys.argv[2])
try:
    program(*inputs)
except RuntimeError as error:
    print(error)
items = HashEmbedding(4, name="item")
bags = HashEmbeddingBag(4, name="item bags", include_last_offset=True)
items.load_state_dict(rows["items"], strict=False)
bags.load_state_dict(rows["bags"], strict=False)
print(all(map(torch.equal, program(*inputs), expected)))
"""


def test_a_program_in_another_process(tmp_path: Path) -> None:
    """It asks for its tables by name, and then gives what it gave here."""
    model = Model()
    model(KEYS, WEIGHTS, ENDS)
    program = exported(model.eval(), strict=False)
    path, data = tmp_path / "program.pt2", tmp_path / "data.pt"
    path.write_bytes(saved(program).getvalue())
    rows = {"items": model.items.state_dict(), "bags": model.bags.state_dict()}
    torch.save((OTHER, model(*OTHER), rows), data)
    script, printed = tmp_path / "loaded.py", tmp_path / "printed"
    script.write_text(LOADED)
    assert warm_processes.status_of(warm_processes.start(script, path, data, output=printed)) == 0
    assert printed.read_text().splitlines() == [
        "the exported program reads table 'item bags' through HashEmbeddingBag(mode='sum', "
        "include_last_offset=True), and this process has none: keep one "
        "HashEmbeddingBag(mode='sum', include_last_offset=True) with name='item bags' alive and "
        "load its rows before the program runs",
        "True",
    ]


class TestTheTable:
    """Of an exported program, in the process that exported it."""

    def program(self, module: nn.Module) -> nn.Module:
        return export(nn.Sequential(module), (KEYS,)).module()

    def test_is_found_by_name_after_its_module_is_gone(self) -> None:
        module = HashEmbedding(4, name="one", default=Default.constant(2.0)).eval()
        program = self.program(module)
        del module
        gc.collect()
        with pytest.raises(RuntimeError, match="reads table 'one' .* this process has none"):
            program(KEYS)
        other = HashEmbedding(4, name="one", default=Default.constant(3.0))
        assert program(KEYS).unique().tolist() == [3.0]
        assert len(other.table) == 0

    def test_is_that_of_the_module_while_it_lives(self) -> None:
        module = HashEmbedding(4, name="one").eval()
        program = self.program(module)
        copied = copy.deepcopy(module)
        copied.table.upsert(KEYS.reshape(-1), torch.ones(6, 4))
        assert program(KEYS).count_nonzero() == 0
        del module
        gc.collect()
        assert program(KEYS).unique().tolist() == [1.0]

    def test_must_be_the_only_one_of_its_name(self) -> None:
        module = HashEmbedding(4, name="one").eval()
        program = self.program(module)
        others = [copy.deepcopy(module) for _ in "12"]
        del module
        gc.collect()
        with pytest.raises(RuntimeError, match="this process has 2 of them"):
            program(KEYS)
        del others[0]
        gc.collect()
        assert program(KEYS).shape == (2, 3, 4)

    def test_must_have_the_width_and_kind(self) -> None:
        module = HashEmbeddingBag(4, name="one").eval()
        program = self.program(module)
        del module
        gc.collect()
        other: nn.Module = HashEmbeddingBag(3, name="one")
        with pytest.raises(ValueError, match="'one' has width 3, and the program .* for 4"):
            program(KEYS)
        other = HashEmbeddingBag(4, name="one", mode="mean")
        gc.collect()
        with pytest.raises(RuntimeError, match=r"only \[\"HashEmbeddingBag\(mode='mean'"):
            program(KEYS)
        assert len(other.table) == 0  # type: ignore[arg-type]
