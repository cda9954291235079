"""DeepFM of DeepCTR-Torch with tables of ids, as the page says, beside DeepFM as it is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pages import python_of
from recsdk_core.nn import HashEmbedding, RowOptimizer

PAGE = Path(__file__).resolve().parents[2] / "docs" / "howto" / "train_in_your_own_loop.md"
NUM_SAMPLES, NUM_IDS, NUM_EPOCHS = 200, 30, 10
FACTORS = {"l2_reg_embedding": 1e-2, "l2_reg_linear": 1e-3}
NAMES = ["user", "item"]


@pytest.fixture
def deepctr(monkeypatch: pytest.MonkeyPatch) -> Any:
    requests = pytest.importorskip("requests", reason="requests is not installed")

    def refuse(*_: Any, **__: Any) -> None:
        raise OSError("at import it asks which version is the newest")

    monkeypatch.setattr(requests, "get", refuse)
    return pytest.importorskip("deepctr_torch", reason="DeepCTR-Torch is not installed")


def make_model(deepctr: Any) -> Any:
    columns = [
        deepctr.inputs.SparseFeat(name, vocabulary_size=NUM_IDS, embedding_dim=4) for name in NAMES
    ] + [deepctr.inputs.DenseFeat("age", 1)]
    return deepctr.models.DeepFM(
        columns, columns, dnn_hidden_units=(16, 8), l2_reg_dnn=1e-3, init_std=0.1, **FACTORS
    )


def losses_of(model: Any, optimizer: torch.optim.Optimizer) -> list[float]:
    random = np.random.default_rng(0)
    given = {name: random.integers(0, NUM_IDS, NUM_SAMPLES) for name in NAMES}
    ages = random.random(NUM_SAMPLES)
    labels = (given["user"] % 3 + given["item"] % 2 + ages > 1.5).astype(np.float32)
    torch.manual_seed(1)  # of the order of samples
    model.compile(optimizer, "binary_crossentropy")
    history = model.fit({**given, "age": ages}, labels, 32, epochs=NUM_EPOCHS, verbose=0)
    losses: list[float] = history.history["loss"]
    return losses


@pytest.mark.filterwarnings("ignore")
def test_deepfm_with_ids_has_the_losses_of_deepfm(deepctr: Any) -> None:
    page: dict[str, Any] = {}
    (function,) = (each for each in python_of(PAGE).split("import torch\n") if "take_ids" in each)
    exec("import torch\n" + function, page)
    dense, hashed = make_model(deepctr), make_model(deepctr)
    page["take_ids"](hashed, **FACTORS, last_batch=False)
    tables = [each for each in hashed.modules() if isinstance(each, HashEmbedding)]
    assert len(tables) == 2 * len(NAMES)
    expected = losses_of(dense, torch.optim.Adam(dense.parameters(), lr=0.01))
    found = losses_of(hashed, RowOptimizer(hashed, torch.optim.Adam, lr=0.01))
    assert len(expected) == NUM_EPOCHS
    assert expected[-1] < 0.8 * expected[0]
    assert found == pytest.approx(expected, rel=5e-6)
    row = dense.embedding_dict["item"].weight.detach()
    rows = hashed.embedding_dict["item"].table.lookup(torch.arange(NUM_IDS))
    torch.testing.assert_close(rows, row, rtol=1e-3, atol=1e-5)
