"""How the ranks agree before each batch, and how they fail together."""

from __future__ import annotations

from recsdk_sharding.exchange.errors import PeerError
from recsdk_sharding.exchange.host_exchange import (
    EndOfData,
    ExchangeJob,
    HostExchange,
    Splits,
    exchange_of_group,
)
from recsdk_sharding.exchange.of_model import exchanges_of, go_on
from recsdk_sharding.exchange.worker import Pending

__all__ = [
    "EndOfData",
    "ExchangeJob",
    "HostExchange",
    "PeerError",
    "Pending",
    "Splits",
    "exchange_of_group",
    "exchanges_of",
    "go_on",
]
