"""Makes one thread draw torch's random numbers from a generator that nobody else sees.

Torch keeps one generator for the process, so its state cannot be saved and restored while another
thread draws. Instead the thread's draws use a generator of their own, and `torch.manual_seed` and
its like act on that one.
"""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cache, partial
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["PrivateRandom", "refuse_other_sources"]


class PrivateRandom:
    """A generator in place of torch's, on the thread that has entered `in_place`."""

    def __init__(self) -> None:
        self._generator = torch.Generator()
        self.has_drawn = False
        """Whether the state that `start` had left was used, for numbers or by itself."""
        self.is_seeded = False
        """Whether it was seeded since `start`, by `torch.manual_seed` or `torch.set_rng_state`."""

    def start(self, seed: int) -> None:
        """Begins the numbers of `seed`, 0 to 2**64 - 1."""
        self._generator.manual_seed(seed)
        self.has_drawn = self.is_seeded = False

    def used(self) -> torch.Generator:
        """The generator, for operations that depend on its state."""
        self.has_drawn = self.has_drawn or not self.is_seeded
        return self._generator

    def set_seed(self, seed: Any) -> torch.Generator:
        """As `torch.manual_seed`."""
        self.is_seeded = True
        return self._generator.manual_seed(int(seed))

    def set_state(self, state: torch.Tensor) -> None:
        """As `torch.set_rng_state`."""
        self.is_seeded = True
        self._generator.set_state(state)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Inside, this thread draws from it, and seeds it."""
        before = getattr(_here, "random", None)
        with _installed(), _DrawFrom(self):
            _here.random = self
            try:
                yield
            finally:
                _here.random = before


def _no_seed(private: PrivateRandom) -> int:
    raise ValueError(
        "init_fn calls torch.seed(), which is another seed each time, so rows could not be a "
        "function of the key; leave it out, or call torch.manual_seed"
    )


def _no_numpy(name: str, private: PrivateRandom, *args: Any, **kwargs: Any) -> None:
    raise ValueError(
        f"init_fn calls numpy.random.{name}, whose state is the whole process's; use torch's "
        "operators, kept apart while it runs, or a generator made inside it by "
        "numpy.random.default_rng(seed)"
    )


def _of_shared_numpy() -> list[str]:
    """The functions of numpy.random that read or change the process's state."""
    shared = np.random.mtrand._rand
    everything = vars(np.random).items()
    methods = {name for name, each in everything if getattr(each, "__self__", None) is shared}
    return sorted(methods | {"seed", "sample", "ranf"})


def _no_device(function: str, private: PrivateRandom, *args: Any, **kwargs: Any) -> None:
    raise ValueError(
        f"init_fn calls {function}, whose state is the device's; rows are made on the host: use "
        "torch.manual_seed or torch.random.fork_rng, kept apart while it runs"
    )


_fork_rng = torch.random.fork_rng


def _fork_host(
    private: PrivateRandom, devices: Any = None, enabled: bool = True, **kwargs: Any
) -> AbstractContextManager[None]:
    """Acts as `torch.random.fork_rng`, but leaves out devices, on which another thread may draw."""
    forked: AbstractContextManager[None] = _fork_rng([], enabled, **kwargs)
    return forked


_here = threading.local()
_lock = threading.Lock()
_num_entered = 0
_originals: list[tuple[Any, str, Any]] = []
_SEEDING = ("manual_seed", "seed", "initial_seed")
_REPLACED: tuple[tuple[Any, str, Callable[..., Any]], ...] = (
    # What torch.manual_seed calls: names bound to that function are of it too.
    (torch.random, "_manual_seed_impl", PrivateRandom.set_seed),
    *(
        (module, name, of_private)
        for module in (torch, torch.random)
        for name, of_private in (
            ("get_rng_state", lambda private: private.used().get_state()),
            ("initial_seed", lambda private: private.used().initial_seed()),
            ("seed", _no_seed),
            ("set_rng_state", PrivateRandom.set_state),
        )
    ),
    (torch.random, "fork_rng", _fork_host),
    *((np.random, name, partial(_no_numpy, name)) for name in _of_shared_numpy()),
)


def _of_devices() -> Iterator[tuple[Any, str, Callable[..., Any]]]:
    """What to do for functions of the random numbers of devices that torch knows by now."""
    for device in ("cuda", torch._C._get_privateuse1_backend_name()):
        module = getattr(torch, device, None)
        if module is not None:
            yield from _of_device(device, module)


@cache
def _of_device(device: str, module: Any) -> list[tuple[Any, str, Callable[..., Any]]]:
    return [
        (module, name, partial(_no_device, f"torch.{device}.{name}"))
        for name in dir(module)
        if name.endswith(("rng_state", "rng_state_all")) or name.startswith(_SEEDING)
    ]


@contextmanager
def _installed() -> Iterator[None]:
    """Torch's functions ask which generator is their thread's while any thread has one."""
    global _num_entered
    with _lock:
        _num_entered += 1
        if _num_entered == 1:
            for module, name, of_private in (*_REPLACED, *_of_devices()):
                original = getattr(module, name)
                _originals.append((module, name, original))
                setattr(module, name, _by_thread(original, of_private))
    try:
        yield
    finally:
        with _lock:
            _num_entered -= 1
            while not _num_entered and _originals:
                setattr(*_originals.pop())


def _by_thread(original: Callable[..., Any], of_private: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        private = getattr(_here, "random", None)
        if private is None:
            return original(*args, **kwargs)
        return of_private(private, *args, **kwargs)

    return call


class _DrawFrom(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Makes this thread's torch operators draw their random numbers from one generator."""

    def __init__(self, private: PrivateRandom) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._private = private

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded not in func.tags or _is_own(kwargs.get("generator")):
            return func(*args, **kwargs)
        kwargs = {**kwargs, "generator": self._private.used()}
        return _with_generator(func)(*args, **kwargs)


def _is_own(generator: Any) -> bool:
    """Whether a generator was given, and not torch's default one, which has many wrappers."""
    default: Any = torch.default_generator
    return generator is not None and generator._cdata != default._cdata


def _with_generator(func: Any) -> Any:
    """The overload of a random operator that takes a generator."""
    if _takes_generator(func):
        return func
    name = "generator" if func._overloadname == "default" else f"{func._overloadname}_generator"
    overload = getattr(func.overloadpacket, name, None)
    if overload is None:
        raise ValueError(
            f"init_fn draws random numbers with {func}, which takes no generator, so rows could "
            "not be a function of the key; use in-place operators such as tensor.normal_()"
        )
    return overload


def _takes_generator(func: Any) -> bool:
    return any(argument.name == "generator" for argument in func._schema.arguments)


def refuse_other_sources(run: Callable[[], Any], table: str) -> None:
    """Runs a function once and raises what it raises, on a thread of its own.

    Raises ValueError if it uses the process's generators directly: the methods of
    `torch.default_generator`, or Python's `random`. It has then drawn nothing.
    """
    owners = {
        id(torch.default_generator): ("torch.default_generator", "torch.manual_seed"),
        id(random._inst): ("random", "torch's operators"),
    }

    def watch(frame: Any, event: str, function: Any) -> None:
        found = owners.get(id(getattr(function, "__self__", None)))
        if event == "c_call" and found is not None:
            raise ValueError(
                f"table {table!r}: init_fn calls {found[0]}.{function.__name__}, whose state is "
                f"the whole process's; use {found[1]}, kept apart while it runs"
            )

    raised: list[BaseException] = []

    def watched() -> None:
        sys.setprofile(watch)
        try:
            run()
        except BaseException as error:
            raised.append(error)
        finally:
            sys.setprofile(None)

    thread = threading.Thread(target=watched, name="recsdk-init-fn")
    thread.start()
    thread.join()
    if raised:
        raise raised[0]
