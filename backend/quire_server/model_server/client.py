# SPDX-License-Identifier: Apache-2.0
"""Client of the server's repository API and probes on loopback. The supervisor calls it; it is independent of adapters.

Models are loaded over gRPC. Over HTTP, the connection's thread would do the loading. The server serves most HTTP
connections on one thread, so that their streams would stall for the duration.
"""

import asyncio
import json
from collections.abc import Awaitable, Mapping
from contextlib import AsyncExitStack
from typing import Any, Self

import aiohttp
from grpc.aio import UsageError
from tritonclient.grpc import aio as grpc
from tritonclient.utils import InferenceServerException

from quire_server.model_server.launch import GRPC_KEY_HEADER
from quire_spec.errors import Internal, Unavailable
from quire_spec.net.addresses import format_for_url

_LOAD_TIMEOUT_S = 150.0
"""Longer than launch.ServerOptions.stub_timeout_s, so that the server's error message arrives first."""
_PROBE_TIMEOUT_S = 5.0
_NO_ANSWER_STATUSES = ("StatusCode.UNAVAILABLE", "StatusCode.DEADLINE_EXCEEDED", "StatusCode.CANCELLED")
"""Statuses of gRPC itself, not responses of the server."""
_NOT_OPEN = "ModelServerClient must be used as an async context manager"
_CONNECTION_CLOSED = "server: ended, its connection is closed"
_CHANNEL_ARGS = [("grpc.enable_http_proxy", 0)]
"""A pod's proxy is for destinations outside the cluster; gRPC would use it for loopback, too."""


class ModelServerClient(AsyncExitStack):
    """Client of one server, by the hosts and ports of HTTP and gRPC. Use it as an async context manager."""

    def __init__(self, http_address: tuple[str, int], grpc_address: tuple[str, int], key: str) -> None:
        super().__init__()
        self._url = f"http://{format_for_url(http_address[0])}:{http_address[1]}/v2"
        self._grpc_address = f"{format_for_url(grpc_address[0])}:{grpc_address[1]}"
        self._headers = {GRPC_KEY_HEADER: key}
        self._session: aiohttp.ClientSession | None = None
        self._grpc_client: grpc.InferenceServerClient | None = None

    async def __aenter__(self) -> Self:
        self._session = await self.enter_async_context(aiohttp.ClientSession())
        self._grpc_client = grpc.InferenceServerClient(self._grpc_address, channel_args=_CHANNEL_ARGS)
        self.push_async_callback(self._grpc_client.close)
        return self

    async def load_model(self, name: str, config: Mapping[str, Any], files: Mapping[str, bytes]) -> None:
        """Load or reload a model without a folder; return when it is ready.

        `files` maps paths such as "1/model.py" to their content.

        Raises:
            Internal: the server rejected it; the message is the server's.
            Unavailable: the server does not respond.
        """
        file_parameters = {f"file:{path}": data for path, data in files.items()}
        await self._call(
            self._client().load_model(name, self._headers, json.dumps(config), file_parameters, _LOAD_TIMEOUT_S)
        )

    async def load_from_disk(self, name: str) -> None:
        """Load a model from its folder in the repository. Raises the same errors as `load_model`."""
        await self._call(self._client().load_model(name, self._headers, client_timeout=_LOAD_TIMEOUT_S))

    async def unload_model(self, name: str) -> None:
        """Unload a model: new requests are rejected at once, requests in flight run to completion.

        Raises:
            Internal: the server rejected it.
            Unavailable: the server does not respond.
        """
        await self._call(self._client().unload_model(name, self._headers, client_timeout=_LOAD_TIMEOUT_S))

    async def is_loaded(self, name: str) -> bool:
        """Return True if the server has this model. The result stays True after the model's stub died.

        This is not the server's readiness, which depends on what the supervisor knows (readiness_file.py).
        """
        return await self._probe(f"/models/{name}")

    async def is_live(self) -> bool:
        """Return True if the server responds."""
        return await self._probe("/health/live")

    async def _call(self, call: Awaitable[None]) -> None:
        try:
            await call
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
