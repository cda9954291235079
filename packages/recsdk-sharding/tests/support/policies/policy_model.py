"""What becomes of the joined batches of all ranks, in plain Python.

Shape letters: N keys, D row width.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np
from policy_batches import FEATURES, TABLES, Array, Shape, bags_of, of_samples, time_of
from policy_cases import FIRST, GROUPS, MAX_ROWS, WIDTH, Left, Outcomes, Reads, Rows

from recsdk_core import Admit, Default, Evict, Outcome, init
from recsdk_core.testing import ReferenceTable, _optimizers
from recsdk_core.testing._rounding import round_nearest
from recsdk_sharding._configs.data_taken import taken_by

STEPS = 14


class Expected:
    """Of all tables what keys read and become, what leaves, and the rows at last."""

    def __init__(
        self,
        eviction: Mapping[str, Evict | None],
        admission: Mapping[str, Admit],
        default: Mapping[str, Default],
        optimizer: Any,
        shape: Shape,
        *,
        is_limited: bool,
        has_data: bool,
        accumulate: Mapping[str, int] | None = None,
        is_early: bool = False,
        dtype: Any = "float32",
        rates: tuple[float, ...] = (1.0,),
    ) -> None:
        """`is_early`: whether a batch reads its rows before the one before it is trained.

        `rates`: by which the learning rate of each step is multiplied, over and over.
        """
        self._shape = shape
        self._has_data = has_data
        self._accumulate = accumulate or {}
        self._is_early = is_early
        self._rates = rates
        self.num: Counter[str] = Counter()
        """How often what the rules do has come."""
        self.rows: Rows = {}
        self.outcomes: list[Outcomes] = [{} for _ in range(STEPS)]
        self.reads: list[Reads] = [{} for _ in range(STEPS)]
        self.left: Left = {name: {} for name in TABLES}
        self.returned: dict[str, tuple[int, int]] = {}
        for name in TABLES:
            limits: dict[str, Any] = {}
            if is_limited:
                limits = {"max_rows": MAX_ROWS, "eviction_groups": GROUPS[name]}
            table = ReferenceTable(
                WIDTH,
                name=name,
                optimizer=optimizer,
                initializer=init.Constant(value=FIRST),
                eviction=eviction[name],
                admission=admission.get(name),
                default=default[name],
                dtype=dtype,
                **limits,
            )
            self._train(table)

    def _train(self, table: ReferenceTable) -> None:
        leavers = table.leavers()
        flying: list[tuple[int, Any, list[tuple[Any, np.float32]]]] = []
        for step in range(STEPS):
            bags = [bags_of(self._shape, step)[n] for n in self._features_of(table)]
            keys = np.concatenate([each.keys_N for each in bags])
            data = self._data_of(table, step, [each.data for each in bags])
            lease = table.lease(step=step + 1)
            values_ND, outcomes = table.find_or_insert(
                keys, lease=lease, return_outcomes=True, **data
            )
            self._note(table.name, step, keys, values_ND, outcomes)
            of_samples_S = of_samples(self._shape, step, table.name)
            gradients_N = [each.gradients(of_samples_S, self._shape) for each in bags]
            trained = zip(_rows_of(table, keys), np.concatenate(gradients_N), strict=True)
            flying.append((step, lease, [each for each in trained if each[0] is not None]))
            num_waiting = 1 if self._is_early and step < STEPS - 1 else 0
            num_together = self._accumulate.get(table.name, 1)
            while len(flying) - num_waiting >= num_together:
                self._update(table, flying[:num_together])
                del flying[:num_together]
                self._note_left(table.name, step - num_waiting, leavers.read())
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

    def _features_of(self, table: ReferenceTable) -> tuple[str, ...]:
        return FEATURES[self._shape.features][table.name]

    def _update(
        self, table: ReferenceTable, batches: list[tuple[int, Any, list[tuple[Any, np.float32]]]]
    ) -> None:
        """One update with the gradients of these batches, which are none in flight then."""
        sums: dict[int, tuple[Any, np.float32]] = {}
        for row, gradient in [each for *_, trained in batches for each in trained]:
            before = sums[id(row)][1] if id(row) in sums else np.float32(-0.0)
            sums[id(row)] = row, before + gradient
        settings = table.optimizer
        last, *_ = batches[-1]
        table.learning_rate = settings.lr * self._rates[last % len(self._rates)]
        made = _optimizers.Step(table.optimizer, table.update_count + 1, table.log_decay)
        table.update_count += 1
        table.log_decay = _optimizers.next_log_decay(table.optimizer, table.log_decay)
        for row, gradient in sums.values():
            gradient_D = np.full(WIDTH, gradient, np.float32)
            _optimizers.update_row(made, row.weights, row.state, gradient_D)
            assert np.array_equal(round_nearest(row.weights, table.dtype), row.weights)
        table.learning_rate = settings.lr
        for _, lease, _ in batches:
            lease.release()

    def _note_left(self, name: str, step: int, left: Any) -> None:
        columns = left.keys, left.causes, left.weights[:, 0]
        for key, cause, number in zip(*(c.tolist() for c in columns), strict=True):
            self.left[name].setdefault(key, []).append((step, cause, number))

    def _data_of(
        self, table: ReferenceTable, step: int, of_features: list[dict[str, Array]]
    ) -> dict[str, Any]:
        """What comes with the keys of a step of what the table takes; its time is set."""
        if not self._has_data:
            table.time = time_of(step)
            return {}
        taken = set(taken_by(table.eviction, table.admission)) & set(of_features[0])
        data = {name: np.concatenate([each[name] for each in of_features]) for name in taken}
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
    """The row that each key has or shares; None of a key that reads what nobody trains."""
    shared = table._shared
    return [
        table._rows.get(key) or (shared[table._which_shared(key)] if shared else None)
        for key in keys.tolist()
    ]
