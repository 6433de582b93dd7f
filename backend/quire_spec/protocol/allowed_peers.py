# SPDX-License-Identifier: Apache-2.0
"""The pods that a request may name: in llm-d's header x-kv-cache-source-host-port a pod from which this pod reads KV
blocks, and in its header x-prefiller-host-port a pod that computes the prompt."""

import asyncio
import socket
import threading
import time
from collections.abc import Mapping

from quire_spec.engine.kv_transfer_config import KVTransferConfig, PeerAddress
from quire_spec.errors import InvalidArgument, truncated_repr

HEADER = b"x-kv-cache-source-host-port"
PREFILLER_HEADER = b"x-prefiller-host-port"
_LOOKUP_S = 1.0
"""Names are looked up at most once in this many seconds, and only for an address that is not known."""
_KNOWN_S = 600.0
"""An address stays allowed for this many seconds after a lookup that had it. Routers name a pod for some time after it
has ended; such a request is answered without its blocks."""


class AllowedPeers:
    """The allowed peers of the configuration. Routers name addresses of pods, so the names among the peers, such as
    that of a headless Service, are looked up."""

    def __init__(self, config: KVTransferConfig | None) -> None:
        """None: the pod reads from no others."""
        self._config = config
        self._known_until: dict[PeerAddress, float] = {}
        self._next_lookup = 0.0

    async def source(self, headers: Mapping[bytes, bytes], header: bytes = HEADER) -> str:
        """Return the pod that a header names, as HOST:PORT. Empty if the header is missing, or if this pod reads from
        no others.

        Raises:
            InvalidArgument: the header is not HOST:PORT, or the pod is not an allowed peer.
        """
        value = headers.get(header)
        if value is None or self._config is None:
            return ""
        # llm-d's router can name several pods, the best one first.
        text = value.decode("latin-1").partition(",")[0].strip()
        if (peer := PeerAddress.parse(text)) is None:
            raise InvalidArgument(f"{header.decode()}: must be HOST:PORT, got {truncated_repr(text)}")
        return await self.allow(peer, header.decode())

    async def allow(self, peer: PeerAddress, field: str) -> str:
        """Return the address of a pod that a request names in `field`, as HOST:PORT. Empty if this pod reads from no
        others.

        Raises:
            InvalidArgument: this pod must not read from that pod.
        """
        if self._config is None:
            return ""
        if not (self._config.allows(peer) or self._is_known(peer)):
            await self._look_up(self._config)
            if not self._is_known(peer):
                raise InvalidArgument(f"{field}: {truncated_repr(str(peer))} is not an allowed peer of this server")
        return str(peer)

    def _is_known(self, peer: PeerAddress) -> bool:
        return time.monotonic() < self._known_until.get(peer, 0.0)

    async def _look_up(self, config: KVTransferConfig) -> None:
        now, loop = time.monotonic(), asyncio.get_running_loop()
        if now < self._next_lookup:
            return
        self._next_lookup = now + _LOOKUP_S
        self._known_until = {peer: until for peer, until in self._known_until.items() if now < until}
        for name in config.peer_names:
            try:
                found = await loop.getaddrinfo(name.host, name.port, type=socket.SOCK_STREAM)
            except OSError:
                # The name has no address at the moment, or DNS does not respond.
                continue
            self._known_until |= {PeerAddress(str(info[4][0]), name.port): now + _KNOWN_S for info in found}


class AllowedNodes:
    """The allowed peers of the configuration, for nodes that another pod names. Blocking; any thread can call it."""

    def __init__(self, config: KVTransferConfig) -> None:
        self._config = config
        self._known: set[PeerAddress] = set()
        self._next_lookup = 0.0
        self._lock = threading.Lock()

    def allows(self, peer: PeerAddress) -> bool:
        """Return whether this pod may read from a peer."""
        if self._config.allows(peer) or peer in self._known:
            return True
        with self._lock:
            if time.monotonic() >= self._next_lookup:
                found = map(_addresses, self._config.peer_names)
                self._known = {address for addresses in found for address in addresses}
                self._next_lookup = time.monotonic() + _LOOKUP_S
            return peer in self._known


def _addresses(name: PeerAddress) -> list[PeerAddress]:
    """Return the addresses that DNS has for a name at the moment."""
    try:
        found = socket.getaddrinfo(name.host, name.port, type=socket.SOCK_STREAM)
    except OSError:
        return []
    return [PeerAddress(str(info[4][0]), name.port) for info in found]
