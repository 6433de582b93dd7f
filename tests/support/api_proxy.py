# SPDX-License-Identifier: Apache-2.0
"""A proxy before the API server that answers in its place, or swallows everything, when a test says so."""

import asyncio
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

_PASSED = ("Content-Type", "Accept")


@dataclass(frozen=True)
class Fault:
    """An answer that is not the API server's."""

    status: int
    headers: Mapping[str, str] = field(default_factory=dict)
    sent: bool = False
    """The API server gets the request all the same; only its answer is lost."""


@dataclass
class ApiProxy:
    """Plain HTTP on a free port of this machine. A context manager."""

    cluster: Cluster
    folder: Path
    fault: Callable[[str, str], Fault | None] = lambda method, path: None
    """What happens to a request, by its method, path and query; set it at any time."""
    delay_s: Callable[[str, str], float] = lambda method, path: 0.0
    """How long it is kept before it is sent on, by the same; whoever has hung up by then is not served."""
    num_faults: int = 0
    _lost: Callable[[str], bool] = lambda path: True
    """Which requests are swallowed."""

    def __enter__(self) -> Self:
        self._ready, self._stop = threading.Event(), threading.Event()
        self._open = threading.Event()
        self._open.set()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), name="proxy", daemon=True)
        self._thread.start()
        assert self._ready.wait(60)
        return self

    def __exit__(self, *_: object) -> None:
        self._open.set()
        self._stop.set()
        self._thread.join(20)

    def swallow(self, only: Callable[[str], bool] = lambda path: True) -> None:
        """From now on nothing gets through and nothing is closed, as behind a router that has lost its state.

        `only` says of which requests that is true, by path and query.
        """
        self._lost = only
        self._open.clear()

    def let_through(self) -> None:
        """New connections work again; what was swallowed stays lost."""
        self._open.set()

    @property
    def kubeconfig(self) -> Path:
        """For the operator."""
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
        login = ClusterConfig.from_environment(str(self.cluster.kubeconfig))
        async with ApiSession(login) as session:
            self._session, self._server, self._who = session._watch_session, login.server, await login.auth_headers()
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
        await self._gate(request)
        await asyncio.sleep(self.delay_s(request.method, request.path_qs))
        if request.transport is None or request.transport.is_closing():
            return web.Response()
        if fault and not fault.sent:
            return self._answer(fault)
        headers = {name: request.headers[name] for name in _PASSED if name in request.headers}
        url = self._server + request.path_qs
        body = await request.read()
        async with self._session.request(
            request.method,
            url,
            data=body or None,
            headers={**headers, **self._who},
            timeout=aiohttp.ClientTimeout(None),
        ) as answer:
            if fault:
                await answer.read()
                return self._answer(fault)
            response = web.StreamResponse(
                status=answer.status, headers={"Content-Type": answer.headers["Content-Type"]}
            )
            await response.prepare(request)
            async for chunk in answer.content.iter_any():
                await self._gate(request)
                try:
                    await response.write(chunk)
                except ConnectionResetError:
                    break  # a watch that was cut
            return response

    async def _gate(self, request: web.Request) -> None:
        """Whoever comes to it while it is closed never gets on."""
        if not self._open.is_set() and self._lost(request.path_qs):
            await asyncio.Event().wait()

    def _answer(self, fault: Fault) -> web.Response:
        self.num_faults += 1
        said = {"kind": "Status", "status": "Failure", "message": "injected", "code": fault.status}
        return web.json_response(said, status=fault.status, headers=dict(fault.headers))
