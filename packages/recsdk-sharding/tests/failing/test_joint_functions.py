"""Every function in which a rank waits for others is run where one of them alone is wrong."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import alone_on_ranks
import torch.distributed as dist

PACKAGES = Path(__file__).resolve().parents[3]
WAYS = {"Agreement", "calling", "group_beside", "joint_ranks", "made_together", "meet"}
"""Functions of ours in which ranks wait for each other."""
# Under whose arguments and errors each is tested: a call of `alone_on_ranks`, or where else.
CHECKPOINTS = ("Saver.save", "Saver.load", "import_rows", "export_rows")
IN_STEPS = ("training", "training_sequences")
IN_TELEMETRY = ("cases_of_one_alone.py",)
WAITING = {
    "recsdk_pipeline/telemetry/telemetry.py: Telemetry.__init__": IN_TELEMETRY,
    "recsdk_pipeline/telemetry/telemetry.py: _Peers.__init__": IN_TELEMETRY,
    "recsdk_pipeline/telemetry/telemetry.py: _Peers.added": IN_TELEMETRY,
    "recsdk_pipeline/telemetry/telemetry.py: _Peers.gathered": IN_TELEMETRY,
    "recsdk_sharding/_adapt/npu.py: _checking.checked": ("DistributedModelParallel",),
    "recsdk_sharding/_adapt/plans_together.py: _together": ("collective_plan",),
    "recsdk_sharding/_batch/output_dist.py: _Wire.start": IN_STEPS,
    "recsdk_sharding/_batch/output_dist.py: _Wire.swap": IN_STEPS,
    "recsdk_sharding/_checkpoint/migrate.py: export_rows": ("export_rows",),
    "recsdk_sharding/_checkpoint/migrate.py: import_rows": ("import_rows",),
    "recsdk_sharding/_checkpoint/saver.py: Saver.load": ("Saver.load",),
    "recsdk_sharding/_checkpoint/saver.py: Saver.save": ("Saver.save",),
    "recsdk_sharding/_checkpoint/saver.py: _GroupRanks.__init__": CHECKPOINTS,
    "recsdk_sharding/_checkpoint/saver.py: _GroupRanks.gather": CHECKPOINTS,
    "recsdk_sharding/_checkpoint/saver.py: _ranks_of": CHECKPOINTS,
    "recsdk_sharding/_modules/feature_processed.py: "
    "ShardedHashFeatureProcessedEmbeddingBagCollection.__init__": ("training_processors",),
    "recsdk_sharding/_modules/making_models.py: made_together": ("DistributedModelParallel",),
    "recsdk_sharding/tensor_parallel/layers.py: LayoutCheck._require_equal": (
        "training_cut_layers",
    ),
    "recsdk_sharding/tensor_parallel/layers.py: _require_equal_sizes": ("training_cut_layers",),
    "recsdk_sharding/tensor_parallel/parallelize.py: parallelize": ("parallelize",),
    "recsdk_sharding/tensor_parallel/wrapper.py: _Averaging.__call__": ("training_cut_layers",),
    "recsdk_sharding/tensor_parallel/wrapper.py: _start_equal": ("parallelize",),
}


def waiting_functions() -> set[str]:
    """Those of the packages outside of `exchange`, which ranks use to wait, and of the demo."""
    return {
        f"{path.relative_to(source).as_posix()}: {name}"
        for source in PACKAGES.glob("recsdk-*/src")
        for path in source.glob("**/*.py")
        if not {"exchange", "demo"} & set(path.parts)
        for name in _waiting(ast.parse(path.read_text(encoding="utf-8")), "")
    }


def _waiting(node: ast.AST, name: str) -> Iterator[str]:
    for child in ast.iter_child_nodes(node):
        inner = name
        if isinstance(child, (ast.FunctionDef, ast.ClassDef)):
            inner = f"{name}.{child.name}".lstrip(".")
        elif isinstance(child, ast.Call) and _waits(child.func):
            yield name
        yield from _waiting(child, inner)


def _waits(called: ast.expr) -> bool:
    if isinstance(called, ast.Attribute):
        is_torch = isinstance(called.value, ast.Name) and called.value.id == "dist"
        is_asking = called.attr.startswith(("get_", "is_", "init_", "new_", "destroy_"))
        is_torch = is_torch and hasattr(dist, called.attr)  # some variables have that name
        return called.attr in WAYS or (is_torch and called.attr[0].islower() and not is_asking)
    return isinstance(called, ast.Name) and called.id in WAYS


def test_every_function_that_waits_for_other_ranks_is_known_here() -> None:
    assert waiting_functions() == set(WAITING)


def test_every_function_that_waits_is_run_where_one_rank_is_wrong() -> None:
    pipeline_tests = PACKAGES / "recsdk-pipeline" / "tests" / "pipeline_support"
    for function, places in WAITING.items():
        for place in places:
            known = place in alone_on_ranks.CALLS or (pipeline_tests / place).is_file()
            assert known, f"{function}: there is no {place}"
