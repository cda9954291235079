"""What ids without a row read in evaluation: zeros, or the initial rows that they would get.

The demo's model is trained on one epoch of few examples, and scores as many later ones twice: as
it is, and after the ids that it never saw have got initial rows, which a table of fixed size reads.
They are uniform within one over the root of the number of rows, as torchrec's. The figure is the
AUC of zeros less that of initial rows, over seeds.
"""

from __future__ import annotations

import statistics
from dataclasses import replace

from benchmarks import records
from benchmarks.models.training import WHOLE, Stream, Vectors, auc, hash_bag, trained
from recsdk_core import Outcome, init
from recsdk_pipeline.data import ClickData, SyntheticClicks
from recsdk_pipeline.demo.settings import RECIPES

NUM_EXAMPLES = 20_000
NUM_ROWS = (100_000, 1_000, 100, 10)
"""Of the fixed tables whose initial rows are compared with zeros."""


def clicks(seed: int) -> ClickData:
    return SyntheticClicks(num_train=NUM_EXAMPLES, num_held_out=NUM_EXAMPLES, seed=seed)


STREAM = Stream(
    name=f"demo_{NUM_EXAMPLES:.0e}".replace("e+0", "e"),
    data=clicks,
    recipe=replace(RECIPES["synthetic"], epochs=1),
)


def aucs(num_rows: int, seed: int) -> tuple[float, float, float]:
    """With zeros, with initial rows, and which share of the ids to score had no row."""
    data = STREAM.data(seed)
    within = num_rows**-0.5
    first = init.Uniform(low=-within, high=within)
    rate = STREAM.recipe.learning_rate
    bags = {name: hash_bag(name, rate, seed, initializer=first) for name in data.features}
    model = trained(STREAM, data, Vectors(bags), seed)
    with_zeros = auc(model, STREAM, data)
    num_ids = num_unseen = 0
    for batch in data.held_out(batch_size=STREAM.recipe.batch_size, share=WHOLE):
        for name, bag in bags.items():
            _, outcomes = bag.table.lookup(batch.sparse[name].values(), return_outcomes=True)
            num_ids += len(outcomes)
            num_unseen += int((outcomes == int(Outcome.MISSING)).sum())
    for batch in data.held_out(batch_size=STREAM.recipe.batch_size, share=WHOLE):
        for name, bag in bags.items():
            bag.table.find_or_insert(batch.sparse[name].values())
    return with_zeros, auc(model, STREAM, data), num_unseen / num_ids


def run(quick: bool) -> list[records.Record]:
    made = []
    for num_rows in NUM_ROWS:
        each = [aucs(num_rows, seed) for seed in (range(1) if quick else range(5))]
        zeros, rows = (statistics.mean(one[i] for one in each) for i in (0, 1))
        less = [one[0] - one[1] for one in each]
        print(
            f"{num_rows} rows: AUC with zeros less that with initial rows {min(less):.5f} to "
            f"{max(less):.5f}; {statistics.mean(one[2] for one in each):.1%} of ids had none"
        )
        made.append(
            records.Record(
                workload=STREAM.name,
                op=f"unseen_ids_of_{num_rows}",
                unit="AUC",
                ours=zeros,
                peers={"initial rows": rows},
                ratio={"initial rows": zeros / rows},
            )
        )
    return made
