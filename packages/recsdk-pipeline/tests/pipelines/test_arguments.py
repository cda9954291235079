"""What the pipeline accepts, on one process and without sharded modules."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pipeline_support.model import World, dense_batches
from torch import nn
from typing_extensions import assert_type

from recsdk_pipeline import HybridEvalPipeline, HybridTrainPipelineSparseDist

CPU = torch.device("cpu")
ALONE = World(0, 1, None)


class DenseModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 1)

    def forward(self, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        output = self.layer(batch.dense)
        return output.square().sum(), output.detach()


def pipeline_of(model: nn.Module, **options: Any) -> HybridTrainPipelineSparseDist[Any, Any]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    return HybridTrainPipelineSparseDist(model, optimizer, CPU, **options)


def test_whether_losses_are_returned_is_known_to_type_checkers() -> None:
    model = DenseModel()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    plain: HybridTrainPipelineSparseDist[Any, torch.Tensor] = HybridTrainPipelineSparseDist(
        model, optimizer, CPU
    )
    out = assert_type(plain.progress(iter(dense_batches(ALONE, 1))), torch.Tensor)
    assert isinstance(out, torch.Tensor)
    assert_type(
        HybridTrainPipelineSparseDist(model, optimizer, CPU, return_loss=True),
        HybridTrainPipelineSparseDist[Any, Any, tuple[Any, torch.Tensor]],
    )
    assert_type(
        HybridEvalPipeline(model.eval(), CPU, return_loss=True),
        HybridEvalPipeline[Any, Any, tuple[Any, torch.Tensor]],
    )


@pytest.mark.parametrize("depth", [1, 12])
def test_depths_from_1_to_12_are_taken(depth: int) -> None:
    pipeline_of(DenseModel(), pipe_n_batch=depth)


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"pipe_n_batch": 0}, "pipe_n_batch must be at least 1, got 0"),
        ({"pipe_n_batch": 13}, "pipe_n_batch must be at most 12, got 13"),
        ({"execute_all_batches": False}, "execute_all_batches must be True, got False"),
        ({"apply_jit": True}, "apply_jit must be False, got True"),
    ],
)
def test_other_arguments_are_refused(option: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        pipeline_of(DenseModel(), **option)


@pytest.mark.parametrize("depth", [2.5, 3.0, True, "3", None])
def test_a_depth_that_is_no_whole_number_is_refused(depth: Any) -> None:
    with pytest.raises(TypeError, match=rf"pipe_n_batch must be an int, got {depth!r}"):
        pipeline_of(DenseModel(), pipe_n_batch=depth)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"model": [DenseModel()]}, TypeError, "model must be a torch.nn.Module, got list"),
        ({"model": None}, TypeError, "model must be a torch.nn.Module, got NoneType"),
        ({"optimizer": [1]}, TypeError, "optimizer must be a torch.optim.Optimizer, .* got list"),
        ({"optimizer": torch.optim.SGD}, TypeError, "optimizer must .* got type"),
        ({"device": "gpu"}, ValueError, "device must be a torch.device, got 'gpu'"),
        ({"device": 0}, TypeError, r"device must be a torch.device, got 0; pass torch.device"),
        ({"device": None}, TypeError, "device must be a torch.device, got None"),
    ],
)
def test_parts_that_are_of_another_kind_are_refused(
    changes: dict[str, Any], error: type[Exception], message: str
) -> None:
    model = DenseModel()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    good: dict[str, Any] = {"model": model, "optimizer": optimizer, "device": CPU}
    with pytest.raises(error, match=message):
        HybridTrainPipelineSparseDist(**{**good, **changes})
    assert HybridTrainPipelineSparseDist(**{**good, "device": "cpu"})


def test_data_that_cannot_tell_its_position_is_refused() -> None:
    with pytest.raises(TypeError, match="state_dict"):
        pipeline_of(DenseModel(), data=[1, 2])


def test_arguments_may_be_given_by_position() -> None:
    model = DenseModel()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    pipeline = HybridTrainPipelineSparseDist(model, optimizer, CPU, True, False, True, 3)
    output, losses = pipeline.progress(iter(dense_batches(ALONE, 2)))
    assert output.shape == (6, 1)
    assert losses.shape == ()


def test_several_losses_are_summed() -> None:
    class TwoLosses(DenseModel):
        def forward(self, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
            loss, output = super().forward(batch)
            return torch.stack([loss / 4, loss * 3 / 4]), output

    torch.manual_seed(0)
    one = DenseModel()
    two = TwoLosses()
    two.load_state_dict(one.state_dict())
    batch = dense_batches(ALONE, 1)
    for model in (one, two):
        pipeline_of(model).progress(iter(batch))
    torch.testing.assert_close(two.layer.weight, one.layer.weight)


def test_an_exception_of_the_model_passes_and_the_pipeline_goes_on() -> None:
    class Failing(DenseModel):
        def forward(self, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
            if batch.labels.isnan().any():
                raise ArithmeticError("a label is not a number")
            return super().forward(batch)

    given = dense_batches(ALONE, 6)
    given[2].labels[0] = torch.nan
    pipeline = pipeline_of(Failing(), pipe_n_batch=2)
    iterator = iter(given)
    pipeline.progress(iterator)
    pipeline.progress(iterator)
    with pytest.raises(ArithmeticError, match="not a number"):
        pipeline.progress(iterator)
    pipeline.progress(iterator)  # the batches in flight were dropped
    with pytest.raises(StopIteration):
        pipeline.progress(iterator)
    assert pipeline.num_batches_trained == 3


@pytest.mark.parametrize(
    ("where", "is_training"),
    [
        *((where, True) for where in ("forward", "backward", "step", "to")),
        *((where, False) for where in ("forward", "to")),
    ],
)
def test_a_stop_of_the_model_or_a_batch_is_no_end_of_the_data(
    where: str, is_training: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*_: Any, **__: Any) -> Any:
        raise StopIteration

    model = DenseModel().train(is_training)
    if where == "forward":
        monkeypatch.setattr(model.layer, "forward", stop)
    elif where == "backward":
        model.layer.register_forward_hook(lambda _, __, out: out.register_hook(stop) and None)
    given = dense_batches(ALONE, 3)
    if where == "to":
        monkeypatch.setattr(given[0], "to", stop)
    pipeline = pipeline_of(model)
    if where == "step":
        monkeypatch.setattr(pipeline._optimizer, "step", stop)
    with pytest.raises(RuntimeError, match="must not pass for the end") as raised:
        pipeline.progress(iter(given))
    assert isinstance(raised.value.__cause__, StopIteration)


def test_an_empty_iterator_ends_at_once() -> None:
    with pytest.raises(StopIteration):
        pipeline_of(DenseModel()).progress(iter([]))


def test_a_batch_that_is_none_is_refused() -> None:
    pipeline = pipeline_of(DenseModel(), pipe_n_batch=2)
    iterator = iter([*dense_batches(ALONE, 1), None, *dense_batches(ALONE, 1)])
    pipeline.progress(iterator)
    with pytest.raises(TypeError, match="must yield batches .*, got None"):
        pipeline.progress(iterator)
    assert pipeline.num_batches_trained == 1


@pytest.mark.parametrize("is_kept", [False, True])
def test_training_on_another_iterator_abandons_what_was_read_ahead(is_kept: bool) -> None:
    pipeline = pipeline_of(DenseModel(), pipe_n_batch=2)
    left = iter(dense_batches(ALONE, 6))
    pipeline.progress(left)
    pipeline.progress(left)  # from the second batch on, two are read ahead
    kept = left if is_kept else None
    del left
    pipeline.progress(iter(dense_batches(ALONE, 1)))
    assert len(pipeline._queues) == 1
    if kept is not None:
        assert len(list(kept)) == 2


@pytest.mark.parametrize("batch", [5, (torch.ones(1),), {"x": torch.ones(1)}])
def test_what_is_no_batch_is_named(batch: Any) -> None:
    with pytest.raises(
        TypeError, match=rf"yield batches with a method to\(device.* got {type(batch).__name__}"
    ):
        pipeline_of(DenseModel()).progress(iter([batch]))


@pytest.mark.parametrize(
    ("result", "text"),
    [
        (None, r"the model must return \(losses, output\), got NoneType"),
        (torch.ones(2), r"the model must return \(losses, output\), got .*Tensor"),
        ((torch.ones(1),), r"the model must return \(losses, output\), got tuple of 1"),
        ((1.0, None), "losses must be a torch.Tensor, got float"),
    ],
)
def test_what_a_model_returns_is_checked(result: Any, text: str) -> None:
    class Other(DenseModel):
        def forward(self, batch: Any) -> Any:
            return result

    with pytest.raises(TypeError, match=text):
        pipeline_of(Other()).progress(iter(dense_batches(ALONE, 1)))
