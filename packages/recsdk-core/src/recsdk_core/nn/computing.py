"""Which functions of torch compute with the numbers of a tensor, so that an empty one misleads.

Others are left alone: attributes, copies, moves, comparisons, and whatever is new in torch.
"""

from __future__ import annotations

from typing import Any

__all__ = ["computes"]

_MODULES = ("torch.nn.functional", "torch.nn.init")
_PREFIXES = ("linalg_", "special_", "fft_", "_foreach_norm", "_foreach_pow", "_foreach_mul")
_SUMS = (
    "amax amin aminmax argmax argmin count_nonzero cummax cummin cumprod cumsum frobenius_norm "
    "kthvalue logcumsumexp logsumexp max mean median min mode nanmean nanmedian nansum norm "
    "nuclear_norm prod quantile renorm std std_mean sum trace unique var var_mean"
)
_PRODUCTS = (
    "__matmul__ __rmatmul__ addbmm addmm addmv addr baddbmm bmm chain_matmul cross dot einsum "
    "inner kron linear matmul mm mv outer tensordot vdot"
)
_PARTS = (
    "__getitem__ __iter__ embedding embedding_bag gather index_select masked_select permute select "
    "sort swapaxes swapdims t take take_along_dim topk transpose unbind "
    "cat concat concatenate flatten hstack ravel reshape stack view vstack"
)
_NUMBERS = (
    "__abs__ __add__ __div__ __mul__ __neg__ __pow__ __radd__ __rdiv__ __rmul__ __rpow__ __rsub__ "
    "__rtruediv__ __sub__ __truediv__ abs absolute add addcdiv addcmul cdist clamp clamp_max "
    "clamp_min clip corrcoef cosine_similarity cov diff dist div divide erf exp exp2 expm1 lerp "
    "log log10 log1p log2 log_softmax logaddexp matrix_exp maximum minimum mul multiply neg "
    "negative pairwise_distance pdist pow reciprocal relu rsqrt rsub sigmoid sign softmax sqrt "
    "square sub subtract svd tanh true_divide"
)
_NAMES = frozenset(f"{_SUMS} {_PRODUCTS} {_PARTS} {_NUMBERS}".split())


def computes(function: Any) -> bool:
    """Whether a function that torch calls with a tensor computes with its numbers."""
    name: str = getattr(function, "__name__", "")
    return (
        name in _NAMES
        or getattr(function, "__module__", None) in _MODULES
        or name.startswith(_PREFIXES)
    )
