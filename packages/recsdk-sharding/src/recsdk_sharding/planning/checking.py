"""Checks of what estimators, enumerator and planner are made of, before torchrec uses it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torchrec.distributed.planner.types import ParameterConstraints, Topology

from recsdk_sharding._adapt.arguments import check_constraint_types
from recsdk_sharding._configs.checking import int_of, is_finite, number_of

__all__ = ["MOST", "check_instance", "constraints_of", "count_of", "finite_of", "topology_of"]

MOST = 2**63 - 1
"""Of rows and the like, which estimates multiply as floats."""


def topology_of(given: Any) -> Topology:
    """The topology; TypeError for what is none."""
    check_instance("topology", given, Topology, "a torchrec Topology")
    return given


def check_instance(what: str, given: Any, kind: type, text: str) -> None:
    """Raises TypeError for what is none of a class, which `text` names."""
    if not isinstance(given, kind):
        raise TypeError(f"{what} must be {text}, got {given!r:.100}")


def constraints_of(given: Any) -> dict[str, ParameterConstraints]:
    """Constraints by the table's name, none for None; TypeError for what are none."""
    if given is not None and not isinstance(given, Mapping):
        raise TypeError(
            "constraints must be a dict of ParameterConstraints by the table's name, got "
            f"{type(given).__name__}"
        )
    check_constraint_types(given)
    return dict(given or {})


def count_of(what: str, given: Any, least: int) -> int:
    """An int from `least` to `MOST` as Python's; TypeError or ValueError for another."""
    number = int_of(what, given)
    if not least <= number <= MOST:
        bound = f"at least {least}" if number < least else "below 2**63"
        raise ValueError(f"{what} must be {bound}, got {number}")
    return number


def finite_of(what: str, given: Any) -> float:
    """A number that is finite as a float; TypeError or ValueError for another."""
    number = number_of(what, given)
    if not is_finite(number):
        raise ValueError(f"{what} must be finite, got {given!r:.50}")
    return float(number)
