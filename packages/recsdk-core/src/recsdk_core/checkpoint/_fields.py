"""Canonical JSON, sealed by its own SHA-256, and strict access to what was parsed from it."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

import numpy as np

from recsdk_core.errors import CheckpointError

__all__ = [
    "MAX_MANIFEST_BYTES",
    "Fields",
    "canonical_json",
    "parse_json",
    "printable",
    "require_few_values",
    "sealed",
    "unsealed",
]

T = TypeVar("T")

MAX_MANIFEST_BYTES = 256 * 2**20

_FEW_VALUES = 250_000
_BYTES_A_VALUE = 8  # manifests of many files have a value in 15 bytes
_HEX64 = re.compile("[0-9a-f]{64}")
_NO_SEAL = "0" * 64
_NO_SIGNS = bytes(set(range(256)) - set(b'"[{,:'))


def canonical_json(value: Any) -> bytes:
    """A JSON value as this format writes it: sorted keys, no spaces, ASCII.

    Raises ValueError for numbers that are infinite or not a number, TypeError for what is no JSON.
    """
    text = json.dumps(
        value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False
    )
    return text.encode("ascii") + b"\n"


def require_few_values(raw: bytes) -> None:
    """Raises ValueError for JSON with more lists, objects and values than its size makes likely.

    Each takes some 60 bytes once it is parsed, and may be two bytes of JSON. The check takes no
    memory for them.
    """
    most = _FEW_VALUES + len(raw) // _BYTES_A_VALUE
    found = _num_signs(raw)
    if found > most:  # maybe within texts
        found = _num_signs_between_texts(raw)
    if found > most:
        raise ValueError(
            f"{found} values and names in {len(raw)} bytes; at most {most} are possible"
        )


def _num_signs_between_texts(raw: bytes) -> int:
    unescaped = raw.replace(rb"\\", b"").replace(rb"\"", b"")
    signs = np.frombuffer(unescaped.translate(None, _NO_SIGNS), np.uint8)
    is_quote = signs == ord('"')
    is_within = np.logical_xor.accumulate(is_quote)
    return len(signs) - int(np.count_nonzero(is_quote | is_within))


def _num_signs(raw: bytes) -> int:
    """The signs that come with each list, object, further value and name."""
    return len(raw) - len(raw.translate(None, b"[{,:"))


def parse_json(raw: bytes, where: str) -> Any:
    """Parses canonical JSON; raises CheckpointError, naming `where`, for anything else."""
    try:
        require_few_values(raw)
        value = json.loads(raw.decode("ascii"), parse_constant=_refuse_constant)
        again = canonical_json(value)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{where}: no JSON of a checkpoint: {type(error).__name__}: {error}"
        ) from None
    if again != raw:
        raise CheckpointError(f"{where}: not written in the canonical form; the file was changed")
    return value


def sealed(value: dict[str, Any], kind: str, version: int, advice: str) -> bytes:
    """A manifest's bytes: its fields, what it is, and the SHA-256 of all with zeros in that place.

    Raises CheckpointError with `advice` if it is too large.
    """
    value = {**value, "format": kind, "version": version, "sha256": _NO_SEAL}
    raw = canonical_json(value)
    if len(raw) > MAX_MANIFEST_BYTES:
        raise CheckpointError(
            f"the manifest would have {len(raw)} bytes, and {MAX_MANIFEST_BYTES} is the most; "
            f"{advice}"
        )
    return canonical_json({**value, "sha256": hashlib.sha256(raw).hexdigest()})


def unsealed(raw: bytes, where: str, kind: str, version: int, advice: str) -> Fields:
    """The fields of a manifest's bytes that nobody changed; those of the seal are taken.

    Raises CheckpointError, naming `where`; with `advice` for a manifest of another kind.
    """
    value = parse_json(raw, where)
    fields = Fields(value, where)
    if (format := fields.take("format")) != kind:
        fields.fail("format", f"must be {kind!r}, got {format!r:.100}; {advice}")
    got = fields.integer("version", 1, 2**63 - 1)
    if got > version:
        fields.fail("version", f"is {got}, newer than {version}; update recsdk-core")
    digest = fields.text("sha256", _HEX64)
    if hashlib.sha256(canonical_json({**value, "sha256": _NO_SEAL})).hexdigest() != digest:
        raise CheckpointError(f"{where}: its SHA-256 does not match; the file was changed")
    return fields


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number of JSON")


def printable(value: Any) -> Any:
    """The value with numbers that JSON lacks written as "NaN", "Infinity" and "-Infinity"."""
    if isinstance(value, dict):
        return {key: printable(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [printable(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else f"{'-' if value < 0 else ''}Infinity"
    return value


class Fields:
    """The fields of one JSON object: each must be there, have its type, and lie within limits.

    `done` refuses fields that were not taken. All raise CheckpointError naming file and field.
    """

    def __init__(self, value: Any, where: str, path: str = "") -> None:
        self._where, self._path = where, path
        if not isinstance(value, dict):
            self._fail("", f"must be an object, got {_short(value)}")
        self._value: dict[str, Any] = value
        self._seen: set[str] = set()

    def _fail(self, name: str, text: str) -> NoReturn:
        field = ".".join(part for part in (self._path, name) if part) or "the whole"
        raise CheckpointError(f"{self._where}: {field} {text}")

    def take(self, name: str) -> Any:
        """The field as it is."""
        self._seen.add(name)
        if name not in self._value:
            self._fail(name, "is missing")
        return self._value[name]

    def flat(self, name: str, most: int) -> Any:
        """Any JSON, with lists and objects nested at most so deep."""
        value = self.take(name)
        if not _is_flat(value, most):
            self._fail(name, f"nests lists and objects deeper than {most}")
        return value

    def has(self, name: str) -> bool:
        """Whether the field is there."""
        return name in self._value

    def integer(self, name: str, low: int, high: int) -> int:
        """An int from `low` to `high`."""
        value = self.take(name)
        if type(value) is not int or not low <= value <= high:
            self._fail(name, f"must be a whole number from {low} to {high}, got {_short(value)}")
        return value

    def number(self, name: str) -> float:
        """A finite number, written with a point or an exponent."""
        value = self.take(name)
        if not isinstance(value, float) or not math.isfinite(value):
            self._fail(name, f"must be a finite number such as 0.0, got {_short(value)}")
        return value

    def real(self, name: str, low: int, high: int) -> float:
        """A number from `low` to `high`, whole or not."""
        value = self.take(name)
        if type(value) not in (int, float) or not low <= value <= high:
            self._fail(name, f"must be a number from {low} to {high}, got {_short(value)}")
        return float(value)

    def text(self, name: str, pattern: re.Pattern[str] | None = None) -> str:
        """A string that `pattern`, if given, matches as a whole."""
        value = self.take(name)
        if not isinstance(value, str) or (pattern and pattern.fullmatch(value) is None):
            wanted = f"match {pattern.pattern}" if pattern else "be a text"
            self._fail(name, f"must {wanted}, got {_short(value)}")
        return value

    def choice(self, name: str, choices: tuple[str, ...]) -> str:
        """One of some strings."""
        value = self.take(name)
        if not isinstance(value, str) or value not in choices:
            self._fail(name, f"must be one of {', '.join(choices)}, got {_short(value)}")
        return value

    def optional(self, name: str, read: Callable[[str], T]) -> T | None:
        """What `read` gives, or None for null."""
        return None if self.take(name) is None else read(name)

    def child(self, name: str) -> Fields:
        """An object."""
        return Fields(self.take(name), self._where, f"{self._path}.{name}".lstrip("."))

    def children(self, name: str, low: int, high: int) -> list[Fields]:
        """A list of `low` to `high` objects."""
        value = self.take(name)
        if not isinstance(value, list) or not low <= len(value) <= high:
            self._fail(name, f"must be a list of {low} to {high} objects, got {_short(value)}")
        path = f"{self._path}.{name}".lstrip(".")
        return [Fields(item, self._where, f"{path}[{i}]") for i, item in enumerate(value)]

    def done(self) -> None:
        """Refuses fields that were not taken."""
        unknown = sorted(set(self._value) - self._seen)
        if unknown:
            self._fail(unknown[0], "is not a field of this format")

    def fail(self, name: str, text: str) -> NoReturn:
        """Refuses a field for a reason that it shares with others."""
        self._fail(name, text)


def _is_flat(value: Any, most: int) -> bool:
    if not isinstance(value, (list, dict)):
        return True
    items = value.values() if isinstance(value, dict) else value
    return most > 0 and all(_is_flat(item, most - 1) for item in items)


def _short(value: Any) -> str:
    if isinstance(value, list):
        return f"a list of {len(value)}"
    if isinstance(value, int) and value.bit_length() > 200:
        return f"a number of {value.bit_length()} bits"
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
