"""Run a script on ranks under torchrun's agent, which starts all of them again when one dies.

python elastic.py NUM_RANKS MAX_RESTARTS SCRIPT [ARGUMENT ...]

Ranks are forked, so that they need not import torchrec again.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

from torch.distributed.launcher.api import LaunchConfig, elastic_launch

import recsdk_pipeline  # noqa: F401  the ranks have it from here


def run(script: str, *arguments: str) -> None:
    sys.argv = [script, *arguments]
    sys.path.insert(0, str(Path(script).parent))
    runpy.run_path(script, run_name="__main__")


def main() -> None:
    num_ranks, max_restarts, *command = sys.argv[1:]
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=int(num_ranks),
        max_restarts=int(max_restarts),
        run_id="test",
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        start_method="fork",
        monitor_interval=0.1,
    )
    elastic_launch(config, run)(*command)


if __name__ == "__main__":
    main()
