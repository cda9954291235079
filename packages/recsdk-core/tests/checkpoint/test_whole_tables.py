"""A table that was cut by columns is one table to whoever looks at it, compares or exports it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from column_ranges import ALL, DIM, Pair
from hypothesis import given, settings
from hypothesis import strategies as st

from recsdk_core import CheckpointError, Default, Evict, _ext, optim
from recsdk_core.checkpoint import chain_of, diff, joining, open_checkpoint
from recsdk_core.checkpoint.comparing import find_row, top_rows
from recsdk_core.checkpoint.joining import side_by_side, table_named
from recsdk_core.checkpoint.participants import OneRank
from recsdk_core.checkpoint.reading import position_of
from recsdk_core.checkpoint.saving import SaveOptions, ShardFile, save_shards
from recsdk_core.checkpoint.stores import open_store
from recsdk_core.checkpoint.tabular import FORMATS, export_table, read_arrays
from recsdk_core.cli import main
from recsdk_core.serving import ServingTable, freeze

KEYS = st.lists(st.sampled_from(ALL.tolist()), unique=True)


def exported(chain: Any, name: str, path: Path, form: str) -> dict[str, bytes]:
    """What a file has, in ascending order of keys."""
    num_rows = export_table(chain, name, path, form)
    found = read_arrays(path)
    order = np.argsort(found["key"])
    assert len(order) == num_rows
    return {name: values[order].tobytes() for name, values in found.items()}


@settings(max_examples=15)
@given(
    links=st.lists(st.tuples(KEYS, KEYS), min_size=1, max_size=3),
    ends=st.sampled_from([(2, 3, DIM), (1, DIM), tuple(range(1, DIM + 1))]),
    dtype=st.sampled_from(["float32", "bfloat16"]),
    eviction=st.sampled_from([None, Evict.lfu()]),
    form=st.sampled_from(FORMATS),
    chunk_bytes=st.sampled_from([1, 500, 2**24]),
)
def test_it_reads_as_the_whole_table(
    tmp_path_factory: pytest.TempPathFactory,
    links: list[tuple[list[int], list[int]]],
    ends: tuple[int, ...],
    dtype: Any,
    eviction: Evict | None,
    form: str,
    chunk_bytes: int,
) -> None:
    limits: dict[str, Any] = {} if eviction is None else {"max_rows": 1000, "eviction": eviction}
    folder = tmp_path_factory.mktemp("pair")
    pair = Pair(folder, ends, dtype=dtype, default=Default.shared_rows(8), **limits)
    for number, (trained, erased) in enumerate([(ALL[::2], ()), *links]):
        pair.train(trained, erased)
        pair.save(str(number), is_delta=number > 0)
    last = str(len(links))
    whole, cut = (chain_of(folder / kind / last) for kind in ("whole", "cut"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(joining, "_CHUNK_BYTES", chunk_bytes)
        for name in ("items", "items.shared"):
            files = [folder / f"{kind}.{form}" for kind in ("whole", "cut")]
            assert exported(cut, name, files[1], form) == exported(whole, name, files[0], form)
            for file in files:
                file.unlink()
        tables = [table_named(chain[-1], "items") for chain in (whole, cut)]
        assert [len(table.parts) for table in tables] == [1, len(ends)]
        fields = [field.name for field in joining.whole_fields(tables[1])]
        for by in fields:
            shown = [
                top_rows(chain, table, count=20, by=by)
                for chain, table in zip((whole, cut), tables, strict=True)
            ]
            assert shown[0] == shown[1]
        for key in ALL[::40].tolist():
            rows = [find_row(c, t, key) for c, t in zip((whole, cut), tables, strict=True)]
            assert (rows[0] is None) == (rows[1] is None)
            for name in rows[0] or ():
                assert rows[0][name].tobytes() == rows[1][name].tobytes()
        assert all(table.is_equal for table in diff(whole, cut))


def test_commands_take_it_by_its_name(tmp_path: Path) -> None:
    """State that a range has one number of is shown for each range."""
    pair = Pair(tmp_path, optimizer=optim.RowwiseAdagrad(lr=0.1))
    pair.train(ALL)
    pair.save("a")
    cut = str(tmp_path / "cut" / "a")

    def run(*arguments: str) -> tuple[int, str]:
        result = CliRunner().invoke(main, ["ckpt", *arguments])
        return result.exit_code, result.output

    status, text = run("get", cut, "5", "--table", "items")
    assert status == 0
    lines = dict(line.split(": ") for line in text.splitlines())
    assert {name: len(values.split()) for name, values in lines.items()} == {"weight": 7, "sum": 3}
    assert run("get", cut, "5") == (0, text)
    assert run("get", cut, "777") == (1, "table 'items' has no row of key 777\n")
    assert run("top", cut, "-n", "3", "--by", "sum")[0] == 0
    target = tmp_path / "items.safetensors"
    assert run("export", cut, str(target)) == (0, f"{target}: {len(ALL)} rows of table 'items'\n")
    status, text = run("get", cut, "5", "--table", "items.columns_0_2")
    assert status == 2
    assert f"there is no 'items.columns_0_2'; {cut} has items\n" in text
    pair.ranges[1].find_or_insert(np.array([777]))
    pair.save("b")
    status, text = run("get", str(tmp_path / "cut" / "b"), "777")
    assert status == 1
    assert "table 'items': only some ranges of its columns have a row of key 777" in text


def two_rows(target: Any, token: bytes, kind: str, entry: Any) -> Any:
    """Writes a file of rows in which a key is twice."""
    fields = [(field.name, field.dtype, field.width) for field in entry.fields]
    values = {name: np.zeros((2, width), np.float32) for name, _, width in fields}
    return _ext.write_row_file(
        target.write,
        kind=kind,
        dim=entry.dim,
        fields=fields,
        blocks=[_ext.RowBlock.rows(np.array([5, 5]), values)],
        token=token,
        name=target.name,
    )


def test_a_key_that_is_twice_in_every_range_is_named(tmp_path: Path) -> None:
    """Both where it is frozen and where it is followed."""
    pair = Pair(tmp_path)
    pair.train(ALL)
    pair.save("a")
    before = chain_of(tmp_path / "cut" / "a")
    freeze(tmp_path / "cut" / "a", tmp_path / "served")
    for name, kind in (("b", "delta"), ("c", "snapshot")):
        shards = [
            ShardFile(
                entry=replace(entry, files=()),
                write=lambda target, token, codec, progress, kind=kind, entry=entry: two_rows(
                    target, token, kind, entry
                ),
                position=position_of(before) if kind == "delta" else None,
            )
            for entry in open_checkpoint(tmp_path / "cut" / "a").manifest.tables
        ]
        options = SaveOptions(is_delta=kind == "delta")
        save_shards(open_store(tmp_path / "cut" / name), OneRank(), shards, options)
    said = "table 'items': key 5 is there twice; what it comes from is damaged"
    live = ServingTable(tmp_path / "served")
    live.follow(tmp_path / "cut", interval_seconds=0.001)
    while live.stats().problem is None:
        assert live.stats().sequence == 0
    live.stop_following()
    assert said in str(live.stats().problem)
    with pytest.raises(CheckpointError, match=said):
        freeze(tmp_path / "cut" / "c", tmp_path / "frozen")


@pytest.mark.parametrize("other", [[5], [5, 6, 6]])
def test_a_key_that_is_twice_in_one_range_is_named(other: list[int]) -> None:
    blocks = [(np.array(keys), np.zeros((len(keys), 2), np.float32)) for keys in ([5, 5, 6], other)]
    with pytest.raises(CheckpointError, match="table 't': key 5 is there twice"):
        side_by_side("t", blocks)
