# SPDX-License-Identifier: Apache-2.0
"""uvicorn's server, extended with a Unix socket for probes, with certificates that can be renewed, and with an orderly
way to close the connections of clients.

Several fronts listen on the same port (SO_REUSEPORT), so a probe that is sent to the port can reach any of them.
Therefore each front also listens on a socket of its own, which is only for probes and does not use TLS.

Clients keep their connections open. When the Service removes a pod, the connections to this pod stay open. Therefore,
before a pod stops, its front closes each connection after the next response. Later, it also closes connections that are
idle. The client then opens its next connection to another pod. This happens before the old pod rejects requests.
"""

import asyncio
import logging
import os
import socket
import ssl
from collections.abc import Callable
from pathlib import Path
from typing import Any

import uvicorn

CERTIFICATE_CHECK_INTERVAL_S = 10.0
CLOSE_IDLE_AFTER_S = 5.0
"""If a pod is about to stop, its idle connections are closed after this many seconds. SIGTERM arrives even later than
that (pod_template.PROPAGATION_S)."""
_CLOSING_CHECK_TICKS = 10
"""Number of ticks between two checks for the closing file. More frequent checks would not help, because
uvicorn updates the headers of responses only at every tenth tick."""

logger = logging.getLogger(__name__)


class FrontServer(uvicorn.Server):
    """The HTTP server of one front."""

    def __init__(
        self,
        config: uvicorn.Config,
        probe_socket: Path | None,
        closing_file: Path,
        on_shutdown: Callable[[], None] = lambda: None,
    ) -> None:
        """The supervisor creates `closing_file` when the pod is about to stop. `on_shutdown` ends the responses that
        never end by themselves."""
        super().__init__(config)
        self._closing_file = closing_file
        self._on_shutdown = on_shutdown
        self._is_closing = False
        self._probe_socket = probe_socket
        self._certificate_task: asyncio.Task[None] | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start to listen."""
        await super().startup(sockets)
        config = self.config
        if self._probe_socket is not None:

            def create_protocol() -> asyncio.Protocol:
                protocol_class = config.http_protocol_class
                return protocol_class(  # type: ignore[call-arg]
                    config=config, server_state=self.server_state, app_state=self.lifespan.state
                )

            # If an earlier front was killed, its socket file still exists.
            self._probe_socket.unlink(missing_ok=True)
            server = await asyncio.get_running_loop().create_unix_server(create_protocol, str(self._probe_socket))
            self.servers.append(server)
        if config.ssl is not None:
            self._certificate_task = asyncio.create_task(self._reload_certificates(config.ssl))

    async def on_tick(self, counter: int) -> bool:
        """Check whether the closing file exists; uvicorn calls this method every 0.1 s."""
        if not self._is_closing and counter % _CLOSING_CHECK_TICKS == 0 and self._closing_file.exists():
            self._is_closing = True
            self.config.encoded_headers.append((b"connection", b"close"))
            asyncio.get_running_loop().call_later(CLOSE_IDLE_AFTER_S, self._close_idle_connections)
            logger.info("closing connections after their responses num_connections=%d", len(self._connections()))
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stop listening, and wait until the open responses have ended."""
        if self._certificate_task is not None:
            self._certificate_task.cancel()
        self._on_shutdown()
        await super().shutdown(sockets)

    def _connections(self) -> list[Any]:
        return list(self.server_state.connections)

    def _close_idle_connections(self) -> None:
        for connection in self._connections():
            # uvicorn closes the connection now if it has no request, and otherwise after the response.
            connection.shutdown()

    async def _reload_certificates(self, context: ssl.SSLContext) -> None:
        """Load certificate files after they were renewed, and use them for new connections. A mounted Secret can change
        while the front is running."""
        loaded = self._certificate_signature()
        while True:
            await asyncio.sleep(CERTIFICATE_CHECK_INTERVAL_S)
            if (signature := self._certificate_signature()) == loaded:
                continue
            try:
                assert self.config.ssl_certfile is not None, "TLS requires a certificate"
                context.load_cert_chain(self.config.ssl_certfile, self.config.ssl_keyfile)
            except (OSError, ssl.SSLError) as error:
                # If the certificate and its key are written one after the other, they do not match for a moment.
                logger.error("renewed certificate cannot be used, the last one stays in use error=%s", error)
                continue
            loaded = signature
            logger.info("certificate reloaded")

    def _certificate_signature(self) -> object:
        try:
            stats = [os.stat(file) for file in (self.config.ssl_certfile, self.config.ssl_keyfile) if file is not None]
        except OSError:
            return None
        return [(stat.st_mtime_ns, stat.st_size, stat.st_ino) for stat in stats]
