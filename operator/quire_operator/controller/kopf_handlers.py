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

from quire_operator.kube import resources
from quire_operator.kube.api_client import ApiClient
from quire_operator.kube.cluster_config import ClusterConfig
from quire_operator.kube.discovery import is_served
from quire_operator.kube.errors import ApiError
from quire_operator.kube.reflector import ObjectStore, WatchTimeouts
from quire_operator.kube.watch_heartbeat import WatchHeartbeat

logger = logging.getLogger(__name__)

EventCallback = Callable[[str | None, dict[str, Any]], None]
"""Called with what happened (None: it was there already) and the object."""

_CONNECT_S, _REQUEST_S = 10.0, 30.0
_LOGIN_RETRY_S = 5.0
"""After a login that failed, such as a plugin's; kopf would wait a minute."""
_WATCH_INACTIVITY_PERIODS = 2.0
"""How long a watch lasts, in inactivities: less than patience has (Patience.deaf_s)."""
_CRD_POLL_S, _CRD_LOG_INTERVAL_S = 2.0, 60.0
"""How often it is looked whether there is the definition, and said that there is none."""


async def watch_services(
    cluster_config: ClusterConfig,
    store: ObjectStore,
    heartbeats: Sequence[WatchHeartbeat],
    timeouts: WatchTimeouts,
    stop: asyncio.Event,
) -> None:
    """Tell `sink` of every LLMService that comes, changes or goes, until `stop` is set.

    `heard` has an entry for each namespace to watch, or the one for all, and is told when something is heard of it.
    kopf runs in a thread with an event loop of its own: it takes the signals of its process, and ends what else runs
    in its loop.

    Raises:
        Exception: kopf ended by itself.
    """
    await _wait_for_crd(cluster_config, heartbeats, stop)
    loop = asyncio.get_running_loop()
    stop_flag = threading.Event()
    finished: asyncio.Future[None] = loop.create_future()

    def on_event(event_type: str | None, body: dict[str, Any]) -> None:
        update = store.remove if event_type == "DELETED" else store.upsert
        loop.call_soon_threadsafe(update, resources.LLM_SERVICE, body)

    def finish(error: BaseException | None) -> None:
        if not finished.done():
            finished.set_exception(error) if error else finished.set_result(None)

    def run_kopf_thread() -> None:
        error: BaseException | None = None
        try:
            asyncio.run(_run_kopf(dataclasses.replace(cluster_config), on_event, heartbeats, timeouts, stop_flag))
        except Exception as exc:
            error = exc
        loop.call_soon_threadsafe(finish, error)

    # A daemon, lest a kopf that hangs keeps the process from ending.
    threading.Thread(target=run_kopf_thread, name="kopf", daemon=True).start()
    stop_waiter = asyncio.create_task(stop.wait())
    try:
        waiters: list[asyncio.Future[Any]] = [stop_waiter, finished]
        await asyncio.wait(waiters, return_when=asyncio.FIRST_COMPLETED)
    finally:
        stop_waiter.cancel()
        stop_flag.set()
    await finished


async def _wait_for_crd(
    cluster_config: ClusterConfig, heartbeats: Sequence[WatchHeartbeat], stop: asyncio.Event
) -> None:
    """Wait for the definition of LLMServices: kopf looks for it once, when it begins, and never again."""
    logged_at = float("-inf")
    async with ApiClient(cluster_config) as client:
        while not stop.is_set():
            try:
                if await is_served(client, resources.LLM_SERVICE):
                    return
                for heartbeat in heartbeats:
                    heartbeat.reset()
                if time.monotonic() - logged_at > _CRD_LOG_INTERVAL_S:
                    logged_at = time.monotonic()
                    logger.error(
                        "definition is missing, nobody is served until it is there name=%s.%s version=%s; install it: "
                        "helm upgrade --install quire charts/quire, or kubectl apply --server-side -f "
                        "crds/llmservices.yaml",
                        resources.LLM_SERVICE.plural, resources.LLM_SERVICE.group, resources.LLM_SERVICE.version,
                    )  # fmt: skip
            except ApiError as error:
                logger.warning("definition is not known error=%s", error)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_CRD_POLL_S):
                    await stop.wait()


async def _run_kopf(
    cluster_config: ClusterConfig,
    on_event: EventCallback,
    heartbeats: Sequence[WatchHeartbeat],
    timeouts: WatchTimeouts,
    stop_flag: threading.Event,
) -> None:
    namespaces = [heartbeat.namespace for heartbeat in heartbeats if heartbeat.namespace is not None]
    await kopf.operator(
        registry=build_registry(cluster_config, on_event, trace_watches(heartbeats)),
        settings=build_settings(timeouts),
        standalone=True,  # never pauses because another operator announces itself
        # By default the name of the user, which a container's user 1000 does not have. Nobody sees it: see above.
        identity="quire-operator",  # type: ignore[arg-type]  # a NewType of str that kopf does not export
        clusterwide=not namespaces,
        namespaces=namespaces,
        stop_flag=stop_flag,
    )


class NoDiffStorage(kopf.DiffBaseStorage):
    """Compares nothing: handlers of plain events are not told of differences, and finding them takes a copy of each
    object, a third of what kopf costs."""

    def build(self, *, body: kopf.Body, extra_fields: Any = None) -> kopf.BodyEssence:
        return kopf.BodyEssence()

    def fetch(self, *, body: kopf.Body) -> None:
        return None

    def store(self, *, body: kopf.Body, patch: kopf.Patch, essence: kopf.BodyEssence) -> None:
        raise AssertionError("no handler here needs anything stored")


def build_settings(timeouts: WatchTimeouts) -> kopf.OperatorSettings:
    """kopf's settings: bounded waits everywhere, and nothing that writes."""
    kopf_settings = kopf.OperatorSettings()
    kopf_settings.posting.enabled = False
    kopf_settings.persistence.diffbase_storage = NoDiffStorage()
    # The kind and the namespaces are known: no right to read definitions and namespaces is needed.
    kopf_settings.scanning.disabled = True
    # A whole number: the API server takes no fraction.
    kopf_settings.watching.server_timeout = max(1, int(_WATCH_INACTIVITY_PERIODS * timeouts.inactivity_s))
    kopf_settings.watching.client_timeout = 1.1 * kopf_settings.watching.server_timeout
    kopf_settings.watching.connect_timeout = _CONNECT_S
    # A dead connection says nothing and does not end by itself (kopf issues 585, 955, 980).
    kopf_settings.watching.inactivity_timeout = timeouts.inactivity_s
    kopf_settings.watching.chunk_size = 500
    kopf_settings.networking.request_timeout = _REQUEST_S
    kopf_settings.networking.connect_timeout = _CONNECT_S
    return kopf_settings


def trace_watches(heartbeats: Sequence[WatchHeartbeat]) -> aiohttp.TraceConfig:
    """What a session of kopf's is to be made with, so that `heard` is told of what it hears."""
    paths = {heartbeat.resource.path(heartbeat.namespace): heartbeat for heartbeat in heartbeats}

    async def on_request_end(
        _: aiohttp.ClientSession, __: SimpleNamespace, params: aiohttp.TraceRequestEndParams
    ) -> None:
        # The server's own path may come before it.
        for path, heartbeat in paths.items():
            if params.response.status == 200 and params.url.path.endswith(path):
                heartbeat.beat()

    trace_config = aiohttp.TraceConfig()
    trace_config.on_request_end.append(on_request_end)
    return trace_config


def build_registry(
    cluster_config: ClusterConfig, on_event: EventCallback, trace: aiohttp.TraceConfig
) -> kopf.OperatorRegistry:
    """The handlers; `trace` sees the requests of kopf's sessions."""
    operator_registry = kopf.OperatorRegistry()
    resource = resources.LLM_SERVICE

    @kopf.on.login(registry=operator_registry, backoff=_LOGIN_RETRY_S)
    async def log_in(**_: Any) -> kopf.AiohttpSession:
        # Called again when the API server no longer takes what it got: the token of a pod is replaced every hour.
        cluster_config.invalidate_token()
        ssl_context = cluster_config.ssl_context if cluster_config.ssl_context is not None else False
        session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(ssl=ssl_context, limit=0),
            headers=dict(await cluster_config.auth_headers()),
            trace_configs=[trace],
        )
        return kopf.AiohttpSession(
            server=cluster_config.server, default_namespace=cluster_config.namespace, aiohttp_session=session
        )

    @kopf.on.event(resource.group, resource.version, resource.plural, registry=operator_registry)
    async def on_service_event(type: str | None, body: kopf.Body, **_: Any) -> None:
        on_event(type, dict(body))

    return operator_registry
