"""The batches in flight of one iterator."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np

from recsdk_core import Table, lease_tables
from recsdk_core.batch_leases import BatchLeases
from recsdk_pipeline._internal.feeds import Feed
from recsdk_pipeline._internal.queue import Queue
from recsdk_pipeline._internal.slot import Request, Slot


def mapped(table: Table, key: int, error: Exception | None) -> Slot:
    """A batch with a new row, of which another part may have failed."""
    [lease] = lease_tables([table], step=key)
    table.map(np.array([key]), insert=True, lease=lease)
    exchange: Any = object()
    feed = Feed(name="", module=SimpleNamespace(), way=(), exchange=exchange)
    request = Request(feed, None, SimpleNamespace())
    request.result = [SimpleNamespace(in_flight=BatchLeases([lease]))]
    return Slot(None, None, True, 0, requests=[request], error=error)


def test_batches_that_are_not_kept_end_though_their_errors_are() -> None:
    table = Table(dim=2, name="t")
    queue = Queue(iter([]), is_training=True)
    errors = [None, ValueError("first"), ValueError("second"), None]
    slots = [mapped(table, 1 + number, error) for number, error in enumerate(errors)]
    queue.slots.extend(slots)
    queue.keep(failed=1)
    assert list(queue.slots) == slots[:2]
    assert table.stats().num_rows_held_back == 2
    queue.keep(failed=0)
    assert list(queue.slots) == slots[:1]
    assert table.stats().num_rows_held_back == 3
