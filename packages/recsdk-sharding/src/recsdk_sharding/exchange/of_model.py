"""The exchanges of a model, and how its ranks go on after one of them has failed."""

from __future__ import annotations

from torch import nn

from recsdk_sharding.exchange.host_exchange import HostExchange, Visit

__all__ = ["exchanges_of", "go_on"]


def exchanges_of(module: nn.Module) -> list[HostExchange]:
    """The exchanges that a model's sharded hash modules use, each once, in module order.

    Empty for a model without sharded hash modules.
    """
    found: dict[int, HostExchange] = {}
    for child in module.modules():
        exchange = getattr(child, "host_exchange", None)
        if isinstance(exchange, HostExchange):
            found.setdefault(id(exchange), exchange)
    return list(found.values())


def go_on(module: nn.Module) -> None:
    """Makes a model usable again after a step that raised, on some ranks or on all.

    Every rank calls it, and waits here until all have: one that still waits for a batch is told
    that the ranks disagree. Batches that were sent ahead are lost. Does nothing for a model without
    sharded hash modules. Raises PeerError if a process group failed. A rank on which a Ctrl-C came
    calls it again.
    """
    exchanges, visit = exchanges_of(module), Visit()
    # All of them at once: another rank may wait for a batch in any of them.
    arrivals = [exchange.arrive(visit) for exchange in exchanges]
    for exchange, arrival in zip(exchanges, arrivals, strict=True):
        exchange.wait_in(visit, arrival)
    for exchange in exchanges:
        exchange.reset()
    visit.is_over = True
