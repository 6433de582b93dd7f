# SPDX-License-Identifier: Apache-2.0
"""Which pods a request can name in the header x-kv-cache-source-host-port."""

import asyncio
import socket

import pytest

from quire_spec.engine.kv_transfer_config import KVTransferConfig, PeerAddress
from quire_spec.errors import InvalidArgument
from quire_spec.protocol import allowed_peers
from quire_spec.protocol.allowed_peers import HEADER, AllowedNodes, AllowedPeers


def test_addresses_of_names_are_allowed_and_known_for_some_time(monkeypatch):
    addresses, lookups = ["10.0.0.1", "fd00::1"], []

    def look_up(host, port, *_, **__):
        lookups.append(host)
        if not addresses:
            raise socket.gaierror("not found")
        return [(0, 0, 0, "", (address, port)) for address in addresses]

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    monkeypatch.setattr(allowed_peers, "_LOOKUP_S", 0.0)
    config = KVTransferConfig("key", allowed_peers=("pods:8005", "10.1.0.0/16:8005"))
    peers, nodes = AllowedPeers(config), AllowedNodes(config)

    def source(text):
        return asyncio.run(peers.source({HEADER: text.encode()}))

    assert source("10.1.2.3:8005") == "10.1.2.3:8005" and source("pods:8005") == "pods:8005"
    assert lookups == [], "these are allowed as they are"
    assert source("10.0.0.1:8005") == "10.0.0.1:8005" and source("[FD00:0::1]:8005") == "[fd00::1]:8005"
    assert lookups == ["pods"]
    others = ("10.0.0.1:8005", "[fd00::1]:8005", "10.1.2.3:8005", "10.0.0.2:8005", "10.0.0.1:8006")
    assert [nodes.allows(PeerAddress.parse(other)) for other in others] == [True, True, True, False, False]
    addresses.clear()
    assert source("10.0.0.1:8005"), "a pod that has ended is a miss, not an error"
    for other in ("10.0.0.2:8005", "10.0.0.1:8006", "http://pods:8005", ""):
        with pytest.raises(InvalidArgument, match="x-kv-cache-source-host-port"):
            source(other)
    addresses.append("10.0.0.2")
    assert source("10.0.0.2:8005")


def test_without_peers_the_header_has_no_effect():
    assert asyncio.run(AllowedPeers(None).source({HEADER: b"?"})) == ""
    with pytest.raises(InvalidArgument, match="allowed peer"):
        asyncio.run(AllowedPeers(KVTransferConfig("key")).source({HEADER: b"10.0.0.1:8005"}))
