"""Predicates: who leaves by them, and what merging and freezing keep, is what they say of each key.

`testing.ReferenceTable` evaluates them one key at a time; tests/stateful compares small tables.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from kept import keys_of

from recsdk_core import Evict, LeaveCause, Table
from recsdk_core.checkpoint import compact
from recsdk_core.cli import main
from recsdk_core.predicates import Kept, Predicate
from recsdk_core.serving import ServingTable, freeze
from recsdk_core.testing import ReferenceTable

RULES = {
    "idle > 2 and step != 3": Evict.lru(),
    "time < 9 or not 1 <= time": Evict.lru(by="time"),
    "count < 1.4": Evict.lfu(half_life=2.5),
    "score <= 0.1": Evict.score(),
    "score < 0.3 or score == 1.25": Evict.show_click(alpha=0.25, beta=1.0, decay=0.5),
    "score < 0.6 or score >= 7": Evict.show_click_totals(alpha=0.25, beta=1.0, decay=0.5),
    "age >= 5 and idle > 1": Evict.lru(min_age=2),
}


def fill(*tables: Any) -> None:
    """Six steps of keys, with what the rule takes."""
    random = np.random.default_rng(3)
    for step in range(6):
        keys = random.zipf(1.3, 60) % 97 * 0x9E3779B97F4A7C1
        more: dict[str, Any] = {}
        if tables[0].eviction.by == "time":
            more["times"] = random.integers(0, 9, len(keys)) + 2 * step
        if tables[0].eviction.order == "score":
            more["scores"] = random.choice(np.float32([0.1, 0.3, -2]), len(keys))
        if tables[0].eviction.needs_clicks:
            more["clicks"] = random.integers(0, 2, len(keys))
        for table in tables:
            table.find_or_insert(keys, **more)


def brought(rule: Evict) -> dict[str, Any]:
    """What a call of one key brings."""
    if rule.by == "time":
        return {"times": 3}
    return {"clicks": 1} if rule.needs_clicks else {}


@pytest.mark.parametrize("text", RULES)
def test_each_key_of_which_it_is_true_leaves_or_is_kept_everywhere(
    text: str, tmp_path: Path
) -> None:
    rule = RULES[text]
    table = Table(3, max_rows=5000, eviction=rule, name="user")
    model = ReferenceTable(3, max_rows=5000, eviction=rule, name="user")
    fill(table, model)
    everyone = keys_of(table)
    table.save(tmp_path / "full")
    table.find_or_insert(np.array([7]), **brought(rule))
    model.find_or_insert(np.array([7]), **brought(rule))
    table.save_delta(tmp_path / "delta")
    expected = model.would_evict(where=text)
    assert 0 < expected[LeaveCause.EVICTED] < len(everyone)
    assert table.would_evict(where=text) == expected
    assert keys_of(table) == everyone | {7}
    with table.leavers() as leavers:
        assert table.evict(where=text) == model.evict(where=text) == table.stats().evicted
        batch = leavers.read()
    left = (everyone | {7}) - keys_of(model)
    assert keys_of(table) == keys_of(model)
    assert (set(batch.keys.tolist()), set(batch.causes.tolist())) == (left, {LeaveCause.EVICTED})
    table.check_invariants()
    # Those left are the ones that a checkpoint keeps, merged or frozen; young ones are no exception
    # there.
    if rule.min_age == 0:
        kept = f"not ({text})"
        command = ["ckpt", "compact", str(tmp_path / "delta"), str(tmp_path / "merged")]
        done = CliRunner().invoke(main, [*command, "--keep", kept])
        assert done.exit_code == 0, done.output
        other = Table(3, max_rows=5000, eviction=rule, name="user")
        other.load(tmp_path / "merged")
        assert keys_of(other) == keys_of(model)
        command = ["freeze", str(tmp_path / "delta"), str(tmp_path / "frozen"), "--where", kept]
        done = CliRunner().invoke(main, command)
        assert f"user: {len(keys_of(model))} rows" in done.output
        frozen = ServingTable(tmp_path / "frozen")
        keys = np.array(sorted(everyone))
        _, outcomes = frozen.lookup(keys, return_outcomes=True)
        assert set(keys[outcomes == 0].tolist()) == keys_of(model) - {7}
    # It goes on: who left is a new key.
    table.find_or_insert(np.array(sorted(left)), **brought(rule))
    table.check_invariants()


def test_numbers_are_exact_and_unknown_keys_are_the_oldest() -> None:
    least, most = -(2**63), 2**63 - 1
    kept = Kept({"evict_step": np.array([least, 2**53, 2**53 + 1, most])}, step=2**53 + 1)
    for text, expected in [
        ("step < 9007199254740993", [True, True, False, False]),
        ("step < 9007199254740992.5 + 0", [True, False, False, False]),
        ("idle == 9223372036854775807", [True, False, False, False]),
        ("idle <= 1", [False, True, True, True]),
        ("step <= 9223372036854775807", [True] * 4),
        ("step < 2 * 9223372036854775808", [True] * 4),
        ("9223372036854775808 < step", [False] * 4),
        ("step != 0.5", [True] * 4),
        ("not step >= -9223372036854775808", [False] * 4),
    ]:
        assert Predicate(text).matches(kept).tolist() == expected, text


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "cannot be read"),
        ("idle >", "cannot be read"),
        ("idle", "is no comparison of a column with a number"),
        ("idle > 1; import os", "cannot be read"),
        ("idle > 1 and 3", "'3' is no comparison"),
        ("idle > 1 if age > 2 else age > 3", "is no comparison"),
        ("f(idle) > 1", "must compare a column with a number"),
        ("idle > __import__('os').getpid()", "is no number"),
        ("idle > step", "must compare a column with a number"),
        ("1 < 2", "must compare a column with a number"),
        ("idle in 3", "must compare by <, <="),
        ("idle > True", "'True' is no number"),
        ("idle > '3'", "is no number"),
        ("idle > 2 ** 3", "is no number"),
        ("idle > 1e999", "is too large"),
        ("idle > 1" + "0" * 400, "is too large"),
        ("days > 1", "there is no column 'days'; columns are step, idle, time"),
        ("(" * 500 + "idle > 1" + ")" * 400, "cannot be read"),
        ("idle > 1 and " * 99, "has 1287 characters; 1000 are the most"),
        ("idle > 1\x00", "cannot be read"),
        ("count > 1", "does not keep that: it keeps step, idle. A table keeps count with"),
        ("age > 1", "A table keeps age with min_age"),
    ],
)
def test_what_cannot_be_read_changes_nothing_and_is_named(text: str, message: str) -> None:
    table = Table(2, max_rows=9, eviction=Evict.lru())
    table.find_or_insert(np.array([1, 2]))
    for call in (table.evict, table.would_evict):
        with pytest.raises(ValueError, match=message.replace("(", r"\(")):
            call(where=text)
    assert len(table) == 2


def test_requests_that_make_no_sense(tmp_path: Path) -> None:
    table, plain = Table(2, max_rows=9, eviction=Evict.lru()), Table(2, name="plain")
    with pytest.raises(ValueError, match="pass one of .* and where, got fraction and where"):
        table.evict(fraction=0.5, where="idle > 1")
    with pytest.raises(TypeError, match="must be a text such as 'idle > 100', got int"):
        table.evict(where=3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="table 'plain' does not keep that: it has no rule"):
        plain.evict(where="idle > 1")
    plain.save(tmp_path / "plain")
    for call in (compact, freeze):
        for where in ("idle > 1", {"item": "idle > 1"}):
            with pytest.raises(ValueError, match=r"'plain' does not keep|predicates must be for"):
                call(tmp_path / "plain", tmp_path / "other", **{_name_of(call): where})
    assert not (tmp_path / "other").exists()
    command = ["ckpt", "compact", str(tmp_path / "plain"), str(tmp_path / "x"), "--table", "plain"]
    assert CliRunner().invoke(main, command).exit_code == 2


def _name_of(call: Any) -> str:
    return "keep" if call is compact else "where"


def test_batches_in_flight_and_readers_are_respected() -> None:
    table = Table(2, max_rows=9, eviction=Evict.lfu())
    table.find_or_insert(np.array([1, 2, 2]))
    with table.lease(3), pytest.raises(RuntimeError, match="not allowed while batches"):
        table.evict(where="count < 2")
    leavers = table.leavers(max_rows=1, on_overflow="raise")
    table.find_or_insert(np.array([3]))
    with pytest.raises(RuntimeError, match="2 keys would leave"):
        table.evict(where="count < 2")
    assert (len(table), len(leavers)) == (3, 0)
    leavers.close()
    assert table.evict(where="count < 2") == 2
    table.check_invariants()
