"""The reader in docs/reference reads what the library writes: the documented format is enough."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pages import module_at
from recsdk_core import Table, optim
from recsdk_core.checkpoint import reshard
from recsdk_core.checkpoint.saving import Codec
from recsdk_core.table import DType

ROOT = Path(__file__).resolve().parents[2]
KEYS = np.array([0, -1, 2**63 - 1, -(2**63), *range(100, 160)], dtype=np.int64)
OPTIMIZERS = {
    "sgd": optim.SGD(lr=0.5),
    "adagrad": optim.Adagrad(lr=0.1),
    "rowwise_adagrad": optim.RowwiseAdagrad(lr=0.1),
    "adam": optim.Adam(lr=0.1, bias_correction="row"),
}
STORED = {"float32": np.float32, "bfloat16": np.uint16, "float16": np.float16}
"""What the files have of each type of tables, in numpy's words."""
CODECS = ("none", "zstd")
DIRECT_FROM = 8 << 20
"""Bytes of a file from which on it is written past the page cache."""
LARGE_BYTES = 14 << 20
"""Bytes of weights whose files exceed that, compressed too."""


def plain_reader() -> Any:
    return module_at(ROOT / "docs" / "reference" / "checkpoint_reader.py")


def train(table: Table, keys: Any, step: int) -> None:
    table.find_or_insert(keys)
    grads = np.random.default_rng(step).normal(size=(len(keys), table.dim)).astype(np.float32)
    table.apply_gradients(keys, grads)


def as_stored(weights: np.ndarray, dtype: str) -> np.ndarray:
    """Weights of a table, which have its type's values, in the type of its files."""
    if dtype == "bfloat16":
        return (weights.view(np.uint32) >> 16).astype(np.uint16)
    return weights.astype(STORED[dtype])


def rows_of(table: Table) -> dict[int, tuple[bytes, ...]]:
    """Weights and state of every key, as bytes."""
    found = {}
    for batch in table.export():
        weights = as_stored(batch.weights, table.dtype)
        for index, key in enumerate(batch.keys.tolist()):
            state = (batch.state[name][index].tobytes() for name in sorted(batch.state))
            found[key] = (weights[index].tobytes(), *state)
    return found


def read(reader: Any, chain: list[Path]) -> dict[int, tuple[bytes, ...]]:
    """The same, as the reader finds it."""
    return {
        key: tuple(row[name].tobytes() for name in ["weight", *sorted(row.keys() - {"weight"})])
        for key, row in reader.read_chain(chain)["user"].items()
    }


def save_chain(table: Table, folder: Path, keys: np.ndarray, codec: Codec) -> list[Path]:
    """A snapshot, and a delta in which some keys left."""
    chain = [folder / "0", folder / "1"]
    train(table, keys, step=1)
    table.save(chain[0], user_state=["\u00e9", {"x": 1.5}], codec=codec)
    table.erase(keys[5:20])
    train(table, np.delete(keys, range(9, 20)), step=2)
    table.save_delta(chain[1], codec=codec)
    return chain


@pytest.fixture
def reader(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The plain reader; `num_unpacked` is how many blocks it has decompressed."""
    module: Any = plain_reader()
    assert module.xxhash is not None
    module.num_unpacked = 0
    unpack = module.decompress

    def decompress(stored: bytes, raw_bytes: int) -> bytes:
        module.num_unpacked += 1
        return bytes(unpack(stored, raw_bytes))

    monkeypatch.setattr(module, "decompress", decompress)
    return module


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("dtype", STORED)
@pytest.mark.parametrize("optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_the_documented_format_is_enough_to_read_it(
    tmp_path: Path, reader: Any, optimizer: optim.Optimizer, dtype: DType, codec: Codec
) -> None:
    table = Table(dim=3, name="user", optimizer=optimizer, dtype=dtype)
    chain = save_chain(table, tmp_path, KEYS, codec)
    three = tmp_path / "three"
    reshard(chain, three, world_size=3, codec=codec)
    assert read(reader, chain) == rows_of(table)
    assert (reader.num_unpacked > 0) == (codec == "zstd")
    types = {row["weight"].dtype for row in reader.read_chain(chain)["user"].values()}
    assert types == {np.dtype(STORED[dtype])}
    assert read(reader, [three]) == rows_of(table)


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("dtype", STORED)
def test_files_that_were_written_past_the_page_cache_are_read_too(
    tmp_path: Path, reader: Any, dtype: DType, codec: Codec
) -> None:
    table = Table(dim=512, name="user", optimizer=optim.RowwiseAdagrad(lr=0.1), dtype=dtype)
    num_rows = LARGE_BYTES // (512 * np.dtype(STORED[dtype]).itemsize)
    chain = save_chain(table, tmp_path, np.arange(num_rows) * 977 - 5, codec)
    for folder in chain:
        [file] = folder.glob("*/tables/0000/*.rows")
        assert file.stat().st_size > DIRECT_FROM
    assert read(reader, chain) == rows_of(table)
    assert (reader.num_unpacked > 2) == (codec == "zstd")


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
