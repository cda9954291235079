"""What ranks share of rules of admission: counts in state dicts and checkpoints, and what refuses.

That they let in the same keys on any number of ranks is crossed with all else in
test_crossed_policies.py.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import eviction_on_ranks
import pytest
from eviction_on_ranks import Saved, run, whole
from plans import Spec
from policy_cases import ADMISSION, ROW_WISE, RULES, WIDTH, Case, Rows
from policy_crossing import expected_by
from policy_model import STEPS
from rank_pool import RankPool

from recsdk_core import Admit, CheckpointError
from recsdk_sharding import HashEmbeddingBagConfig

COLUMNS: dict[str, Spec] = dict.fromkeys(RULES, ("column_wise", [(1, 0), (WIDTH - 1, 1)]))


@pytest.fixture(scope="module")
def expected() -> Rows:
    return expected_by({"rules": "admitting"}).rows


def test_a_device_loads_the_counts_that_the_cpu_would(
    ranks: RankPool, npus: RankPool, tmp_path: Path
) -> None:
    """Into fewer records than there are, of groups that memory does not divide over."""
    rules = dict.fromkeys(RULES, Admit.count(2, max_records=4_096))
    room = {"eviction": None, "num_embeddings": 4_096, "max_rows": 9_000, "eviction_groups": 4}
    saved, by_npus = Saved(str(tmp_path / "saved")), Saved(str(tmp_path / "by_npus"))
    case = Case(ROW_WISE, state=room, admission=rules)
    ranks.run(2, run, case, 0, 7, None, saved)
    npus.run(2, run, replace(case, device="npu"), 0, 7, None, by_npus)
    assert saved_rules(by_npus.folder) == saved_rules(saved.folder)
    found = []
    for most in (64, 4_096):
        fewer = replace(case, admission=dict.fromkeys(RULES, Admit.count(2, max_records=most)))
        for pool, device in ((ranks, "cpu"), (npus, "npu")):
            parts = pool.run(2, run, replace(fewer, device=device), 7, STEPS, saved)
            found.append(whole(parts))
    assert found[0] == found[1] != found[2] == found[3]


def saved_rules(folder: str) -> list[Any]:
    """What a checkpoint says of its tables' admission."""
    manifest = json.loads(Path(folder, "full", "manifest.json").read_text())
    rules = [table["admission"]["rule"] for table in manifest["tables"]]
    assert all(rule["arguments"]["max_records"] for rule in rules)
    return rules


def test_a_sketch_of_another_size_is_refused_where_columns_are_cut_anew(
    ranks: RankPool, tmp_path: Path
) -> None:
    case = Case(COLUMNS, admission=ADMISSION)
    saved = Saved(str(tmp_path / "saved"))
    ranks.run(2, run, case, 0, 2, None, saved)
    larger = ADMISSION | {"full": Admit.count_sketch(2, max_bytes=2**20)}
    other = replace(case, plan=None, admission=larger)
    with pytest.raises(CheckpointError, match=r"'full.*with the same, or allow 'admission'"):
        run(other, 2, 3, saved)


def test_a_state_dict_goes_on_as_its_model(ranks: RankPool, expected: Rows) -> None:
    case = Case(ROW_WISE, admission=ADMISSION)
    found = ranks.run(3, eviction_on_ranks.copies, case, 0, 8, STEPS)
    for which in (0, 1):
        assert whole([of_rank[which] for of_rank in found]) == expected


def test_a_plain_bag_goes_on_over_ranks(ranks: RankPool, expected: Rows) -> None:
    parts = ranks.run(3, eviction_on_ranks.bag_on_ranks, 5, STEPS, ADMISSION["user"])
    assert whole(parts)["user"] == expected["user"]


BAG = {"name": "user", "embedding_dim": 2, "num_embeddings": 9}


@pytest.mark.parametrize(
    ("arguments", "kind", "message"),
    [
        ({"admission": 3}, TypeError, "admission must be an Admit, as Admit.count"),
        (
            {"max_rows": 9, "eviction_groups": 8, "admission": Admit.count(2, max_records=4)},
            ValueError,
            "max_records of admission is 4, and ids fall into 8 groups; pass 8 or more, or set "
            "eviction_groups to a power of two up to 4",
        ),
    ],
)
def test_settings_that_make_no_sense(
    arguments: dict[str, object], kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind, match=f"table 'user': .*{message}"):
        HashEmbeddingBagConfig(**BAG, **arguments)  # type: ignore[arg-type]
