"""The reader in docs/reference reads what the library writes: the documented format is enough."""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from recsdk_core import Table, optim
from recsdk_core.checkpoint import reshard

ROOT = Path(__file__).resolve().parents[2]
KEYS = np.array([0, -1, 2**63 - 1, -(2**63), *range(100, 160)], dtype=np.int64)
OPTIMIZERS = {
    "sgd": optim.SGD(lr=0.5),
    "adagrad": optim.Adagrad(lr=0.1),
    "rowwise_adagrad": optim.RowwiseAdagrad(lr=0.1),
    "adam": optim.Adam(lr=0.1, bias_correction="row"),
}


def plain_reader() -> Any:
    path = ROOT / "docs" / "reference" / "checkpoint_reader.py"
    spec = importlib.util.spec_from_file_location("checkpoint_reader", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def train(table: Table, keys: Any, step: int) -> None:
    table.find_or_insert(keys)
    grads = np.random.default_rng(step).normal(size=(len(keys), table.dim)).astype(np.float32)
    table.apply_gradients(keys, grads)


def rows_of(table: Table) -> dict[int, tuple[bytes, ...]]:
    """Weights and state of every key, as bytes."""
    return {
        key: (
            batch.weights[index].tobytes(),
            *(batch.state[name][index].tobytes() for name in sorted(batch.state)),
        )
        for batch in table.export()
        for index, key in enumerate(batch.keys.tolist())
    }


@pytest.mark.parametrize("optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_the_documented_format_is_enough_to_read_it(
    tmp_path: Path, optimizer: optim.Optimizer
) -> None:
    table = Table(dim=3, name="user", optimizer=optimizer)
    train(table, KEYS, step=1)
    table.save(tmp_path / "0", user_state=["\u00e9", {"x": 1.5}])
    train(table, KEYS[:9], step=2)
    table.erase(KEYS[5:20])
    table.save_delta(tmp_path / "1")
    reshard([tmp_path / "0", tmp_path / "1"], tmp_path / "three", world_size=3)
    reader = plain_reader()
    assert reader.xxhash is not None
    for chain in ([tmp_path / "0", tmp_path / "1"], [tmp_path / "three"]):
        found = reader.read_chain(chain)["user"]
        read = {
            key: tuple(row[n].tobytes() for n in ["weight", *sorted(row.keys() - {"weight"})])
            for key, row in found.items()
        }
        assert read == rows_of(table)


def names_in(value: Any) -> Iterator[str]:
    """The names of all fields, but for what the user and the optimizers name."""
    for item in value if isinstance(value, list) else []:
        yield from names_in(item)
    for name, item in value.items() if isinstance(value, dict) else []:
        yield name
        if name not in ("user_state", "arguments"):
            yield from names_in(item)


def test_every_field_of_a_manifest_is_documented(tmp_path: Path) -> None:
    table = Table(dim=3, name="user", optimizer=optim.Adagrad(lr=0.1))
    table.save(tmp_path / "0", user_state=b"x")
    table.save_delta(tmp_path / "1", user_state=b"x")
    page = (ROOT / "docs" / "reference" / "checkpoint.md").read_text()
    documented = set(re.findall("`([a-z0-9_]+)`", page))
    manifest = json.loads((tmp_path / "1" / "manifest.json").read_text())
    assert set(names_in(manifest)) - documented == set()
