"""Loops of others, each over a RowOptimizer beside nn.Embedding and the loop's own optimizer.

Each is skipped, by its name, where it is not installed; requirements/loops.txt installs them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from recsdk_core.nn import HashEmbedding, RowOptimizer

NUM_KEYS, DIM, NUM_SAMPLES = 12, 4, 32
KEYS = torch.arange(NUM_KEYS)
TOLERANCE: dict[str, float] = {"rtol": 1e-4, "atol": 1e-6}
ACCUMULATES = pytest.mark.parametrize("num_micro_batches", [1, 4])
CLIPS = pytest.mark.parametrize("clip", [None, 0.05])


class Scorer(nn.Module):
    """An embedding and a dense layer; takes samples as a batch, returns loss and scores."""

    def __init__(self, embedding: Any) -> None:
        super().__init__()
        self.embedding, self.head = embedding, nn.Linear(DIM, 1)

    def forward(
        self, keys: torch.Tensor, labels: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        scores = self.head(self.embedding(keys).mean(1)).squeeze(1)
        return (scores - labels).square().mean(), scores

    def rows(self) -> torch.Tensor:
        if isinstance(self.embedding, HashEmbedding):
            found: torch.Tensor = self.embedding.table.lookup(KEYS)
            return found
        return self.embedding.weight.detach()  # type: ignore[no-any-return]


def make_pair() -> tuple[Scorer, Scorer]:
    """A model of raw keys, and its dense twin."""
    torch.manual_seed(0)
    dense = Scorer(nn.Embedding(NUM_KEYS, DIM))
    hashed = Scorer(HashEmbedding(DIM, name="item"))
    hashed.embedding.table.upsert(KEYS, dense.embedding.weight.detach().clone())
    hashed.head.load_state_dict(dense.head.state_dict())
    return hashed, dense


def make_optimizer(model: Scorer) -> torch.optim.Optimizer:
    """Adagrad over the whole model: a dense table too moves touched rows only."""
    if isinstance(model.embedding, HashEmbedding):
        return RowOptimizer(model, torch.optim.Adagrad, lr=0.1)
    return torch.optim.Adagrad(model.parameters(), lr=0.1)


def make_scheduler(optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.7)


def make_samples() -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    keys = torch.randint(NUM_KEYS, (NUM_SAMPLES, 3), generator=generator)
    labels = torch.rand(NUM_SAMPLES, generator=generator)
    return [{"keys": k, "labels": v} for k, v in zip(keys, labels, strict=True)]


def check_equal(hashed: Scorer, dense: Scorer, **tolerance: float) -> None:
    start = make_pair()[1]
    assert not torch.allclose(dense.rows(), start.rows(), atol=1e-2)  # it did train
    tolerance = tolerance or TOLERANCE
    torch.testing.assert_close(hashed.rows(), dense.rows(), **tolerance)
    torch.testing.assert_close(hashed.head.weight, dense.head.weight, **tolerance)


# ---- Lightning ----------------------------------------------------------------------------------


def lightning_fit(
    model: Scorer, num_epochs: int = 2, ckpt_path: Path | None = None, **options: Any
) -> Any:
    lightning = pytest.importorskip("lightning", reason="Lightning is not installed")

    class Module(lightning.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def training_step(self, batch: Any, _: int) -> torch.Tensor:
            loss: torch.Tensor = self.model(**batch)[0]
            return loss

        def configure_optimizers(self) -> Any:
            optimizer = make_optimizer(self.model)
            return {"optimizer": optimizer, "lr_scheduler": make_scheduler(optimizer)}

    trainer = lightning.Trainer(
        max_epochs=num_epochs,
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )
    loader = torch.utils.data.DataLoader(make_samples(), batch_size=4)  # type: ignore[arg-type]
    trainer.fit(Module(), loader, ckpt_path=ckpt_path)
    return trainer


QUIET = pytest.mark.filterwarnings("ignore")
"""Loops warn of few workers, of our state_dict, of one another's versions."""


@QUIET
@ACCUMULATES
@CLIPS
def test_lightning_equals_the_dense_twin(num_micro_batches: int, clip: float | None) -> None:
    pair = make_pair()
    for model in pair:
        lightning_fit(model, accumulate_grad_batches=num_micro_batches, gradient_clip_val=clip)
    assert pair[0].embedding.table.update_count == 2 * 8 // num_micro_batches
    check_equal(*pair)


@QUIET
def test_lightning_equals_the_dense_twin_in_bfloat16() -> None:
    pair = make_pair()
    for model in pair:
        lightning_fit(model, precision="bf16-mixed")
    check_equal(*pair, rtol=1e-2, atol=1e-3)


@QUIET
def test_lightning_resumes_as_if_never_stopped(tmp_path: Path) -> None:
    whole, _ = make_pair()
    lightning_fit(whole, 3)
    stopped, _ = make_pair()
    path = tmp_path / "stopped.ckpt"
    lightning_fit(stopped, 1).save_checkpoint(path)
    resumed = Scorer(HashEmbedding(DIM, name="item"))
    lightning_fit(resumed, 3, path)
    assert torch.equal(resumed.rows(), whole.rows())
    assert torch.equal(resumed.head.weight, whole.head.weight)
    assert resumed.embedding.table.update_count == 3 * 8


# ---- Accelerate ---------------------------------------------------------------------------------


def accelerate_fit(
    model: Scorer, num_epochs: int, clip: float | None = None, *, state: Path | None = None,
    save: Path | None = None, **options: Any,
) -> None:  # fmt: skip
    accelerate = pytest.importorskip("accelerate", reason="Accelerate is not installed")
    accelerate.state.AcceleratorState._reset_state(True)
    accelerator = accelerate.Accelerator(cpu=True, **options)
    loader = torch.utils.data.DataLoader(make_samples(), batch_size=4)  # type: ignore[arg-type]
    optimizer = make_optimizer(model)
    model, optimizer, loader, scheduler = accelerator.prepare(
        model, optimizer, loader, make_scheduler(optimizer)
    )
    if state is not None:
        accelerator.load_state(str(state))
    for _ in range(num_epochs):
        for batch in loader:
            with accelerator.accumulate(model):
                loss, _ = model(**batch)
                accelerator.backward(loss)
                if accelerator.sync_gradients and clip is not None:
                    accelerator.clip_grad_norm_(model.parameters(), clip)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
    if save is not None:
        accelerator.save_state(str(save))


@QUIET
@ACCUMULATES
@CLIPS
def test_accelerate_equals_the_dense_twin(num_micro_batches: int, clip: float | None) -> None:
    pair = make_pair()
    for model in pair:
        accelerate_fit(model, 2, clip, gradient_accumulation_steps=num_micro_batches)
    assert pair[0].embedding.table.update_count == 2 * 8 // num_micro_batches
    check_equal(*pair)


@QUIET
def test_accelerate_equals_the_dense_twin_in_bfloat16() -> None:
    pair = make_pair()
    for model in pair:
        accelerate_fit(model, 2, mixed_precision="bf16")
    check_equal(*pair, rtol=1e-2, atol=1e-3)


@QUIET
def test_accelerate_resumes_as_if_never_stopped(tmp_path: Path) -> None:
    whole, _ = make_pair()
    accelerate_fit(whole, 3)
    stopped, _ = make_pair()
    accelerate_fit(stopped, 1, save=tmp_path)
    resumed = Scorer(HashEmbedding(DIM, name="item"))
    accelerate_fit(resumed, 2, state=tmp_path)
    assert torch.equal(resumed.rows(), whole.rows())
    assert torch.equal(resumed.head.weight, whole.head.weight)


# ---- Hugging Face's Trainer ---------------------------------------------------------------------


def trainer_fit(
    model: Scorer, folder: Path, num_epochs: int = 2, clip: float | None = None, *,
    resume: str | None = None, **options: Any,
) -> None:  # fmt: skip
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    pytest.importorskip("accelerate", reason="Accelerate is not installed")
    optimizer = make_optimizer(model)
    arguments = transformers.TrainingArguments(
        output_dir=str(folder),
        num_train_epochs=num_epochs,
        per_device_train_batch_size=4,
        max_grad_norm=clip or 0.0,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        remove_unused_columns=False,
        train_sampling_strategy="sequential",
        **options,
    )
    trainer = transformers.Trainer(
        model=model,
        args=arguments,
        train_dataset=make_samples(),
        optimizers=(optimizer, make_scheduler(optimizer)),
    )
    trainer.train(resume_from_checkpoint=resume)


@QUIET
@ACCUMULATES
@CLIPS
def test_trainer_equals_the_dense_twin(
    num_micro_batches: int, clip: float | None, tmp_path: Path
) -> None:
    pair = make_pair()
    for model in pair:
        trainer_fit(
            model, tmp_path, clip=clip, gradient_accumulation_steps=num_micro_batches,
            save_strategy="no",
        )  # fmt: skip
    assert pair[0].embedding.table.update_count == 2 * 8 // num_micro_batches
    check_equal(*pair)


@QUIET
def test_trainer_equals_the_dense_twin_in_bfloat16(tmp_path: Path) -> None:
    pair = make_pair()
    for model in pair:
        trainer_fit(model, tmp_path, bf16=True, save_strategy="no")
    check_equal(*pair, rtol=1e-2, atol=1e-3)


@QUIET
def test_trainer_resumes_as_if_never_stopped(tmp_path: Path) -> None:
    whole, _ = make_pair()
    trainer_fit(whole, tmp_path, 3, save_strategy="epoch")
    checkpoints = sorted(tmp_path.glob("checkpoint-*"))
    assert len(checkpoints) == 3
    resumed = Scorer(HashEmbedding(DIM, name="item"))
    trainer_fit(resumed, tmp_path, 3, save_strategy="no", resume=str(tmp_path / "checkpoint-8"))
    assert torch.equal(resumed.rows(), whole.rows())
    assert torch.equal(resumed.head.weight, whole.head.weight)
