"""Cases of one rank alone that is wrong in a call that all ranks make together."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from one_rank_alone import ERRORS, Collective, failed_calls, is_well, steps_of
from pipeline_support.cases_of_failing import other_groups
from pipeline_support.cases_of_telemetry import Kept, labelled_training, of_all, predictions
from pipeline_support.model import World, batches, rest_of
from recsdk_pipeline.telemetry import Report, Telemetry
from sampling import sampled

STEPS_OF_EACH = 3


def _told(report: Report) -> Any:
    """What of a report depends on no clock."""
    names = ("recsdk_steps_total", "recsdk_table_rows", "recsdk_loss", "recsdk_auc")
    return report.step, [report.values.get(name) for name in names]


def _making(world: World) -> Collective:
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

    return Collective(
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


def _reporting(world: World) -> Collective:
    model, pipeline = labelled_training(world)
    telemetry = Telemetry(model, pipeline, to=[Kept()], predictions=predictions)
    rest_of(pipeline, iter(batches(world, 4)))
    return Collective(lambda turn: {}, telemetry.report, lambda found: None, last=("",))


def case_one_rank_makes_telemetry_wrong(world: World) -> None:
    made = _making(world)
    wrong = [f"bad {each}" for each in made.bad]
    for each in made.other:  # the ways take turns, of which the first differs in `ranks`
        wrong += [f"other {each}"] if len(wrong) % 2 == 0 else ["bad every", f"other {each}"]
    ended = of_all(failed_calls(made, wrong, world.size - 1))
    faults = [is_well(of_ranks, world.size - 1) for of_ranks in zip(*ended, strict=True)]
    assert len(faults) == len(wrong)
    assert not any(faults), list(filter(None, faults))


def case_one_rank_fails_in_telemetry(world: World) -> None:
    for make in (_making, _reporting):
        with other_groups(world) as own:
            steps = steps_of(make(own))
        at_steps = [f"{list(ERRORS)[n % len(ERRORS)]} at {step}" for n, step in enumerate(steps)]
        wrong = sampled(of_all(at_steps)[world.size - 1], STEPS_OF_EACH)
        found: list[Any] = []
        while len(found) < len(wrong):
            with other_groups(world) as own:
                ended = failed_calls(make(own), wrong[len(found) :], world.size - 1)
            found += zip(*of_all(ended), strict=True)
        faults = [is_well(of_ranks, world.size - 1) for of_ranks in found]
        assert not any(faults), [
            (each[0].case, fault) for each, fault in zip(found, faults, strict=True) if fault
        ]


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
