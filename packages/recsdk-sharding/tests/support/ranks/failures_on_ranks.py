"""What the tests of `failing_together` run on every rank."""

from __future__ import annotations

import atexit
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from loops import LOOPS
from on_ranks import own_batches
from plans import module_plan
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.types import ShardingEnv, ShardingPlan
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
from worlds import (
    Setup,
    configs_of,
    make_batch,
    new_model,
    optimizer_of,
    shard,
    unwrapped,
    use_nodes_of,
)

import recsdk_core
from recsdk_core.nn import joined
from recsdk_sharding import Saver, export_rows, failing_together, get_default_hybrid_sharders
from recsdk_sharding._batch import lookup, output_dist
from recsdk_sharding._compat.private import default_store, process_groups
from recsdk_sharding._modules import failing, sharded_tables
from recsdk_sharding.device import pooling as device_pooling
from recsdk_sharding.exchange import failure_store, failures

BAD_STEP = 2
SECONDS_FOR_OTHERS = failures._SECONDS_FOR_OTHERS
SIZES = [[4, 3, 2]] * 5


class Trouble(ValueError):
    """What goes wrong."""


def trouble(*_: Any) -> Any:
    raise Trouble(f"rank {dist.get_rank()} has trouble")


class _Failing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return trouble()


class _Batches(list[Any]):
    def __iter__(self) -> Iterator[Any]:
        yield from self[:BAD_STEP]
        trouble()


def _in_forward(model: Any, optimizer: Any) -> None:
    unwrapped(model).over[0].register_forward_pre_hook(trouble)


def _in_dense_backward(model: Any, optimizer: Any) -> None:
    unwrapped(model).over[1].register_forward_hook(lambda _, __, out: _Failing.apply(out))


def _before_the_tables_backward(model: Any, optimizer: Any) -> None:
    unwrapped(model).over[0].register_forward_pre_hook(
        lambda _, inputs: (_Failing.apply(inputs[0]),)
    )


def _in_the_tables_backward(model: Any, optimizer: Any) -> None:
    joined.update_joined = trouble
    device_pooling.train_set = trouble


def _in_optimizer(model: Any, optimizer: Any) -> None:
    optimizer.step = trouble


PLACES: dict[str, Callable[[Any, Any], None]] = {
    "forward": _in_forward,
    "dense backward": _in_dense_backward,
    "before the tables' backward": _before_the_tables_backward,
    "the tables' backward": _in_the_tables_backward,
    "optimizer": _in_optimizer,
    "before the first step": trouble,
    "iterator": lambda model, optimizer: None,
}
MODE = "mode"
"""A further place: the model evaluates from then on, and raises no Trouble but RuntimeError."""


def _made(device: str = "cpu") -> tuple[Any, Any, list[Any]]:
    setup = Setup(device=device)
    model = shard(new_model(setup, "meta"), setup)
    batches = own_batches([row[: dist.get_world_size()] for row in SIZES], False)
    return model, optimizer_of(model, setup.dense_lr), batches


def fail(
    place: str,
    loop: str,
    guilty: list[int],
    device: str = "cpu",
    is_guarded: bool = True,
    step: int = BAD_STEP,
) -> dict[str, Any]:
    """Trains in a loop until the guilty ranks fail at a place; how it ended there, and after.

    `place`: one of PLACES, or MODE.
    """
    model, optimizer, batches = _made(device)
    if len(guilty) < dist.get_world_size():  # nobody else will come
        failures._SECONDS_FOR_OTHERS = 0.1
    is_guilty = dist.get_rank() in guilty
    first = 0 if place == "before the first step" else step
    kept = joined.update_joined, device_pooling.train_set
    at_exit: list[Any] = []
    failure_store.atexit = SimpleNamespace(register=lambda *call: at_exit.append(call))
    num_done = 0

    def train() -> None:
        nonlocal num_done
        make = PLACES.get(place, lambda model, _: model.eval())
        if is_guilty and first == 0:
            make(model, optimizer)
        given = _Batches(batches) if is_guilty and place == "iterator" else batches
        for _ in LOOPS[loop](model, optimizer, given):
            num_done += 1
            if is_guilty and num_done == first:
                make(model, optimizer)

    try:
        found = _ending_of(train, is_guarded)
    finally:
        joined.update_joined, device_pooling.train_set = kept
        failures._SECONDS_FOR_OTHERS = SECONDS_FOR_OTHERS
        failure_store.atexit = atexit
    again = _ending_of(lambda: dist.all_reduce(torch.zeros(1, device=device)))
    threads = [thread.name for thread in threading.enumerate()]
    return {
        "first": found,
        "again": again,
        "steps": num_done,
        "threads": threads,
        "keeps_the_store": bool(at_exit),
    }


def _ending_of(work: Callable[[], Any], is_guarded: bool = True) -> dict[str, Any] | None:
    try:
        with failing_together() if is_guarded else nullcontext():
            work()
    except BaseException as error:
        own = ("rank", "message", "is_final")
        attributes = {name: getattr(error, name) for name in own if hasattr(error, name)}
        return {"type": type(error).__name__, "text": str(error), **attributes}
    return None


def fail_in_an_unsharded_model(device: str) -> Any:
    """The last rank's tables fail in a backward which is its own; a collective after that."""
    setup = Setup(device=device, options={"max_rows": 50})
    model = new_model(setup, device)
    model.over.to(device)
    (batch, *_) = own_batches([[4] * dist.get_world_size()], False)
    loss, _ = model(batch.to(torch.device(device)))
    kept = joined.update_joined, device_pooling.train_set
    is_guilty = dist.get_rank() == dist.get_world_size() - 1
    if is_guilty:
        _in_the_tables_backward(model, None)
    try:
        with suppress(Trouble):
            loss.backward()
            assert not is_guilty
    finally:
        joined.update_joined, device_pooling.train_set = kept
    return _ending_of(lambda: dist.all_reduce(torch.zeros(1, device=device)))


def fail_in_evaluation(guilty: int) -> Any:
    """The forward of an evaluation fails on one rank."""
    model, _, batches = _made()
    model.eval()
    if dist.get_rank() == guilty:
        unwrapped(model).over[0].register_forward_pre_hook(trouble)

    def evaluate() -> None:
        for batch in batches:
            model(batch)

    return _ending_of(evaluate)


def fail_while_others_save(folder: str) -> Any:
    """The last rank fails in place of a save."""
    model, _, _ = _made()
    is_last = dist.get_rank() == dist.get_world_size() - 1
    return _ending_of(trouble if is_last else lambda: Saver().save(model, f"{folder}/never"))


def fail_in_a_save_of_its_own(kind: str, path: str) -> Any:
    """The last rank cannot save tables that are its own, and the others are in a collective."""
    saves = {
        "Table": lambda: recsdk_core.Table(4, name="own").save(path),
        "Saver": lambda: Saver().save(new_model(Setup(), "cpu"), path),
    }
    is_last = dist.get_rank() == dist.get_world_size() - 1
    failures._SECONDS_FOR_OTHERS = 0.1
    try:
        return _ending_of(saves[kind] if is_last else lambda: dist.all_reduce(torch.zeros(1)))
    finally:
        failures._SECONDS_FOR_OTHERS = SECONDS_FOR_OTHERS


def fail_with_a_model_of_its_own(path: str) -> list[Any]:
    """Each rank has a model of its own, and the last fails with it; a collective after that."""
    size, rank = dist.get_world_size(), dist.get_rank()
    groups = [[dist.new_group([each], backend="gloo") for each in range(size)] for _ in range(2)]
    host, env = (ShardingEnv(1, 0, of_ranks[rank]) for of_ranks in groups)
    configs = configs_of(new_model(Setup(), "meta"))
    specs = dict.fromkeys((config.name for config in configs), ("row_wise",))
    plan = ShardingPlan({"ebc": module_plan(configs, specs, 1, 1)})
    use_nodes_of(1, has_groups=False)

    def make(plan: ShardingPlan) -> Any:
        model, sharders = new_model(Setup(), "meta"), get_default_hybrid_sharders(host)
        return DistributedModelParallel(
            model, env, torch.device("cpu"), plan, sharders, init_data_parallel=False
        )

    wrong: list[Callable[[], Any]] = [
        lambda: make(ShardingPlan({})),
        lambda: Saver().save(make(plan), path),
        lambda: export_rows(make(plan), {"nobody": torch.arange(2)}),
    ]
    calls = wrong if rank == size - 1 else []
    found = [_ending_of(call, is_guarded=False) for call in calls]
    return [*found, _ending_of(lambda: dist.all_reduce(torch.zeros(1)))]


def save_twice(folder: str) -> list[Any]:
    """All ranks save to one path twice; what the second gave, and a collective after it."""
    model, _, _ = _made()
    Saver().save(model, f"{folder}/one")
    second = _ending_of(lambda: Saver().save(model, f"{folder}/one"))
    return [second, _ending_of(lambda: dist.all_reduce(torch.zeros(1)))]


@dataclass(frozen=True)
class Frozen(Exception):
    """Takes no attributes."""

    text: str


def raise_frozen() -> Any:
    """All ranks raise an exception that cannot be changed."""

    def work() -> None:
        raise Frozen("as it is")

    return _ending_of(work)


def raise_kinds(names: list[str]) -> list[Any]:
    """Raises one kind after the other on rank 0 only; what each gave on this rank."""
    kinds: dict[str, BaseException] = {
        "StopIteration": StopIteration(),
        "SystemExit 0": SystemExit(0),
        "GeneratorExit": GeneratorExit(),
        "SystemExit 1": SystemExit(1),
        "KeyboardInterrupt": KeyboardInterrupt(),
    }
    found = []
    for name in names:

        def work(error: BaseException = kinds[name]) -> None:
            if dist.get_rank() == 0:
                raise error
            dist.barrier()

        found.append(_ending_of(work))
        if dist.get_rank() == 0:
            with suppress(RuntimeError):
                dist.barrier()
    return found


def be_signalled(number: int, guilty: list[int]) -> Any:
    """Some ranks get a signal, in a collective or outside; SIGTERM ends them by a handler."""
    failures._SECONDS_FOR_OTHERS = 3600.0

    def leave(number: int, _: Any) -> None:
        sys.exit(128 + number)

    def work() -> None:
        if dist.get_rank() in guilty:
            signal.raise_signal(number)
        dist.barrier()

    # A shell starts what runs in its background with SIGINT ignored.
    handler = signal.default_int_handler if number == signal.SIGINT else leave
    before = signal.signal(number, handler)
    try:
        return _ending_of(work)
    finally:
        signal.signal(number, before)
        failures._SECONDS_FOR_OTHERS = SECONDS_FOR_OTHERS


def fail_alike_and_apart() -> list[Any]:
    """Ranks raise the same, then others; how that ended, and keys in torch's store between."""

    def alike() -> None:
        with failing_together():
            trouble()

    def apart() -> None:
        if dist.get_rank():
            raise KeyError("other")
        trouble()

    together, keys = [], []
    for _ in range(3):
        together.append(_ending_of(alike))
        dist.barrier()
        keys.append(_num_keys())
        dist.barrier()
    return [together, keys, _ending_of(apart), _ending_of(lambda: None)]


def fail_in_a_part(steps: list[list[int]], is_guarded: bool) -> list[Any]:
    """Ranks 0 and 1 have a model of their own, which fails on some of them in each step.

    How each step ended, and a collective of all ranks after it, up to the first that failed.
    """
    rank, model = dist.get_rank(), _made_in_a_part()
    collection = None if model is None else unwrapped(model).ebc
    features, found = make_batch(3, 4).sparse, []
    forward = lookup.HashLookup.forward
    failures._SECONDS_FOR_OTHERS = 0.3

    def step(guilty: list[int]) -> None:
        if collection is not None:
            lookup.HashLookup.forward = trouble if rank in guilty else forward
            collection(features).values().sum().backward()

    try:
        for guilty in steps:
            ended = _ending_of(partial(step, guilty), is_guarded)
            after = _ending_of(lambda: dist.all_reduce(torch.zeros(1)))
            found.append((ended, after))
            if after is not None:
                break
    finally:
        lookup.HashLookup.forward = forward
        failures._SECONDS_FOR_OTHERS = SECONDS_FOR_OTHERS
    return found


def fail_while_others_wait(guilty: int) -> Any:
    """One rank fails and the others wait in collectives; how that ended on each."""
    failures._SECONDS_FOR_OTHERS = 0.1

    def work() -> None:
        if dist.get_rank() == guilty:
            trouble()
        dist.all_reduce(torch.zeros(1))

    try:
        return _ending_of(work)
    finally:
        failures._SECONDS_FOR_OTHERS = SECONDS_FOR_OTHERS


def give_a_bad_batch_in_a_part(loop: str, is_guarded: bool) -> list[Any]:
    """Ranks 0 and 1 have a model of their own, and the last of them a batch that is wrong.

    How that ended, and a collective of all ranks after it.
    """
    model = _made_in_a_part()
    failures._SECONDS_FOR_OTHERS = 0.3

    def work() -> None:
        if model is not None:
            batches = [make_batch(seed, 4) for seed in range(3)]
            if dist.get_rank() == 1:
                values, lengths = torch.arange(4), torch.ones(4, dtype=torch.int64)
                wrong = KeyedJaggedTensor(keys=["nobody's"], values=values, lengths=lengths)
                batches[1] = replace(batches[1], sparse=wrong)
            for _ in LOOPS[loop](model, optimizer_of(model, 0.05), batches):
                pass
        if is_guarded:
            dist.all_reduce(torch.zeros(1))

    try:
        ended = _ending_of(work, is_guarded)
        return [ended, _ending_of(lambda: dist.all_reduce(torch.zeros(1)))]
    finally:
        failures._SECONDS_FOR_OTHERS = SECONDS_FOR_OTHERS


def _made_in_a_part() -> Any:
    """The model of ranks 0 and 1; None elsewhere."""
    rank, setup = dist.get_rank(), Setup()
    host, own = (dist.new_group([0, 1], backend="gloo") for _ in range(2))
    if rank > 1:
        return None
    model = new_model(setup, "meta")
    configs = configs_of(model)
    specs: dict[str, Any] = {config.name: ("row_wise",) for config in configs}
    specs["genre"] = ("data_parallel",)
    use_nodes_of(2, has_groups=False)
    return DistributedModelParallel(
        model,
        ShardingEnv(2, rank, own),
        torch.device("cpu"),
        ShardingPlan({"ebc": module_plan(configs, specs, 2, 2)}),
        get_default_hybrid_sharders(ShardingEnv(2, rank, host)),
    )


def raise_one_error_twice() -> list[Any]:
    """All ranks raise an error that they have kept, and then the last rank does, alone."""
    error = Trouble("that is kept")

    def raise_it(ranks: list[int]) -> None:
        if dist.get_rank() in ranks:
            raise error
        dist.barrier()

    size = dist.get_world_size()
    every = [list(range(size)), [size - 1]]
    failures._SECONDS_FOR_OTHERS = 0.3
    try:
        return [_ending_of(partial(raise_it, ranks)) for ranks in every]
    finally:
        failures._SECONDS_FOR_OTHERS = SECONDS_FOR_OTHERS


def count_communication(is_guarded: bool) -> list[Any]:
    """Collectives of all groups in some steps, and keys in torch's store before and after them."""
    guard = failing_together if is_guarded else nullcontext
    modules = (lookup, output_dist, sharded_tables, failing)
    for module in modules:
        module.failing_together = guard
    model, optimizer, batches = _made()
    try:
        loop = LOOPS["plain"](model, optimizer, batches)
        next(loop)
        before, keys = _collectives(), _num_keys()
        for _ in range(3):
            with guard():
                next(loop)
        after = _collectives()
    finally:
        for module in modules:
            module.failing_together = failures.failing_together
    return [after[name] - before[name] for name in before] + [_num_keys() - keys]


def _collectives() -> dict[str, int]:
    return {
        group.group_name: group._get_sequence_number_for_group()
        for group in process_groups()
        if group.size() > 1
    }


def _num_keys() -> int:
    return int(default_store("any").num_keys())
