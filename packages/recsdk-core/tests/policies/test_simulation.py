"""`recsdk simulate`: its figures are those of tables that a stream went through."""

from __future__ import annotations

import json
import math
import re
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from recsdk_core import Admit, Evict, Outcome, hash_strings
from recsdk_core.cli import main
from recsdk_core.simulation import (
    Simulated,
    Trace,
    open_trace,
    read_description,
    running,
    simulate,
)
from recsdk_core.simulation.rules import parsed_rules
from recsdk_core.testing import ReferenceTable
from recsdk_core.virtual_shards import mix64


def worth(now: int, count: Any, score: Any) -> Any:
    """Where keys stand."""
    return count + score / 2 + now % 3


RULES = {
    "none": None,
    "lru": Evict.lru(),
    "lru:time": Evict.lru(by="time"),
    "lfu": Evict.lfu(),
    "lfu:3": Evict.lfu(half_life=3),
    "score": Evict.score(),
    "show_click": Evict.show_click(beta=3, decay=0.5),
    "show_click_totals": Evict.show_click_totals(beta=3, decay=0.5),
    "function": Evict.function(worth, every=1),
    "old": Evict.lru(min_age=2),
    "ttl": Evict.lfu().expiring(ttl=2, every=1),
    "ttl of time": Evict.lru(by="time").expiring(ttl=3, every=2),
    "rare": Evict.lru().expiring(rare_ttl=1, rare_count=2, every=1),
    "share": Evict.lfu(half_life=2).expiring(share=0.3, every=2),
    "churn": Evict.lru().with_churn(2),
    "none+count:2": None,
    "lru+count:3": Evict.lru(),
    "lfu+probability:0.4": Evict.lfu(),
    "lru+count_sketch": Evict.lru(),
    "lfu+show_click": Evict.lfu(),
    "lfu+show_click_of_step": Evict.lfu(),
    "lru+joined": Evict.lru(),
}
ADMISSION = {
    "none+count:2": Admit.count(2),
    "lru+count:3": Admit.count(3, max_records=2),
    "lfu+probability:0.4": Admit.probability(0.4),
    "lru+count_sketch": Admit.count_sketch(2, max_bytes=2**19),
    "lfu+show_click": Admit.show_click(threshold=3, beta=2),
    "lfu+show_click_of_step": Admit.show_click_of_step(threshold=3, beta=2),
    "lru+joined": Admit.count(2) & Admit.probability(0.7) | Admit.show_click(threshold=9, beta=9),
}
BROUGHT = {
    "lru:time": ["times"],
    "ttl of time": ["times"],
    "score": ["scores"],
    "function": ["scores"],
    "show_click": ["clicks"],
    "show_click_totals": ["clicks"],
    "lfu+show_click": ["clicks"],
    "lfu+show_click_of_step": ["clicks"],
    "lru+joined": ["clicks"],
}


def zipf_ids(num: int, distinct: int, exponent: float = 0.99) -> Any:
    shares = np.arange(1, distinct + 1) ** -exponent
    up_to = np.cumsum(shares / shares.sum())
    ranks = np.searchsorted(up_to, np.random.default_rng(1).random(num) * up_to[-1])
    return ranks * 7919


@given(
    st.lists(
        st.tuples(st.integers(-5, 5), st.integers(0, 9), st.integers(-4, 4), st.integers(0, 2)),
        max_size=60,
    ),
    st.integers(1, 12),
    st.integers(1, 9),
)
def test_each_figure_is_that_of_the_reference_table(
    drawn: list[tuple[int, int, int, int]], size: int, step_ids: int
) -> None:
    ids, times, scores, clicks = np.array(drawn, np.int64).reshape(-1, 4).T
    data = {"times": times, "scores": scores.astype(np.float32), "clicks": clicks}
    trace = Trace.of_arrays(ids, **data)
    found = simulate(trace, [size], RULES, admission=ADMISSION, step_ids=step_ids)
    for run, (name, rule) in zip(found, RULES.items(), strict=True):
        admission = ADMISSION.get(name)
        table = ReferenceTable(1, max_rows=size, eviction=rule, admission=admission)
        had = set[int]()
        counts, returned = dict.fromkeys(Outcome, 0), 0
        for start in range(0, len(ids), step_ids):
            part = slice(start, start + step_ids)
            brought = {what: data[what][part] for what in BROUGHT.get(name, [])}
            _, outcomes = table.map(ids[part], insert=True, **brought)
            for key, outcome in zip(ids[part].tolist(), outcomes.tolist(), strict=True):
                counts[Outcome(outcome)] += 1
                if outcome == Outcome.INSERTED:
                    returned += key in had
                    had.add(key)
        inserted, all_ids = counts[Outcome.INSERTED], max(len(ids), 1)
        stats = table.stats()
        assert (run.rule, run.max_rows, run.sample) == (name, size, 1)
        assert run.hit_rate == pytest.approx(counts[Outcome.FOUND] / all_ids)
        assert run.refused_rate == counts[Outcome.REFUSED] / all_ids
        assert run.not_admitted_rate == counts[Outcome.NOT_ADMITTED] / all_ids
        assert run.inserted == inserted
        assert run.returned_rate == returned / max(inserted, 1)
        assert run.num_rows == len(table)
        assert run.evicted == inserted - len(table) - run.expired
        assert run.expired == stats.expired
        soon = stats.returned / max(inserted, 1)
        assert run.churn_rate == (soon if name == "churn" else None)


PART = 0.25
LONG_RULES = {
    "none": None,
    "lru": Evict.lru(),
    "lfu": Evict.lfu(half_life=20),
    "score": Evict.score(min_age=2),
    "show_click": Evict.show_click(beta=3, decay=0.9),
    "function": Evict.function(lambda count, step: count + step / 8, every=4),
    "time": Evict.lru(by="time").expiring(ttl=60_000, every=3),
    "share": Evict.lfu().expiring(share=0.1, rare_ttl=20, rare_count=3, every=5),
    "churn": Evict.lru().with_churn(9),
    "lru+count": Evict.lru(),
    "lru+few_records": Evict.lru(),
    "lru+count_sketch": Evict.lru(),
    "lru+show_click": Evict.lru(),
    "lru+joined": Evict.lru(),
}
LONG_ADMISSION = {
    "lru+count": Admit.count(2),
    "lru+few_records": Admit.count(3, max_records=40_000),
    "lru+count_sketch": Admit.count_sketch(2, max_bytes=2**20),
    "lru+show_click": Admit.show_click(threshold=4, beta=2),
    "lru+joined": Admit.count(2) & Admit.probability(0.5) | Admit.show_click(threshold=7, beta=5),
}


def long_trace() -> Trace:
    """400,000 ids, of which a seventh are clicked, at times that are out of order."""
    random = np.random.default_rng(2)
    ids = zipf_ids(400_000, 300_000)
    return Trace.of_arrays(
        ids,
        np.arange(len(ids)) - random.integers(0, 500, len(ids)),
        scores=random.random(len(ids)),
        clicks=random.random(len(ids)) < 1 / 7,
    )


def test_a_part_of_the_keys_stands_for_all() -> None:
    trace = long_trace()
    whole = simulate(trace, [70_000], LONG_RULES, admission=LONG_ADMISSION)
    part = simulate(trace, [70_000], LONG_RULES, admission=LONG_ADMISSION, sample=PART)
    assert {each.sample for each in part} == {PART}
    for exact, about in zip(whole, part, strict=True):
        assert about.hit_rate == pytest.approx(exact.hit_rate, abs=0.005), about.rule
        assert about.refused_rate == pytest.approx(exact.refused_rate, abs=0.005), about.rule
        assert about.not_admitted_rate == pytest.approx(exact.not_admitted_rate, abs=0.005)
        assert about.evicted == pytest.approx(exact.evicted, rel=0.05), about.rule
        assert about.expired == pytest.approx(exact.expired, rel=0.05), about.rule
        assert about.num_rows == pytest.approx(exact.num_rows, rel=0.02), about.rule
        assert about.returned_rate == pytest.approx(exact.returned_rate, abs=0.01), about.rule
        if exact.churn_rate is not None:
            assert about.churn_rate == pytest.approx(exact.churn_rate, abs=0.01)
    acted = [each.rule for each in whole if each.evicted + each.expired > 0]
    kept_out = [each.rule for each in whole if each.not_admitted_rate > 0]
    assert acted == [name for name in LONG_RULES if name not in LONG_ADMISSION][1:]
    assert kept_out == list(LONG_ADMISSION)


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
        "value": pa.array([0, 0.5, 1, 1.5, 2, 2.5]),
        "is_clicked": pa.array([True, False, False, True, False, True]),
        "holes": pa.array([1, None, 1, 1, 1, 1]),
        "city": pa.array(["Oslo", "Bonn", None, "", "Oslo", "Bonn"]),
        "words": pa.array([["a"], [], None, ["b", None, "a"], [], []], pa.list_(pa.binary())),
    }
    pq.write_table(pa.table(columns), tmp_path / "clicks.parquet", row_group_size=2)
    trace = open_trace(
        tmp_path / "clicks.parquet", "seen", "at", score="value", clicks="is_clicked"
    )
    blocks = list(trace.blocks(2))
    assert [len(ids) for ids, _ in blocks] == [2, 2, 2, 1]
    assert np.concatenate([ids for ids, _ in blocks]).tolist() == [5, 6, 5, 7, -1, 6, 2]
    expected = {
        "times": [3, 3, 1, 5, 5, 5, 9],
        "scores": [0, 0, 1.5, 2, 2, 2, 2.5],
        "clicks": [1, 1, 1, 0, 0, 0, 1],
    }
    assert trace.brings == set(expected)
    for what, values in expected.items():
        assert np.concatenate([data[what] for _, data in blocks]).tolist() == values
    users = np.concatenate([ids for ids, _ in open_trace(tmp_path, "user").blocks(99)])
    assert users.tolist() == [1, 2, 5 - 2**63, 1, 1]
    towns = np.concatenate([ids for ids, _ in open_trace(tmp_path, "city").blocks(99)]).tolist()
    assert (towns[:2], len(set(towns))) == (towns[3:], 3)
    assert towns[0] == hash_strings(np.frombuffer(b"Oslo", np.uint8), np.array([0, 4]))[0]
    [(words, _)] = open_trace(tmp_path, "words").blocks(99)
    assert words[0] == words[2] != words[1]
    with pytest.raises(TypeError, match="'value' holds double, not integers or text"):
        open_trace(tmp_path, "value")
    with pytest.raises(ValueError, match=r"^/.*: column 'holes' has a row without clicks"):
        next(open_trace(tmp_path, "user", clicks="holes").blocks(9))
    with pytest.raises(TypeError, match="'at' holds timestamp.*, not integers or truth values"):
        open_trace(tmp_path, "user", clicks="at")


@pytest.mark.parametrize("kind", ["string", "large_string", "large_binary"])
def test_text_is_hashed_alike_in_all_batches_of_a_row_group(tmp_path: Path, kind: str) -> None:
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    names = [f"{number:06}".encode() for number in range(200_000)]  # more than come at once
    pq.write_table(
        pa.table({"ids": pa.array(names, getattr(pa, kind)())}), tmp_path / "long.parquet"
    )
    found = np.concatenate([ids for ids, _ in open_trace(tmp_path / "long.parquet").blocks(5000)])
    text = np.frombuffer(b"".join(names), np.uint8)
    expected = hash_strings(text, np.arange(len(names) + 1) * 6).view(np.int64)
    assert np.array_equal(found, expected)


@pytest.mark.parametrize("name", ["no.npz", "no.json", "no.parquet"])
def test_a_trace_that_is_not_there(tmp_path: Path, name: str) -> None:
    if name.endswith(".parquet"):
        pytest.importorskip("pyarrow")
    with pytest.raises(
        FileNotFoundError, match=rf"{name}: there is no such file; look at the path"
    ):
        open_trace(tmp_path / name)


def test_columns_with_dots_in_their_names(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    pq = pytest.importorskip("pyarrow.parquet")
    columns = {"f": [1, 2, 3], "f.ids": [4, 5, 6], "f.bag": [[7, 8], [], [9]]}
    pq.write_table(pa.table(columns), tmp_path / "a.parquet")
    for name, ids in (("f", [1, 2, 3]), ("f.ids", [4, 5, 6]), ("f.bag", [7, 8, 9])):
        trace = open_trace(tmp_path / "a.parquet", name)
        assert trace.most_ids == len(ids)
        assert next(trace.blocks(3))[0].tolist() == ids


@given(
    st.lists(st.lists(st.lists(st.one_of(st.none(), st.integers(0, 6)), max_size=4)), max_size=3),
    st.integers(1, 9),
    st.booleans(),
    st.booleans(),
)
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
    told = {"format": "recsdk.data.describe/1", "rows": 9, "columns": columns}
    path.write_text(json.dumps(told))
    return path


@pytest.mark.parametrize("exponent", [0.0, 0.7, 1, 1.3])
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


@pytest.mark.parametrize(
    ("place", "value", "problem"),
    [
        (["rows"], "many", "rows must be a whole number from 0 to 9007199254740992, got 'many'"),
        (["columns"], {}, "columns must be a list of 0 to 1048576 objects, got {}"),
        (["columns", 1], 7, "columns[1] must be an object, got 7"),
        (["columns", 2, "name"], None, "columns[2].name must be a text, got None"),
        (["columns", 2, "ids"], {}, "columns[2].ids.num_ids is missing"),
        (["columns", 2, "ids", "num_ids"], -1, "must be a whole number from 0 to"),
        (["columns", 2, "ids", "num_distinct"], 0, "must be a whole number from 1 to"),
        (["columns", 2, "ids", "zipf"], [], "columns[2].ids.zipf must be an object"),
        (["columns", 2, "ids", "zipf", "exponent"], -0.5, "must be a number from 0 to"),
        (["columns", 2, "ids", "zipf", "exponent"], True, "must be a number from 0 to"),
        (["columns", 2, "ids", "zipf", "exponent"], math.nan, "9007199254740992, got nan"),
    ],
)
def test_a_description_that_was_changed_is_told(
    place: list[Any], value: Any, problem: str, tmp_path: Path
) -> None:
    path = described(tmp_path, exponent=1.1)
    told = json.loads(path.read_text())
    inner = told
    for name in place[:-1]:
        inner = inner[name]
    inner[place[-1]] = value
    path.write_text(json.dumps(told))
    with pytest.raises(ValueError, match=f"^{re.escape(str(path))}: .*{re.escape(problem)}"):
        read_description(str(path))
    done = run(path, "--column", "user")
    assert (done.exit_code, problem in done.output) == (1, True), done.output


def test_a_column_of_too_many_ids_to_draw_is_refused(tmp_path: Path) -> None:
    path = described(tmp_path, exponent=1.1)
    text = path.read_text()
    path.write_text(text.replace('"num_ids": 300000', f'"num_ids": {2**53}'))
    assert path.read_text() != text
    done = run(path, "--column", "user")
    assert done.exit_code == 1
    assert "'user' must have at most 1,099,511,627,776 ids, got 9,007,199,254," in done.output


@pytest.mark.parametrize("text", ["[" * 100_000, "9" * 5000, "\udcff"])
def test_json_that_python_cannot_read_is_no_description(text: str, tmp_path: Path) -> None:
    path = tmp_path / "clicks.json"
    path.write_bytes(text.encode(errors="surrogateescape"))
    assert "clicks.json: is no" in run(path).output


def test_a_trace_says_how_many_ids_were_read() -> None:
    trace = Trace(10, frozenset(), lambda size: iter([(np.array([1, 1, 2, 1]), {})]))
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


@pytest.mark.parametrize(
    ("text", "rule", "admission"),
    [
        ("none", None, None),
        ("lru:time:min_age=3", Evict.lru(by="time", min_age=3), None),
        ("lru:ttl=9:every=2", Evict.lru().expiring(ttl=9, every=2), None),
        ("lfu:1e+3", Evict.lfu(half_life=1000), None),
        (
            "lfu:half_life=5:rare_ttl=2:rare_count=3:share=0.1:churn=7:churn_records=9",
            Evict.lfu(half_life=5)
            .expiring(rare_ttl=2, rare_count=3, share=0.1)
            .with_churn(7, max_records=9),
            None,
        ),
        ("score", Evict.score(), None),
        (
            "show_click:alpha=0.1:beta=2:decay=0.9",
            Evict.show_click(alpha=0.1, beta=2, decay=0.9),
            None,
        ),
        ("show_click_totals:decay=0.9", Evict.show_click_totals(decay=0.9), None),
        ("none+show_click_of_step:2", None, Admit.show_click_of_step(threshold=2)),
        ("lru + count:3:max_records=8", Evict.lru(), Admit.count(3, max_records=8)),
        (
            "none+count_sketch:3:max_bytes=524288",
            None,
            Admit.count_sketch(3, max_bytes=524288),
        ),
        (
            "lru+count:2|show_click:5:beta=2&probability:0.5",
            Evict.lru(),
            Admit.count(2) | Admit.show_click(threshold=5, beta=2) & Admit.probability(0.5),
        ),
    ],
)
def test_rules_are_read_as_they_are_made_in_python(
    text: str, rule: Evict | None, admission: Admit | None
) -> None:
    rules, admissions = parsed_rules(f"lru:by=time,{text}")
    assert rules[text] == rule
    assert admissions.get(text) == admission


def test_the_command_takes_what_comes_with_ids(tmp_path: Path) -> None:
    path, target = tmp_path / "trace.npz", tmp_path / "found.json"
    ids = zipf_ids(20_000, 5_000)
    data = {"at": np.arange(20_000), "worth": ids % 7 / 2, "clicked": ids % 3 == 0}
    np.savez(path, ids=ids, **data)
    named = ["--column", "ids", "--time", "at", "--score", "worth", "--clicks", "clicked"]
    rules = "lru:time:ttl=150:every=1,score:churn=2,show_click:beta=2"
    done = run(path, *named, "--rows", 100, "--rules", rules, "--step", 100, "--json", target)
    assert done.exit_code == 0, done.output
    trace = Trace.of_arrays(ids, data["at"], scores=data["worth"], clicks=data["clicked"])
    parsed, _ = parsed_rules(rules)
    expected = [asdict(each) for each in simulate(trace, [100], parsed, step_ids=100)]
    assert json.loads(target.read_text())["runs"] == expected
    assert all(title in done.output for title in ("expired", "churn"))


def _has_matplotlib() -> bool:
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        return False
    return True


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--rules", "lifo"], "no rule 'lifo'; choose of none, lru"),
        (["--rules", "lfu:x"], "'lfu:x': half_life must be a number, got 'x'"),
        (["--rules", "lru,lfu:min_age=0.5"], "min_age must be a whole number, got '0.5'"),
        (["--rules", "none:ttl=3"], "none takes no settings; got 'ttl=3'"),
        (["--rules", "lru,"], "a comma has no rule on one of its sides"),
        (["--rules", "lru,lfu,lru"], "'lru' is there twice; give each rule once"),
        (["--rules", "lru:half_life=3"], "lru takes by, min_age, ttl"),
        (["--rules", "lfu:3:half_life=4"], "each once as NAME=VALUE; got 'half_life=4'"),
        (["--rules", "lru:churn_records=9"], "churn is not; set it"),
        (
            ["--rules", "low_norm"],
            "low_norm goes by what rows have learned, and nothing is trained",
        ),
        (["--rules", "function"], "recsdk_core.simulation.simulate takes in Python"),
        (["--rules", "lru:share=2"], "share must be above 0, up to 1, got 2"),
        (["--rules", "lru+often"], "no rule 'often'; choose of count, count_sketch"),
        (["--rules", "lru+count"], "'lru+count': count needs n"),
        (["--rules", "lru+count_sketch:3"], "count_sketch needs max_bytes"),
        (["--rules", "lru+count:2|"], "no rule ''; choose of count"),
        (["--rules", "lru+count:2&count_sketch:2:max_bytes=524288"], "by exact counts"),
        (["--rules", "score"], "no scores: give it some (--score NAME"),
        (["--rules", "show_click:beta=2"], "no clicks: give it some (--clicks NAME"),
        (["--rules", "lru+show_click:2:beta=2"], "goes by clicks; the trace has no clicks"),
        (["--rules", "lru+count:0"], "n must be"),
        (["--rules", "lru+probability:2"], "p must be above 0"),
        (["--rules", "lru:time"], "no times: give it some (--time NAME on the command line)"),
        (["--rows", "many"], "--rows must be numbers above 0 and below 2**48, of rows or"),
        (["--rows", "5,nan"], "with commas between them, got 'nan'"),
        (["--rows", "0"], "with commas between them, got '0'"),
        (["--sample", "1/3"], "Error: --sample must be 1, 1/2, 1/4 and so on, got '1/3'"),
        (["--sample", "0"], "Error: --sample must be 1, 1/2, 1/4 and so on, got '0'"),
        (["--sample", "1/0"], "--sample must be 1, 1/2, 1/4 and so on, got '1/0'"),
        (["--sample", "1e400"], "--sample must be 1, 1/2, 1/4 and so on, got '1e400'"),
        (["--sample", "1e999999999"], "and so on, got '1e999999999'"),
        (["--sample", "1E-999999999"], "and so on, got '1E-999999999'"),
        (["--sample", "x"], "--sample must be 1, 1/2, 1/4 and so on, got 'x'"),
        (
            ["--rows", "2000", "--sample", "1/128"],
            "Error: --sample must be at least 0.015625 with a size of 2000",
        ),
        (["--column", "users"], "there is no 'users'; there are ids"),
        (["--time", "at"], "there is no 'at'"),
    ],
)
def test_what_cannot_be_simulated(arguments: list[str], problem: str, tmp_path: Path) -> None:
    """Status 1 is for what the trace lacks."""
    np.savez(tmp_path / "trace.npz", ids=np.arange(9))
    done = run(tmp_path / "trace.npz", *arguments)
    lacks = any(word in problem for word in ("there is no", "give it some", "has no clicks"))
    assert done.exit_code == (1 if lacks else 2), done.output
    assert problem in done.output


def test_what_is_no_trace(tmp_path: Path) -> None:
    np.savez(tmp_path / "floats.npz", ids=np.ones(3))
    np.savez(tmp_path / "empty.npz", ids=np.empty(0, np.int64))
    np.savez(tmp_path / "short.npz", ids=np.arange(3), when=np.arange(2))
    np.savez(tmp_path / "two.npz", a=np.arange(3), b=np.arange(3))
    (tmp_path / "text.npz").write_text("no archive")
    np.savez(tmp_path / "objects.npz", ids=np.array([{}]))
    np.save(tmp_path / "one.npy", np.arange(3))
    (tmp_path / "one.npy").rename(tmp_path / "one.npz")
    for name, problem in (
        ("floats.npz", "floats.npz: ids must be integers, got float64"),
        ("empty.npz", "empty.npz: has no ids; pass a trace that has some"),
        ("two.npz", "say which has the ids"),
        ("floats.npz --time ids", "must have ids beside what other options name, and has none"),
        ("text.npz", "text.npz: cannot be read as npz: it is no zip archive"),
        ("one.npz", "one.npz: cannot be read as npz: it is no zip archive"),
        ("objects.npz", "objects.npz: cannot be read as npz: Object arrays"),
        ("none.npz", "none.npz"),
        ("short.npz --time when", "short.npz: all arrays must be of one shape (N,), got ids (3,)"),
    ):
        path, *more = name.split()
        done = run(tmp_path / path, *more)
        assert done.exit_code == 1, name
        assert done.output.startswith("Error: ")
        assert problem in done.output


@given(place=st.floats(0, 1, exclude_max=True), is_cut=st.booleans())
def test_damaged_traces_are_named(
    tmp_path_factory: pytest.TempPathFactory, place: float, is_cut: bool
) -> None:
    """Wherever a file is cut off, or another byte stands in it."""
    path = tmp_path_factory.mktemp("trace") / "trace.npz"
    np.savez(path, ids=np.arange(100))
    content = bytearray(path.read_bytes())
    at = int(place * len(content))
    content[at] ^= 0xFF
    path.write_bytes(content[:at] if is_cut else content)
    done = run(path, "--rows", "5", "--rules", "lru")
    assert done.output.startswith(f"Error: {path}: " if done.exit_code else "100 ids\n")


def test_of_another_kind_of_file_it_is_said_which_there_are(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    np.save(tmp_path / "ids.npy", np.arange(3))
    done = run(tmp_path / "ids.npy")
    assert done.exit_code == 1
    assert "ids.npy: must be a .npz file, a .json file of recsdk data describe, or Parquet" in (
        done.output
    )


def test_a_damaged_parquet_file_is_named(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    pq = pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "trace.parquet"
    pq.write_table(pa.table({"ids": np.random.default_rng(0).integers(0, 2**60, 1000)}), path)
    content = bytearray(path.read_bytes())
    content[4:500] = bytes(496)
    path.write_bytes(content)
    done = run(path, "--rows", "5")
    assert done.exit_code == 1
    assert done.output.startswith(f"Error: {path}: cannot be read; was it changed or cut off? ")


def test_an_empty_trace() -> None:
    [found] = simulate(Trace.of_arrays(np.empty(0, np.int64)), [5], {"lru": Evict.lru()})
    assert (found.hit_rate, found.inserted, found.num_rows) == (0, 0, 0)
