"""Coverage-guided fuzzing of the readers of `file_readers`, with atheris (Python 3.11 to 3.13).

    python tests/fuzz/fuzz_files.py [CORPUS ...] [-max_total_time=SECONDS]

Anything that they raise is a finding.
"""

from __future__ import annotations

import sys
from pathlib import Path

import atheris
from file_readers import read_one
from instrumented import instrument

from recsdk_core.checkpoint import _fields, tabular, user_state
from recsdk_core.simulation import descriptions, drawn_traces, traces
from recsdk_pipeline._internal import plain_state

CORPUS = Path(__file__).parent / "files"

if __name__ == "__main__":
    for module in (_fields, descriptions, drawn_traces, plain_state, tabular, traces, user_state):
        instrument(module)
    atheris.Setup([*sys.argv, str(CORPUS)], read_one)
    atheris.Fuzz()
