"""No argument is ignored: a public callable honours an odd value or refuses it by name.

Each public callable is found by looking, and given odd values one argument at a time. A refusal is
a TypeError, a ValueError or an error of the package that names the argument, and leaves what the
call was given as it was.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from core_surface import CORE
from number_arguments import NumberCase, faults_of_numbers, number_cases
from odd_arguments import Case, Surface, cases_of, faults_of, good_call
from one_rank import world_of_one
from pipeline_surface import PIPELINE
from sampling import sampled
from sharding_surface import SHARDING

_CASES_AT_A_TIME = 50
SURFACES = (CORE, SHARDING, PIPELINE)
_SIZES = {CORE.package: 1500, SHARDING.package: 2000, PIPELINE.package: 1000}


@pytest.fixture(autouse=True, scope="module")
def _world() -> Iterator[None]:
    with world_of_one():
        yield


@pytest.fixture(autouse=True)
def _away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A text may be taken for a path, and written to."""
    monkeypatch.chdir(tmp_path)


def _pieces(surface: Surface) -> list[list[Case]]:
    cases = sampled(cases_of(surface), _SIZES[surface.package])
    return [cases[i : i + _CASES_AT_A_TIME] for i in range(0, len(cases), _CASES_AT_A_TIME)]


@pytest.mark.parametrize("surface", SURFACES, ids=lambda surface: surface.package)
def test_good_values_are_taken(surface: Surface) -> None:
    for each in surface.callables.values():
        good_call(surface, each)()


@pytest.mark.parametrize(
    ("surface", "cases"),
    [(surface, cases) for surface in SURFACES for cases in _pieces(surface)],
    ids=lambda given: given.package if isinstance(given, Surface) else given[0].name,
)
def test_arguments_are_honoured_or_refused(surface: Surface, cases: list[Case]) -> None:
    faults = {case: fault for case in cases if (fault := faults_of(surface, case)) is not None}
    assert not faults, "\n".join(f"{case}: {fault}" for case, fault in faults.items())


def _numbers(surface: Surface) -> list[list[tuple[int, NumberCase]]]:
    """Each with its place, which chooses among types."""
    cases = list(enumerate(number_cases(surface)))
    return [cases[i : i + _CASES_AT_A_TIME] for i in range(0, len(cases), _CASES_AT_A_TIME)]


@pytest.mark.parametrize(
    ("surface", "cases"),
    [(surface, cases) for surface in SURFACES for cases in _numbers(surface)],
    ids=lambda given: given.package if isinstance(given, Surface) else str(given[0][1]),
)
def test_numbers_of_numpy_are_taken_as_pythons(
    surface: Surface, cases: list[tuple[int, NumberCase]]
) -> None:
    """They come of arrays; results and what is kept are the same, of the same types."""
    faults = [fault for turn, case in cases for fault in faults_of_numbers(surface, case, turn)]
    assert not faults, "\n".join(faults)
