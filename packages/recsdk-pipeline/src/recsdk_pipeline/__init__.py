"""Training and evaluation pipelines for hash embeddings."""

from __future__ import annotations

from typing import TYPE_CHECKING

from recsdk_pipeline._internal.version import __version__, check_layers

if TYPE_CHECKING:
    from recsdk_pipeline.hybrid_eval_pipeline import HybridEvalPipeline
    from recsdk_pipeline.hybrid_pipeline import HybridTrainPipelineSparseDist

__all__ = ["HybridEvalPipeline", "HybridTrainPipelineSparseDist", "__version__"]

check_layers()


def __getattr__(name: str) -> object:
    # On first use: importing torchrec takes seconds, which `recsdk --help` must not cost.
    if name == "HybridTrainPipelineSparseDist":
        from recsdk_pipeline.hybrid_pipeline import HybridTrainPipelineSparseDist

        return HybridTrainPipelineSparseDist
    if name == "HybridEvalPipeline":
        from recsdk_pipeline.hybrid_eval_pipeline import HybridEvalPipeline

        return HybridEvalPipeline
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
