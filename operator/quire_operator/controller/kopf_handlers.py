# SPDX-License-Identifier: Apache-2.0
"""kopf handlers for start-up, cleanup, login, liveness probes and events of LLMServices.

The process and its only event loop belong to kopf. `quire operate` calls run_operator(). The module can also be run
with `kopf run -m quire_operator.controller.kopf_handlers --standalone -A`. Each handler calls operator_process.py. Only
this module raises errors that derive from kopf's errors.

kopf watches only LLMServices, with on.event. The operator does not add finalizers. The deletion of a service therefore
never waits for the operator. The handlers do not write annotations, and they have no state. The child kinds are watched
by Quire's own reflector; kube/reflector.py explains why. kopf takes 15 MB, so only `quire operate` imports it.

kopf calls a handler only after a change. From these calls alone, an idle watch cannot be distinguished from a dead
watch. Therefore, the login handler gives kopf an HTTP session with a trace, in which each response to a watch request
counts as a heartbeat. kopf restarts each watch after at most _WATCH_INACTIVITY_PERIODS periods.
"""

import asyncio
import itertools
import signal
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import aiohttp
import kopf

from quire_operator.controller.operator_process import OperatorOptions, OperatorProcess
from quire_operator.kube.cluster_config import ClusterConfig
from quire_operator.kube.reflector import WatchTimeouts
from quire_operator.kube.resources import LLM_SERVICE
from quire_operator.kube.watch_heartbeat import WatchHeartbeat
from quire_spec.backoff import backoff
from quire_spec.errors import QuireError

_CONNECT_S, _REQUEST_S = 10.0, 30.0
_LOGIN_RETRY_S = 5.0
"""Seconds until a failed login is repeated. A login can fail, for example, in an exec plugin. kopf's default is one
minute.
"""
_WATCH_INACTIVITY_PERIODS = 2.0
"""How long kopf keeps a watch open, as a multiple of the inactivity timeout. It must be less than
WatchTimeouts.stale_after_s.
"""
_EXIT_TIMEOUT_S = 25.0
"""If the process has not ended after this many seconds, kopf kills it. The chart's terminationGracePeriodSeconds is
30.
"""


async def run_operator(
    options: OperatorOptions,
    *,
    liveness_endpoint: str | None = None,
    stop_flag: asyncio.Event | None = None,
    memo: kopf.Memo | None = None,
) -> None:
    """Run the operator until it receives SIGTERM or SIGINT, or until `stop_flag` is set.

    After the start, `memo.operator` is the OperatorProcess.

    Raises:
        Exception: a task of the operator failed; the caller must end the process, so that Kubernetes restarts it.
    """
    stop_flag = stop_flag or asyncio.Event()
    memo = kopf.Memo() if memo is None else memo
    memo.options, memo.stop = options, stop_flag.set
    namespaces = options.settings.namespaces
    await kopf.operator(
        memo=memo,
        standalone=True,  # Without this, the operator would pause when another operator announces itself.
        # kopf derives the default identity from the name of the user, but user 1000 of a container has no name. Only
        # peering uses the identity.
        identity="quire-operator",  # type: ignore[arg-type]  # a NewType of str that kopf does not export
        clusterwide=not namespaces,
        namespaces=namespaces,
        liveness_endpoint=liveness_endpoint,
        stop_flag=stop_flag,
    )
    operator: OperatorProcess | None = memo.get("operator")
    if operator is not None and operator.failure is not None:
        raise operator.failure


@kopf.on.startup(errors=kopf.ErrorsMode.PERMANENT)
async def start_operator(memo: kopf.Memo, settings: kopf.OperatorSettings, **_: Any) -> None:
    """Configure kopf, and start the OperatorProcess."""
    options: OperatorOptions = memo.get("options") or OperatorOptions()
    if not settings.peering.clusterwide and not options.settings.namespaces:
        raise kopf.PermanentError(
            "kopf run needs --all-namespaces; to watch one namespace, run quire operate --namespace NAMESPACE"
        )
    configure_kopf(settings, options.settings.watch_timeouts)
    try:
        memo.operator = OperatorProcess(options, memo.get("stop") or _stop_process)
        await memo.operator.start()
    except QuireError as error:
        raise kopf.PermanentError(str(error)) from error


@kopf.on.cleanup()
async def close_operator(memo: kopf.Memo, **_: Any) -> None:
    """Stop the OperatorProcess."""
    await memo.operator.close()


@kopf.on.login(backoff=_LOGIN_RETRY_S)
async def log_in(memo: kopf.Memo, **_: Any) -> kopf.AiohttpSession:
    """Wait until the API server serves LLMServices. Then return an HTTP session for kopf.

    If the API server rejects the credentials, kopf calls this handler again. The token of a pod changes every hour.
    """
    operator: OperatorProcess = memo.operator
    await operator.wait_for_crd()
    config = operator.cluster_config
    if "auth_headers" in memo:
        config.invalidate_token(memo.auth_headers)
    memo.auth_headers = dict(await config.auth_headers())
    return kopf.AiohttpSession(
        server=config.server,
        default_namespace=config.namespace,
        aiohttp_session=create_session(config, memo.auth_headers, operator.service_heartbeats),
    )


@kopf.on.event(LLM_SERVICE.group, LLM_SERVICE.version, LLM_SERVICE.plural)
async def on_service_event(type: str | None, body: kopf.Body, memo: kopf.Memo, **_: Any) -> None:
    """Pass an event of an LLMService to the controller."""
    memo.operator.handle_service_event(type, dict(body))


@kopf.on.probe(id="controller", errors=kopf.ErrorsMode.PERMANENT)
async def check_controller(memo: kopf.Memo, **_: Any) -> str:
    """Fail the liveness probe if a task of the controller has ended."""
    if memo.operator.failure is not None:
        raise kopf.PermanentError(str(memo.operator.failure))
    return "running"


@kopf.on.probe(id="watches", errors=kopf.ErrorsMode.PERMANENT)
async def check_watches(memo: kopf.Memo, **_: Any) -> str:
    """Fail the liveness probe if a watch is stale."""
    if reason := memo.operator.controller.stale_watch():
        raise kopf.PermanentError(reason)
    return "current"


@kopf.on.probe(id="work_queue", errors=kopf.ErrorsMode.PERMANENT)
async def check_work_queue(memo: kopf.Memo, **_: Any) -> str:
    """Fail the liveness probe if a service has been in the work queue for too long."""
    if reason := memo.operator.controller.stuck_service():
        raise kopf.PermanentError(reason)
    return "moving"


class NoDiffStorage(kopf.DiffBaseStorage):
    """Storage without diffs. Event handlers do not need diffs, and computing them would take a third of kopf's CPU
    time.
    """

    def build(self, *, body: kopf.Body, extra_fields: Any = None) -> kopf.BodyEssence:
        return kopf.BodyEssence()

    def fetch(self, *, body: kopf.Body) -> None:
        return None

    def store(self, *, body: kopf.Body, patch: kopf.Patch, essence: kopf.BodyEssence) -> None:
        raise AssertionError("kopf must not store anything, because the handlers of this module have no state")


class EndlessBackoffs:
    """An endless sequence of delays between the attempts of a kopf request. The delays grow from 1 second to a maximum.

    By default, kopf gives up after 54 s, and the operator exits. An API server can take longer to restart.
    """

    def __init__(self, max_s: float) -> None:
        self._max_s = max_s

    def __iter__(self) -> Iterator[float]:
        for attempt in itertools.count():
            yield backoff(attempt, first=1.0, cap=self._max_s)


def configure_kopf(settings: kopf.OperatorSettings, timeouts: WatchTimeouts) -> None:
    """Change kopf's settings. Every wait gets a time limit, failed requests are repeated without limit, and kopf is not
    allowed to write anything.
    """
    settings.peering.standalone = True
    settings.posting.enabled = False
    settings.persistence.diffbase_storage = NoDiffStorage()
    # The kind and the namespaces are known, so kopf need not scan for them. Therefore, the operator does not need
    # permission to read CRDs and namespaces.
    settings.scanning.disabled = True
    # The value must be an integer, because the API server rejects fractions.
    settings.watching.server_timeout = max(1, int(_WATCH_INACTIVITY_PERIODS * timeouts.inactivity_s))
    settings.watching.client_timeout = 1.1 * settings.watching.server_timeout
    settings.watching.connect_timeout = _CONNECT_S
    # If a connection is dead, no data arrives, but the connection does not end by itself (kopf issues 585, 955, 980).
    settings.watching.inactivity_timeout = timeouts.inactivity_s
    settings.watching.chunk_size = 500
    settings.networking.request_timeout = _REQUEST_S
    settings.networking.connect_timeout = _CONNECT_S
    # The delays are short enough for several attempts before the watch counts as stale. Each error response shows that
    # the API server is alive.
    settings.networking.error_backoffs = EndlessBackoffs(timeouts.max_backoff_s)
    settings.process.ultimate_exiting_timeout = _EXIT_TIMEOUT_S


def trace_watches(heartbeats: Sequence[WatchHeartbeat]) -> aiohttp.TraceConfig:
    """Return a trace for kopf's session. The trace updates a heartbeat when kopf receives a response to a watch request
    for LLMServices.
    """
    paths = {heartbeat.resource.path(heartbeat.namespace): heartbeat for heartbeat in heartbeats}

    async def on_request_end(
        _: aiohttp.ClientSession, __: SimpleNamespace, params: aiohttp.TraceRequestEndParams
    ) -> None:
        # The server's URL can contain a path before the API's path.
        for path, heartbeat in paths.items():
            if params.url.path.endswith(path):
                if params.response.status == 200:
                    heartbeat.beat()
                else:
                    is_denied = params.response.status in (401, 403)
                    heartbeat.record_error(f"HTTP {params.response.status} for {path}" if is_denied else "")

    trace_config = aiohttp.TraceConfig()
    trace_config.on_request_end.append(on_request_end)
    return trace_config


def create_session(
    config: ClusterConfig, auth_headers: dict[str, str], heartbeats: Sequence[WatchHeartbeat]
) -> aiohttp.ClientSession:
    """Return the HTTP session with which kopf sends requests to the API server."""

    async def set_server_name(
        request: aiohttp.ClientRequest, handler: aiohttp.ClientHandlerType
    ) -> aiohttp.ClientResponse:
        # kopf's requests cannot set server_hostname, and a session has no default for it.
        request.server_hostname = config.tls_server_name
        return await handler(request)

    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(ssl=config.ssl_context or False, limit=0),
        headers=auth_headers,
        proxy=config.proxy_url,
        trace_configs=[trace_watches(heartbeats)],
        middlewares=[set_server_name],
    )


def _stop_process() -> None:
    """End `kopf run` by sending a signal. kopf has no function for that."""
    signal.raise_signal(signal.SIGTERM)
