# SPDX-License-Identifier: Apache-2.0
"""The server's repository API and its probes over HTTP on loopback. The supervisor calls it; it knows no adapters."""

import base64
import json
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self

import aiohttp

from quire_server.launch import KEY_HEADER
from quire_spec.errors import Internal, Unavailable

_LOAD_TIMEOUT_S = 150.0
"""Longer than launch.ServerOptions.stub_timeout_s, so that the server's own message arrives first."""
_PROBE_TIMEOUT_S = 5.0


class ServerClient:
    """One server, by its HTTP port. Use it as an async context manager."""

    def __init__(self, host: str, port: int, key: str) -> None:
        self._url = f"http://{f'[{host}]' if ':' in host else host}:{port}/v2"
        self._headers = {KEY_HEADER: key}
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        self._session = aiohttp.ClientSession(headers=self._headers)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._session is not None:
            await self._session.close()

    async def load_model(self, name: str, config: Mapping[str, Any], files: Mapping[str, bytes]) -> None:
        """Load a model that has no folder, or load it again; returns when it is ready.

        `files` maps paths such as "1/model.py" to their content.

        Raises:
            Internal: the server refused it; the message is the server's.
            Unavailable: the server does not answer.
        """
        parameters = {"config": json.dumps(config)}
        parameters |= {f"file:{path}": base64.b64encode(data).decode() for path, data in files.items()}
        await self._post(f"/repository/models/{name}/load", {"parameters": parameters})

    async def reload_base(self, name: str) -> None:
        """Load a model from its folder; raises as `load_model`."""
        await self._post(f"/repository/models/{name}/load", {})

    async def unload_model(self, name: str) -> None:
        """Unload a model: new requests are refused at once, those in flight end in their own time.

        Raises:
            Internal: the server refused it.
            Unavailable: the server does not answer.
        """
        await self._post(f"/repository/models/{name}/unload", {})

    async def is_ready(self, name: str) -> bool:
        """True when the server serves this model. It stays true when the model's stub has died."""
        return await self._probe(f"/models/{name}/ready")

    async def live(self) -> bool:
        """True when the server answers."""
        return await self._probe("/health/live")

    async def _post(self, path: str, body: Mapping[str, Any]) -> None:
        timeout = aiohttp.ClientTimeout(total=_LOAD_TIMEOUT_S)
        try:
            async with self._open().post(self._url + path, json=body, timeout=timeout) as answer:
                if answer.status != 200:
                    raise Internal(f"server: POST {path}: {answer.status} {_message(await answer.text())}")
        except (aiohttp.ClientError, TimeoutError) as error:
            raise Unavailable(f"server: POST {path}: {error or type(error).__name__}") from error

    async def _probe(self, path: str) -> bool:
        timeout = aiohttp.ClientTimeout(total=_PROBE_TIMEOUT_S)
        try:
            async with self._open().get(self._url + path, timeout=timeout) as answer:
                return answer.status == 200
        except (aiohttp.ClientError, TimeoutError):
            return False

    def _open(self) -> aiohttp.ClientSession:
        assert self._session is not None, "ServerClient is an async context manager"
        return self._session


def _message(text: str) -> str:
    """The server's error out of its JSON, or the text as it is."""
    try:
        return str(json.loads(text)["error"])
    except (ValueError, KeyError, TypeError):
        return text[:500]
