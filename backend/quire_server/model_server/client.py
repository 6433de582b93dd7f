# SPDX-License-Identifier: Apache-2.0
"""Client of the model server on the loopback interface. It calls the server's repository API and its health probes. The
supervisor calls this module. The module does not know about adapters.

Models are loaded over gRPC. If a model were loaded over HTTP, the thread that serves the connection would load it. The
server uses one thread for most of its HTTP connections, so all their streams would stall while the model is loaded.
"""

import asyncio
import socket
import ssl
from collections.abc import Awaitable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, Self

import aiohttp
from grpc import ssl_channel_credentials
from grpc.aio import UsageError
from tritonclient.grpc import aio as grpc
from tritonclient.utils import InferenceServerException

from quire_server.model_server.launch import GRPC_KEY_HEADER
from quire_spec.errors import Internal, Unavailable
from quire_spec.net.addresses import format_for_url

_LOAD_TIMEOUT_S = 150.0
"""Timeout of a load in seconds. It is longer than launch.ServerOptions.stub_timeout_s, so that the server can report
its own error first."""
_PROBE_TIMEOUT_S = 5.0
_NO_ANSWER_STATUSES = ("StatusCode.UNAVAILABLE", "StatusCode.DEADLINE_EXCEEDED", "StatusCode.CANCELLED")
"""Statuses that the gRPC library itself reports if it gets no response from the server."""
_NOT_OPEN = "ModelServerClient must be used as an async context manager"
_CONNECTION_CLOSED = "server: ended, its connection is closed"
_CHANNEL_ARGS: list[tuple[str, Any]] = [("grpc.enable_http_proxy", 0)]
"""Options of the gRPC channel. They make gRPC ignore the proxy that is set in environment variables. Otherwise, gRPC
would use this proxy even for loopback."""


class ModelServerClient(AsyncExitStack):
    """Client of one server; it uses the HTTP port and the gRPC port of this server. A ModelServerClient is used as an
    async context manager."""

    def __init__(
        self,
        http_address: tuple[str, int],
        grpc_address: tuple[str, int],
        key: str,
        grpc_certificate: Path | None = None,
    ) -> None:
        """`grpc_certificate` is the certificate chain of the server; None: gRPC without TLS."""
        super().__init__()
        self._grpc_host_and_port, self._grpc_certificate = grpc_address, grpc_certificate
        self._url = f"http://{format_for_url(http_address[0])}:{http_address[1]}/v2"
        self._grpc_address = f"{format_for_url(grpc_address[0])}:{grpc_address[1]}"
        self._headers = {GRPC_KEY_HEADER: key}
        self._session: aiohttp.ClientSession | None = None
        self._grpc_client: grpc.InferenceServerClient | None = None

    async def __aenter__(self) -> Self:
        self._session = await self.enter_async_context(aiohttp.ClientSession())
        if self._grpc_certificate is None:
            self._set_grpc_client()
        return self

    async def connect_tls(self) -> None:
        """Connect to the gRPC port with TLS. The server must already be listening. Without TLS, do nothing.

        Raises:
            Unavailable: the server does not send its certificate.
        """
        if self._grpc_certificate is None or self._grpc_client is not None:
            return
        try:
            pem = await asyncio.to_thread(self._grpc_certificate.read_bytes)
            name = await asyncio.to_thread(_certificate_name, self._grpc_host_and_port, self._grpc_certificate)
        except OSError as error:
            raise Unavailable(f"server: no TLS connection to the gRPC port: {error}") from error
        options = [*_CHANNEL_ARGS, ("grpc.ssl_target_name_override", name)]
        self._set_grpc_client(creds=ssl_channel_credentials(pem), channel_args=options)

    def _set_grpc_client(self, creds: Any = None, channel_args: list[tuple[str, Any]] = _CHANNEL_ARGS) -> None:
        self._grpc_client = grpc.InferenceServerClient(self._grpc_address, creds=creds, channel_args=channel_args)
        self.push_async_callback(self._grpc_client.close)

    async def load_model(self, name: str) -> None:
        """Load a model from its folder in a repository. The call returns when the model is ready.

        A loaded model is loaded again only if its files have changed.

        Raises:
            Internal: the server rejected the model; the error has the server's message.
            Unavailable: the server does not respond.
        """
        await self._call(self._client().load_model(name, self._headers, client_timeout=_LOAD_TIMEOUT_S))

    async def unload_model(self, name: str) -> None:
        """Unload a model. The server rejects new requests at once, and requests in flight run to completion.

        Raises:
            Internal: the server rejected the call.
            Unavailable: the server does not respond.
        """
        await self._call(self._client().unload_model(name, self._headers, client_timeout=_LOAD_TIMEOUT_S))

    async def repository_index(self) -> list[dict[str, str]]:
        """Return the name, version, state and reason of every model. A model that was never loaded has only a name.

        Raises the same errors as `unload_model`.
        """
        index: dict[str, Any] = await self._call(
            self._client().get_model_repository_index(self._headers, as_json=True, client_timeout=_PROBE_TIMEOUT_S)
        )
        return list(index.get("models", []))

    async def is_loaded(self, name: str) -> bool:
        """Return True if the server has loaded this model. The result stays True even after the stub of the model has
        died.

        The readiness that the server reports to other clients can be different, because it also depends on the
        supervisor (readiness_file.py).
        """
        return await self._probe(f"/models/{name}")

    async def is_live(self) -> bool:
        """Return True if the server responds."""
        return await self._probe("/health/live")

    async def _call(self, call: Awaitable[Any]) -> Any:
        try:
            return await call
        except InferenceServerException as error:
            if error.status() in _NO_ANSWER_STATUSES:
                raise Unavailable(f"server: {error.message()}") from error
            raise Internal(f"server: {error.message()}") from error
        except UsageError as error:
            raise Unavailable(_CONNECTION_CLOSED) from error
        except asyncio.CancelledError:
            # gRPC cancels the calls of a closed channel. If the task itself was not cancelled, the connection was lost.
            if (task := asyncio.current_task()) is None or not task.cancelling():
                raise Unavailable(_CONNECTION_CLOSED) from None
            raise

    async def _probe(self, path: str) -> bool:
        assert self._session is not None, _NOT_OPEN
        timeout = aiohttp.ClientTimeout(total=_PROBE_TIMEOUT_S)
        try:
            async with self._session.get(self._url + path, timeout=timeout) as response:
                return response.status == 200
        except (aiohttp.ClientError, TimeoutError):
            return False

    def _client(self) -> grpc.InferenceServerClient:
        assert self._grpc_client is not None, _NOT_OPEN
        return self._grpc_client


def _certificate_name(address: tuple[str, int], certificate: Path) -> str:
    """Return one of the names in the server's certificate. The client expects this name, because the certificate may
    not contain the address of this machine."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # trust this certificate, without its issuer
    context.load_verify_locations(certificate)
    context.set_alpn_protocols(["h2"])
    with socket.create_connection(address, _PROBE_TIMEOUT_S) as plain, context.wrap_socket(plain) as connection:
        found: Any = connection.getpeercert() or {}
    names = [value for kind, value in found.get("subjectAltName", ()) if kind in ("DNS", "IP Address")]
    names += [value for part in found.get("subject", ()) for key, value in part if key == "commonName"]
    return names[0].replace("*", "any") if names else address[0]
