"""`recsdk ckpt`: what it prints, its exit statuses, and what it says of bad input."""

from __future__ import annotations

import io
import json
import os
import re
import resource
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result
from fsspec import register_implementation

from recsdk_core import Admit, Default, Evict, Table, optim
from recsdk_core.checkpoint import open_checkpoint
from recsdk_core.cli import main
from recsdk_core.files.place_lock import lock_place
from recsdk_core.serving import freeze, open_frozen

KEYS = np.array([-(2**63), -1, 0, 1, 7, 2**63 - 1])


def run(*arguments: Any) -> Result:
    return CliRunner().invoke(main, ["ckpt", *map(str, arguments)])


def done(*arguments: Any) -> str:
    result = run(*arguments)
    assert result.exit_code == 0, result.output
    return str(result.output)


def as_json(*arguments: Any, status: int = 0) -> Any:
    result = run(*arguments, "--json")
    assert result.exit_code == status, result.output
    return json.loads(result.stdout)


@pytest.fixture
def chain(tmp_path: Path) -> Path:
    """A folder with a snapshot "a" and a delta "b" of one table."""
    table = Table(dim=2, name="user", optimizer=optim.Adagrad(lr=0.5))
    table.upsert(KEYS, np.arange(12, dtype=np.float32).reshape(6, 2))
    table.save(tmp_path / "a", step=3)
    table.erase(KEYS[1:2])
    table.upsert(KEYS[3:5], np.full((2, 2), 100, np.float32))
    table.save_delta(tmp_path / "b", step=4, user_state={"x": 1})
    return tmp_path


def two_tables(path: Path) -> Path:
    """A checkpoint with two tables."""
    from recsdk_core.checkpoint.model.saving import save_tables
    from recsdk_core.checkpoint.model.shards import Shard
    from recsdk_core.checkpoint.participants import OneRank
    from recsdk_core.checkpoint.saving import SaveOptions

    tables = [Table(dim=2, name=name) for name in ("user", "item")]
    tables[1].find_or_insert(np.array([5]))
    shards = [Shard(table=table) for table in tables]
    save_tables(lambda: (shards, SaveOptions()), OneRank(), path)
    return path


def test_inspect(chain: Path) -> None:
    text = done("inspect", chain / "b")
    for part in (
        "delta 1 on",
        "2 rows, 1 left (0 evicted, 1 erased, 0 expired) of width 2",
        "step 4",
        "Adagrad(",
        "sum float32[2]",
    ):
        assert part in text
    value = as_json("inspect", chain / "b")
    assert value["chain"]["parent"] == open_checkpoint(chain / "a").hash
    assert (value["kind"], value["step"], value["has_user_state"]) == ("delta", 4, True)
    assert value["tables"][0]["optimizer"]["arguments"]["lr"] == 0.5
    assert "snapshot" in done("inspect", chain / "a")


def test_inspect_tells_whether_the_chain_is_there(chain: Path) -> None:
    found = as_json("inspect", chain / "b")
    assert (found["links_before"], found["missing"]) == ([str(chain / "a")], None)
    assert f"chain: all 2 beside it, from {chain / 'a'} on" in done("inspect", chain / "b")
    assert "beside it" not in done("inspect", chain / "a")
    (chain / "a" / "manifest.json").write_text("{}")
    found = as_json("inspect", chain / "b")
    assert found["links_before"] == []
    for text in (found["missing"], done("inspect", chain / "b")):
        assert "its parent is missing" in text
        assert f"{chain / 'a'}/manifest.json" in text


def test_rules_are_told_by_what_was_given_to_them(tmp_path: Path) -> None:
    rule = Evict.lru(by="time").expiring(ttl=9, every=5)
    table = Table(dim=2, name="user", eviction=rule, admission=Admit.count(2))
    for step, name in enumerate("ab"):
        table.time = step
        table.find_or_insert(KEYS[: 1 + step])
        table.save(tmp_path / name)
    told = [line for line in done("inspect", tmp_path / "a").splitlines() if "eviction" in line]
    rules = "Evict(by='time', expire_every=5, min_age=0, order='lru', ttl=9)"
    assert told == [f"  eviction {rules}, at step 1, time 0"]
    found = run("diff", tmp_path / "a", tmp_path / "b").output
    assert f'eviction: "{rules}, at step 1, time 0" and "{rules}, at step 2, time 1"' in found
    assert "Described" not in found


def test_names_that_a_terminal_cannot_show_are_escaped(chain: Path) -> None:
    (chain / "a" / "manifest.json").write_text("{}")
    name = os.fsdecode(b"x\xff\x1b[31m\n\xc3\xa9")
    (chain / "a").rename(chain / name)
    for result in (run("inspect", chain / "b"), run("verify", chain / "b")):
        assert result.exit_code in (0, 1), result.exception
        assert rf"{chain}/x\udcff\x1b[31m\n" "\u00e9/manifest.json" in result.output
    assert f"{chain}/{name}/manifest.json" in as_json("inspect", chain / "b")["missing"]


def test_a_parent_whose_name_is_no_utf_8_is_read(chain: Path) -> None:
    name = os.fsdecode(b"x\xff")
    (chain / "a").rename(chain / name)
    assert as_json("get", chain / "b", "7")["fields"]["weight"] == [100, 100]
    table = Table(dim=2, name="user", optimizer=optim.Adagrad(lr=0.5))
    table.load(chain / "b")
    table.save_delta(chain / "c")
    done("verify", chain / "c")
    file = next((chain / name).rglob("*.rows"))
    file.write_bytes(file.read_bytes()[:-1] + b"?")
    result = run("verify", chain / "c")
    assert (result.exit_code, rf"{chain}/x\udcff/" in result.output) == (1, True)


def test_verify(chain: Path) -> None:
    assert done("verify", chain / "b").count("intact") == 2
    assert done("verify", "--alone", chain / "b").count("intact") == 1
    assert len(as_json("verify", chain / "a", chain / "b")["checkpoints"]) == 2
    file = next((chain / "a").rglob("*.rows"))
    file.write_bytes(file.read_bytes()[:-1])
    for arguments in ([chain / "b"], [chain / "a"], ["--alone", chain / "a"]):
        result = run("verify", *arguments)
        assert result.exit_code == 1
        assert result.output.startswith("Error: ")
        assert "rank_00000.rows: has" in result.output
    assert done("verify", "--alone", chain / "b")


def test_verify_reads_frozen_files_too(chain: Path) -> None:
    freeze(chain / "b", chain / "frozen", num_shards=2)
    assert done("verify", chain / "frozen") == f"{chain / 'frozen'}: all 3 files are intact\n"
    token = open_frozen(chain / "frozen").token
    value = as_json("verify", chain / "frozen")
    assert value == {"frozen": [{"location": str(chain / "frozen"), "token": token}]}
    mixed = run("verify", chain / "frozen", chain / "a")
    assert (mixed.exit_code, "must all be frozen or a chain" in mixed.output) == (2, True)
    for file in sorted((chain / "frozen").rglob("*.frozen")):
        whole = file.read_bytes()
        for wrong in (whole[:-1], whole[:-1] + bytes([whole[-1] ^ 1])):
            file.write_bytes(wrong)
            result = run("verify", chain / "frozen")
            assert (result.exit_code, file.name in result.output) == (1, True), result.output
        file.write_bytes(whole)
    manifest = chain / "frozen" / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"user"', '"used"'))
    result = run("verify", chain / "frozen")
    assert (result.exit_code, "manifest.json: its SHA-256" in result.output) == (1, True)


@pytest.mark.parametrize("action", ["verify", "inspect"])
def test_a_user_state_like_a_frozen_manifest_makes_no_frozen_one(
    tmp_path: Path, action: str
) -> None:
    Table(dim=1).save(tmp_path / "a", user_state={"format": "recsdk-frozen"})
    assert done(action, tmp_path / "a").startswith(f"{tmp_path / 'a'}: ")


def test_inspect_of_what_is_frozen(chain: Path) -> None:
    freeze(chain / "b", chain / "frozen", dtype="int8", num_shards=2)
    manifest = open_frozen(chain / "frozen")
    [entry] = manifest.tables
    first, second, table = done("inspect", chain / "frozen").splitlines()
    position = open_checkpoint(chain / "b").hash
    assert first == f"{chain / 'frozen'}: frozen, of the checkpoint with hash {position}"
    assert second.startswith(f"token {manifest.token}, step 4, ")
    assert table.startswith(f"table 'user': {entry.num_rows} rows of width 2 as int8, ")
    assert table.endswith(" in 2 shards; keys without a row read 0.0")
    value = as_json("inspect", chain / "frozen")
    assert (value["kind"], value["token"]) == ("frozen", manifest.token)
    assert (value["source"]["hash"], value["source"]["step"]) == (position, 4)
    assert value["num_bytes"] == sum(file.num_bytes for file in entry.files)
    [told] = value["tables"]
    assert (told["num_rows"], told["dtype"], told["num_shards"]) == (entry.num_rows, "int8", 2)
    listed = as_json("inspect", chain)
    assert [one["location"] for one in listed["checkpoints"]] == [
        str(chain / "a"),
        str(chain / "b"),
    ]
    assert listed["frozen"] == [
        {
            "location": str(chain / "frozen"),
            "token": manifest.token,
            "step": 4,
            "num_bytes": value["num_bytes"],
        }
    ]
    assert f"{chain / 'frozen'}: frozen, step 4, " in done("inspect", chain)
    damaged = chain / "frozen" / "manifest.json"
    damaged.write_text(damaged.read_text().replace('"user"', '"used"'))
    for where in (chain / "frozen", chain):
        result = run("inspect", where)
        assert (result.exit_code, "manifest.json: its SHA-256" in result.output) == (1, True)


def test_a_folder_whose_only_checkpoint_cannot_be_read_says_why(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "manifest.json").write_text("{}")
    result = run("inspect", tmp_path)
    assert (result.exit_code, "a folder of 1 checkpoint;" in result.output) == (1, True)
    assert f"cannot be read: {tmp_path / 'a'}/manifest.json: not written in" in result.output


def test_a_folder_of_checkpoints_is_listed(chain: Path) -> None:
    shutil.copytree(chain / "b", chain / "copy")
    (chain / "other").mkdir()
    text = done("inspect", chain)
    assert text.startswith(f"{chain}: a folder of 3 checkpoints; inspect one of them")
    (chain / "broken").mkdir()
    (chain / "broken" / "manifest.json").write_text("{}")
    result = run("inspect", chain)
    text = result.output
    assert (result.exit_code, "a folder of 4 checkpoints" in text) == (1, True)
    assert f"{chain / 'a'}: snapshot, step 3, " in text
    assert f"{chain / 'copy'}: delta 1 on " in text
    assert f"cannot be read: {chain / 'broken'}/manifest.json" in text
    value = as_json("inspect", chain, status=1)
    found = [(one["location"], one["kind"], one["step"]) for one in value["checkpoints"]]
    deltas = [(str(chain / name), "delta", 4) for name in ("b", "copy")]
    assert found == [(str(chain / "a"), "snapshot", 3), *deltas]
    assert len(value["errors"]) == 1
    result = run("inspect", chain / "other")
    assert (result.exit_code, "there is no checkpoint" in result.output) == (1, True)


def test_a_wrong_format_is_a_wrong_command_line(chain: Path) -> None:
    result = run("export", chain / "a", chain / "x.csv")
    assert result.exit_code == 2
    assert "must be one of parquet, safetensors, got 'csv'" in result.output


@pytest.mark.parametrize("arguments", [
    ["export", "{}/a", "memory://x.parquet"],
    ["inspect", ""],
    ["verify", "{}/a", "x" * 1025],
    ["diff", "{}/a", ""],
    ["compact", "{}/a", ""],
    ["reshard", "--world-size", "2", "{}/a", ""],
    ["import", "--name", "user", "s3://bucket/rows.npz", "{}/made"],
    ["import", "--name", "user", "{}/rows.npz", "--keys-file", "", "{}/made"],
    ["import", "--name", "", "{}/rows.npz", "{}/made"],
    ["import", "--name", "x" * 991, "{}/rows.npz", "{}/made"],
    ["freeze", "{}/a", "memory://frozen"],
    ["freeze", "", "{}/frozen"],
    ["simulate", "s3://bucket/trace.npz"],
    ["simulate", "{}/trace.npz", "--json", "s3://bucket/report"],
    ["simulate", "{}/trace.npz", "--png", ""],
])  # fmt: skip
def test_what_can_name_no_file_is_a_wrong_command_line(chain: Path, arguments: list[str]) -> None:
    group = [] if arguments[0] in ("freeze", "simulate") else ["ckpt"]
    result = CliRunner().invoke(main, [*group, *(each.format(chain) for each in arguments)])
    assert (result.exit_code, "Invalid value for" in result.output) == (2, True), result.output


@pytest.mark.parametrize(
    "command", [["inspect", "{}"], ["verify", "{}"], ["diff", "x", "{}"], ["compact", "x", "{}"]]
)
@pytest.mark.parametrize("before", ["", "simplecache::"])
def test_urls_that_cannot_be_opened_are_wrong_command_lines(
    command: list[str], before: str
) -> None:
    register_implementation(
        "recsdkabsent", "recsdk_absent.Store", clobber=True, errtxt="Install recsdk_absent"
    )
    for protocol, text in (
        ("nothing", "the protocol 'nothing' is not known to fsspec; look at the URL"),
        ("recsdkabsent", "is not installed; install it with pip; fsspec says: Install recsdk_abse"),
    ):
        result = run(*(each.format(f"{before}{protocol}://x/y") for each in command))
        assert result.exit_code == 2
        assert text in result.output


def test_diff(chain: Path) -> None:
    result = run("diff", chain / "a", chain / "b")
    assert result.exit_code == 1
    assert "3 equal, 2 changed, 1 only in" in result.output
    examples = [f"  only in {chain / 'a'}: -1", "  changed: 1, 7"]
    assert [line for line in result.output.splitlines() if line in examples] == examples
    value = as_json("diff", chain / "a", chain / "b", "--num-examples", 1, status=1)
    [table] = value["tables"]
    assert not value["equal"]
    assert table["examples"] == {"only_in_a": [-1], "only_in_b": [], "changed": [1]}
    done("compact", chain / "b", chain / "c")
    assert as_json("diff", chain / "b", chain / "c")["equal"]
    assert run("diff", chain / "a", chain / "nothing").exit_code == 2
    two_tables(chain / "two")
    value = as_json("diff", chain / "a", chain / "two", status=1)
    assert [table["name"] for table in value["tables"]] == ["user", "item"]


@pytest.mark.parametrize(
    ("key", "weight"),
    [("-9223372036854775808", [0, 1]), ("0x8000000000000000", [0, 1]), ("7", [100, 100]),
     ("9223372036854775808", [0, 1]), ("0", [4, 5]), ("0x7", [100, 100])],
)  # fmt: skip
def test_get(chain: Path, key: str, weight: list[float]) -> None:
    value = as_json("get", chain / "b", key)
    assert value["found"]
    assert value["fields"]["weight"] == weight
    assert "weight: " in done("get", chain / "b", key)


def test_get_of_keys_without_a_row(chain: Path) -> None:
    assert as_json("get", chain / "a", "-1")["found"]
    for key in ("-1", "12345"):
        result = run("get", chain / "b", key)
        assert (result.exit_code, result.output) == (1, f"table 'user' has no row of key {key}\n")
        assert not as_json("get", chain / "b", key, status=1)["found"]


@pytest.mark.parametrize("key", ["", "x", "1.5", "18446744073709551616", "-9223372036854775809",
                                 "0x", "0x10000000000000000", "1e5", "--", "-x"])  # fmt: skip
def test_get_of_what_is_no_key(chain: Path, key: str) -> None:
    result = run("get", chain / "b", key)
    assert result.exit_code == 2
    assert "KEY" in result.output


def test_top(chain: Path) -> None:
    rows = as_json("top", chain / "a", "-n", 2)["rows"]
    assert [row["key"] for row in rows] == [2**63 - 1, 7]
    rows = as_json("top", chain / "b", "--smallest", "-n", 1)["rows"]
    assert rows == [{"key": -(2**63), "norm": 1.0}]
    assert len(done("top", chain / "b").splitlines()) == 5
    result = run("top", chain / "b", "--by", "momentum")
    assert (result.exit_code, "a field of the table, weight, sum, got" in result.output) == (
        2,
        True,
    )


def test_top_of_equal_and_other_norms_is_that_of_any_layout(tmp_path: Path) -> None:
    table = Table(dim=2, name="user", optimizer=optim.SGD())
    values = np.ones((40, 2), np.float32)
    values[7:10, 1] = [np.inf, np.nan, -np.inf]
    table.upsert(np.arange(40)[::-1].copy(), values)
    table.save(tmp_path / "0")
    done("reshard", tmp_path / "0", tmp_path / "3", "--world-size", 3)
    for name in ("0", "3"):
        for options, keys in (([], [31, 30, 32, 0, 1]), (["--smallest"], [0, 1, 2, 3, 4])):
            rows = as_json("top", tmp_path / name, "-n", 5, *options)["rows"]
            assert [row["key"] for row in rows] == keys
        rows = as_json("top", tmp_path / name, "-n", 2)["rows"]
        assert [row["norm"] for row in rows] == ["NaN", "Infinity"]
    assert as_json("get", tmp_path / "0", 30)["fields"]["weight"] == [1, "-Infinity"]


def test_reshard_and_compact(chain: Path) -> None:
    done("reshard", chain / "a", chain / "b", chain / "r", "--world-size", 3, "--rule", "modulo")
    found = open_checkpoint(chain / "r").manifest
    assert (found.world_size, found.step, found.kind) == (3, 4, "snapshot")
    assert open_checkpoint(chain / "r").user_state() == {"x": 1}
    assert as_json("diff", chain / "r", chain / "b")["equal"]
    result = run("compact", chain / "b", chain / "r")
    assert result.exit_code == 1
    assert "choose another path or pass --overwrite" in result.output
    done("compact", chain / "b", chain / "r", "--overwrite")
    assert open_checkpoint(chain / "r").manifest.world_size == 1
    (chain / "link").symlink_to(chain)
    for target in (chain / "b", chain / "link" / "b", chain / "link" / "a"):
        result = run("compact", chain / "b", target, "--overwrite")
        assert (result.exit_code, "one of the source's" in result.output) == (1, True)
    assert run("reshard", chain / "b", chain / "x", "--world-size", 0).exit_code == 2
    result = run("compact", chain / "b", chain / "x", "--keep", "idle <")
    assert (result.exit_code, "predicate 'idle <': cannot be read" in result.output) == (2, True)
    assert not (chain / "x").exists()
    result = run("compact", chain / "b", chain / "a", chain / "x")
    assert (result.exit_code, "out of order" in result.output) == (1, True)


class Terminal(io.StringIO):
    """What a command takes for one."""

    def isatty(self) -> bool:
        return True


def test_a_wrong_table_is_refused_with_those_that_have_keys(tmp_path: Path) -> None:
    """Rows that keys without one share are no table of keys."""
    table = Table(
        dim=2, name="user", max_rows=9, eviction=Evict.lfu(), default=Default.shared_rows(4)
    )
    table.find_or_insert(KEYS)
    table.save(tmp_path / "a")
    command = ["ckpt", "compact", str(tmp_path / "a"), str(tmp_path / "b"), "--keep", "count > 1"]
    freezing = ["freeze", str(tmp_path / "a"), str(tmp_path / "b"), "--where", "count > 1"]
    for arguments in (command, freezing):
        for name in ("users", "user.shared"):
            result = CliRunner().invoke(main, [*arguments, "--table", name])
            assert result.exit_code == 2, result.output
            said = f"Error: --table: there is no {name!r}; {tmp_path / 'a'} has user\n"
            assert result.output.endswith(said)
    assert not (tmp_path / "b").exists()
    assert CliRunner().invoke(main, [*command, "--table", "user"]).exit_code == 0


def test_bars_on_a_terminal_end_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of tables with counts of keys without a row, and rows that those share."""
    table = Table(
        dim=2, name="user", max_rows=4, admission=Admit.count(2), default=Default.shared_rows(4)
    )
    table.find_or_insert(np.repeat(KEYS, 2))
    table.find_or_insert(np.arange(20, 40))
    table.save(tmp_path / "a")
    table.apply_gradients(KEYS, np.ones((6, 2), np.float32))
    table.find_or_insert(np.arange(50, 90))
    table.save_delta(tmp_path / "b")
    monkeypatch.chdir(tmp_path)
    for arguments in (
        "ckpt reshard b r --world-size 3",
        "ckpt verify r",
        "ckpt diff r b",
        "ckpt compact b c",
        "ckpt top b",
        "ckpt export b rows.parquet",
        "freeze b f",
    ):
        monkeypatch.setattr("sys.stderr", Terminal())
        main(arguments.split(), standalone_mode=False)
        bar = sys.stderr.getvalue()
        assert "  0%" in bar
        # Blanks wipe out the time that was left, which is shown where a second passes.
        assert re.search(r"100% *\x1b\[\?25h\n\Z", bar), arguments


@pytest.mark.parametrize("form", ["parquet", "safetensors"])
def test_export_and_import(chain: Path, form: str) -> None:
    target = chain / f"rows.{form}"
    assert as_json("export", chain / "b", target)["num_rows"] == 5
    done("import", target, chain / "i", "--name", "user", "--world-size", 2)
    table = Table(dim=2, name="user", optimizer=optim.Adam())
    table.load(chain / "i")
    expected = Table(dim=2, name="user", optimizer=optim.Adagrad(lr=0.5))
    expected.load(chain / "b")
    assert len(table) == 5
    assert np.array_equal(table.lookup(KEYS), expected.lookup(KEYS))
    result = run("export", chain / "b", target)
    assert (result.exit_code, "exists already" in result.output) == (1, True)
    assert not list(chain.glob(".rows*"))


def test_shared_rows_are_told_apart(tmp_path: Path) -> None:
    table = Table(dim=2, name="user", max_rows=2, default=Default.shared_rows(4))
    table.find_or_insert(KEYS)
    table.save(tmp_path / "a")
    text = done("inspect", tmp_path / "a")
    assert "table 'user.shared': 4 rows that keys of 'user' without one share" in text
    assert as_json("export", tmp_path / "a", tmp_path / "rows.parquet")["num_rows"] == 2
    shared = tmp_path / "shared.parquet"
    assert as_json("export", tmp_path / "a", shared, "--table", "user.shared")["num_rows"] == 4


def test_exported_files_are_read_by_their_libraries(chain: Path) -> None:
    from pyarrow import parquet
    from safetensors.numpy import load_file

    for form in ("parquet", "safetensors"):
        done("export", chain / "a", chain / "rows", "--format", form)
        (chain / "rows").rename(chain / f"rows.{form}")
    frame = parquet.read_table(chain / "rows.parquet").to_pydict()
    arrays = load_file(chain / "rows.safetensors")
    assert frame["key"] == arrays["key"].tolist()
    assert sorted(frame["key"]) == KEYS.tolist()
    assert np.array_equal(np.array(frame["sum"], np.float32), arrays["sum"])


@pytest.mark.parametrize("form", ["parquet", "safetensors"])
def test_exports_that_fail_and_what_they_leave(chain: Path, form: str) -> None:
    target = chain / f"rows.{form}"
    left = chain / f".rows.{form}.partial-{'7' * 32}"
    left.write_bytes(b"of an export that was killed")
    assert as_json("export", chain / "b", target)["num_rows"] == 5
    target.unlink()
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (64, before[1]))
    try:
        result = run("export", chain / "b", target)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert result.exit_code == 1
    assert result.output.startswith(f"Error: {target}: writing failed: ")
    assert not list(chain.glob("*rows.*"))
    result = run("export", chain / "b", f"memory://x/rows.{form}")
    assert (result.exit_code, "give a local path" in result.output) == (2, True)


@pytest.mark.parametrize("form", ["parquet", "safetensors"])
def test_of_two_exports_to_a_file_one_fails(chain: Path, form: str) -> None:
    target, partial = chain / f"rows.{form}", chain / f".rows.{form}.partial-{'7' * 32}"
    partial.write_bytes(b"of the other")
    lock = lock_place(chain / f".rows.{form}.recsdk-lock")
    assert lock is not None
    result = run("export", chain / "b", target)
    assert (result.exit_code, "is under way, by process" in result.output) == (1, True)
    assert partial.read_bytes() == b"of the other"
    lock.release()
    partial.unlink()
    kept = chain / "kept"
    kept.write_bytes(b"another file")
    partial.symlink_to(kept)
    done("export", chain / "b", target)
    assert kept.read_bytes() == b"another file"
    assert not list(chain.glob(".rows*"))


@pytest.mark.parametrize("form", ["parquet", "safetensors"])
def test_an_empty_table_keeps_its_width(tmp_path: Path, form: str) -> None:
    Table(dim=5, name="user").save(tmp_path / "0")
    done("export", tmp_path / "0", tmp_path / f"rows.{form}")
    done("import", tmp_path / f"rows.{form}", tmp_path / "1", "--name", "user")
    Table(dim=5, name="user").load(tmp_path / "1")


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_import_for_a_table_of_16_bits(tmp_path: Path, dtype: Any) -> None:
    weights = np.random.default_rng(0).normal(size=(len(KEYS), 3)).astype(np.float32)
    np.savez(tmp_path / "rows.npz", key=KEYS, weight=weights)
    done("import", tmp_path / "rows.npz", tmp_path / "c", "--name", "t", "--dtype", dtype)
    table, other = (Table(dim=3, name="t", dtype=dtype) for _ in range(2))
    table.load(tmp_path / "c")
    other.upsert(KEYS, weights)
    assert np.array_equal(table.lookup(KEYS), other.lookup(KEYS))


@pytest.mark.parametrize("stored", ["BF16", "F16"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_import_of_16_bits(tmp_path: Path, stored: str, dtype: Any) -> None:
    halves = np.random.default_rng(0).integers(0, 2**16, (len(KEYS), 3)).astype(np.uint16)
    halves &= 0xBFFF  # finite in either format
    weights = halves.view(np.float16).astype(np.float32)
    if stored == "BF16":
        weights = (halves.astype(np.uint32) << 16).view(np.float32)
    save_safetensors(
        tmp_path / "rows.safetensors",
        {"other": ("U8", np.arange(5, dtype=np.uint8)), "emb.weight": (stored, halves),
         "key": ("I64", KEYS), "empty": ("BF16", halves[:0])},
    )  # fmt: skip
    done("import", tmp_path / "rows.safetensors", tmp_path / "c", "--name", "t",
         "--weights", "emb.weight", "--dtype", dtype)  # fmt: skip
    table, other = (Table(dim=3, name="t", dtype=dtype) for _ in range(2))
    table.load(tmp_path / "c")
    other.upsert(KEYS, weights)
    assert np.array_equal(table.lookup(KEYS), other.lookup(KEYS))
    if stored == "BF16" or dtype == "float32":
        assert np.array_equal(table.lookup(KEYS), weights)


def save_safetensors(path: Path, tensors: dict[str, tuple[str, Any]]) -> None:
    """Writes a file of tensors, given with their types, as its library lays it out."""
    header, content = {}, b""
    for name, (dtype, values) in tensors.items():
        begin, content = len(content), content + values.tobytes()
        places = [begin, len(content)]
        header[name] = {"dtype": dtype, "shape": list(values.shape), "data_offsets": places}
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + content)


def test_import_from_numpy(tmp_path: Path) -> None:
    keys, weights = KEYS.view(np.uint64), np.arange(18, dtype=np.float16).reshape(6, 3)
    np.savez(tmp_path / "rows.npz", emb=weights)
    np.save(tmp_path / "ids.npy", keys)
    done("import", tmp_path / "rows.npz", tmp_path / "c", "--name", "t", "--weights", "emb",
         "--keys-file", tmp_path / "ids.npy", "--seed", 5)  # fmt: skip
    table = Table(dim=3, name="t", seed=5)
    table.load(tmp_path / "c")
    assert np.array_equal(table.lookup(KEYS), weights)


def test_what_cannot_be_imported(tmp_path: Path) -> None:
    good = np.zeros((2, 3), np.float32)
    cases: list[tuple[dict[str, Any], str]] = [
        (
            {"key": np.array([1, 1]), "weight": good},
            "x.npz: ids 'key' must not repeat, got 1 again; give each once",
        ),
        (
            {"key": np.array([1, 2, 3]), "weight": good},
            "x.npz: array 'weight' must have shape (3, D)",
        ),
        (
            {"key": np.array([1.0, 2.0]), "weight": good},
            "x.npz: ids 'key' must be whole numbers (N,), got float64",
        ),
        ({"key": np.array([1, 2]), "weight": good[0]}, "x.npz: array 'weight' must have shape"),
        (
            {"key": np.array([1, 2]), "weight": good.astype(np.int32)},
            "'weight' must be floats, got int32",
        ),
        ({"weight": good}, "has no array 'key'; it has weight"),
    ]
    for arrays, text in cases:
        np.savez(tmp_path / "x.npz", **arrays)
        result = run("import", tmp_path / "x.npz", tmp_path / "c", "--name", "t")
        assert result.exit_code == 1
        assert text in result.output
    (tmp_path / "y.csv").write_text("key,weight")
    np.save(tmp_path / "y.npy", good)
    wrong = [
        ("y.npz", "no such file"),
        ("y.csv", "must end in one of .npz, .npy, .parquet, .safetensors, got '.csv'"),
        ("y.npy", "one array without a name, where 'key' is wanted; put it into a .npz"),
    ]
    for name, text in wrong:
        result = run("import", tmp_path / name, tmp_path / "c", "--name", "t")
        assert (result.exit_code, text in result.output) == (1, True)
    (tmp_path / "z.safetensors").write_bytes(b"junk")
    (tmp_path / "z.parquet").write_bytes(b"junk")
    (tmp_path / "z.npz").write_bytes(b"junk")
    for name in ("z.safetensors", "z.parquet", "z.npz"):
        result = run("import", tmp_path / name, tmp_path / "c", "--name", "t")
        assert result.exit_code == 1
        assert result.output.startswith("Error: ")
        assert name in result.output
    assert not (tmp_path / "c").exists()


@pytest.mark.parametrize("end", ["npz", "parquet", "safetensors"])
def test_only_what_is_imported_is_read(tmp_path: Path, end: str) -> None:
    """What else a file has may be of any kind."""
    path, keys, weights = tmp_path / f"x.{end}", np.array([1, 2]), np.ones((2, 3), np.float32)
    if end == "npz":
        np.savez(path, a=keys, b=weights, c=np.array([{}]))
    elif end == "parquet":
        pa = pytest.importorskip("pyarrow")
        pq = pytest.importorskip("pyarrow.parquet")
        columns = {"a": keys, "b": list(weights), "c": [[1], [2, None]], "d": [{"x": 1}, None]}
        pq.write_table(pa.table(columns), path)
    else:
        numpy = pytest.importorskip("safetensors.numpy")
        numpy.save_file({"a": keys, "b": weights, "c": weights[:0]}, path)
    names = ["--keys", "a", "--weights", "b", "--name", "t"]
    assert "2 rows of width 3" in done("import", path, tmp_path / "made", *names)
    ids = ["--keys-file", path, *names]
    assert "2 rows of width 3" in done("import", path, tmp_path / "other", *ids)
    result = run("import", path, tmp_path / "none", "--name", "t")
    assert result.exit_code == 1
    assert result.output.startswith(f"Error: {path}: has no array 'key'; it has a, b, c")


def test_a_file_without_arrays_is_told(tmp_path: Path) -> None:
    np.savez(tmp_path / "x.npz")
    result = run("import", tmp_path / "x.npz", tmp_path / "made", "--name", "t")
    assert result.output == f"Error: {tmp_path}/x.npz: has no array 'key'; it has none\n"


def test_a_column_that_cannot_be_imported_is_named_once(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    pq = pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "x.parquet"
    for weight, text in (
        ([[1.0], [1.0, 2.0]], "'weight' must have lists of one length, got [1, 2]"),
        ([[1.0], None], "'weight' must have no missing values, got 1 of 2"),
        ([[1.0], [None]], "'weight' must have no missing values in its lists, got 1 of 2"),
    ):
        pq.write_table(pa.table({"key": [1, 2], "weight": weight}), path)
        result = run("import", path, tmp_path / "made", "--name", "t")
        assert result.exit_code == 1
        assert result.output.startswith(f"Error: {path}: cannot be read as parquet: column {text}")


def test_the_table_must_be_named_if_there_are_several(tmp_path: Path) -> None:
    path = two_tables(tmp_path / "two")
    result = run("get", path, "5")
    assert result.exit_code == 2
    assert "--table: say which" in result.output
    assert as_json("get", path, "5", "--table", "item")["found"]
    result = run("top", path, "--table", "thing")
    assert (result.exit_code, "there is no 'thing'" in result.output) == (2, True)


def test_what_is_no_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "manifest.json").write_text("{}")
    for name in ("file", "folder", "nothing"):
        for command in (["inspect"], ["verify"], ["top"]):
            result = run(*command, tmp_path / name)
            assert result.exit_code == 1
            assert result.output.startswith("Error: ")
    assert run("inspect").exit_code == 2
    assert run("nonsense").exit_code == 2


def test_it_needs_no_torch(chain: Path) -> None:
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from recsdk_core.cli import main\n"
        "main(['ckpt', 'verify', sys.argv[1]])"
    )
    command = [sys.executable, "-c", code, str(chain / "b")]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (found.returncode, found.stdout.count("intact")) == (0, 2), found.stderr
