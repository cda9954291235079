"""What the ranks tell each other on the host before each batch, and how they fail together.

A `HostExchange` runs jobs one after the other on a thread of its own, over a gloo process group
that nobody else uses, and past it where the ranks are on one host (`collectives`). Each job begins
with a small exchange: every rank says whether its local work went well, whether it has a batch,
whether it trains, at which step, and how much it will send. A rank that failed or has no batch
takes part too, so all ranks learn it in the same exchange; from then on all of them refuse further
jobs until `reset()`. A job ends with a second small exchange, so that a failure after the data has
moved also ends the step on every rank.

Shape letter: W ranks.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError
from functools import partial
from typing import Any, Generic, Literal, TypeVar, cast

import torch.distributed as dist

from recsdk_core import RecsdkError
from recsdk_core.agreement import attempt, is_known, known, text_of
from recsdk_sharding._compat.private import is_profiling
from recsdk_sharding.exchange.agreement import (
    Header,
    Splits,
    message_of,
    raise_failures,
)
from recsdk_sharding.exchange.collectives import gathered
from recsdk_sharding.exchange.errors import EndOfData, PeerError
from recsdk_sharding.exchange.failures import failure_of_peer, tell
from recsdk_sharding.exchange.groups import is_of_groups, ranks_of
from recsdk_sharding.exchange.parts import Parts, shown
from recsdk_sharding.exchange.worker import Pending, Worker

__all__ = [
    "EndOfData",
    "ExchangeJob",
    "HostExchange",
    "PeerError",
    "Splits",
    "Visit",
    "exchange_of_group",
    "require_all_met",
]

T = TypeVar("T")

_SECONDS_AT_EXIT = 1.0
_TO_GO_ON = "to train on after it, call recsdk_sharding.exchange.go_on(model) on every rank"
_SWAP = 2**31 - 1
"""The tag of what is swapped between batches."""


class ExchangeJob(ABC, Generic[T]):
    """The host work of one batch and sharding group, cut where the ranks have to agree.

    The exchange calls the methods on its thread, in the order below, until one fails; each gets
    what the one before it made. Who waits for the job gets what `prepare` or `finish` raises, and
    the other ranks are told of it.
    """

    training: bool
    """Whether the batch is to be trained; all ranks must say the same."""
    tag: int
    """Identifies the job's kind (0 to 2**31 - 1); all ranks must say the same."""
    equal_batches: Sequence[Sequence[int]] = ()
    """Groups of ranks whose batches must be of equal size; all ranks must say the same."""
    has_batch = True
    """Whether the rank has one."""

    @abstractmethod
    def step(self) -> int:
        """The step of this batch; all ranks must say the same."""

    @abstractmethod
    def prepare(self) -> tuple[Splits, Any]:
        """Local work before any communication: how much is sent, and what."""

    @abstractmethod
    def transfer(self, group: dist.ProcessGroup, splits: Sequence[Splits], prepared: Any) -> Any:
        """Collectives over the group, knowing what each rank sends. What it raises is final."""

    @abstractmethod
    def finish(self, received: Any) -> Any:
        """Local work with what was received."""

    def answer(self, group: dist.ProcessGroup, splits: Sequence[Splits], found: Any) -> T:
        """Collectives once `finish` went well on every rank; none unless a job says so.

        Gives the job's result: what `finish` made. What it raises is final.
        """
        return cast(T, found)

    def end(self) -> None:
        """Called when the job has ended, well or not, or was dropped before it began."""


class _Failure(RecsdkError):
    """What a rank says of a failure outside of any job."""


class _Absent(ExchangeJob[None]):
    """Takes part in one exchange without a batch: at the end of data, or to report a failure."""

    training = False
    tag = 0
    has_batch = False

    def __init__(self, failure: str | None = None) -> None:
        self._failure = failure

    def step(self) -> int:
        return 0

    def prepare(self) -> tuple[Splits, None]:
        if self._failure is not None:
            raise _Failure(self._failure)
        return Splits(), None

    def transfer(self, group: dist.ProcessGroup, splits: Sequence[Splits], prepared: None) -> None:
        raise AssertionError("an exchange with an absent rank moves no data")

    def finish(self, received: None) -> None:
        raise AssertionError("an exchange with an absent rank moves no data")


class _Swap(ExchangeJob[list[Any]]):
    """Tells all ranks something that is no batch."""

    training = False
    tag = _SWAP

    def __init__(self, value: Any) -> None:
        self._value = value

    def step(self) -> int:
        return 0

    def prepare(self) -> tuple[Splits, bytes]:
        message = json.dumps(self._value).encode()
        return Splits(batch_size=len(message)), message

    def transfer(
        self, group: dist.ProcessGroup, splits: Sequence[Splits], prepared: bytes
    ) -> list[bytes]:
        lengths = [each.batch_size for each in splits]
        padded = gathered(list(prepared.ljust(max(lengths), b"\0")), group)
        return [bytes(own[:length]) for own, length in zip(padded, lengths, strict=True)]

    def finish(self, received: list[bytes]) -> list[Any]:
        return [json.loads(each) for each in received]


class Visit:
    """One call in which all ranks meet, in one exchange or several."""

    def __init__(self) -> None:
        self.is_over = False
        """Whether it has ended. If a Ctrl-C ended it before, the next goes on from where it was."""


class _Arrival(_Swap):
    """Tells the others that this rank comes to meet them."""

    def __init__(self, visit: Visit) -> None:
        super().__init__(None)
        self.visit = visit


class HostExchange:
    """Runs the host jobs of all batches in submission order, on one thread and process group.

    All ranks must submit the same jobs in the same order. Thread-safe; jobs of one exchange never
    overlap. A job costs, beside its own work, two collectives on the host if there are several
    ranks: one of 144 + 8 W bytes a rank, one of 8.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        """Wraps a gloo `group` that nobody else uses; use `exchange_of_group` to get it."""
        self.group = group
        self.rank: int = dist.get_rank(group)
        self.world_size: int = dist.get_world_size(group)
        self.ranks = ranks_of(group)
        """Their numbers in the default process group; None: they are all of it."""
        self._lock = threading.Lock()
        self._worker: Worker | None = None
        self._num_pending = 0
        self._latched: Callable[[], RecsdkError] | None = None
        self._is_ended = False
        self._is_broken = False
        self._met: Visit | None = None
        """In which all ranks met last, if nothing came after it."""
        self.depth = 0
        """Batches that the pipeline which submits looks ahead; all ranks must have the same. 0: no
        pipeline does."""
        self.num_reopened = 0
        """How often `reopen` was called: jobs from before may have ended or failed unseen."""
        self.num_opened = 0
        """How often it was made usable again: what was said before counts no more."""
        self.num_trained = 0
        """How many batches modules have looked up in training: what jobs before them found may be
        no longer so. Alike on all ranks."""
        self.num_modules = _num_modules.get(group, 0)
        """How many modules were made over the group."""
        self.parts = Parts()
        """Where the time of the jobs went: `prepare`, `exchange` (until all ranks have answered, of
        which there are several), `mapping`."""

    @property
    def state(self) -> Literal["open", "ended", "failed"]:
        """Whether jobs run, or are refused because data ended or a rank failed."""
        if self._latched is None:
            return "open"
        return "ended" if self._is_ended else "failed"

    def submit(self, job: ExchangeJob[T]) -> Pending[T]:
        """Queues a job and returns at once; the result, which is pending, is that of `answer`.

        After the end of data or a failure waiting for it raises EndOfData or that failure. `submit`
        itself never raises for what the job does.
        """
        return self._enqueue(job)

    def announce_end(self) -> None:
        """Says that this rank has no further batch, and waits until all ranks know.

        Takes part in the next exchange without a batch; every rank's job of that exchange raises
        EndOfData. Does nothing if the data has ended already. Raises PeerError if a rank failed.
        """
        self._announce(_Absent())

    def announce_failure(self, error: BaseException) -> None:
        """Says that this rank failed outside of any job, and waits until all ranks know.

        The other ranks' next job raises PeerError with the error's text. Does nothing if the
        exchange has ended or failed already.
        """
        with contextlib.suppress(RecsdkError):  # its own words, or what ended the exchange before
            self._announce(_Absent(text_of(error)))
        if not self._is_broken and not is_known(error, self.ranks):  # else more may know
            known(error, self.ranks)

    def arrive(self, visit: Visit) -> Pending[list[Any]]:
        """Tells the others that this rank comes to `meet`, and returns at once."""
        return self._enqueue(_Arrival(visit))

    def meet(self) -> None:
        """Waits until all ranks have come here, after the jobs that were submitted before.

        Call it before work that other ranks cannot interrupt, such as making a process group. It
        works after the end of data and after a failure too, since some ranks may have called
        `reset` already. A rank that comes with a batch first is told that the ranks disagree, and
        is waited for again. Raises PeerError if the process group failed, and RecsdkError, on every
        rank, if some have come with what they swap.
        """
        visit = Visit()
        self.wait_in(visit, self.arrive(visit))
        visit.is_over = True

    def wait_in(self, visit: Visit, arrival: Pending[list[Any]]) -> None:
        """As `meet`, in a visit; `arrival`: what `arrive` gave."""
        told: list[Any] = []
        while not told and not self._is_broken:
            with contextlib.suppress(RecsdkError):
                told = arrival.result()
            arrival = arrival if told else self.arrive(visit)
        if self._is_broken and self._latched is not None:
            raise self._latched()
        require_all_met(told)

    def swap(self, value: Any, timeout: float | None = None) -> list[Any]:
        """What all ranks tell, after the jobs that were submitted before; as `meet`. JSON, so that
        tuples come back as lists.

        Waits at most `timeout` seconds for them, and then raises TimeoutError. Raises RecsdkError,
        on every rank, if some have come with a batch.
        """
        return self._enqueue(_Swap(value)).result(timeout)

    def reset(self) -> None:
        """Makes the exchange usable again after an end or a failure that all ranks have seen.

        Every rank must have drained its jobs first. Raises RuntimeError if jobs are pending, or if
        the process group itself failed.
        """
        with self._lock:
            if self._num_pending:
                raise RuntimeError(
                    f"cannot reset the host exchange: {self._num_pending} jobs are pending; wait "
                    "for them first"
                )
            if self._is_broken:
                raise RuntimeError(
                    "cannot reset the host exchange: its process group failed; restart the ranks"
                )
            self._open()

    def reopen(self) -> None:
        """Makes an exchange usable that has ended or failed, for who uses it next.

        These are modules that all ranks make, or a pipeline, if another one was last.

        It takes its turn after the jobs that were submitted before, and waits for them. All ranks
        have these in one order and end or fail in the same one, so an exchange goes on from the
        same place on every rank, however far each has come. Jobs from here on look no batches
        ahead until a pipeline says so: what an earlier one said is kept on some ranks only, where
        its exchange still exists. Does nothing if the process group itself failed: later jobs raise
        that.
        """
        with self._lock:
            self.num_reopened += 1
            self.depth = 0
            if self._worker is None:
                self._open()
                return
            turn = self._worker.submit(self._open_in_turn)
            self._num_pending += 1
        turn.result()

    def wait_for_jobs(self) -> None:
        """Waits for the jobs that were submitted before, and raises nothing of theirs."""
        with self._lock:
            if self._worker is None:
                return
            turn = self._worker.submit(lambda: None)
        with contextlib.suppress(CancelledError):  # they are dropped
            turn.result()

    def note_modules(self, count: int) -> None:
        """Takes over how many modules were made over the group, once making one has failed."""
        with self._lock:
            self.num_modules = _num_modules[self.group] = count

    def note_module(self) -> None:
        """Counts a module that is made over the group, as all ranks make it now."""
        with self._lock:
            self.num_modules += 1
            _num_modules[self.group] = self.num_modules

    def shutdown(self, timeout: float) -> None:
        """Drops queued jobs and stops the thread, waiting at most `timeout` seconds for it.

        Who waits for a dropped job gets CancelledError. A later `submit` starts a thread again,
        unless the old one is stuck in a collective: then the exchange has failed for good.
        """
        with self._lock:
            worker, self._worker = self._worker, None
            if worker is None:
                return
            self._take_pending(worker.drop_queued())
        worker.stop()
        if not worker.join(timeout):
            self._break("the job in flight did not end in time")

    def _open(self) -> None:
        """The lock is held."""
        if not self._is_broken:
            self._latched = None
            self._is_ended = False
            self.num_opened += 1

    def _open_in_turn(self) -> None:
        """Opens on the worker's thread, where no job runs."""
        with self._lock:
            self._take_pending(1)
            self._open()

    def _announce(self, job: _Absent) -> None:
        with contextlib.suppress(EndOfData):
            self._enqueue(job).result()

    def _enqueue(self, job: ExchangeJob[T]) -> Pending[T]:
        with self._lock:
            if self._worker is None:
                self._worker = Worker("recsdk-host-exchange")
                weakref.finalize(self, self._worker.stop)
            said = partial(Header, depth=self.depth, num_modules=self.num_modules)
            pending = self._worker.submit(partial(self._run, job, said), job.end)
            self._num_pending += 1  # a Ctrl-C before leaves no job behind that never ends
            return pending

    def _run(self, job: ExchangeJob[T], said: Callable[..., Header]) -> T:
        try:
            if not is_profiling():
                return self._result_of(job, said)
            with shown("host_job"):
                return self._result_of(job, said)
        finally:
            job.end()
            with self._lock:
                self._take_pending(1)

    def _take_pending(self, number: int) -> None:
        """Jobs have ended, of which one may not have been counted; the lock is held."""
        self._num_pending = max(0, self._num_pending - number)

    def _result_of(self, job: ExchangeJob[T], said: Callable[..., Header]) -> T:
        """Runs a job on the worker's thread; `said` makes what this rank says of it."""
        before, self._met = self._met, None
        if self._latched is not None and (self._is_broken or job.tag != _SWAP):
            raise self._held(self._latched())
        if isinstance(job, _Arrival) and before is not None and not before.is_over:
            self._met = job.visit  # all ranks were there when a Ctrl-C came
            return cast(T, [None] * self.world_size)
        step, is_alone = job.step(), self.world_size == 1 and job.has_batch
        with self.parts.part("prepare"):
            prepared, error = attempt(job.prepare)
        splits, batch = prepared or (Splits(), None)
        told = [splits]
        if error is not None or not is_alone:
            told = self._told(job, said, splits, error, step)
        received = self._communicate(lambda: job.transfer(self.group, told, batch), step)
        with self.parts.part("mapping"):
            found, error = attempt(lambda: job.finish(received))
        try:
            if error is not None or not is_alone:
                lengths = self._gather([len(_message_of(error))], step)
                self._raise_failures([row[0] for row in lengths], error, step)
            result = self._communicate(lambda: job.answer(self.group, told, found), step)
            if isinstance(job, _Arrival) and result == [None] * self.world_size:
                self._met = job.visit
            return result
        except BaseException:
            found = None  # the traceback would keep its leases open
            raise

    def _held(self, error: RecsdkError) -> RecsdkError:
        """The error of an earlier job for a later one; it says how jobs run again, if they can."""
        if not (self._is_broken or self._is_ended):
            error.args = (f"{error}; {_TO_GO_ON}", *error.args[1:])
        return error

    def _told(
        self,
        job: ExchangeJob[T],
        said: Callable[..., Header],
        splits: Splits,
        error: BaseException | None,
        step: int,
    ) -> list[Splits]:
        """What every rank says of its batch; raises, on every rank, if they cannot go on."""
        own = said(
            has_batch=job.has_batch,
            training=job.training,
            step=step,
            tag=job.tag,
            message_bytes=len(_message_of(error)),
            splits=splits,
        )
        words = self._gather(own.words(self.world_size), step)
        headers = [Header.of_words(row) for row in words]
        if all(h.tag == _SWAP for h in headers):
            return [h.splits for h in headers]
        self._check(headers, error, step)
        self._check_batch_sizes([h.splits.batch_size for h in headers], job.equal_batches)
        return [h.splits for h in headers]

    def _check(self, headers: list[Header], error: BaseException | None, step: int) -> None:
        """Raises, on every rank, if the ranks cannot go on with this exchange."""
        self._raise_failures([h.message_bytes for h in headers], error, step)
        self._check_modules([h.num_modules for h in headers])
        self._check_depths([h.depth for h in headers])
        absent = [rank for rank, h in enumerate(headers) if not h.has_batch]
        if absent:
            self._is_ended = True
            raise self._latch(lambda: EndOfData(f"ranks {absent} have no further batch"))
        first = headers[0]
        for rank, h in enumerate(headers):
            if (h.training, h.step, h.tag) != (first.training, first.step, first.tag):
                text = _disagreement(first, rank, h)
                raise self._latch(lambda text=text: RecsdkError(text))  # type: ignore[misc]
        self._check_replicas([h.splits for h in headers])

    def _check_replicas(self, splits: list[Splits]) -> None:
        """Raises, on every rank, if tables that all of them hold are seen not to be alike."""
        if len({each.decided for each in splits}) > 1:
            text = (
                "the tables that every rank holds (data_parallel) are no longer alike: a batch "
                "failed on some ranks once others had mapped it, or a table was changed on some "
                "only; load a checkpoint on all ranks"
            )
            raise self._latch(lambda: RecsdkError(text))
        said = {each.values for each in splits}
        steps = [values >> 32 for values in said]
        apart = [step for step in steps if steps.count(step) > 1]
        if apart:
            text = (
                "rows of the tables that every rank holds (data_parallel) had other values on "
                f"other ranks at step {apart[0]}, or on devices were updated otherwise: a rank "
                "trains with another learning rate or optimizer, or on other kernels (set "
                "RECSDK_DEVICE_KERNELS=torch on all ranks if a warning tells of it), or a table "
                "was changed or loaded on some only; load a checkpoint on all ranks"
            )
            raise self._latch(lambda: RecsdkError(text))

    def _check_modules(self, counts: list[int]) -> None:
        """Raises, on every rank, if one still has batches of modules from before others' last."""
        if len(set(counts)) > 1:
            text = (
                f"{counts} sharded modules were made over this group, rank by rank: a rank "
                "exchanges batches of other modules than the rest; all ranks must make and run the "
                "same modules in the same order"
            )
            raise self._latch(lambda: RecsdkError(text))

    def _check_depths(self, depths: list[int]) -> None:
        """Raises, on every rank, if one looks further ahead than another: they would deadlock."""
        if len(set(depths)) > 1:
            text = (
                f"the ranks look different numbers of batches ahead: pipe_n_batch is {depths}, "
                "rank by rank; pass the same on all ranks"
            )
            raise self._latch(lambda: RecsdkError(text))

    def _check_batch_sizes(self, sizes: Sequence[int], groups: Sequence[Sequence[int]]) -> None:
        """Raises, on every rank, if a group that must have equal batches has not."""
        for ranks in groups:
            found = [sizes[rank] for rank in ranks]
            if len(set(found)) > 1:
                text = (
                    f"ranks {list(ranks)} share tensor-parallel layers and must have batches of "
                    f"equal size; they have {found} samples: drop or pad what is left over "
                    "(DataLoader's drop_last=True)"
                )
                raise self._latch(lambda text=text: RecsdkError(text))  # type: ignore[misc]

    def _raise_failures(
        self, message_bytes: Sequence[int], error: BaseException | None, step: int
    ) -> None:
        """Swaps the failed ranks' messages and raises: one's own error, else a PeerError."""
        if any(message_bytes):

            def of_peer(rank: int, text: str) -> RecsdkError:
                return self._latch(lambda: PeerError(rank, text, step))

            gather = partial(self._gather, step=step)
            message = _message_of(error)
            raise_failures(message_bytes, message, error, gather, of_peer, self.ranks)

    def _gather(self, words: Sequence[int], step: int) -> list[list[int]]:
        """The words of all ranks, equally many each."""
        if self.world_size == 1:
            return [list(words)]
        return self._communicate(lambda: gathered(words, self.group), step)

    def _communicate(self, call: Callable[[], T], step: int) -> T:
        try:
            if self.world_size == 1:
                return call()
            with self.parts.part("exchange"):
                return call()
        except Exception as error:
            told = failure_of_peer()
            if told is None:
                if not is_of_groups(error):
                    tell(error, self.group)
                raise self._break(str(error), step) from error
            self._is_broken = True
            rank, message = told.rank, told.message
            raise self._latch(lambda: PeerError(rank, message, is_final=True)) from error

    def _latch(self, make: Callable[[], RecsdkError]) -> RecsdkError:
        self._latched = lambda: known(make(), self.ranks)
        return self._latched()

    def _break(self, text: str, step: int | None = None) -> RecsdkError:
        self._is_broken = True
        hint = "a rank may have died; restart the ranks"
        self._latched = lambda: PeerError(None, f"{text} ({hint})", step)
        return self._latched()


def require_all_met(told: Sequence[Any]) -> None:
    """Raises RecsdkError, on every rank, if some have come to `meet` and others to swap."""
    met = [rank for rank, each in enumerate(told) if each is None]
    if 0 < len(met) < len(told):
        raise known(
            RecsdkError(
                f"ranks {met} save, load or move rows while the others make a model or telemetry; "
                "all ranks must make the same calls in one order"
            )
        )


def _message_of(error: BaseException | None) -> bytes:
    """The error as text, never empty; nothing if there is none."""
    if error is None:
        return b""
    return message_of(str(error) if isinstance(error, _Failure) else text_of(error))


def _disagreement(first: Header, rank: int, other: Header) -> str:
    def describe(header: Header) -> str:
        if header.tag == _SWAP:
            return "makes a model or saves one"
        mode = "trains" if header.training else "evaluates"
        return f"{mode} at step {header.step} with modules {header.tag}"

    return (
        f"the ranks disagree on the batch to exchange: rank 0 {describe(first)}, rank {rank} "
        f"{describe(other)}; all ranks must run the same modules in the same order and mode"
    )


_num_modules: weakref.WeakKeyDictionary[dist.ProcessGroup, int] = weakref.WeakKeyDictionary()
"""How many modules were made over each group, whether or not its exchange still existed."""

_exchanges: weakref.WeakValueDictionary[dist.ProcessGroup, HostExchange] = (
    weakref.WeakValueDictionary()
)


def exchange_of_group(group: dist.ProcessGroup) -> HostExchange:
    """The one exchange of a host process group, made when it is first asked for."""
    found = _exchanges.get(group)
    if found is None:
        found = _exchanges[group] = HostExchange(group)
    return found


@atexit.register
def _stop_threads() -> None:
    for exchange in list(_exchanges.values()):
        exchange.shutdown(_SECONDS_AT_EXIT)
