"""The training of `random_models` on dictionaries of rows: plain numpy, no torch and no engine.

Shape letters: D row width, G bags of a feature, N keys, S samples.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import Any

import numpy as np
from random_models import OPTIMIZERS, Bags, Case, bags_of, initializer, joined

from recsdk_core.testing import ReferenceTable


class DictionaryTable:
    """One table: key -> (weights, state), float64 (D,) each."""

    def __init__(self, case: Case, index: int) -> None:
        self.spec = case.tables[index]
        self.rows: dict[int, tuple[np.ndarray, dict[str, np.ndarray]]] = {}
        self._initial = ReferenceTable(
            self.spec.dim, name=f"t{index}", seed=index, initializer=initializer()
        )
        self._optimizer = case.optimizer
        self._arguments = OPTIMIZERS[case.optimizer][1]
        self._num_updates = 0
        self._seen: dict[int, int] = defaultdict(int)

    def see(self, keys: np.ndarray) -> None:
        """The keys of a step, as often as they come: those seen often enough get rows."""
        for key in keys.tolist():
            self._seen[key] += 1
        fields = {"adagrad": ["sum"], "adam": ["exp_avg", "exp_avg_sq"]}
        for key in keys.tolist():
            if key not in self.rows and self._seen[key] >= self.spec.count:
                state = {name: np.zeros(self.spec.dim) for name in fields.get(self._optimizer, [])}
                self.rows[key] = (self._initial_row(key), state)

    def _initial_row(self, key: int) -> np.ndarray:
        row: np.ndarray = self._initial.find_or_insert(np.array([key]))[0].astype(np.float64)
        return row

    def vectors(self, keys: np.ndarray) -> np.ndarray:
        """The rows of keys, or what keys without a row read: (N, D)."""
        found = [
            self.rows[key][0] if key in self.rows else self._default(key) for key in keys.tolist()
        ]
        return np.stack(found) if found else np.zeros((0, self.spec.dim))

    def _default(self, key: int) -> np.ndarray:
        return self._initial_row(key) if self.spec.count > 1 else np.zeros(self.spec.dim)

    def update(self, grads: dict[int, np.ndarray]) -> None:
        """One step of the optimizer on the rows of these keys."""
        self._num_updates += 1
        lr, eps = self._arguments["lr"], self._arguments.get("eps", 0.0)
        for key, grad in grads.items():
            if key not in self.rows:
                continue
            weights, state = self.rows[key]
            if self._optimizer == "sgd":
                weights -= lr * grad
            elif self._optimizer == "adagrad":
                state["sum"] += grad**2
                weights -= lr * grad / (np.sqrt(state["sum"]) + eps)
            else:
                state["exp_avg"] += 0.1 * (grad - state["exp_avg"])
                state["exp_avg_sq"] += 0.001 * (grad**2 - state["exp_avg_sq"])
                mean = state["exp_avg"] / (1 - 0.9**self._num_updates)
                square = state["exp_avg_sq"] / (1 - 0.999**self._num_updates)
                weights -= lr * mean / (np.sqrt(square) + eps)


def positions_of(bags: Bags) -> np.ndarray:
    """The keys of samples, one after another, as positions in the bags' keys."""
    bag_N = np.repeat(np.arange(len(bags.lengths)), bags.lengths)
    of_samples = [np.flatnonzero(bag_N == bag) for bag in bags.bag_of_sample]
    return np.concatenate([np.zeros(0, np.int64), *of_samples])


class _Feature:
    """A feature of a table in one step."""

    def __init__(self, case: Case, table: DictionaryTable, bags: Bags) -> None:
        self.bags = bags
        self.bag_N = np.repeat(np.arange(len(bags.lengths)), bags.lengths)
        self.vectors_ND = table.vectors(bags.keys)
        self.weights_N = bags.weights if case.is_weighted else np.ones(len(bags.keys))
        norms_G = np.bincount(self.bag_N, self.weights_N, len(bags.lengths))
        is_mean = table.spec.is_mean
        self.norms_G = np.where(norms_G == 0, np.inf, norms_G) if is_mean else np.ones_like(norms_G)
        pooled_GD = np.zeros((len(bags.lengths), table.spec.dim))
        np.add.at(pooled_GD, self.bag_N, self.weights_N[:, None] * self.vectors_ND)
        self.pooled_GD = pooled_GD / self.norms_G[:, None]
        self.is_mean = is_mean

    def pooled(self) -> np.ndarray:
        """The pooled vectors of samples: (S, D)."""
        return self.pooled_GD[self.bags.bag_of_sample]

    def sequence(self) -> dict[str, np.ndarray]:
        """The vectors and keys of samples, one after another."""
        positions = positions_of(self.bags)
        return {
            "values": self.vectors_ND[positions],
            "lengths": self.bags.lengths[self.bags.bag_of_sample],
            "ids": self.bags.keys[positions],
        }

    def grads(self, case: Case) -> tuple[np.ndarray, np.ndarray]:
        """Gradients of keys' vectors (N, D) and of their weights (N,), of `random_models`' loss."""
        if not case.is_sequence:
            return self._back(2 * (self.pooled() - 0.3) / case.world_size)
        grads_ND = np.zeros_like(self.vectors_ND)
        values = self.sequence()["values"]
        np.add.at(grads_ND, positions_of(self.bags), 2 * (values - 0.3) / case.world_size)
        return grads_ND, np.zeros(len(grads_ND))

    def _back(self, grads_SD: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Gradients of keys' vectors (N, D) and of their weights (N,) from those of samples."""
        grads_GD = np.zeros_like(self.pooled_GD)
        np.add.at(grads_GD, self.bags.bag_of_sample, grads_SD)
        grads_ND = (grads_GD / self.norms_G[:, None])[self.bag_N]
        centred_ND = self.vectors_ND - self.pooled_GD[self.bag_N] * self.is_mean
        return grads_ND * self.weights_N[:, None], (grads_ND * centred_ND).sum(1)


def train_dictionary(case: Case) -> dict[str, Any]:
    """Trains on the joined batches; gives what `random_models.train_unsharded` does."""
    tables = [DictionaryTable(case, index) for index in range(len(case.tables))]
    outputs, weight_grads = [], []
    for step in range(len(case.sizes)):
        bags = joined([bags_of(case, step, rank) for rank in range(case.world_size)])
        output, grads = _step(case, tables, bags)
        outputs.append(output)
        weight_grads.append(grads if case.learns_weights else {})
    rows = {f"t{index}": table.rows for index, table in enumerate(tables)}
    return {"outputs": outputs, "rows": rows, "weight_grads": weight_grads}


def _step(
    case: Case, tables: list[DictionaryTable], bags: dict[str, Bags]
) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """What a step gives, and the gradients of weights by feature."""
    for table in tables:
        table.see(np.concatenate([bags[name].keys for name in table.spec.features]))
    passes = forward(case, tables, bags)
    return outputs_of(case, passes), train(case, tables, bags, passes)


def forward(
    case: Case, tables: list[DictionaryTable], bags: dict[str, Bags]
) -> list[dict[str, _Feature]]:
    """The features of each table in one step, by the names of their outputs."""
    readers = Counter(name for table in tables for name in table.spec.features)
    return [
        {
            name if readers[name] == 1 else f"{name}@t{index}": _Feature(case, table, bags[name])
            for name in table.spec.features
        }
        for index, table in enumerate(tables)
    ]


def outputs_of(case: Case, passes: list[dict[str, _Feature]]) -> dict[str, Any]:
    shown = {name: feature for of_table in passes for name, feature in of_table.items()}
    if case.is_sequence:
        return {name: feature.sequence() for name, feature in shown.items()}
    values = np.concatenate([feature.pooled() for feature in shown.values()], axis=1)
    return {"keys": list(shown), "values": values}


def train(
    case: Case,
    tables: list[DictionaryTable],
    bags: dict[str, Bags],
    passes: list[dict[str, _Feature]],
) -> dict[str, np.ndarray]:
    """Updates the rows; gives the gradients of weights by feature."""
    weight_grads = {name: np.zeros(len(each.keys)) for name, each in bags.items()}
    for table, of_table in zip(tables, passes, strict=True):
        grads: dict[int, np.ndarray] = defaultdict(lambda: np.zeros(table.spec.dim))  # noqa: B023
        for shown, feature in of_table.items():
            name = shown.partition("@")[0]
            grads_ND, of_weights = feature.grads(case)
            weight_grads[name] += of_weights
            for key, grad in zip(bags[name].keys.tolist(), grads_ND, strict=True):
                grads[key] += grad
        table.update(grads)
    return weight_grads
