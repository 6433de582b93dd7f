# SPDX-License-Identifier: Apache-2.0
"""Controls a pod from its start to its end. It decides whether the pod is ready, reports its status and its metrics,
and drains and stops it.

This module owns readiness and the status document. process_manager.py owns the processes, adapters/manager.py owns the
adapters, and admin_api.py owns the HTTP API. app.py assembles them.
"""

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import Mapping
from typing import Any

import aiohttp

from quire_server.adapters.manager import AdapterManager
from quire_server.adapters.on_demand import OnDemandAdapters
from quire_server.supervisor import reporting
from quire_server.supervisor.managed_process import StartupFailed
from quire_server.supervisor.other_models import OtherModels
from quire_server.supervisor.process_manager import ProcessManager
from quire_server.supervisor.settings import SupervisorSettings
from quire_server.version import VERSION
from quire_spec import constants
from quire_spec.documents.adapter_catalog import AdapterCatalog
from quire_spec.documents.pod_status import AdapterState, ModelSignature, PodStatus, ProcessState
from quire_spec.errors import QuireError
from quire_spec.net import addresses

logger = logging.getLogger(__name__)

_FIRST_PROGRESS_LOG_S = 5.0
_MAX_PROGRESS_LOG_S = 60.0
_PRUNE_INTERVAL_S = 3600.0
_READINESS_DELAY_S = 0.02
_METRICS_TIMEOUT = aiohttp.ClientTimeout(total=5)
_SERVER_METRICS_MAX_AGE_S = 1.0


class Supervisor:
    """State and lifecycle of one pod."""

    def __init__(
        self,
        settings: SupervisorSettings,
        process_manager: ProcessManager,
        adapter_manager: AdapterManager,
        on_demand: OnDemandAdapters,
        other_models: OtherModels,
        session: aiohttp.ClientSession,
    ) -> None:
        self._settings = settings
        self._process_manager = process_manager
        self._adapter_manager = adapter_manager
        self._on_demand = on_demand
        self.other_models = other_models
        self.model_signatures: Mapping[str, ModelSignature] = {}
        """The verified signatures of the base model and the draft model; see `verify_models`."""
        self._session = session
        self._all_were_up = False
        self._server_metrics_page = "", -math.inf
        """The page, and the time when it was read."""
        self.draining = False
        """True after a stop signal. From then on, the pod does not become ready again."""
        process_manager.on_change = self.on_process_change
        process_manager.other_models = other_models
        adapter_manager.on_change = self._on_adapter_change
        adapter_manager.other_models = other_models.names
        other_models.on_change = self._publish_readiness
        self._readiness_timer: asyncio.TimerHandle | None = None

    # Used by the health port

    def not_ready_reason(self) -> str:
        """Return a sentence that contains the reason why the pod is not ready; return an empty text if the pod is
        ready."""
        if self.draining:
            return "draining: the pod is stopping"
        handles, core_names = self._process_manager.handles, self._process_manager.core_names
        for name, process in self._process_manager.processes.items():
            # A pod with several cores starts with all of them, and then serves while one of them does.
            is_optional = name == constants.KV_PEER or (name in core_names and bool(handles.cores))
            serves_without = process.state is ProcessState.RESTARTING and is_optional
            if process.state is not ProcessState.READY and not serves_without:
                is_lost = name in core_names and self._settings.config.engine.nnodes > 1 and process.last_error
                return f"{name} is {process.state.value.lower()}" + (f": {process.last_error}" if is_lost else "")
        server = handles.server
        if server is None or not server.base_ready:
            return f"model {self._settings.config.servedName!r} is loading on the server"
        if not self._process_manager.core_connected:
            return "text is connecting to core"
        if gating := self._adapter_manager.gating():
            return f"adapters are loading: {reporting.summarize_names(gating)}"
        if gating := self.other_models.gating():
            return f"models of the repository are loading: {reporting.summarize_names(gating)}"
        return ""

    def is_closing(self) -> bool:
        """Return True if the pod is about to stop. It still serves, but its connections should end."""
        return self._process_manager.is_closing()

    def status(self) -> PodStatus:
        """Return the status document."""
        reason, handles = self.not_ready_reason(), self._process_manager.handles
        core, text = handles.core, handles.text
        adapters = self._adapter_manager.statuses()
        return PodStatus(
            version=VERSION,
            served_name=self._settings.config.servedName,
            ready=not reason,
            reason=reason,
            core_started_at=core.started_at if core else None,
            generation=self._adapter_manager.catalog_version.generation,
            processes={name: process.status() for name, process in self._process_manager.processes.items()},
            memory=core.memory if core else None,
            models=self._served_models(),
            adapters=adapters,
            other_models=self.other_models.statuses(),
            catalogue=self._adapter_manager.catalog_version.digest,
            tool_call_parser=text.tool_call_parser if text else None,
            reasoning_parser=text.reasoning_parser if text else None,
            cores=dict(self._process_manager.core_states),
            on_demand=self._on_demand.status() if self._adapter_manager.catalog.sources else None,
            model_signatures=dict(self.model_signatures),
            degraded=self._degraded(),
            kv_differences=reporting.layout_differences(self._process_manager.kv_peer_status),
        )

    def _degraded(self) -> str:
        """Return how many of several cores run if some of them do not, such as `cores 3 of 4`; else an empty text."""
        num_running, num_cores = len(self._process_manager.handles.cores), len(self._process_manager.core_names)
        return f"cores {num_running} of {num_cores}" if 0 < num_running < num_cores else ""

    async def metrics(self) -> str:
        """Return the metrics of the text process, the server and the supervisor."""
        text, server = await asyncio.gather(self._text_metrics(), self._server_metrics())
        pages = [text, server, reporting.supervisor_metrics(self.status())]
        if self._settings.config.engine.kv_transfer is not None:
            pages.append(reporting.kv_peer_metrics(self._process_manager.kv_peer_status))
        return reporting.concat_pages(*pages)

    def set_catalog(self, catalog: AdapterCatalog, replaces: str = "") -> None:
        """Apply a new catalog; the parameters and errors are the same as for `AdapterManager.check`."""
        self._adapter_manager.set_catalog(catalog, replaces)

    def replace_adapters(self, document: dict[str, Any]) -> None:
        """Apply a catalog of the same generation: the file of `quire serve` has changed.

        `document` is a parsed adapters.json. Raises ConfigError if it is invalid; see also `AdapterManager.check`.
        """
        catalog = AdapterCatalog.from_json(document | {"generation": self._adapter_manager.catalog_version.generation})
        self.set_catalog(catalog)
        logger.info("catalog replaced adapters=%d sources=%d", len(catalog.adapters), len(catalog.sources))

    def _served_models(self) -> list[str]:
        """Return the server models that clients can use now."""
        handles = self._process_manager.handles
        if handles.core is None or handles.text is None or handles.server is None:
            return []
        base = [self._settings.config.servedName] if handles.server.base_ready else []
        return base + sorted(self._adapter_manager.served_names() & handles.server.models)

    async def vllm_backend_metrics(self) -> str:
        """Return the metrics that vllm_backend reports on the server's metrics port. They have the same names and
        labels as in vllm_backend."""
        text, server = await asyncio.gather(self._text_metrics("vllm_backend"), self._server_metrics())
        return reporting.concat_pages(text, server)

    async def adapter_residency(self) -> list[dict[str, Any]]:
        """Return where each adapter is. The list is empty while no text process runs."""
        text_handle = self._process_manager.handles.text
        with contextlib.suppress(QuireError):
            return await text_handle.adapters() if text_handle else []
        return []

    async def _text_metrics(self, page_format: str = "") -> str:
        text_handle = self._process_manager.handles.text
        with contextlib.suppress(QuireError):
            return await text_handle.metrics(page_format) if text_handle else ""
        return ""

    async def _server_metrics(self) -> str:
        """Return the metrics of the server, at most _SERVER_METRICS_MAX_AGE_S old: an endpoint picker reads the page 20
        times a second, and needs none of them."""
        page, read_at = self._server_metrics_page
        if (now := time.monotonic()) - read_at <= _SERVER_METRICS_MAX_AGE_S:
            return page
        page = await self._read_server_metrics()
        self._server_metrics_page = page, now
        return page

    async def _read_server_metrics(self) -> str:
        host, port = self._settings.loopback, self._settings.config.ports.metrics
        url = f"http://{addresses.format_for_url(host)}:{port}/metrics"
        with contextlib.suppress(aiohttp.ClientError, TimeoutError):
            async with self._session.get(url, timeout=_METRICS_TIMEOUT) as response:
                return await response.text()
        return ""

    # Lifecycle

    def on_process_change(self) -> None:
        """React to a process that has started to serve or has ended."""
        handles = self._process_manager.handles
        all_up = handles.core is not None and handles.text is not None and handles.server is not None
        if all_up and not self._all_were_up:
            self._adapter_manager.gate_readiness()
        self._all_were_up = all_up
        self._publish_readiness()
        self._adapter_manager.resync()
        self.other_models.resync()

    def _on_adapter_change(self) -> None:
        self._publish_readiness_soon()
        self.other_models.resync()  # an ensemble can depend on an adapter

    def _publish_readiness_soon(self) -> None:
        """Schedule an update of the readiness file, because an adapter has changed. If several adapters change at the
        same time, the file is updated only once."""
        if self._readiness_timer is None:
            self._readiness_timer = asyncio.get_running_loop().call_later(_READINESS_DELAY_S, self._publish_readiness)

    def _publish_readiness(self) -> None:
        """Update the readiness file of the server."""
        if self._readiness_timer is not None:
            self._readiness_timer.cancel()
            self._readiness_timer = None
        served = self._adapter_manager.served_names()
        adapters = {name: name in served for name in self._adapter_manager.exposed_names()}
        self._process_manager.publish_readiness(self.draining, adapters)

    async def run(self, stop: asyncio.Event) -> None:
        """Serve until `stop` is set. Then drain and stop all processes. Raises StartupFailed if a process does not
        start."""
        self._publish_readiness()
        run_task = asyncio.create_task(self._process_manager.run(), name="pod")
        stop_task = asyncio.create_task(stop.wait(), name="stop")
        background_tasks = [
            asyncio.create_task(coro)
            for coro in (self._log_progress(), self._prune_cache(), self._on_demand.run(), self.other_models.run())
        ]
        drained = False
        try:
            await _wait_for_first(run_task, stop_task, *background_tasks)
            if stop.is_set():
                drained = await self._drain(run_task)
        finally:
            self.draining = True
            # Close the adapter manager first. Otherwise, it would react when the processes end.
            await self._adapter_manager.close()
            await _cancel_tasks(run_task, stop_task, *background_tasks)
            if not stop.is_set():
                # The start has failed, so there are no requests to wait for.
                self._process_manager.kill()
            await self._process_manager.stop(drained)
        if not run_task.cancelled():
            run_task.result()

    async def _drain(self, run_task: "asyncio.Task[None]") -> bool:
        """Wait until the open requests have ended; return False if some are still open."""
        self.draining = True
        self._publish_readiness()
        timeout_s = self._settings.config.limits.drainSeconds
        logger.info("draining: rejecting new requests, waiting for open ones timeout_s=%g", timeout_s)
        drain_task = asyncio.create_task(self._process_manager.drain(timeout_s))
        tasks: list[asyncio.Future[Any]] = [drain_task, run_task]
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        await _cancel_tasks(drain_task)
        drained = not drain_task.cancelled() and drain_task.result()
        if not drained:
            logger.warning("drain timed out, ending the open requests with an error")
        return drained

    async def _log_progress(self) -> None:
        """Until the pod is ready, log at increasing intervals why it is not ready. Then print the ready banner."""
        started_at, pause_s = time.monotonic(), _FIRST_PROGRESS_LOG_S
        next_log_at = started_at + pause_s
        while self.not_ready_reason() or self._adapter_manager.unsettled():
            self._check_required_adapters()
            await asyncio.sleep(0.05)
            if time.monotonic() >= next_log_at:
                logger.info("not ready yet: %s (%.0f s)", self._describe_pending(), time.monotonic() - started_at)
                pause_s = min(2 * pause_s, _MAX_PROGRESS_LOG_S)
                next_log_at += pause_s
        self._check_required_adapters()
        # The banner is the only output on stdout, because the log goes to stderr. stdout may be closed.
        with contextlib.suppress(OSError):
            print(reporting.ready_banner(self._settings, self.status(), time.monotonic() - started_at), flush=True)

    def _check_required_adapters(self) -> None:
        """Raise StartupFailed if all adapters are required and one of them has failed."""
        if self._settings.config.sources.requireAdapters:
            failed = [adapter for adapter in self._adapter_manager.statuses() if adapter.state is AdapterState.FAILED]
            if failed:
                problems = "\n".join(f"adapter {adapter.name!r}: {adapter.error}" for adapter in failed)
                raise StartupFailed(problems, is_config_error=True)

    def _describe_pending(self) -> str:
        unsettled = [f"{adapter.name} {adapter.progress.state.value}" for adapter in self._adapter_manager.unsettled()]
        adapters = f"{len(unsettled)} adapters are loading: {reporting.summarize_names(unsettled)}"
        reason = self.not_ready_reason()
        for name, process in self._process_manager.processes.items():
            if reason == f"{name} is starting" and (event := process.last_event()):
                # Such as the compilation of kernels, which takes minutes on a busy machine.
                return f"{reason}; it logged last: {event}"
        return adapters if unsettled and (not reason or reason.startswith("adapters")) else reason

    async def _prune_cache(self) -> None:
        """At regular intervals, remove unused adapters from the cache."""
        while True:
            try:
                for digest in await self._adapter_manager.prune_cache():
                    logger.info("adapter removed from the cache digest=%s", digest)
            except OSError as error:
                # The volume can be temporarily unavailable. The adapters that are already loaded do not need it.
                logger.warning("cache prune failed error=%s", error)
            await asyncio.sleep(_PRUNE_INTERVAL_S)


async def _wait_for_first(
    run_task: "asyncio.Task[None]", stop_task: "asyncio.Task[Any]", *background_tasks: "asyncio.Task[None]"
) -> None:
    """Wait until `run_task` or `stop_task` has ended. If a background task fails, raise its error."""
    pending: set[asyncio.Task[Any]] = {run_task, stop_task, *background_tasks}
    while not (run_task.done() or stop_task.done()):
        done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
        for task in done - {run_task}:
            task.result()


async def _cancel_tasks(*tasks: "asyncio.Task[Any]") -> None:
    """Cancel tasks and wait until they have ended. Their exceptions are not raised."""
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
