"""torchrec's planner with estimates that hold for hash tables."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torchrec.distributed.planner import EmbeddingShardingPlanner
from torchrec.distributed.planner.enumerators import EmbeddingEnumerator
from torchrec.distributed.planner.types import (
    Enumerator,
    ParameterConstraints,
    ShardEstimator,
    Stats,
    Topology,
)

from recsdk_sharding._configs.checking import check_switch
from recsdk_sharding.planning.checking import (
    check_instance,
    constraints_of,
    count_of,
    topology_of,
)
from recsdk_sharding.planning.perf import HashPerfEstimator
from recsdk_sharding.planning.printing import PlanTable
from recsdk_sharding.planning.storage import HashStorageEstimator

__all__ = ["HashEmbeddingEnumerator", "HashEmbeddingShardingPlanner"]


class HashEmbeddingEnumerator(EmbeddingEnumerator):  # type: ignore[misc]
    """torchrec's enumerator; by default with `HashPerfEstimator` and `HashStorageEstimator`.

    Give it to torchrec's `EmbeddingShardingPlanner`, with the same topology, batch size and
    constraints.
    """

    def __init__(
        self,
        topology: Topology,
        batch_size: int,
        constraints: Mapping[str, ParameterConstraints] | None = None,
        estimator: ShardEstimator | list[ShardEstimator] | None = None,
        use_exact_enumerate_order: bool | None = False,
    ) -> None:
        """As torchrec's. Raises TypeError or ValueError for what does not fit."""
        topology_of(topology)
        constraints_of(constraints)
        given = [] if estimator is None else [estimator]
        for each in estimator if isinstance(estimator, list) else given:
            check_instance("estimator", each, ShardEstimator, "a ShardEstimator or a list of them")
        if use_exact_enumerate_order is not None:
            check_switch("use_exact_enumerate_order", use_exact_enumerate_order)
        super().__init__(
            topology,
            count_of("batch_size", batch_size, 1),
            constraints,
            estimator
            or [
                HashPerfEstimator(topology, constraints),
                HashStorageEstimator(topology, constraints),
            ],
            use_exact_enumerate_order,
        )


class HashEmbeddingShardingPlanner(EmbeddingShardingPlanner):  # type: ignore[misc]
    """torchrec's planner, with estimates for tables whose rows cost nothing until they are used.

    Takes torchrec's arguments. By default `enumerator` is a `HashEmbeddingEnumerator`, and `stats`
    a `PlanTable`. Constraints may be `HashParameterConstraints`. `str()` of the planner is the last
    plan as a table, on the rank that made it: rank 0 with `collective_plan`.

    >>> from torchrec.distributed.planner import Topology
    >>> from recsdk_sharding.planning import HashEmbeddingShardingPlanner
    >>> topology = Topology(world_size=2, compute_device="cpu")
    >>> print(HashEmbeddingShardingPlanner(topology=topology))
    no plan yet
    """

    def __init__(
        self,
        topology: Topology | None = None,
        batch_size: int | None = None,
        enumerator: Enumerator | None = None,
        *,
        stats: Stats | list[Stats] | None = None,
        constraints: Mapping[str, ParameterConstraints] | None = None,
        **options: Any,
    ) -> None:
        """Takes the arguments of torchrec's planner, which documents them and has the defaults.

        Raises TypeError or ValueError for what does not fit.
        """
        table = self._plan_table = PlanTable()  # torchrec's constructor logs str(self)
        given = [table] if stats is None else stats if isinstance(stats, list) else [stats]
        constraints_of(constraints)
        for each in given:
            check_instance("stats", each, Stats, "torchrec Stats or a list of them")
        if enumerator is not None:
            check_instance("enumerator", enumerator, Enumerator, "a torchrec Enumerator")
        super().__init__(
            topology=None if topology is None else topology_of(topology),
            batch_size=None if batch_size is None else count_of("batch_size", batch_size, 1),
            enumerator=enumerator,
            stats=given if table in given else [*given, table],
            constraints=constraints,
            **options,
        )
        if enumerator is None:
            self._enumerator = HashEmbeddingEnumerator(
                self._topology, self._batch_size, constraints
            )

    def __str__(self) -> str:
        """The last plan, as a table."""
        return str(self._plan_table)
