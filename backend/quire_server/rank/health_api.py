# SPDX-License-Identifier: Apache-2.0
"""HTTP API of the health port of a node other than the first: the routes of the first node that it needs. The status
needs the admin key."""

from pathlib import Path

from aiohttp import web

from quire_server.openai.http.admin_key import AdminKey
from quire_server.rank.supervisor import RankSupervisor
from quire_spec.dataclass_json import to_json
from quire_spec.errors import ConfigError, Unavailable


class HealthAPI:
    """The handlers of the port."""

    def __init__(self, supervisor: RankSupervisor, key_file: Path | None) -> None:
        """Raises ConfigError if the key file cannot be read or is empty."""
        self._supervisor = supervisor
        self._key = None if key_file is None else AdminKey(key_file)
        if self._key is not None:
            try:
                self._key.read()
            except Unavailable as error:
                raise ConfigError(str(error)) from error

    def app(self) -> web.Application:
        """Return the aiohttp application."""
        app = web.Application()
        app.add_routes(
            [
                web.get("/health/live", self._live),
                web.get("/health/ready", self._ready),
                web.get("/metrics", self._metrics),
                web.get("/status", self._status),
            ]
        )
        return app

    async def _live(self, request: web.Request) -> web.Response:
        return web.json_response({"live": True})

    async def _ready(self, request: web.Request) -> web.Response:
        reason = self._supervisor.not_ready_reason()
        return web.json_response({"ready": not reason, "reason": reason}, status=503 if reason else 200)

    async def _metrics(self, request: web.Request) -> web.Response:
        return web.Response(text=self._supervisor.metrics(), content_type="text/plain")

    async def _status(self, request: web.Request) -> web.Response:
        if self._key is not None:
            try:
                is_allowed = self._key.matches(request.headers.get("Authorization", ""))
            except Unavailable as error:
                return web.json_response({"error": str(error)}, status=503)
            if not is_allowed:
                return web.json_response({"error": "the admin key is missing or wrong"}, status=401)
        return web.json_response(to_json(self._supervisor.status()))
