"""Which new keys get a row."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, TypeAlias

from recsdk_core._internal.checks import require_finite, require_int, require_number, require_one_of

__all__ = ["RECORDS", "TERM_SETTINGS", "Admit", "record_names"]

Kind: TypeAlias = Literal["count", "probability", "show_click", "all", "any"]

_MOST_COUNT = 2**31
_MOST_TERMS = 63
_SETTINGS = {
    "count": {"n"},
    "probability": {"p"},
    "show_click": {"alpha", "beta", "threshold"},
}
TERM_SETTINGS = ("n", "p", "alpha", "beta", "threshold")
"""What rules are made of, by name; each kind has some of them."""
RECORDS = ("admit_keys", "admit_counts", "admit_steps", "admit_clicks")
"""What is kept of keys without a row, by name; clicks only if the rule takes them."""


@dataclass(frozen=True, kw_only=True)
class Admit:
    """A rule for which new keys get a row; `Table(admission=...)` takes it.

    Make one with `Admit.count`, `probability` or `show_click`, and join two with `&` and `|`. The
    rule decides on a key without a row in each step that sees it, by how often that step and those
    before have seen it: duplicates count, and each occurrence as often as `counts` of the call
    says. A key that the rule keeps out is NOT_ADMITTED: it reads the table's default value and is
    not trained. `upsert` gives keys rows in any case. Evaluation counts nothing.

    Neither the order of the keys nor the number of threads matters. A step may be cut into calls
    in any way: after it the same keys have rows, unless `max_records` is reached; only the outcomes
    of its calls differ.
    """

    kind: Kind
    """What decides."""
    n: int | None = None
    """Of "count": the occurrence that is admitted, 1 to 2**31 - 1."""
    p: float | None = None
    """Of "probability": above 0, up to 1."""
    alpha: float | None = None
    """Of "show_click": what an occurrence is worth, 0 or more."""
    beta: float | None = None
    """Of "show_click": what a click is worth, 0 or more."""
    threshold: float | None = None
    """Of "show_click": what a key must be worth, above 0."""
    max_records: int | None = None
    """Keys without a row whose count is kept; None: no limit."""
    parts: tuple[Admit, ...] = ()
    """Of "all" and "any": the two rules."""

    def __post_init__(self) -> None:
        require_one_of(
            "Admit", ("count", "probability", "show_click", "all", "any"), kind=self.kind
        )
        wanted = _SETTINGS.get(self.kind, {"parts"})
        given = {name for name in TERM_SETTINGS if getattr(self, name) is not None}
        given |= {"parts"} if self.parts else set()
        if given != wanted:
            raise ValueError(
                f"Admit: kind={self.kind!r} takes {', '.join(sorted(wanted))}, got {sorted(given)}"
            )
        if self.n is not None:
            require_int("Admit", 1, _MOST_COUNT, n=self.n)
        if self.p is not None:
            require_number("Admit", p=self.p)
            if not 0.0 < self.p <= 1.0:
                raise ValueError(f"Admit: p must be above 0, up to 1, got {self.p}")
        self._check_show_click()
        if self.parts:
            self._check_parts()
        if self.max_records is not None:
            require_int("Admit", 1, 2**63, max_records=self.max_records)
            if all(term.kind not in ("count", "show_click") for term in self.terms()):
                raise ValueError("Admit: max_records is given, and the rule counts nothing")

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
        `max_records` limits how many: it divides over the groups of keys of `max_rows`, or without
        that over the groups that a `max_rows` of its size would have. From a full group the counts
        leave that were seen longest ago, the lowest by a fixed hash first; those of the step stay.
        A key whose count left, or found no room, counts from 0 again. `stats()` has
        `admission_records` and `records_lost`.

        A key that is admitted and then finds no room under `max_rows` is REFUSED; it keeps its
        count, if one was kept before. A key that leaves the table counts from 0 again.

        >>> import numpy as np
        >>> from recsdk_core import Admit, Outcome, Table
        >>> table = Table(dim=2, admission=Admit.count(3))
        >>> for keys in ([7, 7, 8], [7, 8]):
        ...     _, outcomes = table.map(np.array(keys), True)
        ...     print([Outcome(outcome).name for outcome in outcomes])
        ['NOT_ADMITTED', 'NOT_ADMITTED', 'NOT_ADMITTED']
        ['INSERTED', 'NOT_ADMITTED']
        """
        return Admit(kind="count", n=n, max_records=max_records)

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

    def __and__(self, other: Admit) -> Admit:
        """Admits a key in a step in which both rules do."""
        return self._joined("all", other)

    def __or__(self, other: Admit) -> Admit:
        """Admits a key in a step in which one of the rules does, or both."""
        return self._joined("any", other)

    def _joined(self, kind: Kind, other: Admit) -> Admit:
        if not isinstance(other, Admit):
            return NotImplemented
        limits = {part.max_records for part in (self, other)} - {None}
        if len(limits) > 1:
            raise ValueError(
                f"Admit: max_records is {self.max_records} in one rule and {other.max_records} in "
                "the other; a table keeps one count of a key: give one limit"
            )
        return Admit(kind=kind, parts=(self, other), max_records=next(iter(limits), None))

    @property
    def takes_clicks(self) -> bool:
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
    return RECORDS if rule.takes_clicks else RECORDS[:3]
