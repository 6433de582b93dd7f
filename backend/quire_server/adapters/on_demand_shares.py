# SPDX-License-Identifier: Apache-2.0
"""Which adapters leave an adapter source when a new one needs room. Pure.

Each client that brought adapters has an equal share of the number and of the bytes. A client that is above its share
pays with its own adapters. Therefore, a client that names many adapters does not remove those of other clients.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from quire_spec.constants import AdapterName


@dataclass(frozen=True, slots=True)
class OnDemandAdapter:
    """An adapter that was found in an adapter source."""

    name: AdapterName
    client: str
    """The client whose request brought the adapter."""
    num_bytes: int
    idle_s: float = 0.0
    """Seconds since the last request; 0 if a request is open."""


def select_leaving(
    adapters: Iterable[OnDemandAdapter], newcomer: OnDemandAdapter, max_adapters: int, max_bytes: int
) -> list[AdapterName] | None:
    """Return the names of the adapters that must leave before the newcomer has room; None if it gets no room, because
    too many adapters have open requests.

    `adapters` are those of the source, without the newcomer.
    """
    staying = {adapter.name: adapter for adapter in adapters}
    leaving: list[AdapterName] = []
    while True:
        present = (*staying.values(), newcomer)
        if len(present) <= max_adapters and sum(adapter.num_bytes for adapter in present) <= max_bytes:
            return leaving
        usages = _usages(present, max_adapters, max_bytes)
        candidates = [adapter for adapter in staying.values() if adapter.client in _payers(usages, staying, newcomer)]
        if not (idle := [adapter for adapter in candidates if adapter.idle_s > 0]):
            return None
        victim = max(idle, key=lambda adapter: (usages[adapter.client], adapter.client, adapter.idle_s, adapter.name))
        del staying[victim.name]
        leaving.append(victim.name)


def _usages(adapters: Iterable[OnDemandAdapter], max_adapters: int, max_bytes: int) -> dict[str, float]:
    """Return for each client the part of the limits that its adapters use."""
    counts, sizes = Counter[str](), Counter[str]()
    for adapter in adapters:
        counts[adapter.client] += 1
        sizes[adapter.client] += adapter.num_bytes
    return {client: max(counts[client] / max_adapters, sizes[client] / max_bytes) for client in counts}


def _payers(
    usages: Mapping[str, float], staying: Mapping[AdapterName, OnDemandAdapter], newcomer: OnDemandAdapter
) -> set[str]:
    """Return the clients whose adapters can leave."""
    share, owner = 1 / len(usages), newcomer.client
    if usages[owner] <= share:
        return {client for client, usage in usages.items() if usage > share}
    # Every client can have one adapter, even if the limits are so low that it is more than a share.
    has_others = any(adapter.client == owner for adapter in staying.values())
    return {owner} if has_others else {*usages}
