"""torchrec's DLRM on Parquet files of raw ids, in one process.

python dlrm_parquet.py FOLDER      needs pyarrow; writes train.parquet and held_out.parquet there

For several ranks give `ParquetData` rank and world_size, and spread the model as dlrm.py does.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import nn
from torchmetrics.classification import BinaryAUROC
from torchrec.models.dlrm import DLRM
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

from recsdk_pipeline.data import ParquetData
from recsdk_sharding import HashEmbeddingBagCollection, HashEmbeddingBagConfig

FEATURES = ["user", "item", "tags"]
WIDTH = 16


def write_clicks(path: Path, rng: np.random.Generator, count: int) -> None:
    """Clicks that the user's and the item's parity explain; a sample has 0 to 3 tags."""
    users, items = rng.integers(0, 1000, (2, count)) * 7919**4  # raw ids are any numbers
    tags = [rng.integers(0, 50, rng.integers(4)) for _ in range(count)]
    likely = 0.1 + 0.4 * (users % 2) + 0.4 * (items % 2)
    columns = {
        "user": users,
        "item": items,
        "tags": pa.array(tags, pa.list_(pa.int64())),
        "age": rng.random(count).astype(np.float32),
        "clicked": rng.random(count) < likely,
    }
    pq.write_table(pa.table(columns), path, row_group_size=1000)


def batches(path: Path, seed: int = 0) -> ParquetData:
    return ParquetData(
        str(path), ids=FEATURES, dense=["age"], labels="clicked", batch_size=500, seed=seed
    )


def main() -> None:
    folder = Path(sys.argv[1])
    rng = np.random.default_rng(0)
    write_clicks(folder / "train.parquet", rng, 20_000)
    write_clicks(folder / "held_out.parquet", rng, 5_000)

    torch.manual_seed(0)
    tables = [HashEmbeddingBagConfig(1000, WIDTH, name) for name in FEATURES]
    ebc = HashEmbeddingBagCollection(tables=tables)
    apply_optimizer_in_backward(torch.optim.Adagrad, ebc.parameters(), {"lr": 0.1})
    model = DLRM(ebc, 1, dense_arch_layer_sizes=[WIDTH], over_arch_layer_sizes=[32, 1])
    dense = [p for name, p in model.named_parameters() if "embedding" not in name]
    optimizer = torch.optim.Adam(dense, lr=0.005)
    for epoch in range(3):
        for batch in batches(folder / "train.parquet", seed=epoch):
            logits = model(batch.dense, batch.sparse).squeeze(1)
            loss = nn.functional.binary_cross_entropy_with_logits(logits, batch.labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    model.eval()
    auc = BinaryAUROC()
    with torch.no_grad():
        for batch in batches(folder / "held_out.parquet"):
            auc.update(model(batch.dense, batch.sparse).squeeze(1), batch.labels.int())
    print(f"held-out AUC {float(auc.compute()):.3f}")


if __name__ == "__main__":
    main()
