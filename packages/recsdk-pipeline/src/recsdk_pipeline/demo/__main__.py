"""One rank of `recsdk demo`; torchrun starts it: python -m recsdk_pipeline.demo SETTINGS."""

from __future__ import annotations

import signal
import sys


def main() -> int:
    """Do the work of one rank; return the exit status."""
    # Before the slow imports, and for good: nothing needs saving, and Python would not see Ctrl-C
    # while it waits for another rank.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    from recsdk_pipeline.demo.settings import Settings
    from recsdk_pipeline.demo.worker import run_rank

    return run_rank(Settings.of_json(sys.argv[1]))


if __name__ == "__main__":
    raise SystemExit(main())
