"""A server of click probabilities that follows the training whose first checkpoint was frozen.

python server.py FOLDER [--port 8000]       needs fastapi and uvicorn

FOLDER/served is the frozen checkpoint, FOLDER/chain has what it was frozen of and its deltas. Rows
come by `ServingTable.follow`; the layers above them lie in each delta as its `user_state`.
"""

from __future__ import annotations

import dataclasses
import socket
import threading
from argparse import ArgumentParser
from pathlib import Path
from typing import Annotated, Any

import torch
import uvicorn
from clicks import FEATURES, NUM_DENSE, TABLES, with_layers
from fastapi import FastAPI, HTTPException
from pydantic import BaseModel, Field
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recsdk_core import RecsdkError
from recsdk_core.checkpoint import open_checkpoint
from recsdk_sharding import QuantHashEmbeddingBagCollection

Id = Annotated[int, Field(ge=-(2**63), lt=2**63)]
Bag = Annotated[list[Id], Field(max_length=100)]
Numbers = Annotated[list[float], Field(min_length=NUM_DENSE, max_length=NUM_DENSE)]


class Request(BaseModel):
    """Examples to score, at most 1,024: numbers, and a bag of raw ids of each feature."""

    dense: Annotated[list[Numbers], Field(max_length=1024)]
    ids: dict[str, Annotated[list[Bag], Field(max_length=1024)]]


class Answer(BaseModel):
    """A probability for each example, and the trainer's step of the model that gave it."""

    scores: list[float]
    step: int


class Scorer:
    """The newest model. Threads read it at once; each call takes one pair of step and model."""

    def __init__(self, folder: Path) -> None:
        self.tables = QuantHashEmbeddingBagCollection(TABLES, path=folder / "served")
        self._chain = folder / "chain"
        self._stop = threading.Event()
        self.problem: str | None = None
        self._take_layers(self.step_of_rows())

    @property
    def step(self) -> int:
        """The trainer's step of the model that answers."""
        return self._current[0]

    def step_of_rows(self) -> int:
        """The step of the table that is furthest behind."""
        return min(table.stats().step or 0 for table in self.tables.serving_tables().values())

    def follow(self) -> None:
        """Take deltas from now on, rows and then layers."""
        for table in self.tables.serving_tables().values():
            table.follow(self._chain)
        threading.Thread(target=self._follow_layers, daemon=True).start()

    def stop(self) -> None:
        """Stay at the version that is served."""
        self._stop.set()
        for table in self.tables.serving_tables().values():
            table.stop_following()

    @torch.no_grad()
    def score(self, dense: torch.Tensor, sparse: KeyedJaggedTensor) -> tuple[int, torch.Tensor]:
        """The step of the model, and probabilities (B,)."""
        step, model = self._current
        return step, torch.sigmoid(model(dense, sparse).squeeze(1))

    def _take_layers(self, step: int) -> None:
        layers = open_checkpoint(self._chain / f"step_{step}").user_state()
        self._current = step, with_layers(self.tables, layers)

    def _follow_layers(self) -> None:
        while not self._stop.wait(0.02):
            if (step := self.step_of_rows()) > self.step:
                try:
                    self._take_layers(step)
                    self.problem = None
                except (OSError, RecsdkError, ValueError) as error:  # the layers before stay
                    self.problem = str(error)


def tensors_of(request: Request) -> tuple[torch.Tensor, KeyedJaggedTensor]:
    """What the model takes; HTTPException 422 for what does not fit."""
    count = len(request.dense)
    if request.ids.keys() != set(FEATURES) or any(len(b) != count for b in request.ids.values()):
        raise HTTPException(422, f"ids must have {count} bags for each of {', '.join(FEATURES)}")
    bags = [bag for name in FEATURES for bag in request.ids[name]]
    ids = torch.tensor([each for bag in bags for each in bag], dtype=torch.int64)
    lengths = torch.tensor([len(bag) for bag in bags], dtype=torch.int64)
    dense = torch.tensor(request.dense, dtype=torch.float32).view(count, NUM_DENSE)
    return dense, KeyedJaggedTensor(list(FEATURES), ids, lengths=lengths)


def make_app(scorer: Scorer) -> FastAPI:
    """The routes: /score, and /stats for whoever watches."""
    app = FastAPI(title="clicks")

    @app.post("/score")
    def score(request: Request) -> Answer:  # in a thread of FastAPI's
        step, scores = scorer.score(*tensors_of(request))
        return Answer(scores=scores.tolist(), step=step)

    @app.get("/stats")
    def stats() -> dict[str, Any]:
        tables = scorer.tables.serving_tables().items()
        told = {name: dataclasses.asdict(table.stats()) for name, table in tables}
        return {"step": scorer.step, "problem": scorer.problem, "tables": told}

    return app


def main() -> None:
    parser = ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--port", type=int, default=8000, help="0: any that is free")
    args = parser.parse_args()
    torch.set_num_threads(1)  # requests are small, and run at once
    scorer = Scorer(args.folder)
    scorer.follow()
    with socket.create_server(("127.0.0.1", args.port)) as listening:
        print(f"http://127.0.0.1:{listening.getsockname()[1]}", flush=True)
        config = uvicorn.Config(make_app(scorer), log_level="warning", access_log=False)
        uvicorn.Server(config).run(sockets=[listening])
    scorer.stop()


if __name__ == "__main__":
    main()
