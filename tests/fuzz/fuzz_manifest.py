"""Coverage-guided fuzzing of the manifest's reader, with atheris (Python 3.11 to 3.13).

    python tests/fuzz/fuzz_manifest.py [CORPUS ...] [-max_total_time=SECONDS]

The first byte chooses: even, the rest is a whole file; odd, the rest is JSON that is given a right
SHA-256 and the canonical form first, so that mutations reach beyond those checks. Anything but
CheckpointError, or a manifest that is not written as it was read, is a finding.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import atheris

from recsdk_core import CheckpointError
from recsdk_core.checkpoint import _fields, manifest
from recsdk_core.checkpoint._fields import canonical_json
from recsdk_core.checkpoint.manifest import Manifest

CORPUS = Path(__file__).parent / "manifests"


def sealed(raw: bytes) -> bytes | None:
    """The JSON object in canonical form with a right SHA-256; None if it is no object."""
    try:
        value: Any = json.loads(raw)
        if not isinstance(value, dict):
            return None
        digest = hashlib.sha256(canonical_json({**value, "sha256": "0" * 64})).hexdigest()
        return canonical_json({**value, "sha256": digest})
    except (ValueError, RecursionError):
        return None


def read_one(data: bytes) -> None:
    raw: bytes | None = data[1:]
    if data[:1] and data[0] % 2:
        raw = sealed(data[1:])
    if raw is None:
        return
    try:
        found = Manifest.from_bytes(raw, "manifest.json")
    except CheckpointError:
        return
    assert Manifest.from_bytes(found.to_bytes(), "again") == found


def instrument(module: ModuleType) -> None:
    """Has the module's functions tell atheris what they reach; its import hook would not, as the
    loader of an editable install is not Python's own."""
    owners = [module, *(c for c in vars(module).values() if inspect.isclass(c))]
    for owner in owners:
        for value in vars(owner).values():
            function = getattr(value, "__func__", value)
            if inspect.isfunction(function) and function.__module__ == module.__name__:
                atheris.instrument_func(function)


if __name__ == "__main__":
    instrument(manifest)
    instrument(_fields)
    atheris.Setup([*sys.argv, str(CORPUS)], read_one)
    atheris.Fuzz()
