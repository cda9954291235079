"""What each rank of `recsdk demo` does."""

from __future__ import annotations

import logging
import sys
import time
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torchmetrics.functional.classification import binary_auroc
from torchrec.distributed.collective_utils import invoke_on_rank_and_broadcast_result

from recsdk_pipeline.data import BadLine, BadLines, ClickData, SyntheticClicks
from recsdk_pipeline.demo.model import ClickModels, ConstantIds, Dlrm, HashedIds
from recsdk_pipeline.demo.parquet_clicks import BadRows, NotAClick, ParquetClicks
from recsdk_pipeline.demo.report import Screen, Summary, prepare_folder
from recsdk_pipeline.demo.settings import Settings
from recsdk_pipeline.demo.source import click_data, num_steps
from recsdk_pipeline.demo.spreading import Rank, joined_ranks, spread
from recsdk_pipeline.demo.training import BASELINE, MODEL, Training
from recsdk_sharding import PeerError, failing_together


def run_rank(settings: Settings) -> int:
    """Train and report as told; return the exit status."""
    _hush()
    bad = BadLines(limit=settings.max_bad_lines)
    with joined_ranks() as rank:
        try:
            with failing_together():
                return _run(settings, rank, bad)
        except (BadLine, NotAClick, PeerError) as error:  # in what one rank streamed
            print(f"recsdk demo: {error}", file=sys.stderr)
            raise SystemExit(1) from None


def _run(settings: Settings, rank: Rank, bad: BadLines) -> int:
    try:
        data = _prepare(settings, bad)
    except (BadLine, ValueError, TypeError, ImportError, OSError) as error:
        return _failed(error, rank)
    training, summary = _train(settings, data, rank, bad)
    try:
        _report(settings, training, summary, rank)
    except OSError as error:
        return _failed(error, rank)
    return 0


def _prepare(settings: Settings, bad: BadLines) -> ClickData:
    """Read the data, and see that the result can be written; every rank raises alike."""
    data = click_data(settings, bad)  # every rank reads the same files
    problem: OSError | None = invoke_on_rank_and_broadcast_result(
        dist.GroupMember.WORLD, 0, _problem_of_folder, Path(settings.output)
    )
    if problem is not None:
        raise problem
    return data


def _problem_of_folder(path: Path) -> OSError | None:
    """Make the folder; what is wrong with it is returned, so that all ranks get it."""
    try:
        prepare_folder(path)
    except OSError as error:
        return error
    return None


def _failed(error: Exception, rank: Rank) -> int:
    if rank.is_first:
        print(f"recsdk demo: {error}", file=sys.stderr)
    return 1


def _train(
    settings: Settings, data: ClickData, rank: Rank, bad: BadLines
) -> tuple[Training, Summary]:
    torch.manual_seed(settings.seed)
    batch_size = settings.recipe().batch_size
    batches = data.train(epoch=0, batch_size=batch_size, share=rank.share)  # read meanwhile
    model, optimizer = spread(_models(data, settings.seed), rank, settings.recipe())
    training = Training(
        model,
        optimizer,
        data=data,
        batches=batches,
        rank=rank,
        recipe=settings.recipe(),
        num_steps=num_steps(data, settings),
    )
    screen = Screen(num_steps=training.num_steps, is_shown=rank.is_first)
    with screen:
        training.run(screen)
    return training, _summary(settings, training, data, bad)


def _report(settings: Settings, training: Training, summary: Summary, rank: Rank) -> None:
    """Show the result, then write it: if it cannot be written, it was at least shown."""
    screen = Screen(num_steps=summary.steps, is_shown=rank.is_first)
    screen.show_summary(summary)
    if rank.is_first:
        screen.show_path(summary.write(Path(settings.output)))
        _draw(Path(settings.output), training, screen)


def _draw(folder: Path, training: Training, screen: Screen) -> None:
    try:
        from recsdk_pipeline.demo.drawing import write_pictures
    except ImportError:
        screen.say('no pictures: they need matplotlib; run pip install "recsdk-pipeline[plot]"')
        return
    for path in write_pictures(folder, training.states, training.reports):
        screen.show_path(path)


def _models(data: ClickData, seed: int) -> ClickModels:
    sizes = {"num_features": len(data.features), "num_dense": data.num_dense}
    models: dict[str, nn.Module] = {MODEL: Dlrm(HashedIds(data.features, seed=seed), **sizes)}
    if isinstance(data, SyntheticClicks):
        models[BASELINE] = Dlrm(ConstantIds(data.features), **sizes)
    return ClickModels(models)


def _summary(settings: Settings, training: Training, data: ClickData, bad: BadLines) -> Summary:
    aucs = training.evaluate()
    is_defined = aucs[MODEL] is not None
    best = _generator_auc(data) if is_defined and isinstance(data, SyntheticClicks) else None
    bad = _of_all_ranks(data.bad) if isinstance(data, ParquetClicks) else bad
    return Summary(
        auc=aucs[MODEL],
        auc_generator=best,
        auc_without_ids=aucs.get(BASELINE),
        examples_per_second=training.examples_per_second,
        stall_share=training.stall_share(),
        rows=training.rows(),
        world_size=settings.world_size,
        steps=training.steps,
        bad_lines=bad.count,
        first_bad_line=bad.first[0] if bad.first else None,
        seconds=time.time() - settings.started_at,
    )


def _of_all_ranks(bad: BadRows) -> BadLines:
    """What all ranks met; in another epoch another rank may have met it again."""
    found: list[dict[tuple[str, int], str]] = [{}] * dist.get_world_size()
    dist.all_gather_object(found, bad.seen)
    seen = {place: text for each in found for place, text in each.items()}
    first = [text for _, text in sorted(seen.items())[:10]]
    return BadLines(limit=bad.limit, count=len(seen), first=first)


def _generator_auc(data: SyntheticClicks) -> float:
    probabilities, labels = data.held_out_truth()
    return float(binary_auroc(torch.from_numpy(probabilities), torch.from_numpy(labels).int()))


def _hush() -> None:
    """Keep torch's own deprecation notices off the user's screen."""
    warnings.filterwarnings("ignore", category=FutureWarning)
    warnings.filterwarnings("ignore", category=UserWarning, module="torch")
    for name in ("torch.fx._symbolic_trace", "torchrec"):
        logging.getLogger(name).setLevel(logging.ERROR)
