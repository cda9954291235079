"""Every optimizer of the engine, with every legal way to decay and to clip."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

from recsdk_core import optim

PLAIN: dict[str, Any] = {
    "sgd": optim.SGD(lr=0.1),
    "momentum": optim.SGD(lr=0.1, momentum=0.7),
    "dampening": optim.SGD(lr=0.1, momentum=0.7, dampening=0.4),
    "nesterov": optim.SGD(lr=0.1, momentum=0.7, nesterov=True),
    "adagrad": optim.Adagrad(lr=0.1, eps=1e-4),
    "adagrad slower": optim.Adagrad(lr=0.1, lr_decay=0.3, initial_accumulator_value=0.2, eps=1e-3),
    "rowwise adagrad": optim.RowwiseAdagrad(lr=0.1, eps=1e-4, initial_accumulator_value=0.2),
    "adam": optim.Adam(lr=0.02, eps=1e-4),
    "adam by row": optim.Adam(lr=0.02, betas=(0.0, 0.8), eps=1e-3, bias_correction="row"),
    "adamw": optim.AdamW(lr=0.02, eps=1e-4),
    "adamw by row": optim.AdamW(lr=0.02, betas=(0.3, 0.8), eps=1e-3, bias_correction="row"),
    "partial rowwise adam": optim.PartialRowwiseAdam(lr=0.02, eps=1e-4),
    "partial rowwise adam by row": optim.PartialRowwiseAdam(
        lr=0.02, betas=(0.3, 0.8), eps=1e-3, bias_correction="row"
    ),
    "lamb": optim.LAMB(lr=0.02, eps=1e-4),
    "lamb by row": optim.LAMB(
        lr=0.02, betas=(0.3, 0.8), eps=1e-3, weight_decay=0.3, bias_correction="row"
    ),
    "ftrl": optim.FTRL(lr=0.2),
    "ftrl regularized": optim.FTRL(
        lr=0.2,
        l1_regularization_strength=0.3,
        l2_regularization_strength=0.2,
        beta=0.5,
        initial_accumulator_value=0.3,
    ),
    "rmsprop": optim.RMSprop(lr=0.02, eps=1e-4),
    "rmsprop momentum": optim.RMSprop(lr=0.02, alpha=0.8, momentum=0.6, eps=1e-3),
    "rmsprop centered": optim.RMSprop(lr=0.02, alpha=0.8, centered=True, eps=1e-2),
    "rmsprop both": optim.RMSprop(lr=0.02, alpha=0.8, centered=True, momentum=0.6, eps=1e-2),
}
"""Each optimizer in each of its forms."""

DECAYS: dict[str, dict[str, Any]] = {
    "": {},
    " l2": {"weight_decay": 0.4, "weight_decay_mode": "l2"},
    " decoupled": {"weight_decay": 0.4, "weight_decay_mode": "decoupled"},
    " l2, catching up": {"weight_decay": 0.4, "weight_decay_mode": "l2", "catch_up": True},
    " decoupled, catching up": {
        "weight_decay": 0.4,
        "weight_decay_mode": "decoupled",
        "catch_up": True,
    },
}
CLIPS: dict[str, dict[str, Any]] = {
    "": {},
    " clip_value": {"clip_value": 0.75},
    " clip_norm": {"clip_norm": 1.5},
    " clip both": {"clip_value": 2.5, "clip_norm": 3.0},
}


def is_a_product(optimizer: Any, weight_decay_mode: str, **_: Any) -> bool:
    """Whether the updates that leave a row out have a closed form."""
    is_plain_sgd = isinstance(optimizer, optim.SGD) and not optimizer.momentum
    return weight_decay_mode == "decoupled" or is_plain_sgd


def with_every_option() -> dict[str, Any]:
    """All of it by name: what the optimizer's class refuses is left out."""
    found = {}
    for name, optimizer in PLAIN.items():
        names = {field.name for field in fields(optimizer)}
        for decay, options in DECAYS.items():
            if not names >= set(options):
                continue
            if options.get("catch_up") and not is_a_product(optimizer, **options):
                continue
            decaying = replace(optimizer, **options)
            for clip, limits in CLIPS.items():
                found[name + decay + clip] = replace(decaying, **limits)
    return found
