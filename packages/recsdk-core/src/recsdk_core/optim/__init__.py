"""The optimizers that are fused into the backward pass.

Each backward applies one update to each touched row, with the summed gradient of its key. Defaults
and formulas are those of the torch class of the same name. Where torch has no such class, the
docstring names the source.
"""

from recsdk_core.optim._configs import (
    FTRL,
    LAMB,
    SGD,
    Adagrad,
    Adam,
    AdamW,
    Optimizer,
    PartialRowwiseAdam,
    RMSprop,
    RowwiseAdagrad,
)
from recsdk_core.optim._torch import from_torch

__all__ = [
    "FTRL",
    "LAMB",
    "SGD",
    "Adagrad",
    "Adam",
    "AdamW",
    "Optimizer",
    "PartialRowwiseAdam",
    "RMSprop",
    "RowwiseAdagrad",
    "from_torch",
]
