"""The reader in docs/reference reads frozen checkpoints: the documented format is enough."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pages import module_at
from recsdk_core import Default, Table
from recsdk_core.serving import ServingTable, freeze
from recsdk_core.serving.manifest import DTYPES, FrozenDType

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def reader() -> Any:
    module = module_at(ROOT / "docs" / "reference" / "frozen_reader.py")
    assert module.xxhash is not None
    return module


@pytest.mark.parametrize("default", [Default.constant(0.25), Default.shared_rows(7)])
@pytest.mark.parametrize("num_shards", [1, 3])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_documented_format_is_enough_to_read_it(
    tmp_path: Path, reader: Any, dtype: FrozenDType, num_shards: int, default: Default
) -> None:
    table = Table(dim=5, name="items", default=default)
    keys = np.array([0, -1, 2**63 - 1, -(2**63), *range(100, 900, 7)], dtype=np.int64)
    table.find_or_insert(keys)
    table.save(tmp_path / "checkpoint")
    freeze(tmp_path / "checkpoint", tmp_path / "frozen", dtype=dtype, num_shards=num_shards)
    plain = reader.Table(tmp_path / "frozen", "items")
    asked = np.concatenate([keys, np.arange(50)])
    wanted = np.stack([plain.row(key) for key in asked.tolist()])
    served = ServingTable(tmp_path / "frozen").lookup(asked)
    assert served.tobytes() == wanted.tobytes()


def test_the_table_that_the_c_example_serves_is_read_for_ever(reader: Any) -> None:
    path = ROOT / "cpp" / "tests" / "data" / "version_1.frozen"
    file = reader.File(path.read_bytes(), "00112233445566778899aabbccddeeff")
    rows = {key: file.row(key) for key in (1, -1, 2**63 - 1, 5)}
    assert rows.pop(5) is None
    found = {key: row.tolist() for key, row in rows.items()}
    assert found == {1: [1.0, 2.0], -1: [3.0, 4.0], 2**63 - 1: [2.75, 3.25]}
