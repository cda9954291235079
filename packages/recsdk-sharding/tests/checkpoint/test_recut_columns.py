"""A checkpoint of a table that is cut by columns is taken, or refused, as one of a whole table.

But of an initializer that makes columns of whole rows checkpoints do not say which.
"""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import loads_on_ranks
import numpy as np
import on_ranks
import pytest
import torch
from loads_on_ranks import WIDTH, Settings
from plans import columns
from rank_pool import RankPool
from torchrec.modules.embedding_configs import DataType
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad
from worlds import Setup, new_model, rows_of

from recsdk_core import Admit, Default, Evict, init, optim
from recsdk_core.nn import HashEmbeddingBag
from recsdk_sharding import Saver
from sampling import sampled
from table_crossing import assert_same, contents

CATCHING_UP = optim.AdamW(lr=0.1, weight_decay=0.5, catch_up=True)
MOMENTUM = optim.RMSprop(lr=0.02, momentum=0.6)
SHARED = {"default": Default.shared_rows(8), "admission": Admit.count(2)}


def of(**config: Any) -> Settings:
    return Settings(config=config)


PAIRS: dict[str, tuple[str, Settings, Settings]] = {
    "nothing": ("", Settings(CATCHING_UP, SHARED), Settings(CATCHING_UP, SHARED)),
    "dtype": ("", of(data_type=DataType.BF16), of(data_type=DataType.FP16)),
    "decay to catch up": ("optimizer", Settings(CATCHING_UP), Settings()),
    "none to catch up": ("optimizer", Settings(), Settings(CATCHING_UP)),
    "fields of one kind": ("optimizer", Settings(MOMENTUM), Settings(optim.RMSprop(lr=0.02))),
    "initializer": (
        "initializer",
        of(initializer=init.Constant(value=0.25)),
        of(initializer=init.Normal(stddev=0.1)),
    ),
    "seed": ("seed", of(**SHARED), of(seed=7, **SHARED)),
    "order": ("eviction", of(eviction=Evict.lru()), of(eviction=Evict.lfu(half_life=2.0))),
    "no eviction": ("eviction", of(), of(eviction=Evict.lru().expiring(ttl=4))),
    "constant": ("default", of(**SHARED), of(default=Default.constant(2.0))),
    "fewer shared rows": ("default", of(**SHARED), of(default=Default.shared_rows(4))),
    "more shared rows": ("default", of(default=Default.shared_rows(4)), of(**SHARED)),
    "sketch": (
        "admission",
        of(admission=Admit.count_sketch(2, max_bytes=2**19)),
        of(admission=Admit.count_sketch(2, max_bytes=2**20)),
    ),
    "counts": ("admission", of(admission=Admit.count(2)), of(admission=Admit.count(3))),
}
"""What differs: what one may allow then, and the settings of the tables."""
REFUSED = set(PAIRS) - {"nothing", "no eviction", "counts"}
"""Unless it is allowed; what cannot be is refused in any case."""


@pytest.mark.parametrize(
    ("what", "is_allowed", "device"),
    [
        *product(PAIRS, (False, True), ("cpu",)),
        *sampled(product((what for what in PAIRS if what != "dtype"), (True,), ("npu",)), 3),
    ],
)
def test_both_are_taken_or_refused(
    ranks: RankPool, npus: RankPool, tmp_path: Path, what: str, is_allowed: bool, device: str
) -> None:
    name, saved, loading = PAIRS[what]
    allow = [name] if is_allowed and name else []
    pool = npus if device == "npu" else ranks
    [said] = pool.run(1, loads_on_ranks.compare, saved, loading, allow, device, str(tmp_path))
    assert (said is not None) == (what in REFUSED and not allow)


def test_modules_of_the_core_take_all_that_was_saved(ranks: RankPool, tmp_path: Path) -> None:
    settings = of(eviction=Evict.lru(), **SHARED)
    ranks.run(1, loads_on_ranks.save_both, settings, "cpu", str(tmp_path))
    initializer = init.Uniform(low=-(200**-0.5), high=200**-0.5)
    made = []
    for name in ("whole", "cut"):
        module = HashEmbeddingBag(
            WIDTH,
            name="t",
            optimizer=settings.optimizer,
            initializer=initializer,
            max_rows=64,
            eviction_groups=4,
            **settings.config,
        )
        Saver().load(module, tmp_path / name)
        made.append(module)
    assert_same(contents(made[1].table), contents(made[0].table), "of the table that was cut")
    counted = []
    for each in made:
        state = each.state_dict()
        pairs = zip(state["admit_keys"].tolist(), state["admit_counts"].tolist(), strict=True)
        counted.append(dict(pairs))
    assert len(counted[0]) > 5
    assert counted[1] == counted[0]


def test_state_of_column_ranges_becomes_its_mean(ranks: RankPool) -> None:
    setup = Setup(RowWiseAdagrad, {"lr": 0.1}, plan=columns("column_wise", [0]))
    [saved] = ranks.run(1, on_ranks.save, setup, [[5], [4]])
    model = new_model(setup, "cpu")
    model.load_state_dict(
        {name: torch.from_numpy(np.asarray(value)) for name, value in saved["state"].items()}
    )
    rows = rows_of(model.ebc.tables())["user"]
    widths = {"user.columns_0_3": 3, "user.columns_3_7": 4, "user.columns_7_8": 1}
    cut: dict[str, Any] = {name: saved["rows"][name] for name in widths}
    assert rows
    for key, (weights, state) in rows.items():
        parts = [cut[name][key] for name in widths]
        assert np.array_equal(weights, np.concatenate([part[0] for part in parts]))
        sums = [part[1]["sum"].item() for part in parts]
        assert len(set(sums)) == len(sums)
        mean = np.average(sums, weights=list(widths.values()))
        np.testing.assert_allclose(state["sum"], mean, rtol=1e-6)
