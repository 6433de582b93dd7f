# SPDX-License-Identifier: Apache-2.0
"""HTTP server of the operator, which serves GET /health/ready, /health/live and /metrics.

Only the probes of older charts use /health/live.

The liveness probe of the current chart uses kopf's endpoint instead, which has a single path (see kopf_handlers.py).
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from aiohttp import web

from quire_operator.controller.controller import Controller
from quire_spec.errors import ConfigError


@asynccontextmanager
async def serve_health(controller: Controller, host: str, port: int) -> AsyncIterator[int]:
    """Serve until the context ends, and yield the port. If `port` is 0, any free port is used.

    Raises:
        ConfigError: the port is in use, or the address does not belong to this machine.
    """

    async def live(_: web.Request) -> web.Response:
        reason = controller.unhealthy_reason()
        return web.Response(text=f"{reason or 'alive'}\n", status=503 if reason else 200)

    async def ready(_: web.Request) -> web.Response:
        is_ready = controller.ready
        lines = [f"namespace {name} is not served: {why}" for name, why in controller.unserved_namespaces().items()]
        owners = controller.reconciler.foreign_services()
        for owner in sorted(set(owners.values())):
            num = sum(other == owner for other in owners.values())
            lines.append(f"{num} LLMServices belong to operator {owner} and are not changed")
        text = "\n".join(["ready" if is_ready else "reading the cluster", *lines, ""])
        return web.Response(text=text, status=200 if is_ready else 503)

    async def metrics(_: web.Request) -> web.Response:
        text = controller.metrics.generate_text(controller.update_gauges)
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
                f"--port {port}: cannot listen on {host} ({error.strerror or error}); stop the program "
                "that uses the port, or give another port"
            ) from error
        yield runner.addresses[0][1]
    finally:
        await runner.cleanup()
