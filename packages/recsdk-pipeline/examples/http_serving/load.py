"""Requests on a server that runs: how many a second it answers, and how long the slowest wait.

python load.py http://127.0.0.1:8000 [--requests 2000] [--at-once 4] [--examples 16]    needs httpx
"""

from __future__ import annotations

import asyncio
import time
from argparse import ArgumentParser
from typing import Any

import httpx
import numpy as np
from clicks import FEATURES

from recsdk_pipeline.data import ClickBatch, SyntheticClicks


def body_of(batch: ClickBatch) -> dict[str, Any]:
    """The JSON of a request: its examples' numbers, and their bags of ids by feature."""
    ids = {name: [bag.tolist() for bag in batch.sparse[name].to_dense()] for name in FEATURES}
    return {"dense": batch.dense.tolist(), "ids": ids}


async def run_load(url: str, *, requests: int, at_once: int, examples: int) -> str:
    """Send that many requests, never more than `at_once` at a time; return a line of figures."""
    clicks = SyntheticClicks(num_train=1, num_held_out=1)
    bodies = [
        body_of(clicks.draw(first, first + examples)[0].batch())
        for first in range(0, 50 * examples, examples)
    ]
    seconds: list[float] = []
    left = iter(range(requests))
    async with httpx.AsyncClient(base_url=url, timeout=30) as client:

        async def one_after_the_other() -> None:
            for number in left:
                began = time.perf_counter()
                answer = await client.post("/score", json=bodies[number % len(bodies)])
                seconds.append(time.perf_counter() - began)
                answer.raise_for_status()

        began = time.perf_counter()
        await asyncio.gather(*(one_after_the_other() for _ in range(at_once)))
        rate = len(seconds) / (time.perf_counter() - began)
    p50, p99 = np.percentile(seconds, [50, 99]) * 1000
    return (
        f"{len(seconds)} requests of {examples} examples, {at_once} at once: "
        f"{rate:.0f} a second, p50 {p50:.1f} ms, p99 {p99:.1f} ms"
    )


def main() -> None:
    parser = ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("url")
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--at-once", type=int, default=4)
    parser.add_argument("--examples", type=int, default=16, help="in a request")
    args = vars(parser.parse_args())
    print(asyncio.run(run_load(args.pop("url"), **args)))


if __name__ == "__main__":
    main()
