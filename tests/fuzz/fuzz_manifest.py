"""Coverage-guided fuzzing of the manifests' readers, with atheris (Python 3.11 to 3.13).

    python tests/fuzz/fuzz_manifest.py [CORPUS ...] [-max_total_time=SECONDS]

The first byte chooses: even, the rest is a whole file; odd, the rest is JSON that is given a right
SHA-256 and the canonical form first, so that mutations reach beyond those checks. Anything but
CheckpointError, or a manifest that is not written as it was read, is a finding.
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import atheris
from instrumented import instrument

from recsdk_core import CheckpointError
from recsdk_core.checkpoint import _fields, manifest
from recsdk_core.checkpoint._fields import canonical_json
from recsdk_core.checkpoint.manifest import Manifest
from recsdk_core.serving import manifest as frozen_manifest
from recsdk_core.serving.manifest import FrozenManifest

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
    for kind in (Manifest, FrozenManifest):
        try:
            found = kind.from_bytes(raw, "manifest.json")
        except CheckpointError:
            continue
        assert kind.from_bytes(found.to_bytes(), "again") == found


if __name__ == "__main__":
    instrument(manifest)
    instrument(frozen_manifest)
    instrument(_fields)
    atheris.Setup([*sys.argv, str(CORPUS)], read_one)
    atheris.Fuzz()
