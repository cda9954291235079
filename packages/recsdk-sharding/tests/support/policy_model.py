"""What becomes of the joined batches of all ranks, in plain Python.

Shape letters: N keys, D row width.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np
from eviction_on_ranks import (
    FIRST,
    GROUPS,
    MAX_ROWS,
    RULES,
    WIDTH,
    Left,
    Outcomes,
    Reads,
    Rows,
    batches,
    data_of,
    time_of,
)

from recsdk_core import Admit, Default, Evict, Outcome, init, optim
from recsdk_core.testing import ReferenceTable
from recsdk_sharding._configs.data_taken import taken_by

STEPS = 14


class Expected:
    """Of all tables what keys read and become, what leaves, and the rows at last."""

    def __init__(
        self,
        eviction: Mapping[str, Evict | None],
        admission: Mapping[str, Admit],
        default: Mapping[str, Default],
        *,
        is_limited: bool,
        has_data: bool,
        accumulate: int = 1,
    ) -> None:
        self._has_data = has_data
        self._accumulate = accumulate
        self.num: Counter[str] = Counter()
        """How often what the rules do has come."""
        self.rows: Rows = {}
        self.outcomes: list[Outcomes] = [{} for _ in range(STEPS)]
        self.reads: list[Reads] = [{} for _ in range(STEPS)]
        self.left: Left = {name: {} for name in RULES}
        self.returned: dict[str, tuple[int, int]] = {}
        for position, name in enumerate(RULES):
            limits: dict[str, Any] = {}
            if is_limited:
                limits = {"max_rows": MAX_ROWS, "eviction_groups": GROUPS[name]}
            table = ReferenceTable(
                WIDTH,
                name=name,
                optimizer=optim.SGD(lr=1.0),
                initializer=init.Constant(value=FIRST),
                eviction=eviction[name],
                admission=admission.get(name),
                default=default[name],
                **limits,
            )
            self._train(table, position)

    def _train(self, table: ReferenceTable, position: int) -> None:
        leavers, flying = table.leavers(), []
        for step, lists in enumerate(batches(0, STEPS)):
            keys = np.array([key for bag in lists[position] for key in bag])
            data = self._data_of(table, step, position)
            lease = table.lease(step=step + 1)
            values_ND, outcomes = table.find_or_insert(
                keys, lease=lease, return_outcomes=True, **data
            )
            self._note(table.name, step, keys, values_ND, outcomes)
            flying.append((lease, _rows_of(table, keys)))
            if len(flying) < self._accumulate:
                continue
            for row in [row for _, rows in flying for row in rows]:
                row.weights = row.weights - np.float32(1)
            for lease, _ in flying:
                lease.release()
            flying.clear()
            left = leavers.read()
            columns = left.keys, left.causes, left.weights[:, 0]
            for key, cause, number in zip(*(c.tolist() for c in columns), strict=True):
                self.left[table.name].setdefault(key, []).append((step, cause, number))
        self.rows[table.name] = {
            key: row
            for batch in table.export()
            for key, row in zip(batch.keys.tolist(), batch.weights.tolist(), strict=True)
        }
        stats = table.stats()
        self.returned[table.name] = stats.returned, stats.churn_lost
        counted = ("evicted", "expired", "returned", "churn_lost", "records_lost")
        self.num.update({name: getattr(stats, name) for name in counted})
        self.num.update({each.name: count for each, count in stats.outcomes.items()})

    def _data_of(self, table: ReferenceTable, step: int, position: int) -> dict[str, Any]:
        """What comes with the keys of a step of what the table takes; its time is set."""
        if not self._has_data:
            table.time = time_of(step)
            return {}
        taken = taken_by(table.eviction, table.admission)
        data = {n: d[position].reshape(-1) for n, d in data_of(step).items() if n in taken}
        if "times" in data:
            latest = int(data["times"].max())
            table.time = latest if table.time is None else max(table.time, latest)
        return data

    def _note(self, name: str, step: int, keys: Any, values_ND: Any, outcomes: Any) -> None:
        """What keys read, and what became of them; a new one may be found on another rank."""
        columns = keys, values_ND[:, 0], outcomes
        for key, value, outcome in zip(*(c.tolist() for c in columns), strict=True):
            found = Outcome.FOUND if outcome == Outcome.INSERTED else outcome
            self.outcomes[step].setdefault(name, {})[key] = int(found)
            self.reads[step].setdefault(name, {})[key] = value


def _rows_of(table: ReferenceTable, keys: Any) -> list[Any]:
    """The row that each key has or shares; none of a key that reads what nobody trains."""
    shared = table._shared
    rows = [
        table._rows.get(key) or (shared[table._which_shared(key)] if shared else None)
        for key in keys.tolist()
    ]
    return [row for row in rows if row is not None]
