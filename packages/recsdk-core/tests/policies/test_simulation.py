"""`recsdk simulate`: its figures are those of tables that a stream went through."""

from __future__ import annotations

import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from recsdk_core import Admit, Evict, Outcome
from recsdk_core.cli import main
from recsdk_core.simulation import Simulated, Trace, open_trace, running, simulate
from recsdk_core.testing import ReferenceTable
from recsdk_core.virtual_shards import mix64

RULES = {
    "none": None,
    "lru": Evict.lru(),
    "lru:time": Evict.lru(by="time"),
    "lfu": Evict.lfu(),
    "lfu:3": Evict.lfu(half_life=3),
    "none+count:2": None,
    "lru+count:3": Evict.lru(),
    "lfu+probability:0.4": Evict.lfu(),
}
ADMISSION = {
    "none+count:2": Admit.count(2),
    "lru+count:3": Admit.count(3),
    "lfu+probability:0.4": Admit.probability(0.4),
}


def zipf_ids(num: int, distinct: int, exponent: float = 0.99) -> Any:
    shares = np.arange(1, distinct + 1) ** -exponent
    up_to = np.cumsum(shares / shares.sum())
    ranks = np.searchsorted(up_to, np.random.default_rng(1).random(num) * up_to[-1])
    return ranks * 7919


@given(
    st.lists(st.tuples(st.integers(-5, 5), st.integers(0, 9)), max_size=60),
    st.integers(1, 12),
    st.integers(1, 9),
)
@settings(deadline=None, max_examples=40)
def test_each_figure_is_that_of_the_reference_table(
    drawn: list[tuple[int, int]], size: int, step_ids: int
) -> None:
    ids, times = np.array(drawn, np.int64).reshape(-1, 2).T
    trace = Trace.of_arrays(ids, times)
    found = simulate(trace, [size], RULES, admission=ADMISSION, step_ids=step_ids)
    for run, (name, rule) in zip(found, RULES.items(), strict=True):
        admission = ADMISSION.get(name)
        table = ReferenceTable(1, max_rows=size, eviction=rule, admission=admission)
        had = set[int]()
        counts, returned = dict.fromkeys(Outcome, 0), 0
        for start in range(0, len(ids), step_ids):
            part = slice(start, start + step_ids)
            by_time = {"times": times[part]} if name == "lru:time" else {}
            _, outcomes = table.map(ids[part], True, **by_time)
            for key, outcome in zip(ids[part].tolist(), outcomes.tolist(), strict=True):
                counts[Outcome(outcome)] += 1
                if outcome == Outcome.INSERTED:
                    returned += key in had
                    had.add(key)
        inserted, all_ids = counts[Outcome.INSERTED], max(len(ids), 1)
        assert (run.rule, run.max_rows, run.sample) == (name, size, 1)
        assert run.hit_rate == pytest.approx(counts[Outcome.FOUND] / all_ids)
        assert run.refused_rate == counts[Outcome.REFUSED] / all_ids
        assert run.not_admitted_rate == counts[Outcome.NOT_ADMITTED] / all_ids
        assert run.inserted == inserted
        assert run.returned_rate == returned / max(inserted, 1)
        assert run.num_rows == len(table)
        assert run.evicted == inserted - len(table)


def test_a_part_of_the_keys_stands_for_all() -> None:
    trace = Trace.of_arrays(zipf_ids(400_000, 300_000))
    rules = {"none": None, "lru": Evict.lru(), "lfu": Evict.lfu(), "lru+count": Evict.lru()}
    admission = {"lru+count": Admit.count(2)}
    whole = simulate(trace, [70_000], rules, admission=admission)
    part = simulate(trace, [70_000], rules, admission=admission, sample=0.25)
    assert [each.sample for each in part] == [0.25] * 4
    for exact, about in zip(whole, part, strict=True):
        assert about.hit_rate == pytest.approx(exact.hit_rate, abs=0.005)
        assert about.refused_rate == pytest.approx(exact.refused_rate, abs=0.005)
        assert about.not_admitted_rate == pytest.approx(exact.not_admitted_rate, abs=0.005)
        assert about.evicted == pytest.approx(exact.evicted, rel=0.05)
        assert about.num_rows == pytest.approx(exact.num_rows, rel=0.02)


def test_a_long_trace_is_sampled_as_far_as_the_smallest_table_allows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(running, "MOST_LOOKUPS", 1000)
    trace = Trace.of_arrays(np.arange(10_000))
    samples = [
        simulate(trace, [size], {"none": None})[0].sample for size in (1000, 70_000, 1 << 20)
    ]
    assert samples == [1, 0.25, 1 / 16]


def test_parquet_gives_what_arrays_give(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    pq = pytest.importorskip("pyarrow.parquet")
    bags = [[5, 6, None], [], None, [5], [7, -1, 6], [2]]
    when = [3, 1, 4, 1, 5, 9]
    columns = {
        "seen": pa.array(bags, pa.list_(pa.int64())),
        "user": pa.array([1, 2, None, 2**63 + 5, 1, 1], pa.uint64()),
        "at": pa.array(when, pa.timestamp("us")),
    }
    pq.write_table(pa.table(columns), tmp_path / "clicks.parquet", row_group_size=2)
    trace = open_trace(tmp_path / "clicks.parquet", "seen", "at")
    blocks = list(trace.blocks(2))
    assert [len(ids) for ids, _ in blocks] == [2, 2, 2, 1]
    assert np.concatenate([ids for ids, _ in blocks]).tolist() == [5, 6, 5, 7, -1, 6, 2]
    times = [times for _, times in blocks if times is not None]
    assert np.concatenate(times).tolist() == [3, 3, 1, 5, 5, 5, 9]
    users = np.concatenate([ids for ids, _ in open_trace(tmp_path, "user").blocks(99)])
    assert users.tolist() == [1, 2, 5 - 2**63, 1, 1]


@given(
    st.lists(st.lists(st.lists(st.one_of(st.none(), st.integers(0, 6)), max_size=4)), max_size=3),
    st.integers(1, 9),
    st.booleans(),
    st.booleans(),
)
@settings(deadline=None, max_examples=40)
def test_nulls_empty_lists_row_groups_and_files_move_no_figure(
    files: list[list[list[int | None]]], step_ids: int, is_large: bool, has_statistics: bool
) -> None:
    pa = pytest.importorskip("pyarrow")
    pq = pytest.importorskip("pyarrow.parquet")
    kind = (pa.large_list if is_large else pa.list_)(pa.int64())
    with TemporaryDirectory() as folder:
        for number, bags in enumerate([*files, [[]]]):
            # An empty list and a null are two ways to have no ids.
            lists = [bag or (None, [])[index % 2] for index, bag in enumerate(bags)]
            pq.write_table(
                pa.table({"ids": pa.array(lists, kind)}),
                Path(folder, f"{number}.parquet"),
                row_group_size=2,
                write_statistics=has_statistics,
            )
        trace = open_trace(folder)
        ids = [each for bags in files for bag in bags for each in bag if each is not None]
        assert trace.most_ids == len(ids) if has_statistics else trace.most_ids >= len(ids)
        arrays = Trace.of_arrays(np.array(ids, np.int64))
        for found, expected in zip(trace.blocks(step_ids), arrays.blocks(step_ids), strict=True):
            assert found[0].tolist() == expected[0].tolist()
        rules = {"none": None, "lru": Evict.lru()}
        assert simulate(trace, [1, 3], rules, step_ids=step_ids) == simulate(
            arrays, [1, 3], rules, step_ids=step_ids
        )


def described(folder: Path, **zipf: Any) -> Path:
    columns = [
        {"name": "label", "ids": None},
        {"name": "few", "ids": {"num_ids": 9, "num_distinct": 9, "zipf": None}},
        {"name": "user", "ids": {"num_ids": 300_000, "num_distinct": 1000, "zipf": zipf}},
    ]
    path = folder / "clicks.json"
    path.write_text(json.dumps({"format": "recsdk.data.describe/1", "columns": columns}))
    return path


@pytest.mark.parametrize("exponent", [0.0, 0.7, 1.0, 1.3])
def test_ids_are_drawn_by_a_description(exponent: float, tmp_path: Path) -> None:
    trace = open_trace(described(tmp_path, exponent=exponent), "user")
    blocks = [ids for ids, _ in trace.blocks(7000)]
    assert [len(ids) for ids in blocks] == [7000] * 42 + [6000]
    ids = np.concatenate(blocks)
    [again] = [ids for ids, _ in trace.blocks(300_000)]
    np.testing.assert_array_equal(again, ids)
    shares = np.arange(1, 1001.0) ** -exponent
    expected = 300_000 * shares / shares.sum()
    # The sum of squared normal deviations of 1000 ranks is 1000, give or take 45.
    order = mix64(np.arange(1, 1001, dtype=np.uint64)).view(np.int64)
    places = {key: n for n, key in enumerate(order.tolist())}
    seen = np.bincount([places[key] for key in ids.tolist()], minlength=1000)
    assert ((seen - expected) ** 2 / expected).sum() < 1250


def test_a_drawn_trace_says_so(tmp_path: Path) -> None:
    path = described(tmp_path, exponent=1.1)
    done = run(path, "--column", "user", "--rows", "100", "--rules", "lru")
    assert done.exit_code == 0, done.output
    assert "drawn, not read: 1,000 ids by Zipf's law of exponent 1.10" in done.output
    for arguments, problem in (
        ([], "say which has the ids; there are few, user"),
        (["--column", "few"], "'few' has no exponent"),
        (["--column", "user", "--time", "at"], "no times are drawn"),
    ):
        done = run(path, *arguments)
        assert done.exit_code == 1
        assert problem in done.output
    for text, problem in (("{", "is no JSON"), ("[]", "not of the format"), ("{}", "not of the")):
        path.write_text(text)
        assert problem in run(path).output


def test_a_trace_says_how_many_ids_were_read() -> None:
    trace = Trace(10, False, lambda size: iter([(np.array([1, 1, 2, 1]), None)]))
    [found] = simulate(trace, [5], {"none": None})
    assert (found.num_ids, found.hit_rate, found.inserted) == (4, 0.5, 2)


def run(*arguments: Any) -> Any:
    return CliRunner().invoke(main, ["simulate", *map(str, arguments)])


def test_the_command(tmp_path: Path) -> None:
    path, target, picture = tmp_path / "trace.npz", tmp_path / "found.json", tmp_path / "found.png"
    np.savez(path, ids=zipf_ids(20_000, 5_000))
    drawn = ["--png", picture] if _has_matplotlib() else []
    done = run(
        path, "--rows", "100,50%", "--rules", "none,lfu:9,lru+count:2", "--json", target, *drawn
    )
    assert done.exit_code == 0, done.output
    found = json.loads(target.read_text())
    assert found["format"] == "recsdk.simulate/1"
    assert {each["num_ids"] for each in found["runs"]} == {20_000}
    distinct = len(np.unique(zipf_ids(20_000, 5_000)))
    assert [each["max_rows"] for each in found["runs"]] == [100] * 3 + [round(distinct / 2)] * 3
    assert set(found["runs"][0]) == set(Simulated.__dataclass_fields__)
    assert [each["rule"] for each in found["runs"]] == ["none", "lfu:9", "lru+count:2"] * 2
    for shown in ("20,000 ids", "refused", "lfu:9", f"{found['runs'][3]['hit_rate']:.2%}"):
        assert shown in done.output
    assert not drawn or picture.read_bytes().startswith(b"\x89PNG")


def _has_matplotlib() -> bool:
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        return False
    return True


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--rules", "lifo"], "'lifo' is none of none, lru"),
        (["--rules", "lfu:x"], "could not convert"),
        (["--rules", "lru+often"], "neither +count:N nor"),
        (["--rules", "lru+count:0"], "n must be"),
        (["--rules", "lru+probability:2"], "p must be above 0"),
        (["--rules", "lru:time"], "the trace has no times"),
        (["--rows", "many"], "'many' is no number of rows"),
        (["--rows", "0"], "at least one"),
        (["--sample", "1/3"], "sample must be 1, 1/2"),
        (["--sample", "0"], "sample must be 1, 1/2"),
        (["--sample", "1/0"], "Fraction(1, 0)"),
        (["--rows", "2000", "--sample", "1/128"], "at least 0.015625"),
        (["--column", "users"], "there is no 'users'; there are ids"),
        (["--time", "at"], "there is no 'at'"),
    ],
)
def test_what_cannot_be_simulated(arguments: list[str], problem: str, tmp_path: Path) -> None:
    np.savez(tmp_path / "trace.npz", ids=np.arange(9))
    done = run(tmp_path / "trace.npz", *arguments)
    assert done.exit_code == 1, done.output
    assert problem in done.output


def test_what_is_no_trace(tmp_path: Path) -> None:
    np.savez(tmp_path / "floats.npz", ids=np.ones(3))
    np.savez(tmp_path / "two.npz", a=np.arange(3), b=np.arange(3))
    (tmp_path / "text.npz").write_text("no archive")
    for name, problem in (
        ("floats.npz", "integers, got float64"),
        ("two.npz", "say which has the ids"),
        ("text.npz", ""),
        ("none.npz", "none.npz"),
    ):
        done = run(tmp_path / name)
        assert done.exit_code == 1, name
        assert done.output.startswith("Error: ")
        assert problem in done.output


def test_an_empty_trace() -> None:
    [found] = simulate(Trace.of_arrays(np.empty(0, np.int64)), [5], {"lru": Evict.lru()})
    assert (found.hit_rate, found.inserted, found.num_rows) == (0, 0, 0)
