"""A loss that a GradScaler has scaled reaches no row, and trains nothing silently."""

from __future__ import annotations

import io
import pickle
import threading
import warnings
from typing import Any

import pytest
import torch
from torch._dynamo import compiled_autograd
from torch.amp import GradScaler
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

from recsdk_core.nn import HashEmbedding, HashEmbeddingBag, scaled_losses
from recsdk_core.optim import SGD

KEYS = torch.tensor([[5, -7], [5, 2**62]])


class OwnScaler(GradScaler):
    """Has a method of its own, as those of devices may."""

    def scale(self, outputs: Any) -> Any:
        return super().scale(outputs)


class ApartScaler(GradScaler):
    """Shares nothing with its base but the name, as those of some backends."""

    def __init__(self, device: str, init_scale: float) -> None:
        self._enabled = True
        self._factor = init_scale

    def scale(self, outputs: Any) -> Any:
        if isinstance(outputs, torch.Tensor):
            return outputs * self._factor
        return [self.scale(each) for each in outputs]

    def get_scale(self) -> float:
        return self._factor

    def __reduce__(self) -> Any:
        return ApartScaler, ("cpu", self._factor)


def scaled(scaler: GradScaler, loss: torch.Tensor) -> torch.Tensor:
    return scaler.scale(loss)


def scaled_in_a_list(scaler: GradScaler, loss: torch.Tensor) -> torch.Tensor:
    return scaler.scale([loss])[0]


def scaled_in_a_generator(scaler: GradScaler, loss: torch.Tensor) -> torch.Tensor:
    return next(iter(scaler.scale(each for each in (loss,))))


def scaled_inside(scaler: GradScaler, loss: torch.Tensor) -> torch.Tensor:
    return scaler.scale(loss) + 1


WAYS = [scaled, scaled_in_a_list, scaled_in_a_generator, scaled_inside]


@pytest.mark.parametrize("kind", [GradScaler, OwnScaler, ApartScaler])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("module_type", [HashEmbedding, HashEmbeddingBag])
def test_a_scaled_loss_is_refused_and_rows_stay(module_type: Any, way: Any, kind: Any) -> None:
    module = module_type(4, name="item", optimizer=SGD(lr=1.0))
    before = module(KEYS).detach().clone()
    scaler = pickle.loads(pickle.dumps(kind("cpu", init_scale=1024.0)))
    with pytest.raises(RuntimeError, match=r"tables \['item'\].*1024.*bfloat16.*enabled=False"):
        way(scaler, module(KEYS).sum()).backward()
    assert torch.equal(module(KEYS), before)
    assert module.table.update_count == 0
    module(KEYS).sum().backward()  # without the scaler it trains, after a failure too
    assert module.table.update_count == 1


def test_the_scaler_of_sharded_dense_layers_is_watched() -> None:
    assert hasattr(ShardedGradScaler.scale, "_is_watched")


def test_what_is_not_scaled_trains() -> None:
    module = HashEmbedding(4, optimizer=SGD(lr=1.0))
    dense = torch.nn.Linear(4, 1)
    scaler = GradScaler("cpu", init_scale=1024.0)
    scaler.scale(dense(torch.ones(2, 4)).sum()).backward()  # another model's loss
    assert float(dense.bias.grad) == 2048
    module(KEYS).sum().backward()
    off = GradScaler("cpu", enabled=False)
    off.scale(module(KEYS).sum()).backward()
    assert module.table.update_count == 2


def test_backward_passes_that_failed_are_not_kept_for_ever() -> None:
    module = HashEmbedding(4, optimizer=SGD())
    scaler = GradScaler("cpu")
    for _ in range(200):
        with pytest.raises(RuntimeError, match="has scaled the loss"):
            scaler.scale(module(KEYS).sum()).backward()
    assert 0 < len(scaled_losses._scaler_of_pass) <= 64


def grads_of_a_dense_model(scaler: GradScaler) -> torch.Tensor:
    dense = torch.nn.Linear(4, 1)
    scaler.scale(dense(torch.ones(2, 4)).sum()).backward()
    assert dense.bias.grad is not None
    return dense.bias.grad


@pytest.mark.parametrize("is_whole", [False, True])
def test_compiled_autograd_takes_scaled_losses_of_other_models(is_whole: bool) -> None:
    with compiled_autograd._enable(torch.compile(backend="eager", fullgraph=is_whole)):
        grad = grads_of_a_dense_model(GradScaler("cpu", init_scale=8.0))
    assert float(grad) == 16


def test_a_scaled_loss_is_saved_without_a_warning() -> None:
    loss = GradScaler("cpu").scale(torch.ones((), requires_grad=True) * 2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.save(loss, io.BytesIO())


def test_frozen_tables_under_a_scaler_are_let_alone() -> None:
    module = HashEmbedding(4)
    module.weight.requires_grad_(False)
    dense = torch.nn.Linear(4, 1)
    GradScaler("cpu", init_scale=8.0).scale(dense(module(KEYS)).sum()).backward()
    assert float(dense.bias.grad) == 8 * KEYS.numel()


def test_a_scaled_pass_on_one_thread_does_not_hold_up_another() -> None:
    module = HashEmbedding(4, optimizer=SGD(lr=1.0))
    scaler = GradScaler("cpu", init_scale=8.0)
    failures: list[BaseException] = []

    def train() -> None:
        try:
            module(KEYS).sum().backward()
        except BaseException as error:
            failures.append(error)

    def train_beside(grad: torch.Tensor) -> None:
        thread = threading.Thread(target=train)
        thread.start()
        thread.join()

    value = torch.ones((), requires_grad=True)
    doubled = value * 2
    doubled.register_hook(train_beside)  # runs once the scaled pass has begun
    scaler.scale(doubled).backward()
    assert not failures
    assert module.table.update_count == 1
    assert float(value.grad) == 16
