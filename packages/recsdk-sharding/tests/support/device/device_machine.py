"""Random operations on a collection in device memory and on one of the engine's, compared.

Both must map the same ids to the same rows, with the same outcomes and counts; rows that no update
has touched are equal to the bit, the others within float order.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from device_type import DEVICE_TYPE
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from optimizer_cases import PLAIN
from recsdk_core import BusyError, Default, Evict, Outcome, RecsdkError
from recsdk_sharding import HashEmbeddingBagCollection, HashEmbeddingBagConfig, RowOptimizer

TOLERANCE = {"rtol": 1e-4, "atol": 1e-4}
CAPACITIES = {"small": 12, "large": 60}
KEYS = np.concatenate([np.arange(12), -(2**63) + np.arange(8), 2**63 - 1 - np.arange(8)])
STATS = (
    "num_rows",
    "outcomes",
    "erased",
    "evicted",
    "expired",
    "evicted_by_request",
    "updates",
    "nonfinite",
)
FORMS = [name for name in PLAIN if "centered" not in name and "both" not in name]


RULES = [
    None,
    None,
    Evict.lru(),
    Evict.lfu(half_life=2.0),
    Evict.lru(min_age=3),
    Evict.lru().expiring(ttl=4, every=2),
]
DEFAULTS = [Default.zeros(), Default.initial_row()]


def collection(
    device: str,
    optimizer: Any,
    accumulate_steps: int,
    rules: list[Evict | None],
    defaults: list[Default],
) -> HashEmbeddingBagCollection:
    """Two tables with as much room on a device as on the cpu; one is full soon."""
    configs = [
        HashEmbeddingBagConfig(
            name=name,
            embedding_dim=4,
            num_embeddings=capacity,
            max_rows=None if is_unlimited(name, rule) else capacity,
            feature_names=[name],
            on_nonfinite="skip",
            accumulate_steps=accumulate_steps,
            eviction=rule,
            default=default,
        )
        for (name, capacity), rule, default in zip(CAPACITIES.items(), rules, defaults, strict=True)
    ]
    ebc = HashEmbeddingBagCollection(configs, device=device)
    apply_optimizer_in_backward(RowOptimizer, ebc.parameters(), {"settings": optimizer})
    return ebc


def is_unlimited(name: str, rule: Evict | None) -> bool:
    """Whether a table has no `max_rows`; it has room for all keys that there are."""
    return name == "large" and rule is not None and rule.expires


class Machine:
    """The two collections, and what is known about their rows."""

    def __init__(self, seed: int, device: str) -> None:
        self._random = random.Random(seed)
        self.device = device
        optimizer = PLAIN[self._random.choice(FORMS)]
        if self._random.random() < 0.3 and hasattr(optimizer, "weight_decay_mode"):
            optimizer = replace(optimizer, weight_decay=0.3, weight_decay_mode="decoupled")
        self._steps = self._random.choice([1, 1, 2])
        self._rules = dict(zip(CAPACITIES, self._random.choices(RULES, k=2), strict=True))
        rules = list(self._rules.values())
        defaults = self._random.choices(DEFAULTS, k=2)
        made = partial(
            collection,
            optimizer=optimizer,
            accumulate_steps=self._steps,
            rules=rules,
            defaults=defaults,
        )
        self.both = [made(each) for each in ("cpu", device)]
        self._readers = [
            {name: table.leavers(max_rows=20) for name, table in ebc.tables().items()}
            for ebc in self.both
        ]
        self._in_flight: list[list[torch.Tensor]] = []
        self._num_read = 0
        self._touched: dict[str, set[int]] = {name: set() for name in CAPACITIES}

    def run(self, num_operations: int) -> list[str]:
        """Does and checks random operations; returns their names."""
        done = []
        for _ in range(num_operations):
            operation = self._random.choice(OPERATIONS)
            operation(self)
            done.append(operation.__name__)
            self.check()
        return done

    def _keys(self) -> torch.Tensor:
        return torch.from_numpy(
            np.array(self._random.choices(KEYS, k=self._random.randint(0, 9)), np.int64)
        )

    @staticmethod
    def _result(call: Callable[[Any], Any], table: Any) -> Any:
        try:
            return call(table)
        except (RecsdkError, ValueError) as error:
            return type(error)

    def _same(self, call: Callable[[Any], Any], *, name: str) -> Any:
        """What the call gives on both tables, which must be equal: outcomes or an error's type."""
        results = [self._result(call, ebc.tables()[name]) for ebc in self.both]
        np.testing.assert_equal(results[1], results[0])
        return results[0]

    # ---- operations --------------------------------------------------------------------------

    def forward(self) -> None:
        """A batch whose backward is yet to come, or never does."""
        keys = {name: self._keys() for name in CAPACITIES}
        lengths = [split(self._random, len(keys[name]), 3) for name in CAPACITIES]
        batch = KeyedJaggedTensor(
            list(CAPACITIES),
            torch.cat(list(keys.values())),
            lengths=torch.tensor(lengths).flatten(),
        )
        outputs = [ebc(batch).values() for ebc in self.both]
        close(outputs[1].detach(), outputs[0].detach())
        self._in_flight.append(outputs)
        for name, of_table in keys.items():
            self._touched[name].update(of_table.tolist())

    def backward(self) -> None:
        """Trains the oldest batch in flight; some gradients are not finite."""
        if not self._in_flight:
            return
        scale = self._random.choice([1.0, 0.5, 0.1, float("nan")])
        outputs = self._in_flight.pop(0)
        grad = torch.linspace(-1, 1, outputs[0].numel()).view_as(outputs[0]) * scale
        for out in outputs:
            out.backward(grad.to(out.device))

    def abandon(self) -> None:
        """Drops what is in flight."""
        self._in_flight.clear()

    def evaluate(self) -> None:
        keys = self._keys()
        batch = KeyedJaggedTensor(
            list(CAPACITIES), torch.cat([keys, keys]), lengths=torch.tensor([len(keys)] * 2)
        )
        outputs = [ebc.eval()(batch).values().detach() for ebc in self.both]
        close(outputs[1], outputs[0])
        for ebc in self.both:
            ebc.train()

    def erase(self) -> None:
        keys, name = self._keys().numpy(), self._random.choice(list(CAPACITIES))
        outcomes = self._same(lambda table: table.erase(keys, return_outcomes=True), name=name)
        assert self._in_flight == [] or outcomes is BusyError
        if outcomes is not BusyError:
            self._touched[name].difference_update(keys.tolist())

    def lookup(self) -> None:
        keys, name = self._keys().numpy(), self._random.choice(list(CAPACITIES))
        self._same(lambda table: table.lookup(keys, return_outcomes=True)[1], name=name)
        values = [ebc.tables()[name].lookup(keys) for ebc in self.both]
        close(values[1], values[0])

    def find_or_insert(self) -> None:
        keys, name = self._keys().numpy(), self._random.choice(list(CAPACITIES))
        self._same(lambda table: table.find_or_insert(keys, return_outcomes=True)[1], name=name)

    def upsert(self) -> None:
        keys, name = np.unique(self._keys().numpy())[:3], self._random.choice(list(CAPACITIES))
        tables = [ebc.tables()[name] for ebc in self.both]
        if self._rules[name] is None and len(tables[0]) + len(keys) > CAPACITIES[name]:
            return
        values = np.random.default_rng(len(keys)).normal(size=(len(keys), 4)).astype(np.float32)
        self._same(lambda table: table.upsert(keys, values), name=name)

    def evict(self) -> None:
        """A table without a rule refuses."""
        fraction, name = self._random.choice([0.0, 0.3, 1.0]), self._random.choice(list(CAPACITIES))
        if is_unlimited(name, self._rules[name]):
            most = round(CAPACITIES[name] * (1 - fraction) / 4)
            self._same(lambda table: table.evict(max_rows=most), name=name)
            return
        self._same(lambda table: table.evict(fraction=fraction), name=name)

    def read_leavers(self) -> None:
        """Some or all of what has left."""
        name, at_most = self._random.choice(list(CAPACITIES)), self._random.choice([1, 3, None])
        readers = [of[name] for of in self._readers]
        assert len(readers[1]) == len(readers[0])
        assert readers[1].num_lost == readers[0].num_lost
        expected, found = (reader.read(at_most) for reader in readers)
        np.testing.assert_array_equal(found.keys, expected.keys)
        np.testing.assert_array_equal(found.causes, expected.causes)
        close(found.weights, expected.weights)
        assert found.state.keys() == expected.state.keys()
        for field, value in found.state.items():
            close(value, expected.state[field])
        self._num_read += len(found.keys)

    def change_rate(self) -> None:
        rate = self._random.choice([0.01, 0.05, 0.1])
        for ebc in self.both:
            for table in ebc.tables().values():
                table.learning_rate = rate

    def reload(self) -> None:
        """Each loads what the other has; what is in flight is dropped."""
        self._in_flight.clear()
        states = [ebc.state_dict() for ebc in self.both]
        for ebc, state in zip(self.both, states[::-1], strict=True):
            ebc.load_state_dict(state)

    # ---- what must hold ------------------------------------------------------------------------

    def check(self) -> None:
        for name in CAPACITIES:
            engine, device = (ebc.tables()[name] for ebc in self.both)
            rows, outcomes = engine.map(KEYS, insert=False)
            device_rows, device_outcomes = device.index.map(KEYS, insert=False)
            np.testing.assert_array_equal(device_outcomes, outcomes)
            found = outcomes == Outcome.FOUND
            np.testing.assert_array_equal(device_rows[found], rows[found])
            one, other = engine.stats(), device.stats()
            for field in STATS:
                found = getattr(other, field), getattr(one, field)
                assert found[0] == found[1], (name, field, found)
            device.check_invariants()
            self._check_rows(name, engine, device)

    def _check_rows(self, name: str, engine: Any, device: Any) -> None:
        assert not device._rows.weight_RD[-1].any(), "the row that refused keys read was written to"
        for expected, batch in zip(engine.export(), device.export(), strict=True):
            np.testing.assert_array_equal(batch.keys, expected.keys)
            close(batch.weights, expected.weights)
            for field, value in batch.state.items():
                close(value, expected.state[field])
            is_new = [key not in self._touched[name] for key in batch.keys.tolist()]
            np.testing.assert_array_equal(batch.weights[is_new], expected.weights[is_new])


def close(one: Any, other: Any) -> None:
    np.testing.assert_allclose(torch.as_tensor(one).cpu(), torch.as_tensor(other), **TOLERANCE)


def split(source: random.Random, total: int, num_parts: int) -> list[int]:
    """Whole numbers that add up to `total`."""
    cuts = sorted(source.randint(0, total) for _ in range(num_parts - 1))
    return [b - a for a, b in zip([0, *cuts], [*cuts, total], strict=True)]


OPERATIONS = [
    *[Machine.forward] * 4,
    *[Machine.backward] * 5,
    *[Machine.erase] * 2,
    Machine.abandon,
    Machine.evaluate,
    Machine.lookup,
    Machine.find_or_insert,
    Machine.upsert,
    Machine.evict,
    *[Machine.read_leavers] * 2,
    Machine.change_rate,
    Machine.reload,
]


def run_machines(seeds: list[int], num_operations: int) -> dict[str, int]:
    """How often each operation ran, and each outcome and kind of event occurred, over the seeds."""
    counts: dict[str, int] = {}
    for seed in seeds:
        machine = Machine(seed, DEVICE_TYPE)
        try:
            done = machine.run(num_operations)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error
        for table in machine.both[1].tables().values():
            stats = table.stats()
            done += [kind.name for kind in Outcome for _ in range(stats.outcomes[kind])]
            done += ["erased"] * stats.erased + ["nonfinite"] * stats.nonfinite
            done += ["expired"] * stats.expired
            done += ["evicted"] * (stats.evicted - stats.evicted_by_request)
        done += ["left"] * machine._num_read
        for name in done:
            counts[name] = counts.get(name, 0) + 1
    return counts
