"""Says which fbgemm kernels torchrec's own tables lack on an Ascend NPU.

torchrec runs its tables on fbgemm's table-batched embeddings, which fbgemm_gpu has for cpu, cuda
and mtia. On an npu without such kernels they fail in forward, with a message about the device of
some argument. So importing the package makes that message say what is missing, on npu only.
"""

from __future__ import annotations

import functools
from typing import Any

from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    SplitTableBatchedEmbeddingBagsCodegen,
)

from recsdk_core import BackendUnavailable

__all__ = ["adapt_kernels"]

_OPERATOR = "split_embedding_codegen_lookup_*_function"
_DEVICE = "npu"


def adapt_kernels() -> None:
    """Makes fbgemm's table-batched embeddings say what they lack on an npu."""
    kind = SplitTableBatchedEmbeddingBagsCodegen
    kind.forward = _explaining(kind.forward)


def _explaining(forward: Any) -> Any:
    @functools.wraps(forward)
    def adapted(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return forward(self, *args, **kwargs)
        except RuntimeError as error:
            is_for_want = type(error) in (RuntimeError, NotImplementedError)
            if not is_for_want or all(each.device.type != _DEVICE for each in self.parameters()):
                raise
            raise BackendUnavailable(
                f"torchrec's tables on npu need fbgemm's {type(self).__name__}, whose operator "
                f"torch.ops.fbgemm.{_OPERATOR} failed there: {error}; fbgemm_gpu has its kernels "
                "for cpu, cuda and mtia only: install a build of fbgemm with kernels for npu, or "
                "make these tables HashEmbeddingBagCollection or HashEmbeddingCollection"
            ) from error

    return adapted
