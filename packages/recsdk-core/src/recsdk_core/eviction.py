"""Who leaves a full table, and which keys expire."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

from recsdk_core._internal.checks import (
    int_within,
    keep_plain_numbers,
    require_number,
    require_one_of,
)

__all__ = ["Evict", "EvictionClock"]

Order: TypeAlias = Literal[
    "lru", "lfu", "score", "show_click", "show_click_totals", "low_norm", "function"
]
Clock: TypeAlias = Literal["step", "time"]

Places: TypeAlias = Callable[..., Any]

_BY_CLICKS = ("show_click", "show_click_totals")
_ORDERS = ("lru", "lfu", "score", *_BY_CLICKS, "low_norm", "function")
_COLUMNS = ("step", "time", "count", "score")

_MOST_COUNT = 2**36
_MOST_RECORDS = 2**32 - 2
_LEAST_WEIGHT, _MOST_WEIGHT = 2.0**-16, 2.0**20


@dataclass(frozen=True, kw_only=True)
class Evict:
    """A rule for who leaves when other keys need the room; `Table(eviction=...)` takes it.

    Make one with `Evict.lru`, `lfu`, `score`, `show_click`, `show_click_totals`, `low_norm` or
    `function`. In a group of keys that is full, see `Table`, the keys that are lowest in the rule's
    order leave, those lower by a fixed hash first among equals. With `expiring` keys also leave
    that were not seen for long, or a share of all. Each occurrence of a key in a call that inserts
    counts as seeing it; evaluation sees none. Keys of the step that needs the room stay. New keys
    for which no other may leave are refused, the lowest first. Steps end at 2**63 - 1: all calls
    from there on are of that step.

    Making one raises ValueError or TypeError that names the setting; of what a setting may be, see
    below. Rules do not change, so any thread may use them.
    """

    order: Order
    """What the order follows from."""
    by: Clock = "step"
    """What `lru` takes for the time; of "function" "time" if that is one of its columns."""
    half_life: float | None = None
    """Of "lfu": steps after which an occurrence counts half, above 0; None: all count alike."""
    min_age: int = 0
    """Steps that a key stays at least, from the one in which it came: 0 to 2**63 - 1."""
    ttl: int | None = None
    """Steps, or with `by="time"` time, after which a key that was not seen expires, 1 or more."""
    rare_ttl: int | None = None
    """The same of a key that was seen less than `rare_count` times; 1 or more, below `ttl`."""
    rare_count: int | None = None
    """How often a key must be seen so as not to be rare, 2 to 2**36."""
    expire_every: int | None = None
    """Steps between two looks at all keys: for those that expire, norms, a function; 1 or more,
    None: 100."""
    alpha: float | None = None
    """Of "show_click" and "show_click_totals": what an occurrence adds to a key's score; None of
    others."""
    beta: float | None = None
    """The same: what a click adds."""
    decay: float | None = None
    """The same: what a step leaves of a score, above 0, up to 1; of "show_click_totals" one that
    sees the key."""
    share: float | None = None
    """The part of each group's keys that leaves at each look, above 0, up to 1; None: none."""
    below: float | None = None
    """Of "low_norm": keys of a lower norm leave at each look, above 0; None: none do so."""
    places: Places | None = None
    """Of "function": makes where keys stand of their columns."""
    churn_steps: int | None = None
    """Steps within which a key that left counts as returned if it gets a row again, 1 or more."""
    churn_records: int | None = None
    """Keys that left and are remembered, 1 to 2**32 - 2; None: 2**20."""

    def __post_init__(self) -> None:
        keep_plain_numbers(self)
        require_one_of("Evict", _ORDERS, order=self.order)
        require_one_of("Evict", ("step", "time"), by=self.by)
        if self.by == "time" and self.order not in ("lru", "function"):
            why = {
                "lfu": "counts have no time, and half_life is in steps",
                "score": "scores have no time",
                **dict.fromkeys(_BY_CLICKS, "shows and clicks have no time, and decay is by steps"),
                "low_norm": "norms have no time",
            }[self.order]
            raise ValueError(f"Evict: by='time' is for lru, got order={self.order!r}: {why}")
        if self.half_life is not None:
            require_number("Evict", half_life=self.half_life)
            if self.order != "lfu":
                raise ValueError(f"Evict: half_life is for lfu, got order={self.order!r}")
            if not 0.0 < self.half_life < float("inf"):
                raise ValueError(
                    f"Evict: half_life must be a finite number above 0, got {self.half_life}"
                )
        int_within("Evict", 0, 2**63, min_age=self.min_age)
        self._check_show_click()
        self._check_places()
        self._check_expiry()
        self._check_looks()
        self._check_churn()

    def _check_show_click(self) -> None:
        given = {"alpha": self.alpha, "beta": self.beta, "decay": self.decay}
        for name, value in given.items():
            if (value is not None) != self.takes_clicks:
                raise ValueError(
                    f"Evict: {name} is for show_click, which needs it, got {name}={value} with "
                    f"order={self.order!r}"
                )
        if self.alpha is None or self.beta is None or self.decay is None:
            return
        require_number("Evict", alpha=self.alpha, beta=self.beta, decay=self.decay)
        for name, weight in (("alpha", self.alpha), ("beta", self.beta)):
            if weight != 0 and not _LEAST_WEIGHT <= weight <= _MOST_WEIGHT:
                raise ValueError(f"Evict: {name} must be 0, or from 2**-16 to 2**20, got {weight}")
        if self.alpha == 0 and self.beta == 0:
            raise ValueError("Evict: alpha and beta are 0, so all keys would be alike; set one")
        if not 0.0 < self.decay <= 1.0:
            raise ValueError(f"Evict: decay must be above 0, up to 1, got {self.decay}")

    def _check_places(self) -> None:
        if (self.places is not None) != (self.order == "function"):
            raise ValueError(
                f"Evict: places is for function, which needs it, got places={self.places!r} with "
                f"order={self.order!r}"
            )
        if self.places is None:
            return
        if not callable(self.places):
            raise TypeError(f"Evict: the function must be callable, got {self.places!r}")
        parameters = _parameters_of(self.places)
        by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
        others = [name for name, each in parameters.items() if each.kind not in by_name]
        if others:
            raise ValueError(
                f"Evict: the function is called with columns by name, got {', '.join(others)} that "
                "has none; make it a parameter that can be given by its name"
            )
        if not parameters or not set(parameters) <= {*_COLUMNS, "now"}:
            raise ValueError(
                "Evict: the parameters of the function name columns, some of "
                f"{', '.join(_COLUMNS)} and now, got {', '.join(parameters) or 'none'}"
            )
        if (self.by == "time") != ("time" in parameters):
            raise ValueError(f"Evict: by={self.by!r}, and time is a column or not; leave by out")

    def _check_expiry(self) -> None:
        if self.ttl is not None:
            int_within("Evict", 1, 2**63, ttl=self.ttl)
        if (self.rare_ttl is None) != (self.rare_count is None):
            raise ValueError(
                "Evict: rare_ttl and rare_count belong together, got "
                f"rare_ttl={self.rare_ttl}, rare_count={self.rare_count}"
            )
        if self.rare_ttl is not None:
            int_within("Evict", 1, 2**63, rare_ttl=self.rare_ttl)
            int_within("Evict", 2, _MOST_COUNT + 1, rare_count=self.rare_count)
            if self.ttl is not None and self.rare_ttl >= self.ttl:
                raise ValueError(
                    f"Evict: rare_ttl must be below ttl, got {self.rare_ttl} and {self.ttl}"
                )
        if self.share is not None:
            require_number("Evict", share=self.share)
            if not 0.0 < self.share <= 1.0:
                raise ValueError(f"Evict: share must be above 0, up to 1, got {self.share}")

    def _check_looks(self) -> None:
        if self.below is not None:
            require_number("Evict", below=self.below)
            if self.order != "low_norm":
                raise ValueError(f"Evict: below is for low_norm, got order={self.order!r}")
            if not 0.0 < self.below < float("inf"):
                raise ValueError(f"Evict: below must be a finite number above 0, got {self.below}")
        if self.expire_every is not None:
            int_within("Evict", 1, 2**63, expire_every=self.expire_every)
            if not self.expires and self.order not in ("low_norm", "function"):
                raise ValueError(
                    "Evict: expire_every is given, and no key expires; set ttl or share"
                )

    def _check_churn(self) -> None:
        if self.churn_steps is not None:
            int_within("Evict", 1, 2**63, churn_steps=self.churn_steps)
        if self.churn_records is not None:
            int_within("Evict", 1, _MOST_RECORDS + 1, churn_records=self.churn_records)
            if self.churn_steps is None:
                raise ValueError("Evict: churn_records is given, and churn_steps is not; set it")

    @property
    def expires(self) -> bool:
        """Whether keys leave at looks: not seen for long, a part of all, or of low norm."""
        return self._is_expiring or self.below is not None

    @property
    def _is_expiring(self) -> bool:
        return any(x is not None for x in (self.ttl, self.rare_ttl, self.share))

    @property
    def columns(self) -> tuple[str, ...]:
        """What "function" is given, some of step, time, count, score and now; of others nothing."""
        return () if self.places is None else tuple(inspect.signature(self.places).parameters)

    @property
    def takes_clicks(self) -> bool:
        """Whether calls that insert may bring the clicks of their keys."""
        return self.order in _BY_CLICKS

    @property
    def needs_clicks(self) -> bool:
        """Whether calls that insert must bring the clicks of their keys."""
        return self.beta is not None and self.beta > 0

    @staticmethod
    def lru(*, by: Clock = "step", min_age: int = 0) -> Evict:
        """The key that was seen longest ago leaves first.

        `by="step"`: a lease's step counts; a call without one is a step of its own, after the
        latest. `by="time"`: the largest of the times that came with the key counts, in any unit;
        calls take them as `times`, or from `Table.time`. Keys of unknown time, -2**63, leave first,
        and do not expire. Keys stay `min_age` steps at least, 0 to
        2**63 - 1, as in the rules below. Raises ValueError or TypeError for anything else.

        >>> import numpy as np
        >>> from recsdk_core import Evict, Table
        >>> table = Table(dim=2, max_rows=2, eviction=Evict.lru())
        >>> for key in (1, 2, 1, 3):
        ...     _ = table.find_or_insert(np.array([key]))
        >>> [key in table for key in (1, 2, 3)], table.stats().evicted
        ([True, False, True], 1)
        """
        return Evict(order="lru", by=by, min_age=min_age)

    @staticmethod
    def lfu(*, half_life: float | None = None, min_age: int = 0) -> Evict:
        """The key that was seen least often leaves first; duplicates in a call count.

        With `half_life`, in steps, an occurrence counts half after so many steps, a quarter after
        twice as many: without it keys that were frequent once stay for ever. Raises ValueError
        unless it is finite and above 0.
        """
        return Evict(order="lfu", half_life=half_life, min_age=min_age)

    @staticmethod
    def score(*, min_age: int = 0) -> Evict:
        """The key with the lowest score leaves first.

        Calls take finite `scores`, float32. In each step the largest score of a key replaces the
        one that it had. A key that came without a score has 0. Raises as `lru`.
        """
        return Evict(order="score", min_age=min_age)

    @staticmethod
    def show_click(
        *, alpha: float = 1.0, beta: float = 0.0, decay: float = 1.0, min_age: int = 0
    ) -> Evict:
        """The key with the lowest score leaves first, where shows and clicks make the score.

        Each occurrence of a key adds `alpha`, and each of its `clicks` `beta`; an occurrence counts
        as often as `counts` of the call says. A step leaves `decay` of what was there before, so
        keys compare alike at whatever step one looks at them. `alpha` and `beta` are 0, or 2**-16
        to 2**20, and count in whole numbers of 2**-16; scores end at 2**36. Calls that insert must
        bring `clicks` if `beta` is above 0; an `upsert` without them is a show without a click.
        `decay` is above 0, up to 1. Raises ValueError for other numbers, or with both weights 0.

        >>> import numpy as np
        >>> from recsdk_core import Evict, Table
        >>> table = Table(dim=2, max_rows=2, eviction=Evict.show_click(beta=3.0, decay=0.5))
        >>> _ = table.find_or_insert(np.array([1, 2, 2]), clicks=np.array([1, 0, 0]))
        >>> _ = table.find_or_insert(np.array([3]), clicks=0)
        >>> [key in table for key in (1, 2, 3)], table.explain(1).columns["score"]
        ([True, False, True], 2.0)
        """
        return Evict(order="show_click", alpha=alpha, beta=beta, decay=decay, min_age=min_age)

    @staticmethod
    def show_click_totals(
        *, alpha: float = 1.0, beta: float = 0.0, decay: float = 1.0, min_age: int = 0
    ) -> Evict:
        """The key with the lowest score leaves first, to which all its shows and clicks count anew.

        A step that sees a key adds `alpha` times all its shows so far, this step's included, and
        `beta` times all its clicks, and leaves `decay` of the sum and of the score before. The
        first step that sees it leaves all of that sum; steps that do not see it change nothing. So
        keys that are not seen never lose, and what was shown early counts at each step again: the
        code of Rec SDK does so, and who is free to choose takes `Evict.show_click`. Numbers and
        errors are as there, 8 bytes more of each key are kept, and scores end at 2**46. Where a
        share leaves at a look, of keys that stand alike the smaller one does first.

        >>> import numpy as np
        >>> from recsdk_core import Evict, Table
        >>> table = Table(dim=2, max_rows=9, eviction=Evict.show_click_totals(decay=0.5))
        >>> for keys in ([1, 1], [1], [2, 2]):
        ...     _ = table.find_or_insert(np.array(keys))
        >>> [table.explain(key).columns["score"] for key in (1, 2)]  # (2 + 3) / 2, and 2
        [2.5, 2.0]
        """
        return Evict(
            order="show_click_totals", alpha=alpha, beta=beta, decay=decay, min_age=min_age
        )

    @staticmethod
    def low_norm(
        *, every: int | None = None, below: float | None = None, min_age: int = 0
    ) -> Evict:
        """The key leaves first whose row has the lowest norm: rows that learned little go.

        It is the root of the sum of squares of the row's weights, of all its columns. A table takes
        the norms of all rows in a look, at the first call of each step that is a multiple of
        `every`, 100 by default, or has passed one; before the call decides. In between the order is
        that of the latest look. A key that came since stands above all others, so that nobody
        leaves before it was trained; equal ones go by a fixed hash. A row with a number that is not
        finite has norm infinity, or 0 if it is not a number. With `below` keys of a lower norm
        leave at each look, whatever room there is: they expire. The table then needs no `max_rows`.

        Norms depend on training, so the batches of all steps before must have been trained when a
        look is due: with leases, a call that comes earlier raises BusyError. Pipelines of
        recsdk_pipeline train first; those of torchrec look ahead and fail. Tables that are cut by
        columns are refused, as no rank has a whole row, and an `Index` unless its `make_rows` has a
        method `norms`. Cost: at each look a pass over the weights of the rows that came or changed
        since the look before, of an `Index` of all; a bit and 4 bytes a row; and 24 to 56 bytes a
        row whose norm has changed until the batch that looked is done, for readers that must not
        see it yet. Raises ValueError for `every` below 1, and unless `below` is finite and above 0.

        >>> import numpy as np
        >>> from recsdk_core import Evict, Table
        >>> table = Table(dim=2, max_rows=2, eviction=Evict.low_norm(every=1))
        >>> table.upsert(np.array([1, 2]), np.array([[3, 4], [0.5, 0]], np.float32))
        >>> _ = table.find_or_insert(np.array([3]))
        >>> [key in table for key in (1, 2, 3)], table.explain(1).columns["norm"]
        ([True, False, True], 5.0)
        """
        return Evict(order="low_norm", expire_every=every, below=below, min_age=min_age)

    @staticmethod
    def function(places: Places, *, every: int | None = None, min_age: int = 0) -> Evict:
        """The key leaves first for which a function gives the lowest number.

        The names of its parameters say which columns it is given, numpy arrays (n,), and what the
        table keeps of a key: `step`, int64, that saw it last; `time`, int64, the largest that came
        with it, which calls must then bring, as for `lru(by="time")`; `count`, int64, how often it
        was seen; `score`, float32, that calls gave it last, 0 before. `now` is the step of the last
        call that inserted, an int. It returns n numbers, finite in single precision, in which they
        are kept. It must be pure: what it says of a key must follow from that key's columns and
        `now` alone, on all ranks. It is called for up to 32,768 keys at a time, of which most with
        equal columns are shown once and some again, under the table's lock, and must not call the
        table. What it raises takes the call back.

        It is called in looks at all keys, as `low_norm` has them: at the first call of each step
        that is a multiple of `every`, 100 by default, or has passed one. In between the order is
        that of the latest look, and keys that came since stand above all others. No batch need have
        been trained. A checkpoint has the numbers and the function's name, not the function: give
        it again to the table that loads. The name is for people: a table with another function, or
        another rule, loads it too, and goes on by its own. Cost: a pass at each look over the
        columns of keys that came or were seen since the look before. If the function has a
        parameter `now`, it is asked too about all other keys, once for each different set of
        columns, and the pass is over 4 bytes more of each key. Each different set of columns takes
        about 50 to 120 bytes, by how many columns are kept: where few keys are alike, as with times
        in nanoseconds, as much for each key. A decay needs no `now`: what
        `count * 0.5 ** ((now - step) / 100)` says of two keys, `np.log2(count) + step / 100` says
        too.

        >>> import numpy as np
        >>> from recsdk_core import Evict, Table
        >>> rule = Evict.function(lambda step, count: count + step / 10, every=1)
        >>> table = Table(dim=2, max_rows=2, eviction=rule)
        >>> for keys in ([1, 1, 1], [2], [3]):
        ...     _ = table.find_or_insert(np.array(keys))
        >>> [key in table for key in (1, 2, 3)]
        [True, False, True]
        """
        is_by_time = callable(places) and "time" in _parameters_of(places)
        by: Clock = "time" if is_by_time else "step"
        return Evict(order="function", by=by, places=places, expire_every=every, min_age=min_age)

    def expiring(
        self,
        *,
        ttl: int | None = None,
        rare_ttl: int | None = None,
        rare_count: int | None = None,
        share: float | None = None,
        every: int | None = None,
    ) -> Evict:
        """This rule, and keys expire: they also leave once they were not seen for `ttl`.

        Give `ttl`, `rare_ttl` with `rare_count`, or `share`, all in one call: a second is refused.

        `ttl` counts steps, or with `by="time"` what times count, up to `Table.time`, or the `now`
        of the call that looks. Keys that were seen less than `rare_count` times, which is then kept
        of each, expire after `rare_ttl` already; `ttl` may be left out. A key whose time nobody
        knows does not expire. Keys below `min_age` stay.

        `share` makes a part of the keys leave at each look, whatever room there is: of each group,
        see `Table`, the lowest in the rule's order, rounded down but one key at least. Without
        `max_rows` all keys are one group.

        The table looks for such keys in the first call of each step that is a multiple of `every`,
        100 by default, or has passed one; and in `Table.expire`. It decides by what the step before
        left, but the keys that the call brings stay. With it a table needs no `max_rows`. Cost: a
        pass over 8 to 48 bytes a row at each look. `Evict.low_norm` and `Evict.function` have the
        looks that `every` says here, or else their own. Raises ValueError if nothing is given, if
        the rule expires keys already, and for a number below 1, a `rare_count` below 2 or above
        2**36, a `rare_ttl` not below `ttl`, or a `share` that is not above 0, up to 1.

        >>> import numpy as np
        >>> from recsdk_core import Evict, Table
        >>> table = Table(dim=2, eviction=Evict.lru().expiring(ttl=2, every=1))
        >>> for key in (1, 2, 2, 2):
        ...     _ = table.find_or_insert(np.array([key]))
        >>> 1 in table, table.stats().expired
        (False, 1)
        """
        if self._is_expiring:
            raise ValueError(
                f"Evict.expiring: the rule expires keys already, {self}; give all in one call"
            )
        made = replace(
            self,
            ttl=ttl,
            rare_ttl=rare_ttl,
            rare_count=rare_count,
            share=share,
            expire_every=self.expire_every if every is None else every,
        )
        if not made._is_expiring:
            raise ValueError(
                "Evict.expiring: give ttl, rare_ttl with rare_count, or share; got none"
            )
        return made

    def with_churn(self, steps: int, *, max_records: int | None = None) -> Evict:
        """This rule, and keys that come back are counted: `stats().returned`.

        A key has returned if it gets a row again at most `steps` steps after the one in which it
        left, for others, since it expired or by `Table.evict`. Erased keys are not remembered, and
        `erase` of a key that has left forgets it. Ask for it once: a second call is refused.
        `max_records` keys are remembered, 2**20 by default, divided over groups of keys, those of
        `max_rows` where there are such; a table takes one for each group at least. In a full group
        the key that left first is forgotten, the lowest by a fixed hash of those of one step.
        `stats().churn_lost` counts keys that were forgotten though they could have returned in
        time: while it is 0, `returned` is exact, else at least so many have. Both are counts, and
        decide nothing: as other counts they begin at 0 in each process, and loading a checkpoint
        forgets who left. A batch in flight counts once readers see it. Cost: some 40 bytes a key
        that is remembered, and a look for each key that comes. Raises ValueError for a second call,
        for `steps` below 1, and unless `max_records` is 1 to 2**32 - 2.

        >>> import numpy as np
        >>> from recsdk_core import Evict, Table
        >>> table = Table(dim=2, max_rows=2, eviction=Evict.lru().with_churn(10))
        >>> for key in (1, 2, 3, 1):
        ...     _ = table.find_or_insert(np.array([key]))
        >>> table.stats().evicted, table.stats().returned
        (2, 1)
        """
        if self.churn_steps is not None:
            raise ValueError(
                f"Evict.with_churn: the rule counts keys that return within {self.churn_steps} "
                "steps already; ask for it once"
            )
        return replace(self, churn_steps=steps, churn_records=max_records)


def _parameters_of(places: Places) -> Mapping[str, inspect.Parameter]:
    try:
        return inspect.signature(places).parameters
    except ValueError:  # of some that are compiled
        raise ValueError(
            f"Evict: the function must tell its parameters, got {places!r}; give a function of "
            "Python's that calls it"
        ) from None


@dataclass(frozen=True, kw_only=True)
class EvictionClock:
    """Where the clock of a table with eviction stands."""

    step: int | None = None
    """The step of the last call that inserted, as the table counts; None: there was none."""
    time: int | None = None
    """As `Table.time`; None: there was none yet."""
