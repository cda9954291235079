"""Rules as text, as `recsdk simulate --rules` takes them.

A rule is one of eviction, and may go on by + and one of admission, or several joined by & and |.
Each has its settings behind colons, by the names that they have in Python: lfu:half_life=1000. The
one for which a rule is mostly asked may stand first without its name: lfu:1000:min_age=10.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import reduce
from operator import and_, or_
from typing import Any

from recsdk_core.admission import Admit
from recsdk_core.eviction import Evict

__all__ = ["RULES_HELP", "parsed_rules"]

RULES_HELP = (
    "Of none (refuse), lru, lru:time, lfu, lfu:HALF_LIFE in steps, score, "
    "show_click:alpha=A:beta=B:decay=D, show_click_totals with the same; each but none may have "
    "min_age=, ttl=, rare_ttl=, rare_count=, share=, every= and churn= behind colons, and any may "
    "go on by +count:N, +count_sketch:N:max_bytes=B, +probability:P, +show_click:THRESHOLD, "
    "+show_click_of_step:THRESHOLD, joined by & and |: which new ids are let in."
)

Settings = Mapping[str, Callable[[str], Any]]
_KINDS: dict[Callable[[str], Any], str] = {int: "a whole number", float: "a number", str: "a word"}


@dataclass(frozen=True)
class _Maker:
    """Makes a rule of a name."""

    make: Callable[..., Any]
    settings: Settings = field(default_factory=dict)
    first: str | None = None
    """The setting that may stand without its name."""
    needs: tuple[str, ...] = ()


_LOOKS: Settings = {"ttl": int, "rare_ttl": int, "rare_count": int, "share": float, "every": int}
_CHURN: Settings = {"churn": int, "churn_records": int}
_EVICTING: dict[str, Settings] = {
    "lru": {"by": str, "min_age": int},
    "lfu": {"half_life": float, "min_age": int},
    "score": {"min_age": int},
    "show_click": {"alpha": float, "beta": float, "decay": float, "min_age": int},
}
_EVICTING["show_click_totals"] = _EVICTING["show_click"]
_FIRST = {"lru": "by", "lfu": "half_life"}
_ADMISSIONS = {
    "count": _Maker(Admit.count, {"n": int, "max_records": int}, "n", ("n",)),
    "count_sketch": _Maker(
        Admit.count_sketch, {"n": int, "max_bytes": int}, "n", ("n", "max_bytes")
    ),
    "probability": _Maker(Admit.probability, {"p": float}, "p", ("p",)),
    "show_click": _Maker(
        Admit.show_click,
        {"threshold": float, "alpha": float, "beta": float, "max_records": int},
        "threshold",
        ("threshold",),
    ),
    "show_click_of_step": _Maker(
        Admit.show_click_of_step,
        {"threshold": float, "alpha": float, "beta": float},
        "threshold",
        ("threshold",),
    ),
}
_NOT_OF_A_TRACE = {
    "low_norm": "goes by what rows have learned, and nothing is trained here",
    "function": "goes by a function, which recsdk_core.simulation.simulate takes in Python",
}


def _evicting(name: str) -> Callable[..., Evict]:
    """Makes an `Evict` of the settings of its order, of looks and of churn."""

    def make(**given: Any) -> Evict:
        own = {each: value for each, value in given.items() if each in _EVICTING[name]}
        looks = {each: value for each, value in given.items() if each in _LOOKS}
        rule: Evict = getattr(Evict, name)(**own)
        rule = rule.expiring(**looks) if looks else rule
        if "churn_records" in given and "churn" not in given:
            raise ValueError("churn_records is given, and churn is not; set it")
        if "churn" in given:
            rule = rule.with_churn(given["churn"], max_records=given.get("churn_records"))
        return rule

    return make


_EVICTIONS = {"none": _Maker(lambda: None)} | {
    name: _Maker(_evicting(name), {**own, **_LOOKS, **_CHURN}, _FIRST.get(name))
    for name, own in _EVICTING.items()
}


def parsed_rules(text: str) -> tuple[dict[str, Evict | None], dict[str, Admit]]:
    """The rules of a list with commas, and what they admit, by their text.

    Raises ValueError, which names the rule.
    """
    rules: dict[str, Evict | None] = {}
    admission: dict[str, Admit] = {}
    for rule in (part.strip() for part in text.split(",")):
        if not rule or rule in rules:
            what = f"{rule!r} is there twice" if rule else "a comma has no rule on one of its sides"
            raise ValueError(f"--rules: {what}; give each rule once, with commas between them")
        eviction, *admitting = re.split(r"\+(?=\s*[a-z])", rule, maxsplit=1)
        try:
            rules[rule] = _made(eviction, _EVICTIONS)
            if admitting:
                admission[rule] = _admission(admitting[0])
        except (ValueError, TypeError) as error:
            raise ValueError(f"--rules: {rule!r}: {error}") from error
    return rules, admission


def _admission(text: str) -> Admit:
    joined = (
        reduce(and_, (_made(term, _ADMISSIONS) for term in terms.split("&")))
        for terms in text.split("|")
    )
    rule: Admit = reduce(or_, joined)
    return rule


def _made(text: str, makers: Mapping[str, _Maker]) -> Any:
    name, *parts = (part.strip() for part in text.split(":"))
    if name in _NOT_OF_A_TRACE and makers is _EVICTIONS:
        raise ValueError(f"{name} {_NOT_OF_A_TRACE[name]}")
    if name not in makers:
        raise ValueError(f"there is no rule {name!r}; choose of {', '.join(makers)}")
    maker = makers[name]
    given: dict[str, Any] = {}
    for place, part in enumerate(parts):
        setting, equals, value = (each.strip() for each in part.partition("="))
        if not equals and place == 0 and maker.first is not None:
            setting, value = maker.first, part
        if setting not in maker.settings or setting in given:
            takes = "no settings"
            if maker.settings:
                takes = f"{', '.join(maker.settings)}, each once as NAME=VALUE"
            raise ValueError(f"{name} takes {takes}; got {part!r}")
        given[setting] = _number(setting, value, maker.settings[setting])
    if lacking := [each for each in maker.needs if each not in given]:
        raise ValueError(f"{name} needs {', '.join(lacking)}")
    return maker.make(**given)


def _number(setting: str, value: str, kind: Callable[[str], Any]) -> Any:
    try:
        return kind(value)
    except ValueError:
        raise ValueError(f"{setting} must be {_KINDS[kind]}, got {value!r}") from None
