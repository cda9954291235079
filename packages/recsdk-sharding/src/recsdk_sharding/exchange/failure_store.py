"""What ranks that failed write into torch's store, and what the others read there."""

from __future__ import annotations

import atexit
import json
import os
import threading
import time
from collections.abc import Callable
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

    Calls raise TimeoutError if the store does not answer, and what torch raises if it is gone.
    """

    def __init__(self, find: Callable[[], Any], size: int) -> None:
        """`find`: gives torch's store of the ranks, which is not kept.

        Else its port would not be free again when the process group is destroyed.
        """
        self._find = find
        self._size = size
        self._round = 0
        self._is_lost = False

    def tell(self, own: Failure, seconds: float) -> bool:
        """Writes a failure; True if all ranks fail at the same place within `seconds`.

        All ranks that fail get the same answer.
        """
        is_together = self._asked(lambda: self._tell(own, seconds), seconds + _SECONDS_TO_ANSWER)
        self._round += int(is_together)
        return is_together

    def first(self) -> Failure | None:
        """What the first rank that failed says; None: none failed."""
        return self._asked(lambda: self._read("first"), _SECONDS_TO_ANSWER)

    def acknowledge(self) -> None:
        """Says that this rank knows."""
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
            while store.add("seen", 0) < self._size - 1 and time.monotonic() < end:
                time.sleep(_POLL_SECONDS[1])

    def _tell(self, own: Failure, seconds: float) -> bool:
        store = self._find()
        store.set(self._key(str(own.rank)), json.dumps(own))
        store.compare_set(self._key("first"), "", json.dumps(own))
        if store.add(self._key("count"), 1) == self._size:
            self._forget_last_round(store)
            every = [self._read(str(rank)) for rank in range(self._size)]
            found = {each.where for each in every if each is not None}
            return self._decide(store, is_together=len(found) == 1)
        pause, longest = _POLL_SECONDS
        end = time.monotonic() + seconds
        while not store.check([self._key("verdict")]) and time.monotonic() < end:
            time.sleep(pause)
            pause = min(2 * pause, longest)
        return self._decide(store, is_together=False)

    def _decide(self, store: Any, *, is_together: bool) -> bool:
        """Proposes an answer; returns the one that came first."""
        proposed = "together" if is_together else "apart"
        answer: bytes = store.compare_set(self._key("verdict"), "", proposed)
        return answer == b"together"

    def _forget_last_round(self, store: Any) -> None:
        """Deletes its texts, which all ranks have done with: they have counted in this round."""
        for name in ("first", "count", *map(str, range(self._size))):
            store.delete_key(f"{self._round - 1}/{name}")

    def _read(self, name: str) -> Failure | None:
        key, store = self._key(name), self._find()
        return Failure(*json.loads(store.get(key))) if store.check([key]) else None

    def _key(self, name: str) -> str:
        return f"{self._round}/{name}"

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
