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
from policy_cases import Batch
from policy_crossing import BY_HAND
from programs_on_ranks import Runner, Seen, sharded
from random_batches import FIRST_TIME
from random_programs import OF_PROGRAM, OF_TABLE, Part, Program, Turn, program_of
from random_programs import is_legal as is_legal_by_hand
from torchrec.optim.keyed import CombinedOptimizer
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
from worlds import Rows

from pipeline_support.random_saves import LOADED_AS, SAVED_AS, Saves
from recsdk_core import RecsdkError
from recsdk_pipeline import HybridEvalPipeline, HybridTrainPipelineSparseDist
from recsdk_sharding._batch.key_data import tables_with_time
from recsdk_sharding.exchange import failures

NUM_CALLS = 14
Chains = tuple[list[str], list[str]]
"""The checkpoints under pipelines, and step by step."""
_FIRST = 100
"""Batches of a part begin at a multiple of this."""
_APART = 13
"""Where reading goes on after a batch that was bad: ranks have read different numbers of them."""
Kind = Literal[
    "train",
    "leave",
    "read",
    "drop",
    "anew",
    "erase",
    "save",
    "load",
    "fail",
    "refuse",
    "look",
    "update",
]
"""`leave` is what becomes of a batch in flight that is dropped; `anew` begins another iterator. In
a `fail` a batch is bad: `refuse` is one that no rank maps, `look` one that is looked up and then
left, `update` one whose rows are trained."""
KINDS = ["train"] * 8 + ["read"] * 3 + ["fail"] * 2 + ["drop", "anew", "erase", "save", "load"]
IN_ORDER = {"way": BY_HAND, "turns": "trained", "errors": "none"}
"""What tables may have is what goes with training step by step."""
OWN = {
    "full": ["refuse"],
    "nonfinite": ["apply", "skip"],
    "before": ["nothing", "Saver"],
    "depth": ["1", "2", "3", "6", "12"],
    "reads": ["itself", "another"],
    "saved as": SAVED_AS,
    "loaded as": LOADED_AS,
    "position": ["not known", "known"],
    "sent as": ["float32", "FP16", "BF16", "INT8"],
    "cast": ["no", "yes"],
    "trouble": ["ids", "none", "iterator", "reading", "model", "interrupted", "optimizer"],
    "held": ["no", "yes"],
}
"""`reads`: the pipeline that evaluates. `sent as`: what vectors are between ranks. `cast`: whether
the model runs under `torch.autocast`. `trouble`: what fails with a bad batch, see `_Bad`; `held`:
whether the error is kept, as Python keeps the last one of a session. `position`: whether
the pipeline knows that of its data, and what is loaded goes on where it was saved."""
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


class Trouble(Exception):
    """What fails on purpose."""


_ERRORS = {"reading": KeyboardInterrupt, "interrupted": KeyboardInterrupt}
"""What is raised, if it is no `Trouble`."""
OF_ONE_RANK = ("ids", "none", "iterator")
"""Troubles that one rank has with its batch, before any rank maps it."""


class _Bad(NamedTuple):
    """A batch that is bad."""

    batch: int
    trouble: str
    """Its ids; it is none; the iterator raises, or is interrupted while it reads; the model raises
    or is interrupted once it has looked the batch up; or the optimizer raises."""
    is_here: bool
    """Whether it is on this rank."""

    def given(self, batch: Any) -> Any:
        """What is read in place of the batch."""
        if not self.is_here:
            return batch
        if self.trouble in ("iterator", "reading"):
            self.fail()
        if self.trouble == "ids":
            nothing = torch.zeros(0, dtype=torch.int64)
            stranger = KeyedJaggedTensor(["stranger"], nothing, lengths=nothing)
            return Batch(stranger, batch.gradients)
        return None if self.trouble == "none" else batch

    def fail(self, *_: Any) -> None:
        raise _ERRORS.get(self.trouble, Trouble)


class _Pipelined(Runner):
    """A model under its pipelines."""

    def __init__(self, calls: Calls, part: Part, saves: Saves) -> None:
        super().__init__(calls.program, part, calls.model_of(part), _this_rank())
        self._saves = saves
        row, device = calls.row, torch.device(part.device)
        self.next_batch = _FIRST * calls.program.parts.index(part)
        self._expected = {"num_batches_trained": 0, "next": self.next_batch}
        """What the pipeline's state is, but for the name of the position in it."""
        self._states: list[tuple[Any, dict[str, int]]] = []
        """Of the pipeline at the last save, and what was expected of it."""
        self._pipeline: Any = HybridTrainPipelineSparseDist(
            self.model,
            CombinedOptimizer([self.model.fused_optimizer]),
            device,
            pipe_n_batch=int(row["depth"]),
            data=_Data(self) if row["position"] == "known" else None,
        )
        self._reading = self._pipeline
        if row["reads"] == "another":
            self._reading = HybridEvalPipeline(self.model, device, pipe_n_batch=2)
        self.events: list[Event] = []
        self._in_flight: list[int] = []
        self._knows_position = row["position"] == "known"
        self._trouble, self._holds = row["trouble"], row["held"] == "yes"
        self._bad: _Bad | None = None
        self._held: list[BaseException] = []
        self._iterator: Iterator[Any] = _Reading(self)
        self.module.register_forward_hook(self._after_forward)

    def call(self, call: Call) -> None:
        getattr(self, f"_call_{call.kind}")(call.number)

    def read(self) -> Any:
        """The next batch, whose time is set as it is read."""
        number, self.next_batch = self.next_batch, self.next_batch + 1
        self._in_flight.append(number)
        self._set_time(number)
        batch = self._batch_of(number)
        is_bad = self._bad is not None and self._bad.batch == number
        return self._bad.given(batch) if is_bad else batch

    def _after_forward(self, *_: Any) -> None:
        if self._is_turn_of("model", "interrupted"):
            self._bad.fail()

    @property
    def _following(self) -> int:
        """The next batch to be trained."""
        return (*self._in_flight, self.next_batch)[0]

    def _is_turn_of(self, *troubles: str) -> bool:
        """Whether the next batch to be trained is bad by one of these."""
        bad = self._bad
        is_next = bad is not None and bad.batch == self._following
        return is_next and bad.trouble in troubles and self.model.training

    def _call_fail(self, number: int) -> None:
        """A batch is bad that is read next or soon after; those before it are trained."""
        is_here = self._trouble not in OF_ONE_RANK or (
            dist.get_rank() == number % dist.get_world_size()
        )
        self._bad = _Bad(self.next_batch + (number + 2) % 3, self._trouble, is_here)
        try:
            while True:
                out = self._progress_to_fail()
                self._trained(self._in_flight.pop(0), out)
        except (Trouble, RecsdkError, KeyboardInterrupt, TypeError, ValueError) as error:
            if self._holds:
                self._held.append(error)
        self._tell_what_came_of(self._bad)
        self._in_flight, self.next_batch = [], self._bad.batch + _APART
        self._bad = None

    def _progress_to_fail(self) -> Any:
        optimizer = self._pipeline._optimizer
        step = optimizer.step
        self._set_rate(self._following)
        if self._is_turn_of("optimizer"):
            optimizer.step = self._bad.fail
        try:
            return self._pipeline.progress(self._iterator)
        finally:
            optimizer.step = step

    def _tell_what_came_of(self, bad: _Bad) -> None:
        """The bad batch, and those in flight."""
        place = self._in_flight.index(bad.batch)
        assert place == 0 or bad.trouble == "reading"
        before, after = self._in_flight[:place], self._in_flight[place + 1 :]
        self._leave(before)
        if bad.trouble in (*OF_ONE_RANK, "reading"):
            self.events += [Event("refuse", batch) for batch in (bad.batch, *after)]
        else:
            kind: Kind = "update" if bad.trouble == "optimizer" else "look"
            self.events.append(Event(kind, bad.batch))
            self._leave(after)

    def _call_train(self, _: int) -> None:
        self._set_rate(self._following)
        out = self._pipeline.progress(self._iterator)
        self._trained(self._in_flight.pop(0), out)

    def _trained(self, batch: int, out: Any) -> None:
        self.events.append(Event("train", batch, self._seen(batch, out, with_outcomes=False)))
        num_trained = self._expected["num_batches_trained"] + 1
        self._expected = {"num_batches_trained": num_trained, "next": batch + 1}
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
        self._iterator = _Reading(self)
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
        self._states = [(self._pipeline.state_dict(), self._expected)]
        self.events.append(Event("save", rows=self.rows()))

    def _call_load(self, number: int) -> None:
        if self._saves.chain:
            self._call_drop(number)
            self._saves.load(self.model)
            _give_time(self)
            for state, expected in self._states:
                self._expected = expected
                self.next_batch = -1 if self._knows_position else self.next_batch
                self._pipeline.load_state_dict(state)
                if self._knows_position:
                    assert self.next_batch == self._expected["next"]
            self.events.append(Event("load"))

    def _near(self, number: int) -> int:
        return max(self.next_batch - len(self._in_flight) + number, 0)

    def end(self) -> None:
        """Drops what is in flight."""
        self._call_drop(0)


class _Data:
    """Knows how far it was read."""

    def __init__(self, model: _Pipelined) -> None:
        self._model = model

    def state_dict(self) -> dict[str, int]:
        return {"next": self._model.next_batch}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._model.next_batch = state["next"]


class _Reading:
    """An iterator that goes on after it has raised."""

    def __init__(self, model: _Pipelined) -> None:
        self._model = model

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        return self._model.read()


class _Steps(Runner):
    """A model that is trained step by step."""

    def _refuse(self, turn: Turn) -> Iterator[Seen]:
        """The time that was set for it stays."""
        self._set_time(*turn.batches)
        yield from ()

    def _update(self, turn: Turn) -> Iterator[Seen]:
        list(self._train(turn))
        yield from ()

    def _look(self, turn: Turn) -> Iterator[Seen]:
        list(super()._leave(turn))
        yield from ()

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


def run_calls(calls: Calls, number: int, folder: str, chains: Chains) -> tuple[Chains, list[str]]:
    """Runs a part on this rank, from what the part before it saved, and the same step by step.

    Returns what was saved of both, and what was found equal.
    """
    failures._SECONDS_FOR_OTHERS_TO_BE_INTERRUPTED = 60.0  # all are, on a busy machine later
    with torch.autocast("cpu", torch.bfloat16, enabled=calls.row["cast"] == "yes"):
        return _run_part(calls, number, folder, chains)


def _run_part(calls: Calls, number: int, folder: str, chains: Chains) -> tuple[Chains, list[str]]:
    part = calls.program.parts[number]
    saves = [
        Saves(f"{folder}/{number}_{name}", part.codec, chain, calls.row["saved as"], loaded_as)
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
    return (saves[0].chain, saves[1].chain), [note for note, _, _ in pairs]


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
