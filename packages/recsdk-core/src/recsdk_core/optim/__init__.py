"""The optimizers that are fused into the backward pass.

One update is applied per touched key and backward, with the key's summed gradient. Defaults and
formulas are those of the torch class of the same name, applied to touched rows only; where torch
has none, the source is named.
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
