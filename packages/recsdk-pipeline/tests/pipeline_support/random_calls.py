"""Random calls of the pipelines, and the same step by step on the same ranks.

Tables, plans and batches are those of `random_programs` of recsdk-sharding's tests. What became of
each batch is written down, also of those in flight that were dropped, and of those that raised;
then another model does it one after another. So all is equal to the bit, on devices too.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from comparing import assert_identical
from default_types import of_type
from policy_cases import Batch
from policy_crossing import BY_HAND
from programs_on_ranks import Runner, Seen, sharded
from random_batches import FIRST_TIME
from random_programs import OF_PROGRAM, OF_TABLE, Part, Program, Turn, program_of
from random_programs import is_legal as is_legal_by_hand
from rank_pool import GROUP_TIMEOUT
from torchrec.optim.keyed import CombinedOptimizer
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
from worlds import Rows

from pipeline_support.random_saves import LOADED_AS, SAVED_AS, Saves
from recsdk_core import RecsdkError
from recsdk_core.nn.function import end_failed_backward
from recsdk_pipeline import HybridEvalPipeline, HybridTrainPipelineSparseDist
from recsdk_sharding._batch.key_data import tables_with_time
from recsdk_sharding.exchange import PeerError, failures

NUM_CALLS = 14
Chains = tuple[list[str], list[str]]
"""The checkpoints under pipelines, and step by step."""
_FIRST = 300
"""Batches of a part begin at a multiple of this."""
Kind = Literal[
    "train",
    "leave",
    "read",
    "drop",
    "anew",
    "erase",
    "save",
    "load",
    "take",
    "put",
    "break",
    "fail",
    "refuse",
    "look",
    "update",
    "raise",
]
"""`leave` is what becomes of batches in flight that are dropped; `anew` begins another iterator.
`put` loads the state dict that a `take` gave; a `break` is a save that one rank breaks off. After a
`fail` a batch is bad: `refuse` is one that no rank maps, `look` one that is looked up and then
left, `update` one whose rows are trained, `raise` one that a table does not take."""
KINDS = ["train"] * 8 + ["read"] * 3 + ["fail"] * 2
KINDS += ["drop", "anew", "erase", "save", "load", "put", "break"]
OWN = {
    "before": ["nothing", "Saver"],
    "depth": ["1", "2", "3", "6", "12"],
    "reads": ["itself", "another"],
    "saved as": SAVED_AS,
    "loaded as": LOADED_AS,
    "position": ["not known", "known"],
    "sent as": ["float32", "FP16", "BF16", "INT8"],
    "cast": ["no", "yes"],
    "trouble": ["ids", "none", "iterator", "ends", "reading", "model", "interrupted", "optimizer"],
    "held": ["no", "yes"],
}
"""`reads`: the pipeline that evaluates. `sent as`: what vectors are between ranks. `cast`: whether
the model runs under `torch.autocast`. `trouble`: what fails with a bad batch, see `_Bad`; `held`:
whether the error is kept, as Python keeps the last one of a session. `position`: whether
the pipeline knows that of its data, and what is loaded goes on where it was saved."""
IN_ORDER = ("way", "turns", "errors")
SETTINGS = {n: v for n, v in (OF_TABLE | OF_PROGRAM).items() if n not in IN_ORDER} | OWN


def in_order(row: dict[str, str]) -> dict[str, str]:
    """What tables may have is what goes with training step by step.

    An interrupted read and a batch that raises would meet on some ranks only.
    """
    errors = "none" if row.get("trouble") == "reading" else "in pipelines"
    return {**row, "way": BY_HAND, "turns": "trained", "errors": errors}


def is_legal(row: dict[str, str]) -> bool:
    """Whether the values of some or all settings go together."""
    return is_legal_by_hand(in_order(row))


class Call(NamedTuple):
    """What all ranks do at once."""

    kind: Kind
    number: int
    """Of a read or an erase, which batch it is of, from the next to be trained on."""


class Event(NamedTuple):
    """What came of a call, for the other model to do."""

    kind: Kind
    batches: tuple[int, ...] = ()
    seen: Seen | None = None
    """What the batch gave."""
    rows: Rows | None = None
    """What was saved, if it was."""
    error: str | None = None
    """What the batch raised, if a table did."""


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
    program = program_of(in_order(row), seed)
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


_EXPECTED = (Trouble, RecsdkError, KeyboardInterrupt, TypeError, ValueError, StopIteration)
_ERRORS = {"reading": KeyboardInterrupt, "interrupted": KeyboardInterrupt}
"""What is raised, if it is no `Trouble`."""
OF_ONE_RANK = ("ids", "none", "iterator", "ends")
"""Troubles that one rank has with its batch, before any rank maps it."""
OF_TABLES = ("CapacityError", "NonFiniteError", "RecsdkError")
"""What tables raise: the last if copies of one are no longer alike."""


class _Bad(NamedTuple):
    """A batch that is bad."""

    batch: int
    trouble: str
    """Its ids; it is none; the iterator raises, ends, or is interrupted while it reads; the model
    raises or is interrupted once it has looked the batch up; or the optimizer raises."""
    is_here: bool
    """Whether it is on this rank."""

    def given(self, batch: Any) -> Any:
        """What is read in place of the batch."""
        if not self.is_here:
            return batch
        if self.trouble in ("iterator", "reading"):
            self.fail()
        if self.trouble == "ends":
            raise StopIteration
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
        self._depth = int(row["depth"])
        self._trouble, self._holds = row["trouble"], row["held"] == "yes"
        self._raises = any(
            table["on_full"] == "raise" or table["on_nonfinite"] == "raise"
            for table in calls.program.tables
        )
        self.is_closed = False
        """Whether the process groups are, as the rows of one rank alone have raised."""
        self._bad: _Bad | None = None
        self._held: list[BaseException] = []
        self._iterator: Iterator[Any] = _Reading(self)
        self.module.register_forward_hook(self._after_forward)

    def call(self, call: Call) -> None:
        try:
            getattr(self, f"_call_{call.kind}")(call.number)
        except RecsdkError:  # of a batch before, which this rank has trained: another has not
            if not _has_closed():
                raise
        self.is_closed = _has_closed()

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
        """A batch soon after is bad: it comes at once, or after other calls."""
        if self._bad is None:
            is_here = self._trouble not in OF_ONE_RANK or (
                dist.get_rank() == number % dist.get_world_size()
            )
            batch = self._following + self._depth + (number + 2) % 3
            self._bad = _Bad(batch, self._trouble, is_here)
        while number % 2 and self._train_on(self._iterator):
            pass

    def _train_on(self, iterator: Iterator[Any]) -> bool:
        """Whether the next batch was trained."""
        optimizer = self._pipeline._optimizer
        step = optimizer.step
        self._set_rate(self._following)
        if self._is_turn_of("optimizer"):
            optimizer.step = self._bad.fail  # type: ignore[union-attr]
        try:
            out = self._pipeline.progress(iterator)
        except _EXPECTED as error:
            if self._holds:
                self._held.append(error)
            self._tell_what_came_of(error)
            return False
        finally:
            optimizer.step = step
        self._trained(self._in_flight.pop(0), out)
        return True

    def _tell_what_came_of(self, error: BaseException) -> None:
        """The batch that raised, and those in flight."""
        if _has_closed():
            assert self._raises
            assert _kind_of(error) == "NonFiniteError", error
            return
        batch, *after = self._in_flight
        kind = _kind_of(error)
        if kind in OF_TABLES:
            assert self._raises, error
            self.events.append(Event("raise", (batch,), error=_name(error)))
            if kind == "NonFiniteError":
                self._leave(after)
            else:
                self._refuse_all(after)
        else:
            assert self._bad is not None, error
            self._tell_of_bad(self._bad, batch, after)
        self._begin_after(batch)

    def _tell_of_bad(self, bad: _Bad, batch: int, after: list[int]) -> None:
        assert batch == bad.batch or bad.trouble == "reading"
        if bad.trouble == "reading":
            self._leave([batch, *after])
        elif bad.trouble in OF_ONE_RANK:
            self._refuse_all([batch, *after])
        else:
            self.events.append(Event("update" if bad.trouble == "optimizer" else "look", (batch,)))
            self._leave(after)

    def _leave(self, batches: list[int]) -> None:
        """The batches from a bad one on that no rank maps are refused."""
        bad = self._bad
        num_good = len(batches)
        if bad is not None and bad.batch in batches and bad.trouble in (*OF_ONE_RANK, "reading"):
            num_good = batches.index(bad.batch)
        self.events.append(Event("leave", tuple(batches[:num_good])))
        self._refuse_all(batches[num_good:])

    def _refuse_all(self, batches: list[int]) -> None:
        self.events += [Event("refuse", (batch,)) for batch in batches]

    def _begin_after(self, batch: int) -> None:
        """Reading goes on past all that a rank may have read: they differ where one has failed."""
        self._in_flight = []
        self.next_batch = batch + self._depth + 3
        if self._bad is not None and self._bad.batch < self.next_batch:
            self._bad = None

    def _call_train(self, _: int) -> None:
        self._train_on(self._iterator)

    def _trained(self, batch: int, out: Any) -> None:
        self.events.append(Event("train", (batch,), self._seen(batch, out, with_outcomes=False)))
        num_trained = self._expected["num_batches_trained"] + 1
        self._expected = {"num_batches_trained": num_trained, "next": batch + 1}
        assert self._pipeline.num_batches_trained == num_trained

    def _call_drop(self, _: int) -> None:
        self._pipeline.drop()
        self._leave(self._in_flight)
        self._begin_after(self._following)

    def _call_anew(self, _: int) -> None:
        """Training on another iterator abandons what is in flight of this one."""
        self._leave(self._in_flight)
        self._begin_after(self._following)
        self._iterator = _Reading(self)
        self._train_on(self._iterator)

    def _call_read(self, number: int) -> None:
        numbers = [self._near(number + each) for each in range(3)]
        self.model.eval()
        batches = iter([self._batch_of(batch) for batch in numbers])
        for batch in numbers:
            out = self._reading.progress(batches)
            self.events.append(Event("read", (batch,), self._seen(batch, out, with_outcomes=False)))
        self.model.train()

    def _call_erase(self, number: int) -> None:
        self._call_drop(number)
        turn = Turn("erase", (self._near(number),))
        list(self._erase(turn))
        self.events.append(Event("erase", turn.batches))

    def _call_save(self, _: int) -> None:
        self._saves.save(self.model)
        self._note_saved()

    def _note_saved(self) -> None:
        self._states = [(self._pipeline.state_dict(), self._expected)]
        self._saves.rows = self.rows()
        self.events.append(Event("save", rows=self._saves.rows))

    def _call_put(self, number: int) -> None:
        """Takes the state dict, and goes back to it once what is in flight has been dropped."""
        state = self.model.state_dict()
        self.events.append(Event("take", rows=self.rows()))
        self._call_drop(number)
        self.model.load_state_dict(state)
        self._saves.is_replaced = True
        _give_time(self)
        self.events.append(Event("put", rows=self.rows()))

    def _call_break(self, number: int) -> None:
        if self._saves.breaks_off(self.model, number % dist.get_world_size()):
            self.events.append(Event("break", rows=self.rows()))
        else:
            self._note_saved()

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

    def run_all(self, calls: tuple[Call, ...]) -> None:
        """Makes the calls, and drops what is in flight, unless the groups are closed before."""
        for call in calls:
            if not self.is_closed:
                self.call(call)
        if not self.is_closed:
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

    def _raise(self, turn: Turn) -> Iterator[Seen]:
        [batch] = turn.batches
        try:
            list(self._train(turn))
        except RecsdkError as error:
            yield Seen(batch, {}, {}, {}, _name(error))
            self._go_on()
            end_failed_backward()  # as the next one does, and a pipeline by itself

    def _leave(self, turn: Turn) -> Iterator[Seen]:
        """Maps batches that nobody reads: where reading begins rows, none begins by that.

        What comes after one that a table does not take is not mapped.
        """
        table: Any = self.module.ebc
        batches = iter(turn.batches)
        for batch in batches:
            with suppress(RecsdkError):
                table.input_dist(table.create_context(), self._given(batch).ids).wait().wait()
                continue
            self._go_on()
            for refused in batches:
                self._set_time(refused)
        yield from ()

    def _break(self, _: Turn) -> Iterator[Seen]:
        """Leaves all as it was."""
        yield from ()

    def _take(self, _: Turn) -> Iterator[Seen]:
        self._state = self.model.state_dict()
        yield from ()

    def _put(self, _: Turn) -> Iterator[Seen]:
        self.model.load_state_dict(self._state)
        _give_time(self)
        yield from ()

    def do(self, event: Event) -> Seen | None:
        """The same; what a batch gives that was trained or read."""
        found = list(self.run((Turn(event.kind, event.batches),)))  # type: ignore[arg-type]
        return found[0] if found else None


def _name(error: BaseException) -> str:
    return type(error).__name__


def _kind_of(error: BaseException) -> str:
    """What was raised on this rank, or on the one that told of it."""
    return error.message.partition(":")[0] if isinstance(error, PeerError) else _name(error)


def _has_closed() -> bool:
    """Whether a failure has closed this process's groups."""
    world = failures._world()
    return world is not None and world._failure is not None


def _give_time(runner: Runner) -> None:
    """The first ids may have none, also after a save from before them."""
    tables = tables_with_time(runner.collection.tables().values())
    if any(table.time is None for table in tables):
        runner.collection.set_time(FIRST_TIME)


def _this_rank() -> slice:
    return slice(dist.get_rank(), dist.get_rank() + 1)


def run_calls(
    calls: Calls, number: int, folder: str, chains: Chains
) -> tuple[Chains, list[str], bool]:
    """Runs a part on this rank, from what the part before it saved, and the same step by step.

    Returns what was saved of both, what was found equal, and whether it made groups of its own.
    """
    failures._SECONDS_FOR_OTHERS_TO_BE_INTERRUPTED = 60.0  # all are, on a busy machine later
    cast = torch.autocast("cpu", torch.bfloat16, enabled=calls.row["cast"] == "yes")
    with of_type(calls.row["default type"]), cast:
        return _run_part(calls, number, folder, chains)


def _run_part(
    calls: Calls, number: int, folder: str, chains: Chains
) -> tuple[Chains, list[str], bool]:
    part = calls.program.parts[number]
    saves = [
        Saves(f"{folder}/{number}_{name}", part.codec, chain, calls.row["saved as"], loaded_as)
        for name, chain, loaded_as in zip(
            ("calls", "steps"), chains, (calls.row["loaded as"], "saved"), strict=True
        )
    ]
    pipelined = _Pipelined(calls, part, saves[0])
    _begin(pipelined, saves[0])
    pipelined.run_all(calls.of_parts[number])
    pairs: list[tuple[str, Any, Any]] = []
    if pipelined.is_closed:  # what each rank had trained of the last batch is its own
        _enter_groups(part, f"{folder}/{number}_groups", pipelined.ranks.start)
        saves[1].chain = saves[0].chain
    else:
        steps = _Steps(calls.program, part, calls.model_of(part), _this_rank())
        _begin(steps, saves[1])
        pairs += [pair for event in pipelined.events for pair in _pairs_of(event, steps, saves[1])]
        pairs.append(("rows at the end", pipelined.rows(), steps.rows()))
    if saves[0].rows is not None:
        loaded = Runner(calls.program, part, sharded(calls.program, part), _this_rank())
        saves[0].load(loaded.model)
        pairs.append(("rows of the last save", loaded.rows(), saves[0].rows))
        saves[0].assert_served(loaded, _FIRST * number)
    _assert_same(pairs)  # after all that ranks do together: others would wait
    return (saves[0].chain, saves[1].chain), [note for note, _, _ in pairs], pipelined.is_closed


def _begin(runner: Runner, saves: Saves) -> None:
    if saves.chain:
        saves.load(runner.model)
    _give_time(runner)


def _enter_groups(part: Part, file: str, rank: int) -> None:
    """In place of those that were closed."""
    dist.destroy_process_group()
    dist.init_process_group(
        "gloo" if part.device == "cpu" else "hccl",
        init_method=f"file://{file}",
        rank=rank,
        world_size=part.world_size,
        timeout=GROUP_TIMEOUT,
    )


def _pairs_of(event: Event, steps: _Steps, saves: Saves) -> Iterator[tuple[str, Any, Any]]:
    """Does the same step by step; what is to be equal."""
    note = " ".join(map(str, (event.kind, *event.batches)))
    if event.kind == "save":
        saves.save(steps.model)
        yield note, event.rows, steps.rows()
    elif event.kind == "load":
        saves.load(steps.model)
        _give_time(steps)
    else:
        found = steps.do(event)
        saves.is_replaced |= event.kind == "put"
        if event.kind not in ("refuse", "leave"):  # how many of them each rank has is its own
            yield note, _given_by(event.seen), _given_by(found)
            yield f"{note}, error", event.error, None if found is None else found.error
        if event.rows is not None:
            yield f"{note}, rows", event.rows, steps.rows()


def _given_by(seen: Seen | None) -> Any:
    return None if seen is None or seen.error is not None else seen.vectors


def _assert_same(pairs: list[tuple[str, Any, Any]]) -> None:
    compared = []
    try:
        for note, found, expected in pairs:
            compared.append(note)
            assert_identical(found, expected)
    except AssertionError as error:
        raise AssertionError(f"the last of {compared} differs") from error
