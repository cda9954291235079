"""What the tests of migration run on every rank."""

from __future__ import annotations

from typing import Any

import torch
from worlds import Setup, new_model, shard

from recsdk_sharding import export_rows, import_rows


def there_and_back(state: dict[str, Any], ids: dict[str, Any]) -> dict[str, Any]:
    """Imports rows, and exports them and those of an unknown id."""
    model = shard(new_model(Setup(), "meta"))
    tensors = {name: torch.from_numpy(value) for name, value in state.items()}
    keys = {name: torch.from_numpy(value) for name, value in ids.items()}
    import_rows(model, tensors, keys)
    wanted = {name: torch.cat([value, torch.tensor([123456])]) for name, value in keys.items()}
    return {name: value.numpy() for name, value in export_rows(model, wanted).items()}
