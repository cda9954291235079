"""Steps of tables where torch makes tensors on a device, or of another type, by default."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import device_steps
import torch
import torch.distributed as dist
from default_types import of_type
from device_type import DEVICE_TYPE
from torchrec.modules.embedding_configs import PoolingType
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
from worlds import rows_of

from recsdk_sharding import HashEmbeddingBagCollection, HashEmbeddingCollection

NUM_TABLES = 3


def differences(
    default: str, is_sequence: bool, pooling: str, is_weighted: bool, sharding: str
) -> list[str]:
    """What differs between steps under a default and without one: "device", or a type of torch.

    Of tables that are sharded on the device, and of ones that are not there and on the host.
    """
    said = []
    case = is_sequence, PoolingType[pooling], is_weighted, sharding
    for home in ("sharded", DEVICE_TYPE, "cpu"):
        if default == "device":
            found = _trained(home, torch.device(DEVICE_TYPE), *case)
        else:
            with of_type(default):
                found = _trained(home, nullcontext(), *case)
        expected = _trained(home, nullcontext(), *case)
        same = [torch.equal(*pair) for pair in zip(found[0], expected[0], strict=True)]
        types = {part.dtype for part in found[0]}
        if not all(same) or found[1] != expected[1] or types != {torch.float32}:
            said.append(home)
    return said


def _trained(
    home: str,
    under: AbstractContextManager[Any],
    is_sequence: bool,
    pooling: PoolingType,
    is_weighted: bool,
    sharding: str,
) -> tuple[list[torch.Tensor], Any]:
    configs = device_steps._configs(NUM_TABLES, pooling=pooling)
    options = {} if is_sequence else {"is_weighted": is_weighted}
    if home == "sharded":
        module = device_steps._sharded(configs, sharding, is_sequence=is_sequence, **options)
    else:
        kind: Any = HashEmbeddingCollection if is_sequence else HashEmbeddingBagCollection
        module = kind(configs, device=torch.device(home), **options)
        apply_optimizer_in_backward(RowWiseAdagrad, module.parameters(), {"lr": 0.1})
    given = []
    for step, is_shared in enumerate((False, True, False)):
        batch = _batch(10 * step + dist.get_rank(), is_shared, is_weighted and not is_sequence)
        with under:
            found = module(batch)
            parts = [each.values() for each in found.values()] if is_sequence else [found.values()]
            torch.cat(parts).square().sum().backward()
        given += [part.detach().cpu() for part in parts]
    rows = rows_of(module.tables())
    return given, {name: sorted(of_table) for name, of_table in rows.items()}


def _batch(seed: int, is_shared: bool, is_weighted: bool) -> KeyedJaggedTensor:
    if not is_weighted:
        if is_shared:
            return device_steps._shared_batch(seed, NUM_TABLES)
        return device_steps._batch(seed, NUM_TABLES, 4)
    batch = device_steps._batch(seed, NUM_TABLES, 4)
    weights = torch.linspace(0.5, 2, len(batch.values()), dtype=torch.float32)
    return KeyedJaggedTensor(batch.keys(), batch.values(), weights, lengths=batch.lengths())
