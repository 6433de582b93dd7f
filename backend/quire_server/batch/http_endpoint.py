# SPDX-License-Identifier: Apache-2.0
"""HTTP client of a batch. It sends the requests to any server that has the OpenAI API."""

from types import TracebackType
from typing import Any, Self

import aiohttp

from quire_server.batch.reply import Reply
from quire_spec.net.server_url import server_root

MAX_RESPONSE_BYTES = 64 * 2**20
_CONNECT_TIMEOUT_S = 10.0
_CHUNK_BYTES = 2**16
_GATEWAY_STATUSES = (502, 503, 504)
"""Statuses that a server or gateway returns if it cannot serve requests at the moment. The request is not the cause."""


class HttpEndpoint:
    """Connections to one server."""

    def __init__(self, url: str, api_key: str, max_inflight: int, timeout_s: float) -> None:
        """`url` is the root of the server, with or without /v1. If `api_key` is empty, no key is sent.

        Raises:
            ConfigError: the URL is wrong.
        """
        self._root = server_root(url, "--url", "--api-key-env")
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=max_inflight),
            timeout=aiohttp.ClientTimeout(total=timeout_s, sock_connect=_CONNECT_TIMEOUT_S),
            headers=headers,
            trust_env=True,
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._session.close()

    async def post(self, url: str, body: dict[str, Any]) -> Reply:
        """Send one request. If the request fails, no error is raised, and the Reply describes the failure."""
        try:
            # A redirect would send the key to another server.
            async with self._session.post(self._root + url, json=body, allow_redirects=False) as response:
                content = bytearray()
                async for chunk in response.content.iter_chunked(_CHUNK_BYTES):
                    content += chunk
                    if len(content) > MAX_RESPONSE_BYTES:
                        problem = f"the response is larger than {MAX_RESPONSE_BYTES} bytes; request fewer tokens"
                        return Reply(0, problem=problem, should_retry=False)
                return _reply(response, bytes(content))
        except aiohttp.ClientConnectorError as error:
            return Reply(0, problem=f"no connection: {error}", was_received=False)
        except aiohttp.ClientError as error:
            return Reply(0, problem=f"connection lost: {error}")
        except TimeoutError:
            return Reply(0, problem="no response within the time limit; raise --timeout")


def _reply(response: aiohttp.ClientResponse, body: bytes) -> Reply:
    headers = response.headers
    should_retry = {"true": True, "false": False}.get(headers.get("x-should-retry", ""))
    try:
        retry_after_s = max(0.0, float(headers["retry-after"]))
    except (KeyError, ValueError):
        retry_after_s = None
    was_received = response.status not in _GATEWAY_STATUSES
    return Reply(
        response.status, body, headers.get("x-request-id", ""), retry_after_s, should_retry, was_received=was_received
    )
