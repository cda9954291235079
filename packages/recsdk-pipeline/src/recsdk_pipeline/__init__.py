"""Training and evaluation pipelines for hash embeddings."""

from __future__ import annotations

from recsdk_pipeline._internal.version import __version__, check_layers

check_layers()

from recsdk_pipeline.hybrid_pipeline import HybridTrainPipelineSparseDist  # noqa: E402

__all__ = ["HybridTrainPipelineSparseDist", "__version__"]
