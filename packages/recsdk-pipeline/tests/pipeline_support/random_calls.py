"""Random calls of the pipelines, and the same step by step on the same ranks.

Tables, plans and batches are those of `random_programs` of recsdk-sharding's tests. What became of
each batch is written down, also of those in flight that were dropped; then another model does it
one after another. So all is equal to the bit, on devices too.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from comparing import assert_identical
from policy_crossing import BY_HAND
from programs_on_ranks import Runner, Seen, sharded
from random_batches import FIRST_TIME
from random_programs import OF_PROGRAM, OF_TABLE, Part, Program, Turn, program_of
from random_programs import is_legal as is_legal_by_hand
from torchrec.optim.keyed import CombinedOptimizer
from worlds import Rows

from pipeline_support.random_saves import LOADED_AS, Saves
from recsdk_pipeline import HybridEvalPipeline, HybridTrainPipelineSparseDist
from recsdk_sharding._batch.key_data import tables_with_time

NUM_CALLS = 14
Chains = tuple[list[str], list[str]]
"""The checkpoints under pipelines, and step by step."""
_FIRST = 40
"""Batches of a part begin at a multiple of this."""
Kind = Literal["train", "leave", "read", "drop", "anew", "erase", "save", "load"]
"""`leave` is what becomes of a batch in flight that is dropped; `anew` begins another iterator."""
KINDS = ["train"] * 8 + ["read"] * 3 + ["drop", "anew", "erase", "save", "load"]
IN_ORDER = {"way": BY_HAND, "turns": "trained"}
"""What tables may have is what goes with training step by step."""
OWN = {
    "before": ["nothing", "Saver"],
    "depth": ["1", "2", "3", "6", "12"],
    "reads": ["itself", "another"],
    "loaded as": LOADED_AS,
    "sent as": ["float32", "FP16", "BF16", "INT8"],
    "cast": ["no", "yes"],
}
"""`reads`: the pipeline that evaluates. `sent as`: what vectors are between ranks. `cast`: whether
the model runs under `torch.autocast`."""
SETTINGS = {n: v for n, v in (OF_TABLE | OF_PROGRAM).items() if n not in IN_ORDER} | OWN


def is_legal(row: dict[str, str]) -> bool:
    """Whether the values of some or all settings go together."""
    return is_legal_by_hand({**row, **IN_ORDER})


class Call(NamedTuple):
    """What all ranks do at once."""

    kind: Kind
    number: int
    """Of a read or an erase, which batch it is of, from the next to be trained on."""


class Event(NamedTuple):
    """What came of a call, for the other model to do."""

    kind: Kind
    batch: int = 0
    seen: Seen | None = None
    """What the batch gave."""
    rows: Rows | None = None
    """What was saved, if it was."""


@dataclass(frozen=True)
class Calls:
    """A program whose parts make calls of pipelines."""

    program: Program
    of_parts: tuple[tuple[Call, ...], ...]
    row: dict[str, str]
    """All settings."""

    def model_of(self, part: Part) -> Any:
        """A new model on this rank."""
        sent_as = self.row["sent as"]
        return sharded(self.program, part, None if sent_as == "float32" else sent_as)

    @property
    def seed(self) -> int:
        """Its program's."""
        return self.program.seed


def calls_of(row: dict[str, str], seed: int) -> Calls:
    """Calls with these settings."""
    program = program_of({**row, **IN_ORDER}, seed)
    source = np.random.default_rng([seed, 3])
    depth = int(row["depth"])
    made = []
    for part in program.parts:
        kinds = source.choice(KINDS, NUM_CALLS).tolist()
        if part is not program.parts[-1]:
            kinds.append("save")
        numbers = source.integers(-2, depth + 1, len(kinds)).tolist()
        made.append(tuple(map(Call, kinds, numbers)))
    return Calls(program, tuple(made), row)


class _Pipelined(Runner):
    """A model under its pipelines."""

    def __init__(self, calls: Calls, part: Part, saves: Saves) -> None:
        super().__init__(calls.program, part, calls.model_of(part), _this_rank())
        self._saves = saves
        row, device = calls.row, torch.device(part.device)
        self._pipeline: Any = HybridTrainPipelineSparseDist(
            self.model,
            CombinedOptimizer([self.model.fused_optimizer]),
            device,
            pipe_n_batch=int(row["depth"]),
        )
        self._reading = self._pipeline
        if row["reads"] == "another":
            self._reading = HybridEvalPipeline(self.model, device, pipe_n_batch=2)
        self.events: list[Event] = []
        self.next_batch = _FIRST * calls.program.parts.index(part)
        self._in_flight: list[int] = []
        self._iterator = self._read_ahead()

    def call(self, call: Call) -> None:
        getattr(self, f"_call_{call.kind}")(call.number)

    def _read_ahead(self) -> Iterator[Any]:
        """Sets the time of each batch as it is read."""
        while True:
            number, self.next_batch = self.next_batch, self.next_batch + 1
            self._in_flight.append(number)
            self._set_time(number)
            yield self._batch_of(number)

    def _call_train(self, _: int) -> None:
        self._set_rate(self._in_flight[0] if self._in_flight else self.next_batch)
        out = self._pipeline.progress(self._iterator)
        self._trained(self._in_flight.pop(0), out)

    def _trained(self, batch: int, out: Any) -> None:
        self.events.append(Event("train", batch, self._seen(batch, out, with_outcomes=False)))
        num_trained = sum(event.kind == "train" for event in self.events)
        assert self._pipeline.num_batches_trained == num_trained

    def _call_drop(self, _: int) -> None:
        self._pipeline.drop()
        self._leave(self._in_flight)
        self._in_flight = []

    def _leave(self, batches: list[int]) -> None:
        self.events += [Event("leave", batch) for batch in batches]

    def _call_anew(self, _: int) -> None:
        """Training on another iterator abandons what is in flight of this one."""
        before, self._in_flight = self._in_flight, []
        self._iterator = self._read_ahead()
        self._set_rate(self.next_batch)
        out = self._pipeline.progress(self._iterator)
        self._leave(before)
        self._trained(self._in_flight.pop(0), out)

    def _call_read(self, number: int) -> None:
        numbers = [self._near(number + each) for each in range(3)]
        self.model.eval()
        batches = iter([self._batch_of(batch) for batch in numbers])
        for batch in numbers:
            out = self._reading.progress(batches)
            self.events.append(Event("read", batch, self._seen(batch, out, with_outcomes=False)))
        self.model.train()

    def _call_erase(self, number: int) -> None:
        self._call_drop(number)
        turn = Turn("erase", (self._near(number),))
        list(self._erase(turn))
        self.events.append(Event("erase", *turn.batches))

    def _call_save(self, _: int) -> None:
        self._saves.save(self.model)
        self.events.append(Event("save", rows=self.rows()))

    def _call_load(self, number: int) -> None:
        if self._saves.chain:
            self._call_drop(number)
            self._saves.load(self.model)
            _give_time(self)
            self.events.append(Event("load"))

    def _near(self, number: int) -> int:
        return max(self.next_batch - len(self._in_flight) + number, 0)

    def end(self) -> None:
        """Drops what is in flight."""
        self._call_drop(0)


class _Steps(Runner):
    """A model that is trained step by step."""

    def _leave(self, turn: Turn) -> Iterator[Seen]:
        """Maps a batch that nobody reads: where reading begins rows, none begins by that."""
        [batch] = turn.batches
        table: Any = self.module.ebc
        table.input_dist(table.create_context(), self._given(batch).ids).wait().wait()
        yield from ()

    def do(self, event: Event) -> dict[str, Any] | None:
        """The same; what a batch gives that was trained or read."""
        found = list(self.run((Turn(event.kind, (event.batch,)),)))  # type: ignore[arg-type]
        return found[0].vectors if found else None


def _give_time(runner: Runner) -> None:
    """The first ids may have none, also after a save from before them."""
    tables = tables_with_time(runner.collection.tables().values())
    if any(table.time is None for table in tables):
        runner.collection.set_time(FIRST_TIME)


def _this_rank() -> slice:
    return slice(dist.get_rank(), dist.get_rank() + 1)


def run_calls(calls: Calls, number: int, folder: str, chains: Chains) -> Chains:
    """Runs a part on this rank, from what the part before it saved, and the same step by step.

    Returns what was saved of both.
    """
    with torch.autocast("cpu", torch.bfloat16, enabled=calls.row["cast"] == "yes"):
        return _run_part(calls, number, folder, chains)


def _run_part(calls: Calls, number: int, folder: str, chains: Chains) -> Chains:
    part = calls.program.parts[number]
    saves = [
        Saves(f"{folder}/{number}_{name}", part.codec, chain, loaded_as)
        for name, chain, loaded_as in zip(
            ("calls", "steps"), chains, (calls.row["loaded as"], "saved"), strict=True
        )
    ]
    pipelined = _Pipelined(calls, part, saves[0])
    steps = _Steps(calls.program, part, calls.model_of(part), _this_rank())
    for runner, own in zip((pipelined, steps), saves, strict=True):
        if own.chain:
            own.load(runner.model)
        _give_time(runner)
    for call in calls.of_parts[number]:
        pipelined.call(call)
    pipelined.end()
    pairs = [pair for event in pipelined.events for pair in _pairs_of(event, steps, saves[1])]
    pairs.append(("rows at the end", pipelined.rows(), steps.rows()))
    if saves[1].rows is not None:
        loaded = Runner(calls.program, part, sharded(calls.program, part), _this_rank())
        saves[0].load(loaded.model)
        pairs.append(("rows of the last save", loaded.rows(), saves[1].rows))
        saves[0].assert_served(loaded, pipelined.next_batch)
    for pair in pairs:  # after all that ranks do together: others would wait
        _assert_same(*pair)
    return saves[0].chain, saves[1].chain


def _pairs_of(event: Event, steps: _Steps, saves: Saves) -> Iterator[tuple[str, Any, Any]]:
    """Does the same step by step; what is to be equal."""
    note = f"{event.kind} {event.batch}"
    if event.kind == "save":
        saves.save(steps.model)
        saves.rows = steps.rows()
        yield note, event.rows, saves.rows
    elif event.kind == "load":
        saves.load(steps.model)
        _give_time(steps)
    else:
        found = steps.do(event)
        yield note, None if event.seen is None else event.seen.vectors, found


def _assert_same(note: str, found: Any, expected: Any) -> None:
    try:
        assert_identical(found, expected)
    except AssertionError as error:
        raise AssertionError(f"{note} differs") from error
