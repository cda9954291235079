"""The table of optimizer updates that every kind of table is tested against.

`cpp/tests/data/optimizer_updates.txt` holds it; `write_optimizer_updates.py` writes it. A case is
an optimizer, and updates of one row:

    case NAME
    optimizer CLASS SETTING=VALUE ...
    tables KIND ...
    update t=NUMBER lr=RATE log_decay=SUM
    gradient ...
    weight BEFORE ... -> AFTER ...
    FIELD BEFORE ... -> AFTER ...

CLASS and SETTING are those of `recsdk_core.optim`; settings that are None are left out. KIND is a
kind of table that has this optimizer: Table the engine's, DeviceTable the engine's over a backend,
torch the one of recsdk_sharding; the others refuse it. `t` is the update's number, `log_decay` what
`Table.log_decay` is before it. FIELD is a field of optimizer state. Floats are written so that they
are read back exactly.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from recsdk_core import optim

NAME = "optimizer_updates.txt"
Floats: TypeAlias = NDArray[np.float32]


@dataclass(frozen=True)
class Update:
    """One update of one row."""

    t: int
    lr: float
    log_decay: float
    gradient: Floats
    before: Mapping[str, Floats]
    """Fields by name: first weight, then the optimizer's state."""
    after: Mapping[str, Floats]


@dataclass(frozen=True)
class Case:
    """An optimizer, which kinds of table have it, and what it does."""

    name: str
    optimizer: Any
    tables: tuple[str, ...]
    updates: tuple[Update, ...]


def path() -> Path:
    """Where the table lies: in the repository, or beside this file in a source distribution."""
    beside = Path(__file__).with_name(NAME)
    return beside if beside.exists() else Path(__file__).parents[2] / "cpp/tests/data" / NAME


def read_cases() -> list[Case]:
    """The cases of the table."""
    lines = [line for line in path().read_text().splitlines() if not line.startswith("#")]
    return [_case(block.splitlines()) for block in "\n".join(lines).strip().split("\n\n")]


def _case(lines: list[str]) -> Case:
    name, optimizer, tables = (line.partition(" ")[2] for line in lines[:3])
    blocks = "\n".join(lines[3:]).split("update ")[1:]
    updates = tuple(_update(block.splitlines()) for block in blocks)
    return Case(name, _optimizer(optimizer.split()), tuple(tables.split()), updates)


def _optimizer(words: list[str]) -> Any:
    settings = dict(_setting(word) for word in words[1:])
    if "beta1" in settings:
        settings["betas"] = (settings.pop("beta1"), settings.pop("beta2"))
    return getattr(optim, words[0])(**settings)


def _setting(word: str) -> tuple[str, Any]:
    name, _, text = word.partition("=")
    if text in ("true", "false"):
        return name, text == "true"
    return name, text if text.isidentifier() else float(text)


def _update(lines: list[str]) -> Update:
    numbers = dict(word.split("=") for word in lines[0].split())
    fields = dict(_field(line) for line in lines[2:])
    return Update(
        t=int(numbers["t"]),
        lr=float(numbers["lr"]),
        log_decay=float(numbers["log_decay"]),
        gradient=_floats(lines[1].split()[1:]),
        before={name: values[0] for name, values in fields.items()},
        after={name: values[1] for name, values in fields.items()},
    )


def _field(line: str) -> tuple[str, tuple[Floats, Floats]]:
    name, _, values = line.partition(" ")
    before, _, after = values.partition(" -> ")
    return name, (_floats(before.split()), _floats(after.split()))


def _floats(words: list[str]) -> Floats:
    return np.array([float(word) for word in words], np.float32)


def text_of(case: Case) -> Iterator[str]:
    """The lines of a case."""
    yield f"case {case.name}"
    yield " ".join(["optimizer", type(case.optimizer).__name__, *_settings(case.optimizer)])
    yield " ".join(["tables", *case.tables])
    for update in case.updates:
        yield f"update t={update.t} lr={update.lr!r} log_decay={update.log_decay!r}"
        yield f"gradient {_words(update.gradient)}"
        for name, before in update.before.items():
            yield f"{name} {_words(before)} -> {_words(update.after[name])}"


def _settings(optimizer: Any) -> Iterator[str]:
    for name, value in vars(optimizer).items():
        if name == "betas":
            yield from (f"beta{i}={beta!r}" for i, beta in enumerate(value, 1))
        elif isinstance(value, bool):
            yield f"{name}={str(value).lower()}"
        elif value is not None:
            yield f"{name}={value}"


def _words(values: Floats) -> str:
    return " ".join(f"{value:.9g}" for value in values.tolist())
