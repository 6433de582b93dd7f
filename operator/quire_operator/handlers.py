# SPDX-License-Identifier: Apache-2.0
"""kopf's part: it watches LLMServices and says what it sees; everything else is in reconcile/.

Only on.event: no finalizer, so that deleting never waits for the operator; no annotations of kopf's; no handler state
that an edit in the middle of something could lose. Imported by `quire operate` alone: kopf is 15 MB.

kopf tells handlers of changes and of nothing else, so that an hour without one looks like an hour without a watch.
What it hears is seen at the HTTP session, which is ours: each watch that the API server begins to answer. kopf begins
one anew at least every _WATCH_S inactivities, and sooner where nothing comes.
"""

import asyncio
import contextlib
import dataclasses
import logging
import threading
import time
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import aiohttp
import kopf

from quire_operator.kube import kinds
from quire_operator.kube.client import Client
from quire_operator.kube.discovery import serves
from quire_operator.kube.errors import ApiError
from quire_operator.kube.heard import Heard
from quire_operator.kube.login import Login
from quire_operator.kube.watch import Patience, Sink

log = logging.getLogger(__name__)

Told = Callable[[str | None, dict[str, Any]], None]
"""Called with what happened (None: it was there already) and the object."""

_CONNECT_S, _REQUEST_S = 10.0, 30.0
_LOGIN_AGAIN_S = 5.0
"""After a login that failed, such as a plugin's; kopf would wait a minute."""
_WATCH_S = 2.0
"""How long a watch lasts, in inactivities: less than patience has (Patience.deaf_s)."""
_LOOK_S, _SAY_S = 2.0, 60.0
"""How often it is looked whether there is the definition, and said that there is none."""


async def watch(login: Login, sink: Sink, heard: Sequence[Heard], patience: Patience, stop: asyncio.Event) -> None:
    """Tell `sink` of every LLMService that comes, changes or goes, until `stop` is set.

    `heard` has an entry for each namespace to watch, or the one for all, and is told when something is heard of it.
    kopf runs in a thread with an event loop of its own: it takes the signals of its process, and ends what else runs
    in its loop.

    Raises:
        Exception: kopf ended by itself.
    """
    await _defined(login, heard, stop)
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
            asyncio.run(_operate(dataclasses.replace(login), told, heard, patience, over))
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


async def _defined(login: Login, heard: Sequence[Heard], stop: asyncio.Event) -> None:
    """Wait for the definition of LLMServices: kopf looks for it once, when it begins, and never again."""
    said_at = float("-inf")
    async with Client(login) as client:
        while not stop.is_set():
            try:
                if await serves(client, kinds.LLM_SERVICE):
                    return
                for each in heard:
                    each.not_yet()
                if time.monotonic() - said_at > _SAY_S:
                    said_at = time.monotonic()
                    log.error(
                        "definition is missing, nobody is served until it is there name=%s.%s version=%s; install it: "
                        "helm upgrade --install quire charts/quire, or kubectl apply --server-side -f "
                        "crds/llmservices.yaml",
                        kinds.LLM_SERVICE.plural, kinds.LLM_SERVICE.group, kinds.LLM_SERVICE.version,
                    )  # fmt: skip
            except ApiError as error:
                log.warning("definition is not known error=%s", error)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_LOOK_S):
                    await stop.wait()


async def _operate(login: Login, told: Told, heard: Sequence[Heard], patience: Patience, over: threading.Event) -> None:
    namespaces = [each.namespace for each in heard if each.namespace is not None]
    await kopf.operator(
        registry=registry(login, told, listening(heard)),
        settings=settings(patience),
        standalone=True,  # never pauses because another operator announces itself
        # By default the name of the user, which a container's user 1000 does not have. Nobody sees it: see above.
        identity="quire-operator",  # type: ignore[arg-type]  # a NewType of str that kopf does not export
        clusterwide=not namespaces,
        namespaces=namespaces,
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


def settings(patience: Patience) -> kopf.OperatorSettings:
    """kopf's settings: bounded waits everywhere, and nothing that writes."""
    made = kopf.OperatorSettings()
    made.posting.enabled = False
    made.persistence.diffbase_storage = _NoDifferences()
    # The kind and the namespaces are known: no right to read definitions and namespaces is needed.
    made.scanning.disabled = True
    # A whole number: the API server takes no fraction.
    made.watching.server_timeout = max(1, int(_WATCH_S * patience.inactivity_s))
    made.watching.client_timeout = 1.1 * made.watching.server_timeout
    made.watching.connect_timeout = _CONNECT_S
    # A dead connection says nothing and does not end by itself (kopf issues 585, 955, 980).
    made.watching.inactivity_timeout = patience.inactivity_s
    made.watching.chunk_size = 500
    made.networking.request_timeout = _REQUEST_S
    made.networking.connect_timeout = _CONNECT_S
    return made


def listening(heard: Sequence[Heard]) -> aiohttp.TraceConfig:
    """What a session of kopf's is to be made with, so that `heard` is told of what it hears."""
    paths = {each.kind.path(each.namespace): each for each in heard}

    async def answered(_: aiohttp.ClientSession, __: SimpleNamespace, params: aiohttp.TraceRequestEndParams) -> None:
        # The server's own path may come before it.
        for path, each in paths.items():
            if params.response.status == 200 and params.url.path.endswith(path):
                each.now()

    made = aiohttp.TraceConfig()
    made.on_request_end.append(answered)
    return made


def registry(login: Login, told: Told, trace: aiohttp.TraceConfig) -> kopf.OperatorRegistry:
    """The handlers; `trace` sees the requests of kopf's sessions."""
    made = kopf.OperatorRegistry()
    kind = kinds.LLM_SERVICE

    @kopf.on.login(registry=made, backoff=_LOGIN_AGAIN_S)
    async def log_in(**_: Any) -> kopf.AiohttpSession:
        # Called again when the API server no longer takes what it got: the token of a pod is replaced every hour.
        login.forget()
        tls = login.tls if login.tls is not None else False
        session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(ssl=tls, limit=0),
            headers=dict(await login.headers()),
            trace_configs=[trace],
        )
        return kopf.AiohttpSession(server=login.server, default_namespace=login.namespace, aiohttp_session=session)

    @kopf.on.event(kind.group, kind.version, kind.plural, registry=made)
    async def seen(type: str | None, body: kopf.Body, **_: Any) -> None:
        told(type, dict(body))

    return made
