"""What modules of bags take.

Shape letters: N keys, B bags, L keys of a bag, D row width.
"""

from __future__ import annotations

import torch

from recsdk_core._internal.checks import require_bool

__all__ = ["bag_offsets", "check_bags", "require_tensor"]


def bag_offsets(
    keys: torch.Tensor, offsets: torch.Tensor | None, include_last_offset: bool
) -> torch.Tensor:
    """Where each bag of the flattened keys begins and the last one ends, (B + 1,).

    Takes what `HashEmbeddingBag.forward` takes. Raises ValueError for shapes that do not fit,
    TypeError for what is no tensor and for offsets that are not int64 or int32.
    """
    check_bags(keys, offsets)
    require_bool("bag_offsets", include_last_offset=include_last_offset)
    if offsets is None:
        bags, length = keys.shape
        return torch.arange(bags + 1, device=keys.device) * length
    if include_last_offset:
        return offsets
    return torch.cat([offsets, offsets.new_tensor([len(keys)])])


def check_bags(keys: torch.Tensor, offsets: torch.Tensor | None) -> None:
    """Raises TypeError or ValueError unless keys and offsets go together."""
    require_tensor("keys", keys)
    if offsets is not None:
        require_tensor("offsets", offsets)
        if offsets.dtype not in (torch.int64, torch.int32):
            raise TypeError(
                f"offsets must be int64 or int32, got {offsets.dtype}; pass offsets.to(torch.int64)"
            )
        if offsets.dim() != 1:
            raise ValueError(f"offsets must have one dimension, got shape {tuple(offsets.shape)}")
        if keys.dim() == 2:
            raise ValueError(
                "offsets must be None if keys have two dimensions, which are bags, got "
                f"{tuple(offsets.shape)} of them; pass keys.flatten() with offsets"
            )
    if keys.dim() != (2 if offsets is None else 1):
        got = "no offsets" if offsets is None else f"offsets {tuple(offsets.shape)}"
        raise ValueError(
            "keys must have shape (B, L), or (N,) together with offsets; got shape "
            f"{tuple(keys.shape)} and {got}"
        )


def require_tensor(name: str, value: object) -> None:
    """Raises TypeError for what is no tensor, or a nested one."""
    if not isinstance(value, torch.Tensor):
        raise TypeError(
            f"{name} must be a torch.Tensor, got {type(value).__name__}; pass torch.as_tensor of it"
        )
    if value.is_nested:
        raise TypeError(
            f"{name} must not be a nested tensor: look up its values(), bags with offsets()[:-1]; "
            "torch.nested.nested_tensor_from_jagged(vectors, offsets()) nests vectors"
        )
    if value.layout is not torch.strided:
        raise TypeError(
            f"{name} must be a dense tensor, got one of layout {value.layout}; pass "
            f"{name}.to_dense()"
        )
