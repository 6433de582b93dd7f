# SPDX-License-Identifier: Apache-2.0
"""A proxy in front of the API server that injects error responses, delays and lost connections."""

import asyncio
import json
import random
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

import aiohttp
import yaml
from aiohttp import web
from support.cluster import Cluster

from quire_operator.kube.api_session import ApiSession
from quire_operator.kube.cluster_config import ClusterConfig

_FORWARDED_HEADERS = ("Content-Type", "Accept")


@dataclass(frozen=True)
class Fault:
    """An injected response."""

    status: int
    headers: Mapping[str, str] = field(default_factory=dict)
    forwarded: bool = False
    """The API server gets the request; only its response is lost."""
    error_event: int = 0
    """Code of an ERROR event: the response is a watch that sends this event and ends."""


def error_storm(rng: random.Random, probability: float) -> Callable[[str, str], Fault | None]:
    """Return a fault function that fails requests at random, each in one of five ways."""
    read_faults = [Fault(429, {"Retry-After": "1"}), Fault(500), Fault(503), Fault(504, forwarded=True)]

    def fault(method: str, path: str) -> Fault | None:
        if rng.random() >= probability:
            return None
        return rng.choice(read_faults if method == "GET" else [*read_faults, Fault(409)])

    return fault


@dataclass
class FaultInjectingProxy:
    """A proxy with plain HTTP on a free port. A context manager."""

    cluster: Cluster
    folder: Path
    fault: Callable[[str, str], Fault | None] = lambda method, path: None
    """Returns the fault of a request, by method and path with query; can be set at any time."""
    delay_s: Callable[[str, str], float] = lambda method, path: 0.0
    """Returns the delay before a request is forwarded; it is dropped if the client has disconnected by then."""
    num_faults: int = 0
    _is_blackholed: Callable[[str], bool] = lambda path: True
    """Which requests get no response."""

    def __enter__(self) -> Self:
        self._ready, self._stop = threading.Event(), threading.Event()
        self._forwarding = threading.Event()
        self._forwarding.set()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), name="proxy", daemon=True)
        self._thread.start()
        assert self._ready.wait(60)
        return self

    def __exit__(self, *_: object) -> None:
        self._forwarding.set()
        self._stop.set()
        self._thread.join(20)

    def blackhole(self, matches: Callable[[str], bool] = lambda path: True) -> None:
        """Forward nothing and close nothing from now on, as a router that has lost its state.

        `matches` selects the requests, by path and query.
        """
        self._is_blackholed = matches
        self._forwarding.clear()

    def stop_blackhole(self) -> None:
        """Forward new requests again; blackholed ones stay lost."""
        self._forwarding.set()

    @property
    def kubeconfig(self) -> Path:
        """A kubeconfig for the operator."""
        file = self.folder / "proxy.kubeconfig"
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "p",
            "contexts": [{"name": "p", "context": {"cluster": "p", "user": "p"}}],
            "clusters": [{"name": "p", "cluster": {"server": f"http://127.0.0.1:{self.port}"}}],
            "users": [{"name": "p", "user": {}}],
        }
        file.write_text(yaml.safe_dump(config))
        return file

    async def _run(self) -> None:
        cluster_config = ClusterConfig.from_environment(str(self.cluster.kubeconfig))
        async with ApiSession(cluster_config) as session:
            self._session, self._server, self._auth_headers = (
                session._watch_session,
                cluster_config.server,
                await cluster_config.auth_headers(),
            )
            app = web.Application(client_max_size=2**24)
            app.add_routes([web.route("*", "/{path:.*}", self._forward)])
            runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
            await runner.setup()
            site = web.TCPSite(runner, "127.0.0.1", 0)
            await site.start()
            self.port = runner.addresses[0][1]
            self._ready.set()
            while not self._stop.is_set():
                await asyncio.sleep(0.05)
            await runner.cleanup()

    async def _forward(self, request: web.Request) -> web.StreamResponse:
        fault = self.fault(request.method, request.path_qs)
        await self._wait_while_blackholed(request)
        await asyncio.sleep(self.delay_s(request.method, request.path_qs))
        if request.transport is None or request.transport.is_closing():
            return web.Response()
        if fault and not fault.forwarded:
            return self._fault_response(fault)
        headers = {name: request.headers[name] for name in _FORWARDED_HEADERS if name in request.headers}
        url = self._server + request.path_qs
        body = await request.read()
        async with self._session.request(
            request.method,
            url,
            data=body or None,
            headers={**headers, **self._auth_headers},
            timeout=aiohttp.ClientTimeout(None),
        ) as upstream:
            if fault:
                await upstream.read()
                return self._fault_response(fault)
            response = web.StreamResponse(
                status=upstream.status, headers={"Content-Type": upstream.headers["Content-Type"]}
            )
            await response.prepare(request)
            async for chunk in upstream.content.iter_any():
                await self._wait_while_blackholed(request)
                try:
                    await response.write(chunk)
                except ConnectionResetError:
                    break  # a watch that was cut
            return response

    async def _wait_while_blackholed(self, request: web.Request) -> None:
        """Block for ever if the request is blackholed."""
        if not self._forwarding.is_set() and self._is_blackholed(request.path_qs):
            await asyncio.Event().wait()

    def _fault_response(self, fault: Fault) -> web.Response:
        self.num_faults += 1
        body = {"kind": "Status", "status": "Failure", "message": "injected", "code": fault.error_event or fault.status}
        if fault.error_event:
            return web.Response(
                text=json.dumps({"type": "ERROR", "object": body}) + "\n", content_type="application/json"
            )
        return web.json_response(body, status=fault.status, headers=dict(fault.headers))
