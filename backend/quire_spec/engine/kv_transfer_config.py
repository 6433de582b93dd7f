# SPDX-License-Identifier: Apache-2.0
"""Configuration of KV peers. It is the field `kv_transfer` of EngineConfig."""

import ipaddress
import re
from dataclasses import dataclass

from quire_spec.errors import ConfigError, truncated_repr

DEFAULT_PORT = 8005
MAX_PEERS = 1024
"""Maximum number of entries of `allowed_peers`."""
_HOST_PORT = re.compile(r"(?P<host>[^:\[\]/]+|\[[0-9a-fA-F]*:[0-9a-fA-F:.]*\]):(?P<port>[0-9]{1,5})")
_NETWORK = re.compile(r"(?P<network>[0-9.]+/[0-9]+|\[[0-9a-fA-F:.]+/[0-9]+\]):(?P<port>[0-9]{1,5})")


@dataclass(frozen=True, slots=True)
class PeerAddress:
    """Where a pod serves its KV blocks."""

    host: str
    """Name or IP address, without brackets."""
    port: int

    def __str__(self) -> str:
        """Return HOST:PORT; an IPv6 address is in brackets."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @classmethod
    def parse(cls, text: str) -> "PeerAddress | None":
        """Return the address HOST:PORT; None if the text is none."""
        match = _HOST_PORT.fullmatch(text)
        if match is None or not 0 < int(match["port"]) < 2**16:
            return None
        host = match["host"].strip("[]").lower()
        return cls(str(_parse_ip(host) or host), int(match["port"]))


@dataclass(frozen=True, slots=True)
class KVTransferConfig:
    """How a pod serves its KV blocks to other pods, and from which pods it reads blocks."""

    key_file: str
    """File with the key that all pods share: at least 16 bytes, which only this user or its group can read. It is read
    for each connection, so that a new key takes effect without a restart."""

    port: int = DEFAULT_PORT
    """Port on which the pod serves its blocks, on the address of its other ports."""

    allowed_peers: tuple[str, ...] = ()
    """Pods from which this pod may read, if a request names one: HOST:PORT, or NETWORK:PORT such as 10.0.0.0/8:8005. A
    name also stands for its addresses. With the port of its OpenAI API, a pod may compute prompts for this pod. If the
    list is empty, the pod serves its blocks, but reads from no other pod."""

    bytes_per_second: int | None = None
    """Maximum number of bytes of blocks that the pod sends in a second, to all peers together; None: no limit."""

    def validate(self) -> None:
        """Raise ConfigError for the first field that cannot be used."""
        if not self.key_file:
            raise ConfigError("kv_transfer.key_file: must not be empty; give a file with the key that all pods share")
        if not 0 < self.port < 2**16:
            raise ConfigError(f"kv_transfer.port: must be a port from 1 to 65535, got {self.port}")
        if self.bytes_per_second is not None and self.bytes_per_second < 1:
            raise ConfigError(
                f"kv_transfer.bytes_per_second: must be at least 1, got {self.bytes_per_second}; omit it for no limit"
            )
        if len(self.allowed_peers) > MAX_PEERS:
            raise ConfigError(
                f"kv_transfer.allowed_peers: {len(self.allowed_peers)} entries, but at most {MAX_PEERS} are possible; "
                "use networks"
            )
        for entry in self.allowed_peers:
            if PeerAddress.parse(entry) is None and _parse_network(entry) is None:
                raise ConfigError(
                    f"kv_transfer.allowed_peers: must be HOST:PORT or NETWORK:PORT, such as 10.0.0.7:{DEFAULT_PORT} or "
                    f"10.0.0.0/8:{DEFAULT_PORT}, got {truncated_repr(entry)}"
                )

    @property
    def peer_names(self) -> list[PeerAddress]:
        """The allowed peers that are names, whose addresses DNS knows."""
        peers = map(PeerAddress.parse, self.allowed_peers)
        return [peer for peer in peers if peer is not None and _parse_ip(peer.host) is None]

    def allows(self, peer: PeerAddress) -> bool:
        """Return whether the pod may read from a peer. A name is compared as text; only an IP address can be in a
        network."""
        address = _parse_ip(peer.host)
        if peer in map(PeerAddress.parse, self.allowed_peers):
            return True
        networks = [] if address is None else filter(None, map(_parse_network, self.allowed_peers))
        return any(port == peer.port and address in network for network, port in networks)


def _parse_ip(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


def _parse_network(entry: str) -> tuple[ipaddress.IPv4Network | ipaddress.IPv6Network, int] | None:
    match = _NETWORK.fullmatch(entry)
    if match is None or not 0 < int(match["port"]) < 2**16:
        return None
    try:
        return ipaddress.ip_network(match["network"].strip("[]")), int(match["port"])
    except ValueError:
        return None
