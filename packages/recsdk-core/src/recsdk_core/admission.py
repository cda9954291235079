"""Which new keys get a row."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

from recsdk_core._internal.checks import (
    int_within,
    keep_plain_numbers,
    require_finite,
    require_number,
    require_one_of,
)
from recsdk_core.virtual_shards import NUM_VIRTUAL_SHARDS

__all__ = ["RECORDS", "TERM_SETTINGS", "Admit", "record_names"]

Kind: TypeAlias = Literal[
    "count", "count_sketch", "probability", "show_click", "show_click_of_step", "all", "any"
]

_MOST_COUNT = 2**31
_MOST_SKETCHED = 2**15
_FEWEST_BYTES = 8 * NUM_VIRTUAL_SHARDS
_MOST_TERMS = 63
_SETTINGS = {
    "count": {"n"},
    "count_sketch": {"n"},
    "probability": {"p"},
    "show_click": {"alpha", "beta", "threshold"},
    "show_click_of_step": {"alpha", "beta", "threshold"},
}
_BY_CLICKS = ("show_click", "show_click_of_step")
TERM_SETTINGS = ("n", "p", "alpha", "beta", "threshold")
"""What rules are made of, by name; each kind has some of them."""
RECORDS = ("admit_keys", "admit_counts", "admit_steps", "admit_clicks")
"""What is kept of keys without a row, by name; clicks only if the rule takes them.

Of a sketch: four counters of 16 bits as a count, under a key of their virtual shard that stands for
them, and 0 as a step.
"""


@dataclass(frozen=True, kw_only=True)
class Admit:
    """A rule for which new keys get a row; `Table(admission=...)` takes it.

    Make one with `Admit.count`, `count_sketch`, `probability`, `show_click` or
    `show_click_of_step`, and join two with `&` and `|`. The rule decides on a key without a row in
    each step that sees it, by how often that step and those before have seen it: duplicates count,
    and each occurrence as often as `counts` of the call says. A key that the rule keeps out is
    NOT_ADMITTED: it reads the table's default value and is not trained. `upsert` gives keys rows in
    any case. Evaluation counts nothing.

    Neither the order of the keys nor the number of threads matters. A step may be cut into calls
    in any way: after it the same keys have rows, unless `max_records` is reached; only the outcomes
    of its calls differ. Making a rule raises ValueError or TypeError that names the setting.
    """

    kind: Kind
    """What decides."""
    n: int | None = None
    """The occurrence that is admitted: of "count" 1 to 2**31 - 1, of "count_sketch" 2**15 - 1."""
    p: float | None = None
    """Of "probability": above 0, up to 1."""
    alpha: float | None = None
    """Of "show_click" and "show_click_of_step": what an occurrence is worth, 0 or more."""
    beta: float | None = None
    """The same: what a click is worth, 0 or more."""
    threshold: float | None = None
    """The same: what a key must be worth, above 0."""
    max_records: int | None = None
    """Keys without a row whose count is kept; None: no limit."""
    max_bytes: int | None = None
    """Of the counters of "count_sketch", and of what it is joined to: 524,288 or more."""
    parts: tuple[Admit, ...] = ()
    """Of "all" and "any": the two rules."""

    def __post_init__(self) -> None:
        keep_plain_numbers(self)
        require_one_of("Admit", get_args(Kind), kind=self.kind)
        if not isinstance(self.parts, tuple):
            raise TypeError(f"Admit: parts must be a tuple of rules, got {self.parts!r}")
        wanted = _SETTINGS.get(self.kind, {"parts"})
        given = {name for name in TERM_SETTINGS if getattr(self, name) is not None}
        given |= {"parts"} if self.parts else set()
        if given != wanted:
            raise ValueError(
                f"Admit: kind={self.kind!r} takes {', '.join(sorted(wanted))}, got {sorted(given)}"
            )
        if self.n is not None:
            most = _MOST_SKETCHED if self.kind == "count_sketch" else _MOST_COUNT
            int_within("Admit", 1, most, n=self.n)
        if self.p is not None:
            require_number("Admit", p=self.p)
            if not 0.0 < self.p <= 1.0:
                raise ValueError(f"Admit: p must be above 0, up to 1, got {self.p}")
        self._check_show_click()
        if self.parts:
            self._check_parts()
        self._check_limits()

    def _check_limits(self) -> None:
        kinds = {term.kind for term in self.terms()}
        has_records = bool(kinds & {"count", "show_click"})
        if "count_sketch" in kinds and has_records:
            raise ValueError(
                "Admit: a rule goes by a sketch or by exact counts, which have all that a sketch "
                "has; take Admit.count in place of Admit.count_sketch"
            )
        if self.max_records is not None:
            int_within("Admit", 1, 2**63, max_records=self.max_records)
            if not has_records:
                raise ValueError(
                    "Admit: max_records must be None where the rule counts nothing, got "
                    f"{self.max_records}; leave it out"
                )
        if self.max_bytes is not None:
            int_within("Admit", _FEWEST_BYTES, 2**63, max_bytes=self.max_bytes)
        if (self.max_bytes is not None) != ("count_sketch" in kinds):
            raise ValueError(
                f"Admit: max_bytes is of rules with count_sketch, which need it; got "
                f"max_bytes={self.max_bytes} with {sorted(kinds)}"
            )

    def _check_show_click(self) -> None:
        if self.alpha is None or self.beta is None or self.threshold is None:
            return
        settings = {"alpha": self.alpha, "beta": self.beta, "threshold": self.threshold}
        require_finite("Admit", **settings)
        for name, weight in settings.items():
            if weight < 0:
                raise ValueError(f"Admit: {name} must be 0 or more, got {weight}")
        if self.alpha == 0 and self.beta == 0:
            raise ValueError(
                "Admit: alpha and beta are 0, so no key would ever have a row; set one"
            )
        if self.threshold == 0:
            raise ValueError("Admit: threshold is 0, so every key has a row; leave the rule out")

    def _check_parts(self) -> None:
        if len(self.parts) != 2 or not all(isinstance(part, Admit) for part in self.parts):
            raise TypeError(f"Admit: parts must be two Admit, got {self.parts!r}")
        if sum(1 for _ in self.terms()) > _MOST_TERMS:
            raise ValueError(f"Admit: a rule has at most {_MOST_TERMS} terms; join fewer")

    @staticmethod
    def count(n: int, *, max_records: int | None = None) -> Admit:
        """Admits a key at its nth occurrence, duplicates counted.

        The counts of keys without a row are kept exactly, 32 bytes and an entry of an index each.
        `max_records` limits how many: it divides over the groups of keys of `max_rows`, and is at
        least their number, or without that over the groups that a `max_rows` of its size would
        have. From a full group the counts leave that were seen longest ago, the lowest by a fixed
        hash first; those of the step stay. A key whose count left, or found no room, counts from 0
        again. `stats()` has `admission_records` and `records_lost`.

        A key that is admitted and then finds no room under `max_rows` is REFUSED; it keeps its
        count, if one was kept before. A key that leaves the table counts from 0 again.

        >>> import numpy as np
        >>> from recsdk_core import Admit, Outcome, Table
        >>> table = Table(dim=2, admission=Admit.count(3))
        >>> for keys in ([7, 7, 8], [7, 8]):
        ...     _, outcomes = table.map(np.array(keys), insert=True)
        ...     print([Outcome(outcome).name for outcome in outcomes])
        ['NOT_ADMITTED', 'NOT_ADMITTED', 'NOT_ADMITTED']
        ['INSERTED', 'NOT_ADMITTED']
        """
        return Admit(kind="count", n=n, max_records=max_records)

    @staticmethod
    def count_sketch(n: int, max_bytes: int) -> Admit:
        """Admits a key at its nth occurrence or seldom earlier, by counters of `max_bytes` in all.

        `n`: 1 to 2**15 - 1. `max_bytes`: 524,288 or more, of the table, whatever ids come; a rank
        has the part of its virtual shards. Counters are two bytes each. Each of the 65,536 shards
        has a count-min sketch of its own, 4 rows of w = max_bytes // 524,288 counters, in which a
        key has one counter a row. A key counts as the least of its four counters as the step before
        left them, and as often as the step itself brings it, exactly. So what others do in a step
        does not matter to a key, and no key is admitted late.

        It may be early. Where N occurrences were counted in a shard, a key counts e * N / w too
        much at most, but for one in 55 keys (e**-4). Counters end at `n`, which alters no decision.
        What is counted are the occurrences of keys that a step leaves without a row. It stays
        counted: of keys that got a row later, were written, erased or evicted too. So a key that
        returns needs fewer occurrences than it did at first, where `Admit.count` begins anew; and a
        stream of new keys without end fills the counters, until all keys are let in. Size it for
        what keys without a row come in a run: with N of the whole table, e * 8 * N / max_bytes
        should stay well below `n`. `Admit.count` with `max_records` forgets instead.

        Beside the counters the table keeps the keys of the last step that got no row, and what
        batches in flight have changed. It goes with `Admit.probability`, not with rules that count
        exactly. A save holds the counters that are not 0, a delta too; a table that loads them has
        the same `max_bytes`.

        Source: G. Cormode and S. Muthukrishnan, "An improved data stream summary: the count-min
        sketch and its applications", Journal of Algorithms 55 (2005).

        >>> import numpy as np
        >>> from recsdk_core import Admit, Table
        >>> table = Table(dim=2, admission=Admit.count_sketch(3, max_bytes=2**20))
        >>> for keys in ([7, 7, 8], [7, 8]):
        ...     _ = table.find_or_insert(np.array(keys))
        >>> 7 in table, 8 in table
        (True, False)
        """
        return Admit(kind="count_sketch", n=n, max_bytes=max_bytes)

    @staticmethod
    def probability(p: float) -> Admit:
        """Admits a key with probability `p` at each occurrence, without keeping anything of it.

        A step draws once for a key, from the table's seed and name, the key and the step's number
        as the table counts; a step that sees it k times admits it with probability 1 - (1 - p)**k.
        So do k occurrences over any number of steps, for draws of different steps are independent.
        The draw is the same on every machine, for any order, threads, cuts of a step into calls,
        and in a run that goes on from a checkpoint.
        """
        return Admit(kind="probability", p=p)

    @staticmethod
    def show_click(
        *,
        threshold: float,
        alpha: float = 1.0,
        beta: float = 0.0,
        max_records: int | None = None,
    ) -> Admit:
        """Admits a key once `alpha` times its shows and `beta` times its clicks reach `threshold`.

        Shows are its occurrences so far, this step's included, each as often as `counts` of the
        call says; clicks are the sum of its `clicks`. Both are kept of keys without a row as
        `Admit.count` keeps counts, and end at 2**31 - 1. Calls that insert must bring `clicks` if
        `beta` is above 0.

        >>> import numpy as np
        >>> from recsdk_core import Admit, Table
        >>> table = Table(dim=2, admission=Admit.show_click(beta=5.0, threshold=6.0))
        >>> _ = table.find_or_insert(np.array([7, 8]), clicks=np.array([1, 0]))
        >>> 7 in table, 8 in table
        (True, False)
        """
        return Admit(
            kind="show_click",
            alpha=alpha,
            beta=beta,
            threshold=threshold,
            max_records=max_records,
        )

    @staticmethod
    def show_click_of_step(*, threshold: float, alpha: float = 1.0, beta: float = 0.0) -> Admit:
        """Admits a key if its shows and clicks of one step reach `threshold`.

        It is `Admit.show_click` without a memory: what earlier steps brought of a key without a row
        is forgotten, so nothing is kept of it. A step may be cut into calls in any way.

        >>> import numpy as np
        >>> from recsdk_core import Admit, Table
        >>> table = Table(dim=2, admission=Admit.show_click_of_step(threshold=2.0))
        >>> for keys in ([7, 8, 8], [7]):
        ...     _ = table.find_or_insert(np.array(keys))
        >>> 7 in table, 8 in table
        (False, True)
        """
        return Admit(kind="show_click_of_step", alpha=alpha, beta=beta, threshold=threshold)

    def __and__(self, other: Admit) -> Admit:
        """Admits a key in a step in which both rules do."""
        return self._joined("all", other)

    def __or__(self, other: Admit) -> Admit:
        """Admits a key in a step in which one of the rules does, or both."""
        return self._joined("any", other)

    def _joined(self, kind: Kind, other: Admit) -> Admit:
        if not isinstance(other, Admit):
            return NotImplemented
        limits = {name: self._limit(other, name) for name in ("max_records", "max_bytes")}
        return Admit(kind=kind, parts=(self, other), **limits)

    def _limit(self, other: Admit, name: str) -> int | None:
        limits: list[int | None] = [getattr(rule, name) for rule in (self, other)]
        own, others = limits
        if own is not None and others is not None and own != others:
            raise ValueError(
                f"Admit: {name} is {own} in one rule and {others} in the other; a table keeps one "
                "count of a key: give one limit"
            )
        return others if own is None else own

    @property
    def takes_clicks(self) -> bool:
        """Whether calls that insert may bring the clicks of their keys."""
        return any(term.kind in _BY_CLICKS for term in self.terms())

    @property
    def keeps_clicks(self) -> bool:
        """Whether clicks are kept of keys without a row."""
        return any(term.kind == "show_click" for term in self.terms())

    @property
    def needs_clicks(self) -> bool:
        """Whether calls that insert must bring the clicks of their keys."""
        return any((term.beta or 0) > 0 for term in self.terms())

    def terms(self) -> Iterator[Admit]:
        """The rules that it is made of in postfix order, itself last."""
        for part in self.parts:
            yield from part.terms()
        yield self


def record_names(rule: Admit | None) -> tuple[str, ...]:
    """The names of `RECORDS` that a table with this rule has."""
    if rule is None:
        return ()
    return RECORDS if rule.keeps_clicks else RECORDS[:3]
