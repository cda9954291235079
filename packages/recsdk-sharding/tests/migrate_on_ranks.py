"""What the tests of migration run on every rank."""

from __future__ import annotations

from typing import Any

import torch
from on_ranks import own_batches
from worlds import Setup, new_model, rows_of, shard, unwrapped

from recsdk_core import CapacityError
from recsdk_sharding import Saver, export_rows, import_rows


def there_and_back(setup: Setup, state: dict[str, Any], ids: dict[str, Any]) -> dict[str, Any]:
    """Imports rows, and exports them and those of an unknown id."""
    model = shard(new_model(setup, "meta"), setup)
    tensors = {name: torch.from_numpy(value) for name, value in state.items()}
    keys = {name: torch.from_numpy(value) for name, value in ids.items()}
    import_rows(model, tensors, keys)
    wanted = {name: torch.cat([value, torch.tensor([123456])]) for name, value in keys.items()}
    return {name: value.numpy() for name, value in export_rows(model, wanted).items()}


def import_between_saves(setup: Setup, folder: str) -> dict[str, Any]:
    """Imports rows of ids that were trained and of others, and saves what changed; all rows."""
    model = shard(new_model(setup, "meta"), setup)
    for batch in own_batches([[4, 3]], setup.weighted, device=setup.device):
        model(batch)[0].backward()
    Saver().save(model, f"{folder}/snapshot")
    ids = torch.arange(-20, 50)
    weights = torch.arange(70 * 8, dtype=torch.float64).reshape(70, 8)
    import_rows(model, {"user.weight": weights}, {"user": ids})
    Saver().save(model, f"{folder}/delta", incremental=True)
    return rows_of(unwrapped(model).ebc.tables())


def import_too_many(setup: Setup) -> dict[str, Any]:
    """Imports more rows than the second of two tables has room for."""
    model = shard(new_model(setup, "meta"), setup)
    state = {"user.weight": torch.ones(4, 8), "genre.weight": torch.ones(5, 3)}
    text = ""
    try:
        import_rows(model, state, {"user": torch.arange(4), "genre": torch.arange(5)})
    except CapacityError as error:
        text = str(error)
    lengths = {name: len(table) for name, table in unwrapped(model).ebc.tables().items()}
    return {"text": text, "lengths": lengths}
