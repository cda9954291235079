"""Cases of one rank alone that is wrong in a call that all ranks make together."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from one_rank_alone import Collective, failed_calls, is_well
from pipeline_support.cases_of_telemetry import Kept, labelled_training, of_all, predictions
from pipeline_support.model import World, batches, rest_of
from recsdk_pipeline.telemetry import Report, Telemetry


def _told(report: Report) -> Any:
    """What of a report depends on no clock."""
    names = ("recsdk_steps_total", "recsdk_table_rows", "recsdk_loss", "recsdk_auc")
    return report.step, [report.values.get(name) for name in names]


def case_one_rank_makes_telemetry_wrong(world: World) -> None:
    model, pipeline = labelled_training(world)
    rest_of(pipeline, iter(batches(world, 4)))

    def arguments(turn: int) -> dict[str, Any]:
        return {
            "model": model,
            "pipeline": pipeline,
            "every": 3 + turn,
            "to": [Kept()],
            "ranks": ("each", "together")[turn],
            "predictions": predictions,
        }

    def read(made: Telemetry, to: list[Kept], **given: Any) -> Any:
        made.report()
        made.close()
        return [_told(each) for each in to[0].reports]

    made = Collective(
        arguments,
        Telemetry,
        read,
        bad={
            "model": 3,
            "pipeline": None,
            "every": 0,
            "to": ["run.jsonl"],
            "ranks": "all",
            "predictions": 3,
        },
        other={"every": 7, "ranks": "together", "predictions": None},
        state=lambda: len(pipeline._watchers),
    )
    wrong = [f"bad {each}" for each in made.bad]
    for each in made.other:  # the ways take turns, of which the first differs in `ranks`
        wrong += [f"other {each}"] if len(wrong) % 2 == 0 else ["bad every", f"other {each}"]
    ended = of_all(failed_calls(made, wrong, world.size - 1))
    faults = [is_well(of_ranks, world.size - 1) for of_ranks in zip(*ended, strict=True)]
    assert len(faults) == len(wrong)
    assert not any(faults), list(filter(None, faults))


def case_one_rank_reports_although_it_is_closed(world: World) -> None:
    model, pipeline = labelled_training(world)
    telemetry = Telemetry(model, pipeline, to=[Kept()])
    if world.rank:
        telemetry.close()
    found = ""
    try:
        telemetry.report()
    except Exception as error:
        found = f"{type(error).__name__}: {error}"
    assert "this telemetry is closed" in found
    assert found.startswith("RuntimeError: " if world.rank else "PeerError: rank 1 failed: ")
    total = torch.ones(1)
    dist.all_reduce(total)
    assert total == world.size
