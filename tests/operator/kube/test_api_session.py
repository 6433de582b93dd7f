# SPDX-License-Identifier: Apache-2.0
"""An API session closes all connections, even if the server does not respond."""

import asyncio
import ssl

import psutil
from nodocker_cluster.pki import CertificateAuthority

from quire_operator.kube.api_session import ApiSession
from quire_operator.kube.cluster_config import ClusterConfig


async def test_connections_that_were_cut_in_a_request_are_closed_with_the_session(tmp_path):
    """The server sends no response and does not end TLS."""
    asked, over = asyncio.Event(), asyncio.Event()

    async def answer(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        writer.transport.pause_reading()
        asked.set()
        await over.wait()
        writer.transport.abort()

    authority = CertificateAuthority(tmp_path)
    authority.issue("api", "api", hosts=["127.0.0.1"])
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls.load_cert_chain(tmp_path / "api.crt", tmp_path / "api.key")
    server = await asyncio.start_server(answer, "127.0.0.1", 0, ssl=tls)
    port = server.sockets[0].getsockname()[1]

    def connections():
        return [c for c in psutil.Process().net_connections("tcp") if c.raddr and c.raddr.port == port]

    login = ClusterConfig(f"https://127.0.0.1:{port}", ssl.create_default_context(cafile=tmp_path / "ca.crt"))
    async with ApiSession(login) as session:
        asking = asyncio.create_task(session.request("GET", "/a"))
        await asked.wait()
        assert len(connections()) == 1
        asking.cancel()
        await asyncio.wait([asking])
    assert connections() == []
    over.set()
    server.close()
    await server.wait_closed()
