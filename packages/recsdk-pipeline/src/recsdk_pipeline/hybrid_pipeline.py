"""A pipeline that does the host work of the next batches while the model trains on this one."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, suppress
from itertools import islice
from typing import Any, Generic, Literal, overload

import torch
from torch import nn
from torchrec.streamable import Pipelineable
from typing_extensions import TypeVar

from recsdk_core.batch_leases import noting_lookups
from recsdk_pipeline._internal.arguments import check_parts
from recsdk_pipeline._internal.checks import check_switch, int_within
from recsdk_pipeline._internal.clicks import giving_clicks
from recsdk_pipeline._internal.feeds import Feeds, FeedSpy
from recsdk_pipeline._internal.position import Progress
from recsdk_pipeline._internal.queue import END, Queue
from recsdk_pipeline._internal.sharing import guard_of
from recsdk_pipeline._internal.slot import Slot
from recsdk_pipeline._internal.streams import SideStream
from recsdk_sharding.exchange import EndOfData, HostExchange, exchanges_of
from recsdk_sharding.exchange.parts import Parts, shown

In = TypeVar("In", bound=Pipelineable, default=Any)
Out = TypeVar("Out", default=Any)
Result = TypeVar("Result", default=Out)

_users: weakref.WeakKeyDictionary[HostExchange, weakref.ref[Any]] = weakref.WeakKeyDictionary()
"""The pipeline that used an exchange last. On some ranks it may be gone."""

_MOST_BATCHES = 12
_STARTED_AHEAD = 2  # batches whose stock modules exchange while the model works on another batch


class HybridTrainPipelineSparseDist(Generic[In, Out, Result]):
    """Trains or evaluates a model on batches, `pipe_n_batch` of them looked ahead.

    While the model works on one batch, the host work of the next `pipe_n_batch` batches is under
    way: ids go to their owners over the host group and get their rows, and batches are copied
    to the device. The results are those of the plain loop over the same batches, bit for bit.

    `model` returns `(losses, output)`; in training mode the sum of the losses is differentiated. It
    may have any mix of recsdk's and torchrec's sharded modules, or none. The pipeline learns from
    the first batch, by object identity, which field of a batch feeds which sharded module. A module
    whose input is not itself a field of the batch runs inside forward, without lookahead. If a
    batch has `click_labels`, how often each of its samples was clicked (B,), tables that go by
    shows and clicks get them for the sample's ids. Where a table evicts by norms, a batch that
    begins with a look at them is read only once all before it are trained.

    `state_dict` says how far training has come, for a checkpoint. `data`, if given, is the training
    data: an object whose `state_dict()` and `load_state_dict()` tell and set how far it was read,
    such as torchdata's StatefulDataLoader. The pipeline asks it after each batch that it reads
    ahead, and keeps the position after the last trained batch in its own state.

    `execute_all_batches` must be True and `apply_jit` False. With `return_loss`, `progress` returns
    `(output, losses)`. All ranks must pass the same `pipe_n_batch`, 1 to 12 (default 6); else the
    first `progress` of a model with hash modules raises RecsdkError on all of them.

    Not thread-safe. Raises ValueError or TypeError for other arguments. The README has an example
    that runs::

        while True:
            try:
                output = pipeline.progress(batches)
            except StopIteration:
                break
    """

    @overload
    def __init__(
        self: HybridTrainPipelineSparseDist[In, Out, Out],
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        device: torch.device,
        execute_all_batches: bool = True,
        apply_jit: bool = False,
        return_loss: Literal[False] = False,
        pipe_n_batch: int = 6,
        data: Any | None = None,
    ) -> None: ...

    @overload
    def __init__(
        self: HybridTrainPipelineSparseDist[In, Out, tuple[Out, torch.Tensor]],
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        device: torch.device,
        execute_all_batches: bool = True,
        apply_jit: bool = False,
        *,
        return_loss: Literal[True],
        pipe_n_batch: int = 6,
        data: Any | None = None,
    ) -> None: ...

    @overload
    def __init__(
        self: HybridTrainPipelineSparseDist[In, Out, Out | tuple[Out, torch.Tensor]],
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        device: torch.device,
        execute_all_batches: bool = True,
        apply_jit: bool = False,
        return_loss: bool = False,
        pipe_n_batch: int = 6,
        data: Any | None = None,
    ) -> None: ...

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        device: torch.device,
        execute_all_batches: bool = True,
        apply_jit: bool = False,
        return_loss: bool = False,
        pipe_n_batch: int = 6,
        data: Any | None = None,
    ) -> None:
        self._depth = _depth_of(execute_all_batches, apply_jit, return_loss, pipe_n_batch)
        self._model = model
        self._optimizer = optimizer
        self._device = check_parts(model, optimizer, device)
        self._return_loss = return_loss
        self._stream = SideStream(self._device)
        self._exchanges: list[HostExchange] = exchanges_of(model)
        self._num_reopened = self._count_reopened()
        self._with_looks: list[Any] = [m for m in model.modules() if hasattr(m, "looks_next")]
        self._guard = guard_of(model)
        self._learned: Feeds | None = None
        self._queues: list[Queue] = []
        self._current: Queue | None = None
        self._running: Slot | None = None
        """The batch whose turn it is."""
        self._progress_made = Progress(data)
        self._parts = {True: Parts(), False: Parts()}  # of training, of evaluation
        self._watchers: list[Callable[[torch.Tensor, Out], None]] = []

    @property
    def num_batches_trained(self) -> int:
        """Batches whose optimizer step is done; batches fetched ahead do not count."""
        return self._progress_made.num_batches

    def state_dict(self) -> dict[str, Any]:
        """How far training has come: `num_batches_trained`, and the position of `data` if given.

        Batches in flight do not count. Every rank has its own state, and may call this between any
        two steps. A run that resumes without `data` must skip `num_batches_trained` batches.
        """
        return self._progress_made.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue where `state_dict` was taken; `data`, if given, is set to its position.

        Call it before the first batch; make the iterator after it. Raises RuntimeError while
        batches are in flight, ValueError for a state that lacks an entry, CheckpointError for a
        damaged position. The state holds data only, so loading runs no code.
        """
        if any(queue.slots for queue in self._queues):
            raise RuntimeError("batches are in flight; call drop() before load_state_dict()")
        self._progress_made.load_state_dict(state_dict)

    def progress(self, dataloader_iter: Iterator[In]) -> Result:
        """Run the model on the next batch of the iterator and return its output.

        In training mode (`model.training`) this is one step: zero_grad, backward,
        optimizer.step. In evaluation mode nothing is written and no gradient is made.

        Each iterator has its own batches in flight: an evaluation with another iterator may come
        between two steps, and the training then goes on where it was. An evaluation that goes on
        after training has its batches in flight mapped again, as ids may have got rows: evaluate
        many batches at a time rather than one. It does not see rows that `drop` shows. Training on
        another iterator abandons the batches in flight of the one before, as `drop` does, since
        their steps now belong to other batches. An iterator that is no longer referenced loses its
        batches in flight at the next call.

        Raises StopIteration when all ranks have done all batches for which every rank has one;
        with sharded modules of recsdk, ranks may have different numbers of batches (evaluate then
        through `progress` too, not by calling the model between steps, since the end is agreed on
        ahead of time). The next iterator may follow.

        Other exceptions, also of background work and of the iterator, are raised at the turn of the
        batch that failed, with their traceback; the other ranks raise PeerError in the same step.
        That batch and those in flight are then dropped, also where the exception is kept. A batch
        that is None is a TypeError. StopIteration of the model, the optimizer or a batch becomes a
        RuntimeError. If one rank's own forward, backward or optimizer raises, the others raise
        PeerError too, but all process groups are closed (`recsdk_sharding.failing_together`):
        restart the ranks. A model of this rank alone, with nothing sharded or in torch's DDP or
        FSDP, tells nobody.
        """
        try:
            with self._guard(), shown("step"):
                self._take_turn()
                result: Result = self._step(dataloader_iter)
        except BaseException:
            self._abandon()
            raise
        finally:
            self._running = None
        if result is END:
            raise StopIteration
        return result

    def drop(self, dataloader_iter: Iterator[In] | None = None) -> None:
        """Abandon the batches in flight of an iterator, or of all iterators.

        Call it after leaving an iterator early: until then the tables count these batches as steps
        under way, hide the rows that they made, and keep those of ids that left. So call it before
        you let a pipeline go: Python may collect it on some ranks later, and meanwhile a step that
        begins with a look at norms fails on all of them. Batches that were read ahead are lost; the
        rows of their ids stay, untrained. An iterator that is not in use is ignored; a later
        `progress` with the same one goes on with its next batch.

        All ranks must call it between the same steps. It waits for host work under way, and raises
        no error of an abandoned batch.
        """
        self._pause()
        if dataloader_iter is None:
            self._forget(self._queues)
        else:
            self._forget([q for q in self._queues if q.iterator() is dataloader_iter])

    def _step(self, dataloader_iter: Iterator[In]) -> Any:
        """As `_progress`; what a model or a batch raises does not pass for the end of the data."""
        try:
            return self._progress(self._queue_of(dataloader_iter))
        except StopIteration as error:
            raise RuntimeError(
                "the model, the optimizer or a batch raised StopIteration, which must not pass for "
                "the end of the data"
            ) from error

    def _progress(self, queue: Queue) -> Any:
        """The result of the next batch; END where there is none."""
        self._renew(queue)
        self._fill(queue, 1)
        if not queue.slots:
            self._forget([queue])
            return END
        slot = self._running = queue.slots.popleft()
        if self._learned is not None and self._learned.can_look_ahead:
            self._fill(queue, self._depth, has_batch=True)
        self._settle(slot)
        if slot.error is None:
            return self._run(slot, queue)
        if isinstance(slot.error, EndOfData):
            self._end(queue)
            self._forget([queue])
            return END
        raise slot.error

    def _run(self, slot: Slot, queue: Queue) -> Out | tuple[Out, torch.Tensor]:
        is_training = self._model.training
        slot.check_mode(is_training)
        if is_training:
            with self._part("update"):
                self._optimizer.zero_grad()
        with self._part("forward"), torch.set_grad_enabled(is_training):
            with noting_lookups(slot.looked_up):
                losses, output = self._forward(slot)
        if is_training:
            if not isinstance(losses, torch.Tensor):
                raise TypeError(f"losses must be a torch.Tensor, got {type(losses).__name__}")
            with self._part("backward"):
                losses.sum().backward()  # type: ignore[no-untyped-call]
        if queue.slots:
            self._settle(queue.slots[0])
        if is_training:
            with self._part("update"):
                self._optimizer.step()
            self._progress_made.advance(slot.position)
            if self._watchers:
                with self._part("telemetry"):
                    for watch in self._watchers:
                        watch(losses, output)
        return (output, losses) if self._return_loss else output

    def _part(self, name: str) -> AbstractContextManager[None]:
        """Inside, time is that part's: of training, or of evaluation."""
        return self._parts[self._model.training].part(name)

    def _settle(self, slot: Slot) -> None:
        with self._part("waiting"):
            slot.settle(self._stream)

    def _forward(self, slot: Slot) -> tuple[torch.Tensor, Out]:
        slot.hand_over(self._stream)
        if self._learned is None:
            with FeedSpy(self._model, slot.batch) as spy, giving_clicks(self._model, slot.batch):
                result = self._model(slot.batch)
            self._learned = spy.feeds()
            return _losses_and_output(result)
        with slot.feeding():
            if self._learned.can_look_ahead:
                return _losses_and_output(self._model(slot.batch))
            with giving_clicks(self._model, slot.batch):
                return _losses_and_output(self._model(slot.batch))

    def _fill(self, queue: Queue, wanted: int, *, has_batch: bool = False) -> None:
        """Fetch batches until `wanted` are in flight, and start their host work.

        `has_batch`: whether one is to be trained first. Those that look at norms wait for it.
        """
        with self._part("waiting"):
            for slot in queue.slots:
                slot.get_under_way()
            for slot in islice(queue.slots, _STARTED_AHEAD):
                slot.start_stock(self._stream)
        while len(queue.slots) < wanted and not queue.is_exhausted:
            if has_batch and queue.is_training and self._looks_next():
                break
            self._fetch(queue)

    def _looks_next(self) -> bool:
        """Whether the next batch must not be mapped before all others are trained."""
        return any(module.looks_next() for module in self._with_looks)

    def _renew(self, queue: Queue) -> None:
        """Starts batches again that were looked ahead for evaluation before others were trained.

        Ids may have got their rows since, or lost them. All ranks have the same batches here.
        """
        if queue.is_training or self._model.training:
            return  # what was looked ahead for evaluation is not trained: `check_mode` refuses it
        num_trained = self._count_trained()
        if all(slot.num_trained == num_trained or slot.error for slot in queue.slots):
            return
        self._pause()
        self._current = queue
        again = [slot.host_batch for slot in queue.slots if slot.error is None]
        failed = [slot for slot in queue.slots if slot.error is not None]
        queue.slots.clear()  # before others are started: the device need not hold both
        try:
            queue.slots.extend(map(self._start, again))
        except Exception as error:
            self._fail(queue, error)
        else:
            queue.slots.extend(failed)

    def _count_trained(self) -> int:
        return sum(exchange.num_trained for exchange in self._exchanges)

    def _fetch(self, queue: Queue) -> None:
        """Fetch one batch and start its host work; a failure takes the batch's place."""
        try:
            with self._part("reading"):
                host_batch = queue.next_batch()
            if host_batch is END:
                self._tell_end(queue)
            else:
                position = self._progress_made.of_data() if queue.is_training else None
                with self._part("start"):
                    queue.slots.append(self._start(host_batch))
                queue.slots[-1].position = position
        except Exception as error:
            self._fail(queue, error)

    def _fail(self, queue: Queue, error: Exception) -> None:
        """Puts a failure in the place of the batch that would come next, and tells the others."""
        queue.is_exhausted = True
        for exchange in self._exchanges:
            exchange.announce_failure(error)
        queue.slots.append(Slot.failed(error))

    def _start(self, host_batch: Any) -> Slot:
        feeds = self._learned.feeds if self._learned is not None else ()
        with self._stream.use():
            batch = host_batch.to(self._device, non_blocking=True)
            slot = Slot(host_batch, batch, self._model.training, self._count_trained())
            slot.start(feeds, self._exchanges)
            slot.mark = self._stream.mark()
        return slot

    def _tell_end(self, queue: Queue) -> None:
        """Agree with the other ranks that this data has ended, once."""
        queue.is_exhausted = True
        if queue.has_ended:
            return
        queue.has_ended = True
        with ExitStack() as each:  # calls all of them, also after one has raised
            for exchange in reversed(self._exchanges):
                each.callback(exchange.announce_end)
        for exchange in self._exchanges:
            exchange.reset()

    def _end(self, queue: Queue) -> None:
        """Drop the batches that not all ranks have; the exchanges are open again afterwards.

        All ranks have agreed on that end, in each exchange. It is not told again: an exchange may
        have been opened since for others, whose first job would take it for its own.
        """
        queue.wait_for_host(self._stream)
        queue.keep(failed=0)
        queue.is_exhausted = queue.has_ended = True
        if self._has_turn():
            for exchange in self._exchanges:
                if exchange.state == "ended":
                    _open(exchange)

    def _queue_of(self, iterator: Iterator[In]) -> Queue:
        """Return the queue of an iterator, and abandon the queues that it replaces."""
        if self._current is not None and self._current.iterator() is not iterator:
            self._pause()
        self._forget([q for q in self._queues if q.iterator() is None])
        found = next((q for q in self._queues if q.iterator() is iterator), None)
        if self._model.training:
            self._forget([q for q in self._queues if q.is_training and q is not found])
        if found is None:
            found = Queue(iterator, is_training=self._model.training)
            self._queues.append(found)
        self._current = found
        return found

    def _take_turn(self) -> None:
        """Open the exchanges if others used them, and then pause this pipeline.

        Those were another pipeline, or modules that all ranks made. Batches in flight of this one
        may have ended or failed without its notice, and a further one would have no counterpart
        elsewhere. Of the other pipeline nothing is asked: where it was left, and it has been
        collected on some ranks only, what it did here would have none either.
        """
        for exchange in self._exchanges:
            if exchange not in _users or _users[exchange]() is not self:
                exchange.reopen()
                _users[exchange] = weakref.ref(self)
            exchange.depth = self._depth
        if not self._has_turn():
            self._num_reopened = self._count_reopened()
            self._pause()

    def _has_turn(self) -> bool:
        """Whether the exchanges are as this pipeline left them."""
        return self._num_reopened == self._count_reopened()

    def _count_reopened(self) -> int:
        return sum(exchange.num_reopened for exchange in self._exchanges)

    def _pause(self) -> None:
        """Wait for host work under way: all ranks must see one order, and open exchanges.

        Nothing else is exchanged, as one rank may come here alone: it made sharders to plan with.
        """
        queue, self._current = self._current, None
        if queue is None:
            return
        error = queue.wait_for_host(self._stream)
        if isinstance(error, EndOfData):
            self._end(queue)
        elif error is not None:
            queue.keep(failed=1)  # it is raised when its turn comes
            queue.is_exhausted = True
            self._reopen()

    def _forget(self, queues: list[Queue]) -> None:
        """Abandon batches whose host work is done."""
        for queue in queues:
            for slot in queue.slots:
                slot.abandon()
            queue.slots.clear()  # the traceback of an error in a slot keeps the queue
        gone = {id(queue) for queue in queues}
        self._queues = [queue for queue in self._queues if id(queue) not in gone]
        if id(self._current) in gone:
            self._current = None

    def _abandon(self) -> None:
        """Drop all batches in flight after a failure.

        Their host work ends first: else it would change tables beside what comes next, a save say.
        All ranks have started the same, or have failed apart and closed the groups, which ends it.
        """
        slots = [] if self._running is None else [self._running]
        for queue in self._queues:
            slots += queue.slots
            queue.slots.clear()  # the exception's traceback keeps the queue
        self._queues = []
        self._current = None
        try:
            for exchange in self._exchanges:
                exchange.wait_for_jobs()
        finally:  # also if the user interrupts
            for slot in slots:
                slot.abandon()
        self._reopen()

    def _reopen(self) -> None:
        """Let the exchanges go on after a failure that all ranks have seen, if none else has."""
        for exchange in self._exchanges if self._has_turn() else ():
            if exchange.state != "open":
                with suppress(RuntimeError):  # its process group failed: it stays closed
                    _open(exchange)


def _open(exchange: HostExchange) -> None:
    """Opens an exchange that refuses jobs; of a batch's jobs the last may still be under way."""
    exchange.wait_for_jobs()
    exchange.reset()


def _depth_of(
    execute_all_batches: bool, apply_jit: bool, return_loss: bool, pipe_n_batch: int
) -> int:
    """How many batches are ahead; raises for arguments that are not taken."""
    check_switch("execute_all_batches", execute_all_batches)
    check_switch("apply_jit", apply_jit)
    check_switch("return_loss", return_loss)
    if not execute_all_batches:
        raise ValueError(
            "execute_all_batches must be True, got False, which would drop batches already fetched"
        )
    if apply_jit:
        raise ValueError("apply_jit must be False, got True, and models are run as they are")
    return int_within("pipe_n_batch", pipe_n_batch, 1, _MOST_BATCHES + 1)


def _losses_and_output(result: Any) -> tuple[torch.Tensor, Any]:
    """What a model returned, checked."""
    if not isinstance(result, tuple | list) or len(result) != 2:
        size = f" of {len(result)}" if isinstance(result, tuple | list) else ""
        raise TypeError(
            f"the model must return (losses, output), got {type(result).__name__}{size}"
        )
    return result[0], result[1]
