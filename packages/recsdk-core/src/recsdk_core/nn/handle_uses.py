"""What loops, optimizers, savers and compilers ask of any parameter, and so of a table's handle.

A handle (0, D) has no row in it, and whatever computes with it gives nothing or zeros. So it
answers what is named here, and nothing else.
"""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["COPIES", "is_permitted", "name_of"]

_COPIES = (
    "alias clone contiguous cpu cuda data detach double float half bfloat16 pin_memory to type "
    "type_as xpu"
)
COPIES = frozenset(_COPIES.split())
"""What gives a copy or a view of a handle, which has no row either, or the handle itself."""
_FACTS = (
    "__dir__ __format__ __hash__ __len__ __repr__ data_ptr dense_dim dim dim_order element_size "
    "get_device has_names is_complex is_conj is_contiguous is_distributed is_floating_point "
    "is_inference is_neg is_pinned is_same_size is_set_to is_shared is_signed isfinite isinf isnan "
    "ndimension nelement numel size sparse_dim storage storage_offset storage_type stride "
    "untyped_storage _typed_storage _is_view _is_zerotensor _nested_tensor_size result_type"
)
_OTHERS_MADE_LIKE_IT = (
    "empty_like full_like new new_empty new_empty_strided new_full new_ones new_tensor new_zeros "
    "ones_like rand_like randint_like randn_like zeros_like"
)
_KEPT = (
    "__reduce_ex__ __setstate__ _reduce_ex_internal as_subclass _make_subclass "
    "detach_ module_load rename_ requires_grad_ retain_grad _has_compatible_shallow_copy_type"
)
_NAMES = COPIES.union(_FACTS.split(), _OTHERS_MADE_LIKE_IT.split(), _KEPT.split())
_ATTRIBUTES = {"__get__", "__set__", "__delete__"}
_TO_ITS_OWN_SHAPE = {"expand_as", "view_as"}
"""Which is how optimizers in backward find the node that gathers a parameter's gradient."""
_NO_PARTS = {"T", "mT", "H", "mH", "real", "imag"}


def name_of(function: Any) -> str:
    """The name of a function, or of the attribute that one gets or sets."""
    name: str = getattr(function, "__name__", "")
    if name not in _ATTRIBUTES:
        return name
    own = function.__self__
    name = getattr(own, "__name__", "") or getattr(own.fget, "__name__", "")
    return name


def is_permitted(function: Any, args: tuple[Any, ...]) -> bool:
    """Whether a handle among the arguments of a function of torch answers it."""
    name: str = getattr(function, "__name__", "")
    if name in _ATTRIBUTES:
        return name_of(function) not in _NO_PARTS
    if getattr(function, "__module__", None) == "torch.nn.init":
        return False
    if getattr(function, "namespace", None) == "recsdk":
        return True  # in exported programs
    if name in ("eq", "ne", "__eq__", "__ne__"):
        return not isinstance(args[1], torch.Tensor) and not isinstance(args[1], (int, float))
    if name in _TO_ITS_OWN_SHAPE:
        return args[0] is args[1]
    return name in _NAMES
