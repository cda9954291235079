"""Cases of evaluating, by either pipeline, and of processors in front of tables."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from pipeline_support.cases_of_pipeline import hashed, pipeline_of
from pipeline_support.model import (
    DEVICE,
    SmallModel,
    World,
    assert_equal,
    batches,
    content,
    plain_evaluation,
    plain_step,
    processed_tables,
    rest_of,
    spread,
)
from recsdk_pipeline import HybridEvalPipeline, HybridTrainPipelineSparseDist


def case_evaluation_writes_nothing(world: World) -> None:
    pipeline = pipeline_of(world)
    rest_of(pipeline, iter(batches(world, 4)))
    before = content(pipeline._model)
    pipeline._model.eval()
    unseen = batches(world, 6, seed=3)
    first = rest_of(pipeline, iter(unseen))
    assert_equal(rest_of(pipeline, iter(unseen)), first)
    assert_equal(content(pipeline._model), before)
    assert pipeline.num_batches_trained == 4
    assert not any(output.requires_grad for output in first)


def counters(model: nn.Module) -> dict[str, Any]:
    """What tables count beside rows and their content."""
    found = {}
    for name, table in model.module.tables["tables"].tables().items():
        stats = table.stats()
        found[name] = (len(table), stats.num_rows, table.update_count)
    return found


def trained(world: World) -> tuple[nn.Module, Any]:
    model, optimizer = hashed(world)
    for batch in batches(world, 4):
        plain_step(model, optimizer, batch)
    return model, optimizer


def case_the_evaluating_pipeline_writes_nothing_at_any_depth(world: World) -> None:
    model, _ = trained(world)
    before, counted = content(model), counters(model)
    unseen = batches(world, 6 + 3 * world.rank, seed=3)
    expected = plain_evaluation(model, unseen[:6])
    model.eval()
    for depth in (1, 3, 12):
        pipeline = HybridEvalPipeline(model, DEVICE, pipe_n_batch=depth)
        for _ in range(2):
            outputs = rest_of(pipeline, iter(unseen))
            assert_equal(outputs, expected)
            assert not any(output.requires_grad for output in outputs)
        assert_equal(content(model), before)
        assert counters(model) == counted
    assert [n for n, p in model.named_parameters() if p.grad is not None and p.grad.any()] == []


def case_an_evaluation_that_goes_on_sees_what_was_trained_meanwhile(world: World) -> None:
    for is_pipelined in (True, False):
        model, optimizer = hashed(world)
        unseen = batches(world, 8, seed=3)
        pipeline = HybridEvalPipeline(model, DEVICE, pipe_n_batch=4)
        iterator = iter(unseen)
        model.eval()
        for _ in range(2):  # four further ones are mapped: no id has a row
            pipeline.progress(iterator)
        model.train()
        if is_pipelined:
            rest_of(HybridTrainPipelineSparseDist(model, optimizer, DEVICE), iter(unseen))
        else:
            for batch in unseen:
                plain_step(model, optimizer, batch)
        model.eval()
        assert_equal(rest_of(pipeline, iterator), plain_evaluation(model, unseen[2:]))


def case_batches_looked_ahead_for_evaluation_are_not_trained_after_others(world: World) -> None:
    pipeline = pipeline_of(world, pipe_n_batch=4)
    iterator = iter(batches(world, 8, seed=3))
    pipeline._model.eval()
    for _ in range(2):
        pipeline.progress(iterator)
    pipeline._model.train()
    rest_of(pipeline, iter(batches(world, 3)))
    with pytest.raises(RuntimeError, match="fetched ahead in eval mode"):
        pipeline.progress(iterator)


def case_the_evaluating_pipeline_returns_losses(world: World) -> None:
    model, _ = trained(world)
    model.eval()
    unseen = batches(world, 3, seed=3)
    pipeline = HybridEvalPipeline(model, DEVICE, return_loss=True)
    with torch.no_grad():
        expected = [model(batch.to(DEVICE)) for batch in unseen]
    for (output, loss), (wanted_loss, wanted) in zip(
        rest_of(pipeline, iter(unseen)), expected, strict=True
    ):
        assert torch.equal(output, wanted)
        assert torch.equal(loss, wanted_loss)


def case_the_evaluating_pipeline_refuses_training_mode(world: World) -> None:
    model, _ = trained(world)
    before = content(model)
    pipeline = HybridEvalPipeline(model, DEVICE)
    given = iter(batches(world, 3, seed=3))
    with pytest.raises(RuntimeError, match=r"in training mode \(module 'itself'\)"):
        pipeline.progress(given)
    model.eval()
    model.module.tables.train()
    with pytest.raises(RuntimeError, match=r"in training mode \(module '.*tables'\)"):
        pipeline.progress(given)
    model.eval()
    assert len(rest_of(pipeline, given)) == 3
    assert_equal(content(model), before)


def case_evaluation_between_steps_up_to_an_uneven_end(world: World) -> None:
    """By the pipeline that trains, and by one of its own."""
    train = batches(world, 6 + 4 * world.rank)
    evaluated = batches(world, 2 + world.rank, seed=1)
    model, optimizer = hashed(world)
    expected = []
    for batch in train[:6]:
        plain_step(model, optimizer, batch)
        expected.append(plain_evaluation(model, evaluated[:2]))
    for is_of_its_own in (False, True):
        pipeline = pipeline_of(world, pipe_n_batch=4)
        evaluating: Any = pipeline
        if is_of_its_own:
            evaluating = HybridEvalPipeline(pipeline._model, DEVICE, pipe_n_batch=3)
        iterator = iter(train)
        for outputs in expected:
            pipeline.progress(iterator)
            pipeline._model.eval()
            assert_equal(rest_of(evaluating, iter(evaluated)), outputs)
            pipeline._model.train()
        assert rest_of(pipeline, iterator) == []
        assert_equal(content(pipeline._model), content(model))


def case_processors_train_with_the_parameters_of_their_step(world: World) -> None:
    def processed(world: World) -> tuple[nn.Module, Any]:
        return spread(SmallModel(tables=processed_tables()), world)

    train = batches(world, 9)
    model, optimizer = processed(world)
    expected = [plain_step(model, optimizer, batch) for batch in train]
    before = [p.clone() for n, p in processed(world)[0].named_parameters() if "position" in n]
    for depth in (1, 4):
        pipeline = pipeline_of(world, processed, pipe_n_batch=depth)
        assert_equal(rest_of(pipeline, iter(train)), expected)
        assert_equal(content(pipeline._model), content(model))
    after = [p for n, p in model.named_parameters() if "position" in n]
    pairs = zip(before, after, strict=True)
    assert not any(torch.equal(one, other) for one, other in pairs)
