"""What loading a table gives: saved whole or cut by columns, before its optimizer or after.

Shape letters: N ids, B bags, D row width.
"""

from __future__ import annotations

from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import nn
from torch.distributed.optim import _apply_optimizer_in_backward
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
from worlds import Setup, shard

from recsdk_core import CheckpointError, optim
from recsdk_sharding import (
    HashEmbeddingBagCollection,
    HashEmbeddingBagConfig,
    KeyedJaggedTensorWithData,
    RowOptimizer,
    Saver,
)
from recsdk_sharding._rows.rows import TableRows
from table_crossing import assert_same, contents

CUT = ("column_wise", [(2, 0), (3, 0)])
WIDTH = 5
NUM_STEPS = 6
Rows = dict[str, Any]


@dataclass(frozen=True)
class Settings:
    """Of a table."""

    optimizer: Any = field(default_factory=lambda: optim.Adagrad(lr=0.1))
    config: dict[str, Any] = field(default_factory=dict)


class _Model(nn.Module):
    def __init__(self, settings: Settings, device: str, *, has_optimizer: bool = True) -> None:
        super().__init__()
        config = HashEmbeddingBagConfig(
            name="t",
            embedding_dim=WIDTH,
            num_embeddings=200,
            feature_names=["f"],
            **{"max_rows": 64, "eviction_groups": 4, **settings.config},
        )
        self.ebc = HashEmbeddingBagCollection([config], device=torch.device(device))
        self._settings = settings
        if has_optimizer:
            self.apply_optimizer()

    def apply_optimizer(self) -> None:
        _apply_optimizer_in_backward(
            RowOptimizer, self.ebc.parameters(), {"settings": self._settings.optimizer}
        )

    def forward(self, batch: KeyedJaggedTensor) -> Any:
        return self.ebc(batch)


def _made(settings: Settings, device: str, *, is_cut: bool = False) -> Any:
    plan = {"t": CUT if is_cut else ("row_wise",)}
    return shard(_Model(settings, "meta"), Setup(plan=plan, device=device))


def _train(model: Any, device: str, first: int, last: int) -> list[np.ndarray]:
    found = []
    for step in range(first, last):
        source = np.random.default_rng(step)
        ids_N = torch.from_numpy(source.zipf(1.3, 20) % 90 + 2 * step)
        times_N = torch.from_numpy(3 * step + source.integers(-3, 4, 20))
        lengths_B = torch.full((10,), 2)
        batch = KeyedJaggedTensorWithData(["f"], ids_N, lengths=lengths_B, times=times_N)
        out = model(batch.to(torch.device(device)))
        out_BD = (out.wait() if hasattr(out, "wait") else out).values()
        out_BD.backward(torch.from_numpy(source.normal(size=(10, WIDTH))).to(out_BD))
        found.append(out_BD.detach().cpu().numpy().copy())
    return found


def _loaded(settings: Settings, device: str, path: str, allow: Collection[str]) -> Any:
    """The table once it is loaded, what training on gives, and the table then; or a refusal."""
    model = _made(settings, device)
    try:
        Saver().load(model, path, allow=allow)
    except CheckpointError as error:
        return str(error)
    [table] = model.module.ebc.tables().values()
    before = contents(table)
    return before, _train(model, device, NUM_STEPS, NUM_STEPS + 3), contents(table)


def save_both(settings: Settings, device: str, folder: str) -> None:
    """Saves one table, whole and cut by columns."""
    model = _made(settings, device)
    _train(model, device, 0, NUM_STEPS)
    Saver().save(model, f"{folder}/whole")
    cut = _made(settings, device, is_cut=True)
    Saver().load(cut, f"{folder}/whole")
    Saver().save(cut, f"{folder}/cut")


def compare(
    saved: Settings, loading: Settings, allow: Collection[str], device: str, folder: str
) -> str | None:
    """What is said of both checkpoints; None: both load, and give the same to the bit."""
    save_both(saved, device, folder)
    one, other = (_loaded(loading, device, f"{folder}/{n}", allow) for n in ("whole", "cut"))
    if isinstance(one, str) or isinstance(other, str):
        assert isinstance(one, str), f"the whole one loads, the other: {other}"
        assert isinstance(other, str), f"the other loads, the whole one: {one}"
        return one
    for found, expected in zip(other, one, strict=True):
        assert_same(found, expected, "of the table that was cut")
    return None


def load_before_the_optimizer(settings: Settings, device: str, *, fails_first: bool = False) -> int:
    """The rows of a table that is loaded before its optimizer is applied.

    They, and what they become, must be those of one that has it from the beginning. `fails_first`:
    memory is short when the optimizer is to be taken for the first time.
    """
    trained = _Model(settings, device)
    _train(trained, device, 0, NUM_STEPS)
    sides = [_Model(settings, device, has_optimizer=each) for each in (True, False)]
    for side in sides:
        side.load_state_dict(trained.state_dict())
    sides[1].apply_optimizer()
    if fails_first:
        [rows] = [each for each in sides[1].modules() if isinstance(each, TableRows)]
        with (
            patch.object(type(rows.home), "replace_rows", side_effect=MemoryError),
            suppress(MemoryError),
        ):
            sides[1].ebc.tables()
            raise AssertionError("it was taken without its state")
    found = []
    for side in sides:
        table = side.ebc.tables()["t"]
        before = contents(table)
        outputs = _train(side, device, NUM_STEPS, NUM_STEPS + 3)
        found.append((before, outputs, contents(table)))
    for late, expected in zip(*reversed(found), strict=True):
        assert_same(late, expected, "with an optimizer that came later")
    return len(found[0][0]["keys"])
