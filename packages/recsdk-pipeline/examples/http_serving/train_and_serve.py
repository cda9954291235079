"""Train the demo's clicks, freeze, serve over HTTP, and follow the deltas while training goes on.

python train_and_serve.py FOLDER [--steps 400]     needs what requirements.txt names

Every batch is scored before it is trained on: by the trainer, by the server, and by the checkpoint
that was frozen, as if nobody followed. FOLDER/freshness.png has their AUC, and the server's lag.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import tempfile
import threading
import time
from argparse import ArgumentParser
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import torch
from clicks import TABLES, layers_of, make_model
from drawing import draw
from load import body_of, run_load
from server import Scorer
from torchmetrics.functional.classification import binary_auroc
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

from recsdk_core.serving import freeze
from recsdk_pipeline.data import ClickBatch, Share, SyntheticClicks
from recsdk_sharding import HashEmbeddingBagCollection, Saver

BATCH, SAVE_EVERY, ASK_EVERY = 1024, 20, 5
ALONE = Share(rank=0, world_size=1)
MODELS = ("trainer", "served", "not followed")


class Trainer:
    """The model that learns, and its chain of checkpoints."""

    def __init__(self, chain: Path) -> None:
        tables = HashEmbeddingBagCollection(TABLES)
        apply_optimizer_in_backward(torch.optim.Adagrad, tables.parameters(), {"lr": 0.1})
        self.model = make_model(tables)
        dense = [*self.model.dense_arch.parameters(), *self.model.over_arch.parameters()]
        self._optimizer = torch.optim.Adam(dense, lr=0.001)
        self._chain, self._saver, self.step = chain, Saver(), 0

    def train(self, batch: ClickBatch) -> None:
        logits = self.model.train()(batch.dense, batch.sparse).squeeze(1)
        self._optimizer.zero_grad()
        torch.nn.functional.binary_cross_entropy_with_logits(logits, batch.labels).backward()
        self._optimizer.step()
        self.step += 1

    @torch.no_grad()
    def score(self, batch: ClickBatch) -> torch.Tensor:
        return torch.sigmoid(self.model.eval()(batch.dense, batch.sparse).squeeze(1))

    def save(self, *, is_delta: bool) -> Path:
        """Rows and layers, as one checkpoint: complete or absent."""
        path = self._chain / f"step_{self.step}"
        self._saver.save(
            self.model, path, is_delta, step=self.step, user_state=layers_of(self.model)
        )
        return path


@dataclass
class Record:
    """What happened when; seconds since it was made."""

    start: float = field(default_factory=time.monotonic)
    trained: list[tuple[float, int]] = field(default_factory=list)
    served: list[tuple[float, int]] = field(default_factory=list)
    saved: list[tuple[float, int]] = field(default_factory=list)
    asked: list[tuple[int, torch.Tensor, dict[str, torch.Tensor]]] = field(default_factory=list)
    """Step, labels, and scores by model."""

    def now(self) -> float:
        return time.monotonic() - self.start

    def wait_until_served(self, seconds: float = 60.0) -> None:
        """Return when the server has told the step that was saved last."""
        step, end = self.saved[-1][1], self.now() + seconds
        while not self.served or self.served[-1][1] < step:
            if self.now() > end:
                raise RuntimeError(f"step {step} is not served after {seconds:g} s; see /stats")
            time.sleep(0.02)

    def seconds_to_serve(self) -> list[tuple[int, float]]:
        """Of each delta, from when it was complete until the server told its step or a later."""
        pairs = ((s, t, [at for at, told in self.served if told >= s]) for t, s in self.saved)
        return [(step, max(0.0, min(times) - at)) for step, at, times in pairs if times]

    def aucs(self, last: int = 5) -> dict[str, list[tuple[int, float]]]:
        """By model, the AUC on the batches of the last few questions."""
        curves: dict[str, list[tuple[int, float]]] = {name: [] for name in MODELS}
        for end in range(last, len(self.asked) + 1):
            asked = self.asked[end - last : end]
            labels = torch.cat([each for _, each, _ in asked]).int()
            for name, curve in curves.items():
                scores = torch.cat([each[name] for _, _, each in asked])
                curve.append((asked[-1][0], float(binary_auroc(scores, labels))))
        return curves


@contextmanager
def running_server(folder: Path) -> Iterator[str]:
    """A server in a process of its own; gives its address."""
    command = [sys.executable, str(Path(__file__).with_name("server.py")), str(folder)]
    process = subprocess.Popen([*command, "--port", "0"], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        url = process.stdout.readline().strip()
        if not url:
            raise RuntimeError(f"the server ended with status {process.wait()} before it listened")
        yield url
    finally:
        process.terminate()
        process.wait()


@contextmanager
def watching(client: httpx.Client, record: Record) -> Iterator[None]:
    """Ask which step is served, again and again, until the end."""
    stop = threading.Event()

    def watch() -> None:
        while not stop.wait(0.02):
            step = client.get("/stats").json()["step"]
            record.served.append((record.now(), step))

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def scores_of(
    batch: ClickBatch, trainer: Trainer, stale: Scorer, client: httpx.Client
) -> dict[str, torch.Tensor]:
    """Of each model, the probabilities of a batch."""
    answer = client.post("/score", json=body_of(batch)).raise_for_status().json()
    _, old = stale.score(batch.dense, batch.sparse)
    scores = trainer.score(batch), torch.tensor(answer["scores"]), old
    return dict(zip(MODELS, scores, strict=True))


def go_on(
    trainer: Trainer, batches: Iterator[ClickBatch], stale: Scorer, client: httpx.Client
) -> Record:
    """Train on all batches, saving deltas and asking the server; return what happened."""
    record = Record()
    with watching(client, record):
        for number, batch in enumerate(batches, 1):
            if number % ASK_EVERY == 0:
                scores = scores_of(batch, trainer, stale, client)
                record.asked.append((trainer.step, batch.labels, scores))
            trainer.train(batch)
            record.trained.append((record.now(), trainer.step))
            if number % SAVE_EVERY == 0:
                trainer.save(is_delta=True)
                record.saved.append((record.now(), trainer.step))
        record.wait_until_served()
    return record


def main() -> None:
    parser = ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path, nargs="?", default=None)
    parser.add_argument("--steps", type=int, default=400, help="before serving, and again after")
    parser.add_argument("--requests", type=int, default=2000, help="of the load at the end")
    args = parser.parse_args()
    if args.steps < 5 * ASK_EVERY or args.steps % SAVE_EVERY:
        parser.error(f"--steps must be {5 * ASK_EVERY} or more, a multiple of {SAVE_EVERY}")
    folder = args.folder or Path(tempfile.mkdtemp())
    torch.manual_seed(0)
    clicks = SyntheticClicks(num_train=2 * args.steps * BATCH, num_held_out=BATCH)
    batches = clicks.train(epoch=0, batch_size=BATCH, share=ALONE)
    trainer = Trainer(folder / "chain")
    for _ in range(args.steps):
        trainer.train(next(batches))
    freeze(trainer.save(is_delta=False), folder / "served", dtype="int8")
    with running_server(folder) as url, httpx.Client(base_url=url, timeout=30) as client:
        stale = Scorer(folder)
        record = go_on(trainer, batches, stale, client)
        print(f"step {trainer.step}: {len(record.saved)} deltas, all served")
        [later] = clicks.held_out(batch_size=BATCH, share=ALONE)
        for name, scores in scores_of(later, trainer, stale, client).items():
            print(f"{name}: held-out AUC {float(binary_auroc(scores, later.labels.int())):.4f}")
        lags = sorted(seconds for _, seconds in record.seconds_to_serve())
        print(f"from saved to served: median {lags[len(lags) // 2]:.3f} s, most {lags[-1]:.3f} s")
        draw(record, folder / "freshness.png")
        print(asyncio.run(run_load(url, requests=args.requests, at_once=4, examples=16)))
    print(f"drawn in {folder / 'freshness.png'}")


if __name__ == "__main__":
    main()
