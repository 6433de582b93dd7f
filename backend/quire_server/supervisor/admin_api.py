# SPDX-License-Identifier: Apache-2.0
"""HTTP API of the health port, which the operator calls admin port.

Probes, metrics and the places of adapters need no key. The status and changes of the adapter catalog need the admin
key.

This module handles only HTTP; the Supervisor owns state and actions. supervisor/app.py serves the API.
"""

import ipaddress
import json
import logging
from collections.abc import Awaitable, Callable
from pathlib import Path

from aiohttp import web

from quire_server.adapters.manager import StaleCatalog
from quire_server.openai.http.admin_key import AdminKey
from quire_server.supervisor.supervisor import Supervisor
from quire_spec.dataclass_json import to_json
from quire_spec.documents.adapter_catalog import REPLACES_HEADER, AdapterCatalog
from quire_spec.errors import Code, ConfigError, QuireError, Unavailable, error_text

logger = logging.getLogger(__name__)

MAX_BODY_BYTES = 8 * 2**20
"""Maximum size of a body. The largest catalog has 4096 adapters with long URLs. Its size is about 3 MB."""

_HTTP_STATUS = {
    Code.INVALID_ARG: 400,
    Code.NOT_FOUND: 404,
    Code.UNAVAILABLE: 503,
    Code.CANCELLED: 499,
    Code.INTERNAL: 500,
}
_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class AdminAPI:
    """The handlers of the health port."""

    def __init__(self, supervisor: Supervisor, key_file: Path | None) -> None:
        """Raises ConfigError if the key file cannot be read or is empty."""
        self._supervisor = supervisor
        self._key = AdminKey(key_file) if key_file is not None else None
        if self._key is not None:
            try:
                self._key.read()
            except Unavailable as error:
                raise ConfigError(str(error)) from error

    def app(self) -> web.Application:
        """Return the aiohttp application."""
        app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[self._end_connections, _errors_as_json])
        app.add_routes(
            [
                web.get("/health/live", self._live),
                web.get("/health/ready", self._ready),
                web.get("/metrics", self._metrics),
                web.get("/metrics/vllm_backend", self._vllm_backend_metrics),
                web.get("/status", self._status),
                web.get("/adapters", self._adapters),
                web.put("/adapters", self._put_adapters),
                web.get("/v2/repository/index", self._index),
                web.post("/v2/repository/index", self._index),
                web.post("/v2/repository/models/{name}/{action:load|unload}", self._load_or_unload),
            ]
        )
        return app

    @web.middleware
    async def _end_connections(self, request: web.Request, handler: _Handler) -> web.StreamResponse:
        """End each connection after its response while the pod is about to stop."""
        response = await handler(request)
        if self._supervisor.is_closing():
            response.force_close()
        return response

    async def _live(self, request: web.Request) -> web.Response:
        return web.json_response({"live": True})

    async def _ready(self, request: web.Request) -> web.Response:
        reason = self._supervisor.not_ready_reason()
        return web.json_response({"ready": not reason, "reason": reason}, status=503 if reason else 200)

    async def _metrics(self, request: web.Request) -> web.Response:
        return _metrics_page(await self._supervisor.metrics())

    async def _vllm_backend_metrics(self, request: web.Request) -> web.Response:
        return _metrics_page(await self._supervisor.vllm_backend_metrics())

    async def _status(self, request: web.Request) -> web.Response:
        self._authorize(request)
        return web.json_response(to_json(self._supervisor.status()))

    async def _adapters(self, request: web.Request) -> web.Response:
        # No key: a router reads it, and the metrics show the same.
        return web.json_response({"adapters": await self._supervisor.adapter_residency()})

    async def _put_adapters(self, request: web.Request) -> web.Response:
        self._authorize(request)
        try:
            document = json.loads(await request.read())
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"adapters: the body is not JSON: {error}") from error
        catalog = AdapterCatalog.from_json(document)
        if "adapters" not in document:
            raise ConfigError("adapters: missing; list all adapters, or [] if there are none")
        self._supervisor.set_catalog(catalog, request.headers.get(REPLACES_HEADER, ""))
        logger.info("catalog accepted generation=%d adapters=%d", catalog.generation, len(catalog.adapters))
        # The status is 202, because the catalog is applied in the background. GET /status reports the progress.
        return web.json_response({"generation": catalog.generation}, status=202)

    async def _index(self, request: web.Request) -> web.Response:
        self._authorize(request)
        return web.json_response(await self._supervisor.other_models.index())

    async def _load_or_unload(self, request: web.Request) -> web.Response:
        """Load or unload a model by name. The parameters `config` and `file:` of the server's API are rejected, because
        a client could use them to run other code."""
        self._authorize(request)
        name, action = request.match_info["name"], request.match_info["action"]
        try:
            document = json.loads(await request.read() or b"{}")
            parameters = dict(document.get("parameters") or {})
        except (ValueError, TypeError, AttributeError, RecursionError) as error:
            raise ConfigError(f"{action}: the body is not a JSON object: {error}") from error
        # Triton's clients always send this parameter.
        if parameters.pop("unload_dependents", False) is not False:
            raise ConfigError("unload_dependents: must be false; unload each model by its name")
        if parameters:
            raise ConfigError(
                f"parameters: {next(iter(parameters))[:80]!r} is not supported; a model is loaded by name only"
            )
        models = self._supervisor.other_models
        await (models.load(name) if action == "load" else models.unload(name))
        logger.info("model %sed name=%s", action, name)
        return web.json_response({})

    def _authorize(self, request: web.Request) -> None:
        """Reject a request that does not contain the admin key. If there is no key file, reject requests from other
        machines instead."""
        if self._key is None:
            if not _is_local(request):
                raise web.HTTPForbidden(
                    text="only requests from this machine are allowed; start the supervisor with --admin-key-file to "
                    "allow others"
                )
            return
        if not self._key.matches(request.headers.get("Authorization", "")):
            raise web.HTTPUnauthorized(
                text="send 'Authorization: Bearer KEY' with the key of --admin-key-file",
                headers={"WWW-Authenticate": "Bearer"},
            )


def _is_local(request: web.Request) -> bool:
    """Return True if a request comes from this machine. The Host header is checked as well, so that a web page cannot
    send requests through DNS rebinding."""
    host = request.url.host or ""
    return _is_loopback(request.remote or "") and (host == "localhost" or _is_loopback(host))


def _is_loopback(address: str) -> bool:
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:
        return False
    mapped = parsed.ipv4_mapped if isinstance(parsed, ipaddress.IPv6Address) else None
    return (mapped or parsed).is_loopback


@web.middleware
async def _errors_as_json(request: web.Request, handler: _Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except StaleCatalog as error:
        return _error_response(409, error_text(error), error.code)
    except QuireError as error:
        return _error_response(_HTTP_STATUS[error.code], error_text(error), error.code)
    except web.HTTPRequestEntityTooLarge:
        return _error_response(413, f"the body is larger than {MAX_BODY_BYTES} bytes", Code.INVALID_ARG)
    except web.HTTPException as error:
        code = Code.NOT_FOUND if error.status == 404 else Code.INVALID_ARG
        headers = {k: v for k, v in error.headers.items() if k in ("Allow", "WWW-Authenticate")}
        return _error_response(error.status, error.text or error.reason, code, headers)
    except Exception:
        logger.exception("health port: request failed path=%s", request.path)
        return _error_response(500, "internal error; see the log of the pod", Code.INTERNAL)


def _error_response(status: int, message: str, code: Code, headers: dict[str, str] | None = None) -> web.Response:
    return web.json_response({"error": message, "code": code.value}, status=status, headers=headers)


def _metrics_page(text: str) -> web.Response:
    return web.Response(body=text.encode(), headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"})
