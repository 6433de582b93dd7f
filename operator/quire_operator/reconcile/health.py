# SPDX-License-Identifier: Apache-2.0
"""The operator's port: GET /health/live, /health/ready and /metrics."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from aiohttp import web

from quire_operator.reconcile.controller import Controller
from quire_spec.errors import ConfigError


@asynccontextmanager
async def serving(controller: Controller, host: str, port: int) -> AsyncIterator[int]:
    """Serve for as long as the context lasts; gives the port, which is free to choose for 0.

    Raises:
        ConfigError: the port is taken, or the address is not ours.
    """

    async def live(_: web.Request) -> web.Response:
        trouble = controller.trouble()
        return web.Response(text=f"{trouble or 'alive'}\n", status=503 if trouble else 200)

    async def ready(_: web.Request) -> web.Response:
        here = controller.ready
        return web.Response(text="ready\n" if here else "reading the cluster\n", status=200 if here else 503)

    async def metrics(_: web.Request) -> web.Response:
        text = controller.metrics.text(controller.refresh)
        return web.Response(body=text, headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"})

    app = web.Application()
    app.add_routes([web.get("/health/live", live), web.get("/health/ready", ready), web.get("/metrics", metrics)])
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    try:
        try:
            await web.TCPSite(runner, host, port).start()
        except OSError as error:
            raise ConfigError(
                f"--port {port}: cannot listen on {host} ({error.strerror or error}); stop what is there, or give "
                "another port"
            ) from error
        yield runner.addresses[0][1]
    finally:
        await runner.cleanup()
