# SPDX-License-Identifier: Apache-2.0
"""Sends requests to an engine on this machine, through the routes of the OpenAI front but without HTTP.

The process of the batch calls the ASGI application of the OpenAI front directly. Therefore, a batch uses the same
routes and the same code as a server. A new route of the front also works in a batch.
"""

import asyncio
import json
from collections.abc import MutableMapping
from pathlib import Path
from typing import Any

from quire_server.batch.local_engine import LocalEngine
from quire_server.batch.reply import Reply
from quire_server.openai.app import Application
from quire_server.openai.settings import FrontSettings
from quire_server.openai.text_client import TextClient
from quire_spec.documents.pod_config import OpenAIConfig

_HEADERS = [(b"content-type", b"application/json"), (b"host", b"localhost")]


class LocalEndpoint:
    """The ASGI application of the OpenAI front, connected to a local text process."""

    def __init__(self, engine: LocalEngine, client: TextClient, run_dir: Path, served_name: str) -> None:
        self._engine = engine
        self._application = Application(FrontSettings(run_dir, served_name, "127.0.0.1", OpenAIConfig()), client)

    async def post(self, url: str, body: dict[str, Any]) -> Reply:
        """Run one request. If the request fails, no error is raised, and the Reply describes the failure."""
        await self._engine.wait_ready()
        exchange = _Exchange(json.dumps(body).encode())
        scope = {"type": "http", "method": "POST", "path": url, "headers": _HEADERS}
        await self._application(scope, exchange.receive, exchange.send)
        headers = exchange.headers
        should_retry = {b"true": True, b"false": False}.get(headers.get(b"x-should-retry", b""))
        request_id = headers.get(b"x-request-id", b"").decode()
        return Reply(exchange.status, b"".join(exchange.chunks), request_id, should_retry=should_retry)


class _Exchange:
    """One request and its response, in the form of ASGI messages."""

    def __init__(self, body: bytes) -> None:
        self._body: bytes | None = body
        self.status = 0
        self.headers: dict[bytes, bytes] = {}
        self.chunks: list[bytes] = []

    async def receive(self) -> MutableMapping[str, Any]:
        """Return the body on the first call. Later calls wait forever, because this client never disconnects."""
        if self._body is None:
            await asyncio.Event().wait()
        body, self._body = self._body, None
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(self, message: MutableMapping[str, Any]) -> None:
        """Receive a part of the response."""
        if message["type"] == "http.response.start":
            self.status, self.headers = message["status"], dict(message["headers"])
        else:
            self.chunks.append(message.get("body", b""))
