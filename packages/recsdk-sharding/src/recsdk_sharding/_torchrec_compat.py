"""Everything of torch and torchrec that is not public but that this package leans on.

It is looked for at import, so that another version fails there, with the line to install, and not
in the middle of a training run.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torchrec
from torch.nn.parallel import DistributedDataParallel
from torchrec.distributed import embedding_sharding, embeddingbag, model_parallel
from torchrec.distributed.planner import planners
from torchrec.distributed.planner.types import Topology
from torchrec.distributed.sharding.rw_sharding import RwPooledEmbeddingSharding
from torchrec.modules.embedding_modules import EmbeddingBagCollection

__all__ = ["active_data_parallel_size", "check_private_interfaces"]


@dataclass(frozen=True)
class _Method:
    """A method or function that is overridden or called: its parameters, in order."""

    owner: Any
    name: str
    parameters: tuple[str, ...]

    def problem(self) -> str | None:
        label = f"{self.owner.__name__}.{self.name}"
        found = getattr(self.owner, self.name, None)
        if found is None:
            return f"{label} is gone"
        names = tuple(name for name in inspect.signature(found).parameters if name != "self")
        if names[: len(self.parameters)] != self.parameters:
            return f"{label} takes {names}, not {self.parameters}"
        return None


@dataclass(frozen=True)
class _Attribute:
    """An attribute that a constructor sets."""

    owner: type
    name: str

    def problem(self) -> str | None:
        if self.name in inspect.unwrap(vars(self.owner)["__init__"]).__code__.co_names:
            return None
        return f"{self.owner.__name__}.{self.name} is gone"


_SHARDED = embeddingbag.ShardedEmbeddingBagCollection
_INTERFACES: tuple[_Method | _Attribute, ...] = (
    _Method(
        _SHARDED,
        "__init__",
        ("module", "table_name_to_parameter_sharding", "env", "fused_params", "device"),
    ),
    _Method(
        _SHARDED,
        "create_grouped_sharding_infos",
        ("module", "table_name_to_parameter_sharding", "prefix", "fused_params", "suffix"),
    ),
    _Method(
        _SHARDED,
        "create_embedding_bag_sharding",
        ("sharding_infos", "env", "device", "permute_embeddings", "qcomm_codecs_registry"),
    ),
    _Method(_SHARDED, "_initialize_torch_state", ("skip_registering",)),
    _Method(_SHARDED, "input_dist", ("ctx", "features")),
    _Attribute(_SHARDED, "_embedding_shardings"),
    _Attribute(_SHARDED, "_has_mean_pooling_callback"),
    _Attribute(_SHARDED, "_has_uninitialized_input_dist"),
    _Attribute(_SHARDED, "_input_dists"),
    _Attribute(_SHARDED, "_module_fqn"),
    _Attribute(_SHARDED, "_optim"),
    _Attribute(_SHARDED, "_sharding_types"),
    _Attribute(EmbeddingBagCollection, "_embedding_bag_configs"),
    _Attribute(EmbeddingBagCollection, "_embedding_names"),
    _Attribute(EmbeddingBagCollection, "_feature_names"),
    _Attribute(EmbeddingBagCollection, "_is_weighted"),
    _Attribute(EmbeddingBagCollection, "_lengths_per_embedding"),
    _Method(RwPooledEmbeddingSharding, "__init__", ("sharding_infos", "env", "device")),
    _Method(RwPooledEmbeddingSharding, "create_input_dist", ("device",)),
    _Method(RwPooledEmbeddingSharding, "create_lookup", ("device", "fused_params")),
    _Method(RwPooledEmbeddingSharding, "create_output_dist", ("device",)),
    _Attribute(RwPooledEmbeddingSharding.__mro__[1], "_pg"),
    _Method(
        embedding_sharding,
        "KJTListSplitsAwaitable",
        ("awaitables", "ctx", "module_fqn", "sharding_types"),
    ),
    _Method(
        model_parallel.DistributedModelParallel,
        "__init__",
        (
            "module",
            "env",
            "device",
            "plan",
            "sharders",
            "init_data_parallel",
            "init_parameters",
            "data_parallel_wrapper",
        ),
    ),
    _Method(Topology, "__init__", ("world_size", "compute_device")),
    _Method(planners, "to_sharding_plan", ("sharding_options", "topology")),
    _Method(DistributedDataParallel, "_get_active_ddp_module", ()),
)


def check_private_interfaces(
    interfaces: Iterable[_Method | _Attribute] = _INTERFACES,
) -> None:
    """Raises ImportError naming every private interface that is not as expected."""
    problems = [text for item in interfaces if (text := item.problem()) is not None]
    if problems:
        raise ImportError(
            f"torchrec {torchrec.__version__} is not as recsdk_sharding expects it: "
            f"{'; '.join(problems)}; install it with: pip install torchrec==1.8.0"
        )


def active_data_parallel_size() -> int:
    """Ranks of the DistributedDataParallel whose forward is running; 1 if there is none."""
    get_active: Callable[[], DistributedDataParallel | None] = (
        DistributedDataParallel._get_active_ddp_module
    )
    active = get_active()
    return 1 if active is None else int(active.process_group.size())
