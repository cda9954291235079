"""Says which sample of the combinatorial tests a run took."""

from __future__ import annotations

import gc

import pytest

import sampling


def pytest_report_header() -> str:
    return f"combinations: {'all' if sampling.IS_FULL else 'a sample'}, seed {sampling.SEED}"


def pytest_collection_finish() -> None:
    gc.freeze()  # what is imported by now: no collection need look at it


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    tally = sampling.tally
    if tally.existing:
        terminalreporter.write_line(
            f"sampled: {tally.taken} of {tally.existing} combinations (seed {sampling.SEED});"
            " RECSDK_TEST_PROFILE=full runs all"
        )
