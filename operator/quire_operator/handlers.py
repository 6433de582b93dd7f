# SPDX-License-Identifier: Apache-2.0
"""kopf's part: it watches LLMServices and says what it sees; everything else is in reconcile/.

Only on.event: no finalizer, so that deleting never waits for the operator; no annotations of kopf's; no handler state
that an edit in the middle of something could lose. Imported by `quire operate` alone: kopf is 15 MB.
"""

import asyncio
import dataclasses
import threading
from collections.abc import Callable
from typing import Any

import aiohttp
import kopf

from quire_operator.kube import kinds
from quire_operator.kube.login import Login
from quire_operator.kube.watch import Sink

Told = Callable[[str | None, dict[str, Any]], None]
"""Called with what happened (None: it was there already) and the object."""

_CONNECT_S, _REQUEST_S = 10.0, 30.0
# Whole numbers: the API server takes no fraction.
_SERVER_S, _CLIENT_S = 300, 330
_INACTIVITY_S = 90.0
"""As watch.Patience: bookmarks come after 60 to 75 s."""


async def watch(login: Login, sink: Sink, namespaces: tuple[str, ...], stop: asyncio.Event) -> None:
    """Tell `sink` of every LLMService that comes, changes or goes, until `stop` is set.

    kopf runs in a thread with an event loop of its own: it takes the signals of its process, and ends what else runs
    in its loop.

    Raises:
        Exception: kopf ended by itself, as it does when the kind is not there.
    """
    loop = asyncio.get_running_loop()
    over = threading.Event()
    ended: asyncio.Future[None] = loop.create_future()

    def told(type: str | None, body: dict[str, Any]) -> None:
        take = sink.remove if type == "DELETED" else sink.put
        loop.call_soon_threadsafe(take, kinds.LLM_SERVICE, body)

    def end(error: BaseException | None) -> None:
        if not ended.done():
            ended.set_exception(error) if error else ended.set_result(None)

    def work() -> None:
        error: BaseException | None = None
        try:
            asyncio.run(_operate(dataclasses.replace(login), told, namespaces, over))
        except Exception as found:
            error = found
        loop.call_soon_threadsafe(end, error)

    # A daemon, lest a kopf that hangs keeps the process from ending.
    threading.Thread(target=work, name="kopf", daemon=True).start()
    stopped = asyncio.create_task(stop.wait())
    try:
        waited: list[asyncio.Future[Any]] = [stopped, ended]
        await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
    finally:
        stopped.cancel()
        over.set()
    await ended


async def _operate(login: Login, told: Told, namespaces: tuple[str, ...], over: threading.Event) -> None:
    await kopf.operator(
        registry=registry(login, told),
        settings=settings(),
        standalone=True,  # never pauses because another operator announces itself
        # By default the name of the user, which a container's user 1000 does not have. Nobody sees it: see above.
        identity="quire-operator",  # type: ignore[arg-type]  # a NewType of str that kopf does not export
        clusterwide=not namespaces,
        namespaces=list(namespaces),
        stop_flag=over,
    )


class _NoDifferences(kopf.DiffBaseStorage):
    """Compares nothing: handlers of plain events are not told of differences, and finding them takes a copy of each
    object, a third of what kopf costs."""

    def build(self, *, body: kopf.Body, extra_fields: Any = None) -> kopf.BodyEssence:
        return kopf.BodyEssence()

    def fetch(self, *, body: kopf.Body) -> None:
        return None

    def store(self, *, body: kopf.Body, patch: kopf.Patch, essence: kopf.BodyEssence) -> None:
        raise AssertionError("no handler here needs anything stored")


def settings() -> kopf.OperatorSettings:
    """kopf's settings: bounded waits everywhere, and nothing that writes."""
    made = kopf.OperatorSettings()
    made.posting.enabled = False
    made.persistence.diffbase_storage = _NoDifferences()
    # The kind and the namespaces are known: no right to read definitions and namespaces is needed.
    made.scanning.disabled = True
    made.watching.server_timeout = _SERVER_S
    made.watching.client_timeout = _CLIENT_S
    made.watching.connect_timeout = _CONNECT_S
    # A dead connection says nothing and does not end by itself (kopf issues 585, 955, 980).
    made.watching.inactivity_timeout = _INACTIVITY_S
    made.watching.chunk_size = 500
    made.networking.request_timeout = _REQUEST_S
    made.networking.connect_timeout = _CONNECT_S
    return made


def registry(login: Login, told: Told) -> kopf.OperatorRegistry:
    """The handlers."""
    made = kopf.OperatorRegistry()
    kind = kinds.LLM_SERVICE

    @kopf.on.login(registry=made)
    async def log_in(**_: Any) -> kopf.AiohttpSession:
        # Called again when the API server no longer takes what it got: the token of a pod is replaced every hour.
        login.forget()
        tls = login.tls if login.tls is not None else False
        session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(ssl=tls, limit=0), headers=dict(await login.headers())
        )
        return kopf.AiohttpSession(server=login.server, default_namespace=login.namespace, aiohttp_session=session)

    @kopf.on.event(kind.group, kind.version, kind.plural, registry=made)
    async def seen(type: str | None, body: kopf.Body, **_: Any) -> None:
        told(type, dict(body))

    return made
