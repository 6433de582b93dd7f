# SPDX-License-Identifier: Apache-2.0
"""Controller: watches, queue, workers and checks of one operator, and what its health and metrics say.

LLMServices come from outside, through `cache`: kopf watches them in an operator, a Watch of ours in tests.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from quire_operator.kube import kinds
from quire_operator.kube.client import Client
from quire_operator.kube.discovery import EVERY_S, Discovery
from quire_operator.kube.errors import ApiError
from quire_operator.kube.heard import Heard
from quire_operator.kube.kinds import DISCOVERED, WATCHED, Kind
from quire_operator.kube.watch import Patience, Watch
from quire_operator.plan.planner import DEFAULT_IMAGES
from quire_operator.reconcile.apply import Applier
from quire_operator.reconcile.cache import SELECTOR, Cache, Key
from quire_operator.reconcile.metrics import Metrics
from quire_operator.reconcile.models import Models
from quire_operator.reconcile.parts import RESYNC_S, Parts
from quire_operator.reconcile.planning import Planning
from quire_operator.reconcile.pod_events import PodEvents
from quire_operator.reconcile.pods import AdapterPusher
from quire_operator.reconcile.queue import Queue
from quire_operator.reconcile.reconciler import Reconciler
from quire_operator.reconcile.secrets import REMEMBER_S, SecretStore
from quire_operator.reconcile.verify import Verifier

log = logging.getLogger(__name__)

_STUCK_S = 900.0
"""A service that waits for its turn, or whose pass lasts, for so long: something hangs."""


@dataclass(frozen=True, slots=True)
class Settings:
    """How a controller works."""

    namespaces: tuple[str, ...] = ()
    """Those that are served; empty: all."""
    workers: int = 8
    images: Mapping[str, str] = field(default_factory=lambda: DEFAULT_IMAGES)
    """Of pods, for GPU and CPU, where the spec names none."""
    operator: Mapping[str, Any] | None = None
    """NetworkPolicy peer that the operator is; None: policies let nobody reach administration."""
    resync_s: float = RESYNC_S
    remember_secrets_s: float = REMEMBER_S
    verify_s: float = 600.0
    """How often the cache is compared with the API server."""
    patience: Patience = field(default_factory=Patience)


class Controller:
    """One operator, without kopf."""

    def __init__(self, client: Client, settings: Settings) -> None:
        """Make it inside a running event loop."""
        self.client, self.settings, self.metrics = client, settings, Metrics()
        self.queue: Queue[Key] = Queue()
        self.cache = Cache(self.queue.add)
        self._pusher = AdapterPusher(observe=self.metrics.visited)
        self._discovery = Discovery(client)
        secrets = SecretStore(client, settings.remember_secrets_s)
        pod_events = PodEvents(client)
        models = Models(client, self.cache, pod_events, self.queue.add, self.metrics.wrote)
        parts = Parts(
            client=client,
            cache=self.cache,
            secrets=secrets,
            models=models,
            planning=Planning(client, models, settings.images),
            discovery=self._discovery,
            applier=Applier(client, self.cache, secrets, self.metrics.wrote),
            pods=self._pusher,
            pod_events=pod_events,
            operator=settings.operator,
            resync_s=settings.resync_s,
            wrote=self.metrics.wrote,
        )
        self.reconciler = Reconciler(parts)
        self.watches: list[Watch] = []
        self.heard: list[Heard] = []
        """Of all kinds that are watched; whoever watches LLMServices adds theirs."""
        self._tasks: list[asyncio.Task[None]] = []
        self.started = asyncio.Event()
        """Set once all is known and workers work."""

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[asyncio.Future[None]]:
        """Run it for as long as the context lasts; the future ends with the error of a part that fails for good."""
        failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def ended(task: asyncio.Task[None]) -> None:
            if not task.cancelled() and not failed.done() and (error := task.exception()):
                failed.set_exception(error)

        self._ended = ended
        self._spawn(self._run())
        try:
            yield failed
        finally:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            await self._pusher.close()
            if failed.done() and not failed.cancelled():
                failed.exception()

    async def _run(self) -> None:
        offered = await self._first_offers()
        await self._watch([kind for kind in WATCHED if kind not in DISCOVERED or kind in offered])
        for heard in self.heard:
            heard.not_yet()  # however long it took until there was an API server
        self.started.set()
        log.info("started workers=%d namespaces=%s", self.settings.workers, ",".join(self.settings.namespaces) or "all")
        for _ in range(self.settings.workers):
            self._spawn(self._work())
        self._spawn(Verifier(self.client, self.cache, self.watches, self.metrics, self.settings).run())
        await self._watch_what_comes(set(offered))

    async def _first_offers(self) -> frozenset[Kind]:
        while True:
            try:
                return await self._discovery.offered()
            except ApiError as error:
                log.warning("the API server does not answer yet error=%s", error)
                await asyncio.sleep(1)

    async def _watch(self, wanted: Sequence[Kind]) -> None:
        namespaces: tuple[str | None, ...] = self.settings.namespaces or (None,)
        made = [
            Watch(self.client, kind, self.cache, namespace, SELECTOR, self.settings.patience)
            for kind in wanted
            for namespace in namespaces
        ]
        for watch in made:
            self._spawn(watch.run())
        await asyncio.gather(*(watch.synced.wait() for watch in made))
        self.watches += made
        self.heard += (watch.heard for watch in made)

    async def _watch_what_comes(self, watched: set[Kind]) -> None:
        """Optional kinds that somebody installs later."""
        while True:
            await asyncio.sleep(EVERY_S)
            with contextlib.suppress(ApiError):
                new = await self._discovery.offered() - watched
                watched |= new
                await self._watch(list(new))
                if new:
                    log.info("more kinds are offered kinds=%s", ",".join(sorted(kind.name for kind in new)))
                    for entry in self.cache.all(kinds.LLM_SERVICE):
                        self.queue.add(entry.key)

    async def _work(self) -> None:
        while True:
            key = await self.queue.get()
            begun, before = time.monotonic(), self.reconciler.num_writes(key)
            try:
                again = await self.reconciler.reconcile(key)
            except ApiError as error:
                further = self.reconciler.num_writes(key) > before
                wait = self.queue.failed(key, error.retry_after_s or 0.0, anew=further)
                self._count("error", begun, type(error).__name__)
                log.warning("pass failed service=%s/%s wait_s=%.1f error=%s", *key, wait, error)
                continue
            except Exception as error:
                # A defect of ours in one service must not end the others' worker.
                wait = self.queue.failed(key)
                self._count("error", begun, type(error).__name__)
                log.exception("pass broke service=%s/%s wait_s=%.1f", *key, wait)
                continue
            if again is None:
                self.queue.done(key)
                self.queue.drop(key)
            elif again.failed:
                self.queue.failed(key, again.after_s)
            else:
                self.queue.done(key, again.after_s)
            self._count("gone" if again is None else "retry" if again.failed else "ok", begun)

    def _count(self, result: str, begun: float, reason: str = "") -> None:
        self.metrics.passes.labels(result).inc()
        self.metrics.seconds.observe(time.monotonic() - begun)
        if reason:
            self.metrics.errors.labels(reason).inc()

    def _spawn(self, work: Any) -> None:
        task = asyncio.create_task(work)
        task.add_done_callback(self._ended)
        self._tasks.append(task)

    # What others ask of it

    @property
    def ready(self) -> bool:
        """It works, and has been told of all that is there, LLMServices too."""
        return self.started.is_set() and all(heard.ever for heard in self.heard)

    def trouble(self) -> str:
        """Why this process should be restarted; empty: it need not be."""
        if not self.started.is_set():
            return ""
        for heard in self.heard:
            if heard.age_s > self.settings.patience.deaf_s:
                return f"nothing heard of {heard.kind.plural} for {heard.age_s:.0f} s"
        if self.queue.age_s > _STUCK_S:
            return f"a service waits since {self.queue.age_s:.0f} s"
        return ""

    def refresh(self) -> None:
        """Set the gauges."""
        self.metrics.depth.set(self.queue.depth)
        self.metrics.queue_age.set(self.queue.age_s)
        self.metrics.services.set(len(self.cache.all(kinds.LLM_SERVICE)))
        ages: dict[str, float] = {}
        for heard in self.heard:
            ages[heard.kind.name] = max(ages.get(heard.kind.name, 0.0), heard.age_s)
        for name, age in ages.items():
            self.metrics.watch_age.labels(name).set(age)
