# SPDX-License-Identifier: Apache-2.0
"""The server of KV blocks of the first node of a group, as that of another node sees it. Only the first node has
leases: a row has the same number on all nodes, and a lease there pins it on all of them."""

import asyncio
import contextlib
import socket
from collections.abc import Callable, Sequence
from pathlib import Path

from quire_server.kv_peer.frames import receive, send
from quire_spec.errors import Unavailable
from quire_spec.protocol import kv_wire
from quire_spec.protocol.protocol_error import ProtocolError

_TIMEOUT_S = 2.0


class FirstNode:
    """A connection to the first node, which is opened when it is needed."""

    def __init__(self, host: str, port: int, key_file: Path, layout: Callable[[], kv_wire.RowLayout | None]) -> None:
        """`host` is a name or an address. `layout` returns that of the rows of this node."""
        self._host, self._port, self._key_file, self._layout = host, port, key_file, layout
        self._connection: socket.socket | None = None
        self._lock = asyncio.Lock()

    async def check(self, lease: bytes, generation: int, rows: Sequence[int]) -> tuple[list[int], float]:
        """Return the number of the row of each address, and for how many seconds the lease lasts.

        Raises:
            ProtocolError: the lease is not valid, or the first node does not answer.
        """
        request = kv_wire.encode(kv_wire.Check(lease, generation, list(rows)))
        async with self._lock:
            try:
                async with asyncio.timeout(_TIMEOUT_S):
                    answer = await self._ask(request)
            except (OSError, TimeoutError, Unavailable, ProtocolError) as error:
                self.close()
                raise ProtocolError("nodes", f"the first node, {self._host}, does not answer: {error}") from error
            except asyncio.CancelledError:
                # An answer may be on its way.
                self.close()
                raise
        if len(answer.rows) != len(rows):
            raise ProtocolError("lease", "the first node does not have this lease")
        return answer.rows, answer.seconds

    async def _ask(self, request: bytes) -> kv_wire.Checked:
        if self._connection is not None:
            # The first node may have restarted, or closed the connection because it was idle.
            with contextlib.suppress(OSError, ProtocolError):
                return await self._exchange(self._connection, request)
            self.close()
        self._connection = await self._connect()
        return await self._exchange(self._connection, request)

    async def _exchange(self, connection: socket.socket, request: bytes) -> kv_wire.Checked:
        await send(connection, request)
        return kv_wire.decode(kv_wire.Checked, await receive(connection, kv_wire.MAX_FRAME_BYTES))

    async def _connect(self) -> socket.socket:
        """Connect, prove the key, and compare the layout."""
        loop = asyncio.get_running_loop()
        if (layout := self._layout()) is None:
            raise ProtocolError("loading", "the rows of this node are not shared yet")
        found = await loop.getaddrinfo(self._host, self._port, type=socket.SOCK_STREAM)
        family, _, _, _, address = found[0]
        connection = socket.socket(family, socket.SOCK_STREAM)
        try:
            connection.setblocking(False)
            await loop.sock_connect(connection, address)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            key = kv_wire.read_key(self._key_file)
            challenge = kv_wire.decode(kv_wire.Challenge, await receive(connection, kv_wire.MAX_HANDSHAKE_BYTES))
            proof = kv_wire.prove(key, challenge, layout)
            await send(connection, kv_wire.encode(proof))
            answer = kv_wire.decode(kv_wire.Welcome, await receive(connection, kv_wire.MAX_HANDSHAKE_BYTES))
            kv_wire.check_welcome(key, challenge, proof, answer)
            if answer.difference:
                raise ProtocolError(answer.difference, f"the layout of the first node differs in {answer.difference!r}")
        except BaseException:
            connection.close()
            raise
        return connection

    def close(self) -> None:
        """Close the connection. The next check opens another one."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None
