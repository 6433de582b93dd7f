# SPDX-License-Identifier: Apache-2.0
"""Controller, which owns the tasks of one operator and the state that its health endpoints report.

The tasks are reflectors, workers with a work queue, and periodic checks. LLMServices are watched by kopf, and
operator_process.py writes them to `cache`. In tests, a Reflector watches them. This module does not depend on kopf.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from quire_operator.api.spec_defaults import SpecDefaults
from quire_operator.controller.apply.applier import Applier
from quire_operator.controller.apply.catalog_pusher import CatalogPusher
from quire_operator.controller.cache_verifier import CacheVerifier
from quire_operator.controller.dependencies import RESYNC_S, ReconcilerDeps
from quire_operator.controller.metrics import ControllerMetrics
from quire_operator.controller.object_cache import LABEL_SELECTOR, ObjectCache, ServiceKey
from quire_operator.controller.observe.checkpoint_store import CheckpointStore
from quire_operator.controller.observe.pod_admin_client import PodAdminClient
from quire_operator.controller.observe.pod_warnings import PodWarnings
from quire_operator.controller.observe.secret_store import SECRET_TTL_S, SecretStore
from quire_operator.controller.plan_service import PlanService
from quire_operator.controller.reconciler import Reconciler
from quire_operator.controller.status_writer import StatusWriter
from quire_operator.controller.work_queue import MAX_DELAY_S, WorkQueue
from quire_operator.kube import discovery, resources
from quire_operator.kube.api_client import ApiClient
from quire_operator.kube.discovery import Discovery
from quire_operator.kube.errors import ApiError, ApiServerUnavailable
from quire_operator.kube.reflector import Reflector, WatchTimeouts
from quire_operator.kube.resources import DISCOVERED_RESOURCES, WATCHED_RESOURCES, Resource
from quire_operator.kube.watch_heartbeat import WatchHeartbeat
from quire_operator.plan.planner import DEFAULT_IMAGES
from quire_sources.http.borders import Borders

logger = logging.getLogger(__name__)

_OPTIONAL_SYNC_S = 10.0
"""The workers wait at most this many seconds for the first list of an optional kind. The API server may always answer
403 for such a kind.
"""
_RIGHTS_POLL_S = 2.0
"""Seconds between two checks of the namespaces in which the operator lacks permissions."""
_UNSERVED_RETRY_S = 60.0
"""Services in such a namespace are looked at again after this many seconds, and as soon as the permissions return."""
_OUTAGE_RETRY_S = 30.0
"""Maximum number of seconds until the next attempt while the API server is unavailable. The retries are necessary
because no event reports that the outage has ended.
"""
_STUCK_AFTER_S = 900.0
"""The work queue counts as stuck if a service has waited in it for more than this number of seconds, or if a worker has
worked on a service for that long.
"""


@dataclass(frozen=True, slots=True)
class ControllerSettings:
    """Settings of a controller."""

    namespaces: tuple[str, ...] = ()
    """The namespaces that are watched. If there are none, all namespaces are watched."""
    workers: int = 8
    identity: str = "default/quire"
    """Identity of this installation of the operator. See ownership.py."""
    images: Mapping[str, str] = field(default_factory=lambda: DEFAULT_IMAGES)
    """Default images of the pods, for GPU and CPU."""
    operator_peer: Mapping[str, Any] | None = None
    """NetworkPolicy peer that selects the operator. If it is None, the policies deny all access to the admin port."""
    borders: Borders | None = field(default_factory=Borders)
    """Addresses from which the operator reads the sources of models. None: all addresses."""
    defaults: SpecDefaults = field(default_factory=SpecDefaults)
    resync_s: float = RESYNC_S
    secret_ttl_s: float = SECRET_TTL_S
    verify_interval_s: float = 600.0
    """Seconds between two comparisons of the cache with the API server."""
    verify_grace_s: float = 30.0
    """Seconds that a difference must last before it counts. A change can be in the list although its event has not
    arrived yet.
    """
    watch_timeouts: WatchTimeouts = field(default_factory=WatchTimeouts)


class Controller:
    """The controller of one operator."""

    def __init__(self, client: ApiClient, settings: ControllerSettings) -> None:
        """Create the controller. An event loop must already be running."""
        self.client, self.settings, self.metrics = client, settings, ControllerMetrics()
        self.queue: WorkQueue[ServiceKey] = WorkQueue()
        self.cache = ObjectCache(self.queue.add)
        self._pod_admin = PodAdminClient(record_visit=self.metrics.record_visit)
        self._discovery = Discovery(client)
        secrets = SecretStore(client, settings.secret_ttl_s)
        pod_warnings = PodWarnings(client)
        record_write = self.metrics.record_write
        checkpoint_store = CheckpointStore(
            client, self.cache, pod_warnings, self.queue.add, record_write, settings.borders
        )
        status_writer = StatusWriter(client, self.cache, record_write)
        deps = ReconcilerDeps(
            client=client,
            cache=self.cache,
            secrets=secrets,
            checkpoints=checkpoint_store,
            plan_service=PlanService(client, checkpoint_store, settings.images),
            discovery=self._discovery,
            applier=Applier(client, self.cache, secrets, status_writer.check_newest, record_write),
            catalog_pusher=CatalogPusher(self._pod_admin, secrets, status_writer.is_newest),
            pod_warnings=pod_warnings,
            status_writer=status_writer,
            record_write=record_write,
            identity=settings.identity,
            operator_peer=settings.operator_peer,
            defaults=settings.defaults,
            resync_s=settings.resync_s,
        )
        self.reconciler = Reconciler(deps)
        self.reflectors: list[Reflector] = []
        self.heartbeats: list[WatchHeartbeat] = []
        """One heartbeat for each watch. The code that watches LLMServices adds its own heartbeat."""
        self._tasks: list[asyncio.Task[None]] = []
        self.started = asyncio.Event()
        """Event that is set when the workers start. Before that, the first lists are read."""

    @contextlib.asynccontextmanager
    async def run(self) -> AsyncIterator[asyncio.Future[None]]:
        """Run the controller until the context ends.

        The context yields a future. If a task fails permanently, the future gets its error.
        """
        failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def on_task_done(task: asyncio.Task[None]) -> None:
            if not task.cancelled() and not failure.done() and (error := task.exception()):
                failure.set_exception(error)

        self._on_task_done = on_task_done
        self._spawn(self._run_tasks())
        try:
            yield failure
        finally:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            await self._pod_admin.close()
            if failure.done() and not failure.cancelled():
                failure.exception()

    async def _run_tasks(self) -> None:
        available_kinds = await self._wait_for_discovery()
        unavailable_kinds = set(DISCOVERED_RESOURCES) - available_kinds
        await self._start_reflectors([kind for kind in WATCHED_RESOURCES if kind not in unavailable_kinds])
        for heartbeat in self.heartbeats:
            heartbeat.reset()  # The API server may have been unavailable for a long time.
        self.started.set()
        settings = self.settings
        logger.info("started workers=%d namespaces=%s", settings.workers, ",".join(settings.namespaces) or "all")
        for _ in range(settings.workers):
            self._spawn(self._run_worker())
        verifier = CacheVerifier(self.client, self.cache, self.reflectors, self.metrics, settings.namespaces)
        self._spawn(verifier.run(settings.verify_interval_s, settings.verify_grace_s))
        self._spawn(self._watch_permissions())
        await self._watch_new_kinds(set(available_kinds))

    async def _wait_for_discovery(self) -> frozenset[Resource]:
        while True:
            try:
                return await self._discovery.available_kinds()
            except ApiError as error:
                logger.warning("API server is not available yet error=%s", error)
                await asyncio.sleep(1)

    async def _start_reflectors(self, kinds_to_watch: Sequence[Resource]) -> None:
        namespaces: tuple[str | None, ...] = self.settings.namespaces or (None,)
        reflectors = [
            Reflector(self.client, resource, self.cache, namespace, LABEL_SELECTOR, self.settings.watch_timeouts)
            for resource in kinds_to_watch
            for namespace in namespaces
        ]
        for reflector in reflectors:
            self._spawn(reflector.run())
        self.reflectors += reflectors
        self.heartbeats += (reflector.heartbeat for reflector in reflectors)
        optional = [reflector for reflector in reflectors if reflector.resource in DISCOVERED_RESOURCES]
        await asyncio.gather(*(self._wait_until_listed(each) for each in reflectors if each not in optional))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_OPTIONAL_SYNC_S):
                await asyncio.gather(*(reflector.synced.wait() for reflector in optional))

    async def _wait_until_listed(self, reflector: Reflector) -> None:
        """Wait for the first list of a kind. In a namespace without permissions, do not wait: others are served."""
        while not reflector.synced.is_set() and not (reflector.namespace and reflector.heartbeat.denied):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_RIGHTS_POLL_S / 10):
                    await reflector.synced.wait()

    async def _watch_permissions(self) -> None:
        """Log the namespaces that are not served, and serve them as soon as the permissions return."""
        unserved: dict[str, str] = {}
        while True:
            before, unserved = unserved, self.unserved_namespaces()
            for namespace in unserved.keys() - before.keys():
                logger.error(
                    "namespace is not served, because a permission is missing or the namespace does not exist "
                    "namespace=%s error=%s", namespace, unserved[namespace],
                )  # fmt: skip
            for namespace in before.keys() - unserved.keys():
                logger.info("namespace is served again namespace=%s", namespace)
                for entry in self.cache.objects_of_kind(resources.LLM_SERVICE):
                    if entry.namespace == namespace:
                        self.queue.add(entry.key)
            await asyncio.sleep(_RIGHTS_POLL_S)

    async def _watch_new_kinds(self, watched: set[Resource]) -> None:
        """Start to watch optional kinds that are installed later, and write the fields that kinds have gained."""
        while True:
            await asyncio.sleep(discovery.REFRESH_INTERVAL_S)
            try:
                new_kinds = await self._discovery.available_kinds(force_refresh=True) - watched
                changed_kinds = await self.client.forget_unknown_fields()
            except ApiError as error:
                logger.warning("could not look for new kinds error=%s", error)
                continue
            for resource in changed_kinds:
                logger.info("the schema of a kind has changed kind=%s", resource.kind)
                self.reconciler.forget_applied(resource)
            if new_kinds:
                watched |= new_kinds
                await self._start_reflectors(list(new_kinds))
                logger.info("watching new kinds kinds=%s", ",".join(sorted(resource.kind for resource in new_kinds)))
            if new_kinds or changed_kinds:
                for entry in self.cache.objects_of_kind(resources.LLM_SERVICE):
                    self.queue.add(entry.key)

    async def _run_worker(self) -> None:
        while True:
            key = await self.queue.get()
            if key[0] in self.unserved_namespaces():
                self.metrics.reconciles.labels("unserved").inc()
                self.queue.done(key, _UNSERVED_RETRY_S)
                continue
            started_at, num_applied_before = time.monotonic(), self.reconciler.num_applied(key)
            try:
                result = await self.reconciler.reconcile(key)
            except Exception as error:
                result_label = "error"
                self.metrics.reconcile_errors.labels(type(error).__name__).inc()
                if isinstance(error, ApiError):
                    made_progress = self.reconciler.num_applied(key) > num_applied_before
                    max_delay_s = _OUTAGE_RETRY_S if isinstance(error, ApiServerUnavailable) else MAX_DELAY_S
                    delay_s = self.queue.add_rate_limited(key, error.retry_after_s or 0.0, made_progress, max_delay_s)
                    logger.warning("reconcile failed service=%s/%s wait_s=%.1f error=%s", *key, delay_s, error)
                else:
                    # A defect that appears while one service is reconciled must not end the worker.
                    delay_s = self.queue.add_rate_limited(key)
                    logger.exception("reconcile raised service=%s/%s wait_s=%.1f", *key, delay_s)
            else:
                if result is None:
                    result_label = "gone"
                    self.queue.done(key)
                    self.queue.forget(key)
                elif result.backoff:
                    result_label = "retry"
                    self.queue.add_rate_limited(key, result.requeue_after_s)
                else:
                    result_label = "ok"
                    self.queue.done(key, result.requeue_after_s)
            self.metrics.reconciles.labels(result_label).inc()
            self.metrics.reconcile_seconds.observe(time.monotonic() - started_at)

    def _spawn(self, coroutine: Any) -> None:
        task = asyncio.create_task(coroutine)
        task.add_done_callback(self._on_task_done)
        self._tasks.append(task)

    # State for health and metrics

    @property
    def ready(self) -> bool:
        """Whether the workers are running and the cache is filled.

        The cache must contain all LLMServices and all objects of the required kinds, except those of namespaces that
        are not served.
        """
        unserved = self.unserved_namespaces()
        served = [heartbeat for heartbeat in self._required_heartbeats() if heartbeat.namespace not in unserved]
        return self.started.is_set() and bool(served) and all(heartbeat.ever_beat for heartbeat in served)

    def unserved_namespaces(self) -> dict[str, str]:
        """Return the watched namespaces in which the operator lacks permissions, with the answer of the API server."""
        denied = [heartbeat for heartbeat in self._required_heartbeats() if heartbeat.namespace and heartbeat.denied]
        return {str(heartbeat.namespace): heartbeat.denied for heartbeat in denied}

    def _required_heartbeats(self) -> list[WatchHeartbeat]:
        return [heartbeat for heartbeat in self.heartbeats if heartbeat.resource not in DISCOVERED_RESOURCES]

    def unhealthy_reason(self) -> str:
        """Return the reason why this process must be restarted. The text is empty if the process is healthy."""
        return self.stale_watch() or self.stuck_service()

    def stale_watch(self) -> str:
        """If a watch is stale, return a text with its name and the seconds since its last response.

        Otherwise, return an empty text.

        An error counts as a response too. In this case, the watch is retried, and a restart would not help.
        """
        if not self.started.is_set():
            return ""
        for heartbeat in self.heartbeats:
            if heartbeat.silent_s > self.settings.watch_timeouts.stale_after_s:
                reason = f"no response from the API server for {heartbeat.silent_s:.0f} s"
                return f"the watch of {heartbeat.resource.plural} is stale: {reason}"
        return ""

    def stuck_service(self) -> str:
        """Return a message if a service has waited for too long, or if a worker has worked on it for too long.

        Otherwise, return an empty text.
        """
        age_s = self.queue.oldest_age_s
        return (
            f"the work queue is stuck: a service has been waiting for {age_s:.0f} s" if age_s > _STUCK_AFTER_S else ""
        )

    def update_gauges(self) -> None:
        """Set the gauges to the values that they have now."""
        self.metrics.queue_depth.set(self.queue.depth)
        self.metrics.queue_age.set(self.queue.oldest_age_s)
        self.metrics.services.set(len(self.cache.objects_of_kind(resources.LLM_SERVICE)))
        unserved = self.unserved_namespaces()
        for namespace in self.settings.namespaces:
            self.metrics.namespace_served.labels(namespace).set(namespace not in unserved)
        self.metrics.foreign_services.set(len(self.reconciler.foreign_services()))
        ages: dict[str, float] = {}
        for heartbeat in self.heartbeats:
            ages[heartbeat.resource.kind] = max(ages.get(heartbeat.resource.kind, 0.0), heartbeat.age_s)
        for name, age in ages.items():
            self.metrics.watch_age.labels(name).set(age)
