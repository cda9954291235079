"""What ranks that failed write into torch's store, and what the others read there."""

from __future__ import annotations

import atexit
import json
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple, TypeVar

from recsdk_core.agreement import attempt, text_of
from recsdk_sharding.exchange.agreement import message_of

__all__ = ["Failure", "FailureStore"]

T = TypeVar("T")

_SECONDS_TO_ANSWER = 5.0
"""After which a store counts as lost: its rank may have been stopped."""
_SECONDS_AT_EXIT = 5.0
"""How long a rank that failed keeps torch's store for the others to read from."""
_POLL_SECONDS = (0.005, 0.1)
_ALL = ""
"""What the names of the rounds of all ranks begin with."""


class Failure(NamedTuple):
    """What a rank that failed says."""

    rank: int
    text: str
    where: str
    """Type and line; those of ranks that do the same thing are equal."""

    @classmethod
    def of(cls, rank: int, error: BaseException) -> Failure:
        """Of an exception that is being raised."""
        traceback = error.__traceback__
        while traceback is not None and traceback.tb_next is not None:
            traceback = traceback.tb_next
        line = ""
        if traceback is not None:
            line = f"{traceback.tb_frame.f_code.co_filename}:{traceback.tb_lineno}"
        text = message_of(text_of(error)).decode(errors="replace")
        return cls(rank, text, f"{type(error).__name__} {line}")


class FailureStore:
    """The ranks' failures, in rounds: after all have failed alike the next one begins.

    Ranks that do something without the others have rounds of their own. If one of these ends
    otherwise, all ranks find it in the round that they are in.

    Calls raise TimeoutError if the store does not answer, and what torch raises if it is gone.
    """

    def __init__(self, find: Callable[[], Any], size: int) -> None:
        """`find`: gives torch's store of the ranks, which is not kept.

        Else its port would not be free again when the process group is destroyed.
        """
        self._find = find
        self._size = size
        self._rounds: Counter[str] = Counter()
        self._is_lost = False

    def tell(self, own: Failure, seconds: float, ranks: Sequence[int] | None = None) -> bool:
        """Writes a failure; True if these ranks fail at the same place within `seconds`.

        All of them that fail get the same answer. None: all ranks.
        """
        scope = _ALL if ranks is None else "_".join(map(str, ranks)) + ":"
        every = range(self._size) if ranks is None else ranks

        def write() -> bool:
            is_together = self._tell(own, seconds, scope, every)
            if not is_together and ranks is not None:
                first = self._find().get(self._key("first", scope))
                self._find().compare_set(self._key("first"), "", first)
                self._decide(self._find(), _ALL, is_together=False)
            return is_together

        is_together = self._asked(write, seconds + _SECONDS_TO_ANSWER)
        self._rounds[scope] += int(is_together)
        return is_together

    def first(self) -> Failure | None:
        """What the first rank that failed says; None: none failed."""
        return self._asked(lambda: self._read("first"), _SECONDS_TO_ANSWER)

    def acknowledge(self) -> None:
        """Says that this rank knows of a failure, its own or another's."""
        self._asked(lambda: self._find().add("seen", 1), _SECONDS_TO_ANSWER)

    def is_apart(self) -> bool:
        """Whether a rank has failed by itself."""
        key, store = self._key("verdict"), self._find()
        return bool(store.check([key])) and store.get(key) == b"apart"

    def keep_until_seen(self, rank: int) -> None:
        """Lets the others read at exit, if this rank has the store: without torchrun, rank 0."""
        if rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
            atexit.register(self._wait_until_seen, self._find())

    def _wait_until_seen(self, store: Any) -> None:
        end = time.monotonic() + _SECONDS_AT_EXIT
        with suppress(Exception):
            while store.add("seen", 0) < self._size and time.monotonic() < end:
                time.sleep(_POLL_SECONDS[1])

    def _tell(self, own: Failure, seconds: float, scope: str, ranks: Sequence[int]) -> bool:
        store = self._find()
        store.set(self._key(str(own.rank), scope), json.dumps(own))
        store.compare_set(self._key("first", scope), "", json.dumps(own))
        if store.add(self._key("count", scope), 1) == len(ranks):
            self._forget_last_round(store, scope, ranks)
            every = [self._read(str(rank), scope) for rank in ranks]
            found = {each.where for each in every if each is not None}
            return self._decide(store, scope, is_together=len(found) == 1)
        pause, longest = _POLL_SECONDS
        end = time.monotonic() + seconds
        while not store.check([self._key("verdict", scope)]) and time.monotonic() < end:
            time.sleep(pause)
            pause = min(2 * pause, longest)
        return self._decide(store, scope, is_together=False)

    def _decide(self, store: Any, scope: str, *, is_together: bool) -> bool:
        """Proposes an answer; returns the one that came first."""
        proposed = "together" if is_together else "apart"
        answer: bytes = store.compare_set(self._key("verdict", scope), "", proposed)
        return answer == b"together"

    def _forget_last_round(self, store: Any, scope: str, ranks: Sequence[int]) -> None:
        """Deletes its texts, which all ranks have done with: they have counted in this round."""
        for name in ("first", "count", *map(str, ranks)):
            store.delete_key(f"{scope}{self._rounds[scope] - 1}/{name}")

    def _read(self, name: str, scope: str = _ALL) -> Failure | None:
        key, store = self._key(name, scope), self._find()
        return Failure(*json.loads(store.get(key))) if store.check([key]) else None

    def _key(self, name: str, scope: str = _ALL) -> str:
        return f"{scope}{self._rounds[scope]}/{name}"

    def _asked(self, call: Callable[[], T], seconds: float) -> T:
        """What a call gives; on a thread, since torch waits for a store without end."""
        if self._is_lost:
            raise TimeoutError("the store of the ranks does not answer")
        found: list[tuple[T | None, BaseException | None]] = []
        thread = threading.Thread(target=lambda: found.append(attempt(call)), daemon=True)
        thread.start()
        thread.join(seconds)
        if not found:
            self._is_lost = True
            raise TimeoutError(f"the store of the ranks did not answer in {seconds} s")
        result, error = found[0]
        if error is not None:
            raise error
        return result  # type: ignore[return-value]
