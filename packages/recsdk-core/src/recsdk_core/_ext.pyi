"""The compiled part: one binding per public header of the engine, converting arguments only."""

import enum
from collections.abc import Callable, Sequence
from typing import Any

from recsdk_core.table import Table as _PythonTable

__version__: str

def version() -> str: ...
