# SPDX-License-Identifier: Apache-2.0
"""Reconciles the adapters of a pod with the catalog. Each adapter has its own task.

The tasks are level-triggered. The process handles contain the actual state. A task compares it with the desired state,
and makes the necessary changes. The task does this again after every change of the catalog and every restart of a
process. Therefore, a restart does not need separate code, and a broken adapter does not delay other adapters. The
manager does not depend on protocols.

adapter_progress.py defines the states. After a failure, the first retry starts after 30 s. After each further failure,
the wait is twice as long, up to 5 min. If the source sends Retry-After, the wait is at least that long, but never
longer than 5 min. An invalid adapter is not tried again until the catalog changes.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Coroutine, Mapping, Set
from dataclasses import replace
from typing import Any
from weakref import WeakValueDictionary

from quire_server.adapters.adapter_progress import (
    Activated,
    AdapterProgress,
    AttemptFailed,
    AttemptStarted,
    CatalogChanged,
    Checked,
    Converged,
    FetchStarted,
    LoadStarted,
    Removed,
    SourceRead,
    SourceUnreachable,
)
from quire_server.adapters.fetcher import AdapterFetcher, CachedAdapter
from quire_server.adapters.managed_adapter import ManagedAdapter, no_effect_text
from quire_server.clients.handles import ProcessHandles, TextHandle
from quire_sources.factory import concurrency_key
from quire_sources.readers.blocking import run_in_daemon_thread
from quire_spec.backoff import backoff
from quire_spec.constants import AdapterDigest, AdapterName
from quire_spec.documents.adapter_catalog import (
    HELD,
    VERSION,
    AdapterCatalog,
    AdapterLimits,
    AdapterSpec,
    Canary,
    CatalogVersion,
    Expose,
    OnNoEffect,
)
from quire_spec.documents.pod_status import AdapterState, AdapterStatus
from quire_spec.documents.sources import Source
from quire_spec.errors import ConfigError, Internal, InvalidArgument, NotFound, QuireError, Unavailable
from quire_spec.protocol.client import ConnectionLost
from quire_spec.protocol.results import AdapterCheck

logger = logging.getLogger(__name__)

_MAX_FETCHES_PER_HOST = 8
"""Maximum number of concurrent fetches from one host. If a host hangs, each fetch from it is blocked for a minute. This
must not delay adapters on other hosts."""
_MAX_TOTAL_FETCHES = 32
_MAX_ADAPTER_LOADS = 4
_MAX_MODEL_LOADS = 6
"""Maximum number of server models that are loaded at the same time. The server starts a process for each load, and more
processes would only compete for the CPU."""
_MAX_CHECKS = 4
"""Maximum number of adapters that are checked at the same time, and of canaries that run at the same time. A canary can
take minutes, so an adapter without a canary does not wait for one."""
_FIRST_RETRY_S = 30.0
_MAX_RETRY_S = 300.0
_CONNECTION_RETRY_S = 5.0
_SECRET_POLL_S = 5.0
"""After a source has denied access, its Secret is checked for changes at this interval, in seconds."""
UNLOAD_DELAY_S = 2.0
"""Number of seconds for which an adapter stays loaded after it lost its last name. In this time, requests with its
digest can still be on their way to the core."""
READINESS_GATE_S = 120.0
"""Maximum number of seconds for which a restarted pod waits for its adapters before it becomes ready."""


class StaleCatalog(InvalidArgument):
    """The catalog has a lower generation than the current catalog.

    This is only allowed if REPLACES_HEADER contains the digest of the current catalog.
    """


class _Superseded(Exception):
    """The catalog changed before the source of an adapter was read. The attempt must start again."""


class AdapterManager:
    """Manages all adapters of a pod. It must be created in a running event loop."""

    def __init__(self, served_name: str, fetcher: AdapterFetcher, handles: ProcessHandles) -> None:
        self._served_name = served_name
        self._fetcher = fetcher
        self._handles = handles
        self._catalog: AdapterCatalog | None = None
        self._catalog_version = CatalogVersion(0, "")
        self._adapter_by_name: dict[str, ManagedAdapter] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._digest_by_name: dict[AdapterName, AdapterDigest] = {}
        """Maps each name to a content digest. The content is used for requests with this name. The text process gets a
        copy of the mapping."""
        self._fetch_semaphore = asyncio.Semaphore(_MAX_TOTAL_FETCHES)
        self._host_fetch_semaphores: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()
        self._adapter_load_semaphore = asyncio.Semaphore(_MAX_ADAPTER_LOADS)
        self._check_semaphore = asyncio.Semaphore(_MAX_CHECKS)
        self._canary_semaphore = asyncio.Semaphore(_MAX_CHECKS)
        self._checks: dict[tuple[AdapterDigest, Canary | None], AdapterCheck] = {}
        """The checks that contents have passed on this pod. A core that restarts need not repeat them."""
        self._model_load_semaphore = asyncio.Semaphore(_MAX_MODEL_LOADS)
        self.on_change: Callable[[], None] = lambda: None
        """Function that is called when the catalog has changed, and when an adapter starts or stops serving."""
        self.other_models: Set[str] = frozenset()
        """Names of the models that the server loads from --model-repository."""
        self._gating_names: set[str] = set()
        self._gate_deadline = 0.0
        self._unload_requested = asyncio.Event()
        self._spawn(self._unload_unused(), "adapter collector")

    # Public interface

    @property
    def catalog_version(self) -> CatalogVersion:
        """Version of the current catalog. Before the first catalog, the generation is 0 and the digest is empty."""
        return self._catalog_version

    @property
    def catalog(self) -> AdapterCatalog:
        """The current catalog. It is empty before the first catalog arrives."""
        return self._catalog or AdapterCatalog()

    def check(self, catalog: AdapterCatalog, replaces: str = "") -> None:
        """Reject an invalid catalog.

        An older catalog is accepted only if `replaces` is the digest of the current catalog.

        Raises:
            ConfigError: an adapter has the name of the base model or of another model.
            StaleCatalog: the current catalog is newer.
        """
        if any(adapter.name == self._served_name for adapter in catalog.adapters):
            raise ConfigError(f"adapters: {self._served_name!r} is the base model's name; rename the adapter")
        if taken := sorted(self.other_models & {adapter.name for adapter in catalog.adapters}):
            raise ConfigError(
                f"adapters: {taken[0]!r} is a model of the model repository; give the adapter another name"
            )
        is_replacement = replaces != "" and replaces == self._catalog_version.digest
        if self._catalog is not None and catalog.generation < self._catalog_version.generation and not is_replacement:
            raise StaleCatalog(
                f"generation {catalog.generation} is older than {self._catalog_version.generation}, the current "
                "generation of this pod"
            )

    def set_catalog(self, catalog: AdapterCatalog, replaces: str = "") -> None:
        """Set the desired state. The parameters and errors are the same as for `check`."""
        self.check(catalog, replaces)
        if catalog == self._catalog:
            return
        previous, previous_weights = self.catalog, self._weights_by_name()
        self._catalog, self._catalog_version = catalog, catalog.version
        exposed_names = catalog.exposed_names()
        contents = [c for adapter in catalog.adapters for c in (*adapter.versioned(), *adapter.held())]
        desired = {adapter.name: adapter for adapter in (*catalog.adapters, *contents)}
        known = self._contents_by_name_and_source()
        for name, managed in self._adapter_by_name.items():
            if name not in desired and not self._stays_on_demand(managed):
                self._change_desired(managed, CatalogChanged(None, managed.progress.exposed))
        # The tasks of pinned adapters are started first, because the semaphores serve tasks in the order in which they
        # wait.
        for adapter in sorted(desired.values(), key=lambda a: not a.pinned):
            if adapter.name in self._adapter_by_name:
                managed = self._adapter_by_name[adapter.name]
                managed.on_demand = False
                self._change_desired(managed, CatalogChanged(adapter, adapter.name in exposed_names))
            else:
                managed = self._adapter_by_name[adapter.name] = ManagedAdapter(
                    AdapterName(adapter.name),
                    AdapterProgress(adapter, adapter.name in exposed_names, held=HELD in adapter.name),
                )
                self._spawn(self._reconcile_loop(managed), f"adapter {adapter.name}")
            self._adopt_content(managed, known)
        published = catalog.sources, catalog.sums, self._weights_by_name()
        if published != (previous.sources, previous.sums, previous_weights):
            self._spawn(self._publish_names(), "publish adapter sources, sums and weights")
        self._publish_if_empty()
        self._spawn(self._publish_loading(), "publish loading adapters")
        self.on_change()

    def add_on_demand(self, name: AdapterName, source: Source, content: CachedAdapter) -> None:
        """Serve an adapter that the catalog does not contain. `result` returns its state.

        Raises:
            InvalidArgument: the name is that of another model.
        """
        spec = AdapterSpec(name, source, expose=Expose.PARAMETER)
        self.check(replace(self.catalog, adapters=(spec,)))
        managed = self._adapter_by_name.get(name)
        if managed is None:
            managed = self._adapter_by_name[name] = ManagedAdapter(name, AdapterProgress(spec, exposed=False))
            self._spawn(self._reconcile_loop(managed), f"adapter {name}")
        else:  # it is being removed
            managed.apply(CatalogChanged(spec, exposed=False))
            managed.changed.set()
        managed.on_demand = True
        managed.apply(SourceRead(managed.progress.revision, source, content))

    def remove_on_demand(self, name: AdapterName) -> None:
        """Remove an adapter that `add_on_demand` added, unless the catalog contains it by now."""
        managed = self._adapter_by_name.get(name)
        if managed is not None and managed.on_demand:
            self._change_desired(managed, CatalogChanged(None, exposed=False))

    def is_served(self, name: AdapterName) -> bool:
        """Return whether requests can use an adapter."""
        text = self._handles.text
        return text is not None and name in text.digest_by_name

    def on_demand_names(self) -> set[AdapterName]:
        """Return the names of the adapters that `add_on_demand` added and that are still served."""
        return {adapter.name for adapter in self._desired_adapters() if adapter.on_demand}

    def _stays_on_demand(self, adapter: ManagedAdapter) -> bool:
        """Return whether the sources of the catalog still lead to an adapter that was added on demand."""
        desired = adapter.progress.desired
        return adapter.on_demand and desired is not None and self.catalog.finds(adapter.name, desired.source)

    def _contents_by_name_and_source(self) -> dict[tuple[str, Source], CachedAdapter]:
        """Return the contents of all adapters, by the name without the role of a held content, and by their source."""
        return {
            (name.partition(HELD)[0], progress.latest_source): progress.latest
            for name, progress in ((adapter.name, adapter.progress) for adapter in self._adapter_by_name.values())
            if progress.latest is not None and progress.latest_source is not None
        }

    def _adopt_content(self, adapter: ManagedAdapter, known: Mapping[tuple[str, Source], CachedAdapter]) -> None:
        """Use the content that another role of the same adapter has read. In this way, a switch needs no source."""
        desired = adapter.progress.desired
        assert desired is not None, "the catalog contains it"
        content = known.get((adapter.name.partition(HELD)[0], desired.source))
        if adapter.progress.must_fetch and content is not None:
            adapter.cancel_other_fetch()
            previous = adapter.progress.latest
            adapter.apply(SourceRead(adapter.progress.revision, desired.source, content))
            self._on_content_replaced(previous, content)

    def refresh(self, name: str) -> None:
        """Read the source of an adapter again.

        If this fails, the error is reported, even if the adapter can still serve its previous content.
        """
        adapter = self._adapter_by_name[name]
        progress = adapter.progress
        self._change_desired(adapter, CatalogChanged(progress.desired, progress.exposed, must_read=True))

    def result(self, name: str) -> tuple[AdapterState, QuireError | None]:
        """Return the state of an adapter, and the error if it failed; raises NotFound if the adapter was removed."""
        adapter = self._adapter_by_name.get(name)
        if adapter is None or adapter.progress.desired is None:
            raise NotFound(f"adapter {name!r}: was removed from the catalog")
        state = adapter.progress.state
        if state is AdapterState.READY and not adapter.progress.is_checked:
            return AdapterState.FETCHING, None
        return state, adapter.failure()

    def is_known(self, name: str) -> bool:
        """Return True if the catalog contains the adapter, or if the adapter was removed but is not unloaded yet."""
        return name in self._adapter_by_name

    def resync(self) -> None:
        """Reconcile every adapter. This is called after a process has started or ended."""
        for adapter in self._adapter_by_name.values():
            adapter.changed.set()
        self._publish_if_empty()
        if self._catalog is not None:
            self._spawn(self._publish_loading(), "publish loading adapters")

    def gate_readiness(self) -> None:
        """Delay the readiness of the pod until all adapters are settled, but for at most READINESS_GATE_S."""
        self._gating_names = {adapter.name for adapter in self._catalog_adapters()}
        self._gate_deadline = asyncio.get_running_loop().time() + READINESS_GATE_S

    def gating(self) -> list[str]:
        """Return the names of the adapters that delay readiness."""
        if asyncio.get_running_loop().time() > self._gate_deadline:
            self._gating_names.clear()
        self._gating_names &= {adapter.name for adapter in self._catalog_adapters() if not adapter.progress.is_settled}
        return sorted(self._gating_names)

    def unsettled(self) -> list[ManagedAdapter]:
        """Return the adapters that are neither Ready nor Failed."""
        return [adapter for adapter in self._catalog_adapters() if not adapter.progress.is_settled]

    def statuses(self) -> list[AdapterStatus]:
        """Return the status of every adapter of the catalog, sorted by name."""
        contents = {a.name: a.content_status() for a in self._desired_adapters() if VERSION in a.name}
        statuses = (
            replace(
                adapter.status(),
                candidate=contents.get(AdapterName(f"{adapter.name}{HELD}candidate")),
                previous=contents.get(AdapterName(f"{adapter.name}{HELD}previous")),
                versions={
                    version: contents[AdapterName(f"{adapter.name}{VERSION}{version}")]
                    for version in self._weights_by_name().get(adapter.name, {})
                },
            )
            for adapter in self._catalog_adapters()
            if VERSION not in adapter.name
        )
        return sorted(statuses, key=lambda status: status.name)

    def served_names(self) -> set[str]:
        """Return the names of the adapters that serve requests. They include adapters that serve their previous content
        during a replacement."""
        core, text = self._handles.core, self._handles.text
        if core is None or text is None:
            return set()
        active_digests = {
            adapter.name: adapter.progress.active.digest
            for adapter in self._desired_adapters()
            if adapter.progress.active is not None
        }
        return {
            name
            for name, digest in active_digests.items()
            if core.serve(digest) and text.digest_by_name.get(name) == digest
        }

    def exposed_names(self) -> set[str]:
        """Return the names of the adapters that have or will have a server model."""
        return {adapter.name for adapter in self._desired_adapters() if adapter.progress.exposed}

    def digests_in_use(self, failed: bool = True) -> set[AdapterDigest]:
        """Return the digests that adapters use: those of their latest content and those of their active content.

        If `failed` is false, the latest content of adapters in the state Failed is left out.
        """
        return {
            content.digest
            for progress in (adapter.progress for adapter in self._adapter_by_name.values())
            for content in (
                None if progress.state is AdapterState.FAILED and not failed else progress.latest,
                progress.active,
            )
            if content
        }

    async def prune_cache(self) -> list[AdapterDigest]:
        """Remove unused adapters from the cache, and return their digests."""
        return await run_in_daemon_thread(self._fetcher.prune_cache, self.digests_in_use())

    async def close(self) -> None:
        """Stop all tasks. Adapters that are loaded stay loaded."""
        # The tasks are cancelled again until all have ended. In 2 of 25 runs under load, a cancellation was lost,
        # because a connection ended at the same time.
        while self._tasks:
            for task in self._tasks:
                task.cancel()
            await asyncio.wait(self._tasks, timeout=1.0)

    # The task of one adapter

    async def _reconcile_loop(self, adapter: ManagedAdapter) -> None:
        while True:
            adapter.changed.clear()
            if adapter.progress.desired is not None:
                pause_s = await self._reconcile_once(adapter)
            else:
                pause_s = await self._remove_once(adapter)
                if pause_s is None and adapter.progress.desired is None:
                    del self._adapter_by_name[adapter.name]
                    return
            self.on_change()
            await self._wait_for_change(adapter, pause_s)

    async def _wait_for_change(self, adapter: ManagedAdapter, timeout_s: float | None) -> None:
        """Wait for a change, but for at most `timeout_s` seconds. If `timeout_s` is None, wait without a limit."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while not adapter.changed.is_set() and not self._secret_has_changed(adapter):
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(_SECRET_POLL_S if _denied_version(adapter) is not None else None):
                            await adapter.changed.wait()

    def _secret_has_changed(self, adapter: ManagedAdapter) -> bool:
        """Return whether the Secret has changed since the source denied access."""
        desired, denied_version = adapter.progress.desired, _denied_version(adapter)
        if denied_version is None or desired is None:
            return False
        return self._fetcher.secret_version(desired.source) != denied_version

    async def _reconcile_once(self, adapter: ManagedAdapter) -> float | None:
        """Change the actual state to the desired state.

        Return the number of seconds until the next attempt, or None if there is no attempt before the next change.
        """
        adapter.apply(AttemptStarted())
        if adapter.progress.is_rejected:
            reactivated = await self._reactivate_previous(adapter)
            await self._publish_names()
            return None if reactivated else _CONNECTION_RETRY_S
        revision = adapter.progress.revision
        try:
            await self._converge(adapter)
            return None
        except _Superseded:
            return 0.0
        except ConnectionLost:
            self._mark_loading(adapter)
            return _CONNECTION_RETRY_S
        except Exception as error:
            # The desired state may have changed since the failed attempt began.
            return await self._record_failure(adapter, error) if adapter.progress.revision == revision else 0.0

    async def _record_failure(self, adapter: ManagedAdapter, error: Exception) -> float | None:
        if not isinstance(error, QuireError):
            logger.error("adapter task failed name=%s", adapter.name, exc_info=error)
            error = Internal(f"{type(error).__name__}: {error}")
        adapter.apply(AttemptFailed(error))
        self._unload_requested.set()
        failure = adapter.progress.failure
        assert failure is not None, "an attempt has failed"
        reactivated = await self._reactivate_previous(adapter)
        await self._publish_names()
        # During an `await`, a new catalog can allow another attempt.
        if adapter.progress.is_rejected:
            return None if reactivated else _CONNECTION_RETRY_S
        retry_after_s = error.retry_after_s if isinstance(error, Unavailable) else None
        pause_s = backoff(max(0, failure.count - 1), _FIRST_RETRY_S, _MAX_RETRY_S)
        return min(max(pause_s, retry_after_s or 0.0), _MAX_RETRY_S)

    async def _reactivate_previous(self, adapter: ManagedAdapter) -> bool:
        """Serve the previous content again, after its replacement has failed.

        Return False if the previous content cannot be served either.
        """
        try:
            if adapter.progress.active is not None:
                await self._load(adapter.progress.active)
                await self._activate(adapter, adapter.progress.active)
        except ConnectionLost:
            return False
        except QuireError as error:
            logger.warning("could not reactivate the previous adapter version name=%s error=%s", adapter.name, error)
            return False
        return True

    async def _converge(self, adapter: ManagedAdapter) -> None:
        if not adapter.progress.is_checked:
            await self._fetch(adapter)
        latest = adapter.progress.latest
        assert latest is not None, "fetch returns or raises"
        # This is repeated, because an adapter of another name with the same content can change in the meantime whether
        # the slot must be pinned.
        held = adapter.progress.held
        while not (self._is_prepared(adapter, latest) if held else self._is_active(adapter, latest)):
            self._mark_loading(adapter)
            await self._load(latest)
            if self._must_check(adapter):
                check = await self._check_content(adapter, latest)
                if adapter.progress.latest != latest:  # another role's content was adopted in the meantime
                    raise _Superseded
                self._accept(adapter, check)
            if not held:
                await self._activate(adapter, latest)
        adapter.apply(Converged())

    def _mark_loading(self, adapter: ManagedAdapter) -> None:
        """Set the state to Loading, unless some cores serve the adapter while a restarted one loads it again."""
        core, active = self._handles.core, adapter.progress.active
        if core is None or active is None or active != adapter.progress.latest or not core.some_lack(active.digest):
            adapter.apply(LoadStarted())

    async def _fetch(self, adapter: ManagedAdapter) -> None:
        progress = adapter.progress
        assert progress.desired is not None, "an adapter that is being removed fetches nothing"
        revision, source = progress.revision, progress.desired.source
        host_semaphore = self._host_fetch_semaphores.setdefault(
            concurrency_key(source), asyncio.Semaphore(_MAX_FETCHES_PER_HOST)
        )
        try:
            async with host_semaphore, self._fetch_semaphore:
                if adapter.progress.revision != revision:
                    raise _Superseded
                adapter.apply(FetchStarted(self._fetcher.secret_version(source)))
                content = await self._fetch_cancellably(adapter, source)
        except QuireError as error:
            if progress.must_fetch:
                raise
            logger.warning("source could not be checked, adapter unchanged name=%s error=%s", adapter.name, error)
            adapter.apply(SourceUnreachable(revision))
            return
        previous = adapter.progress.latest
        adapter.apply(SourceRead(revision, source, content))
        self._on_content_replaced(previous, content)

    async def _fetch_cancellably(self, adapter: ManagedAdapter, source: Source) -> CachedAdapter:
        task = asyncio.create_task(self._fetcher.fetch(source), name=f"fetch {adapter.name}")
        try:
            return await adapter.fetch(source, task)
        except asyncio.CancelledError:
            # `_change_desired` cancelled the fetch, but not this task. The desired source may be the same again by now.
            if (current := asyncio.current_task()) is None or not current.cancelling():
                raise _Superseded from None
            raise

    async def _load(self, content: CachedAdapter) -> None:
        core, _, _ = self._handles.require_all()
        async with self._adapter_load_semaphore:
            # The pin can change while the adapter waits or loads.
            while not core.is_loaded(content.digest, slot_pinned := self._is_slot_pinned(content.digest)):
                await core.load_adapter(content.digest, content.folder, slot_pinned)

    async def _check_content(self, adapter: ManagedAdapter, content: CachedAdapter) -> AdapterCheck:
        """Check a loaded content, unless it has passed its checks before.

        Raises:
            InvalidArgument: it fails a check.
            Unavailable: a check did not end in time.
        """
        canary = adapter.progress.desired.canary if adapter.progress.desired else None
        if (check := self._checks.get((content.digest, canary))) is None:
            core, _, _ = self._handles.require_all()
            async with self._check_semaphore if canary is None else self._canary_semaphore:
                check = await core.verify_adapter(content.digest, content.folder, canary)
            self._checks[content.digest, canary] = check
        return check

    def _accept(self, adapter: ManagedAdapter, check: AdapterCheck) -> None:
        """Record a passed check; raises InvalidArgument if the catalog refuses adapters without an effect."""
        adapter.apply(Checked(check))
        if not check.has_effect and self.catalog.onNoEffect is OnNoEffect.REFUSE:
            raise InvalidArgument(no_effect_text(check))
        if not check.has_effect:
            logger.warning("adapter without effect name=%s effect=%g", adapter.name, check.effect)

    def _must_check(self, adapter: ManagedAdapter) -> bool:
        """Return whether an adapter is checked before requests use it. A request waits for an adapter on demand, whose
        check would take steps and a slot from other requests. Therefore, it is checked only if it could be refused."""
        return not adapter.on_demand or self.catalog.onNoEffect is OnNoEffect.REFUSE

    def _is_prepared(self, adapter: ManagedAdapter, content: CachedAdapter) -> bool:
        """Whether a content is loaded and has passed the checks that the catalog requires now."""
        core, _, _ = self._handles.require_all()
        if not core.is_loaded(content.digest, self._is_slot_pinned(content.digest)):
            return False
        if not self._must_check(adapter):
            return True
        check = self._checks.get(
            (content.digest, adapter.progress.desired.canary if adapter.progress.desired else None)
        )
        return check is not None and (check.has_effect or self.catalog.onNoEffect is not OnNoEffect.REFUSE)

    async def _activate(self, adapter: ManagedAdapter, content: CachedAdapter) -> None:
        """Publish the name of a loaded adapter, then load its model."""
        core, text, server = self._handles.require_all()
        self._digest_by_name[adapter.name] = content.digest
        previous = adapter.progress.active
        adapter.apply(Activated(content))
        self._on_content_replaced(previous, content)
        await core.set_adapter_names(self._digest_by_name)
        await self._send_names(text)
        self._unload_requested.set()
        async with self._model_load_semaphore:
            await (server.load_adapter_model if adapter.progress.exposed else server.unload_adapter_model)(adapter.name)

    def _is_active(self, adapter: ManagedAdapter, content: CachedAdapter) -> bool:
        _, text, server = self._handles.require_all()
        progress = adapter.progress
        return (
            # As long as `active` is the previous content, published names contain that content.
            progress.active == content
            and self._is_prepared(adapter, content)
            and text.digest_by_name.get(adapter.name) == content.digest
            and text.limits_by_name.get(adapter.name) == (progress.desired and progress.desired.limits)
            and (adapter.name in server.models) == progress.exposed
        )

    async def _remove_once(self, adapter: ManagedAdapter) -> float | None:
        """Unload the model, then remove the name.

        Return the number of seconds until the next attempt, or None if the adapter was removed.
        """
        try:
            if self._handles.server is not None:
                await self._handles.server.unload_adapter_model(adapter.name)
            self._digest_by_name.pop(adapter.name, None)
            if self._handles.text is not None:
                await self._send_names(self._handles.text)
            if self._handles.core is not None:
                await self._handles.core.set_adapter_names(self._digest_by_name)
            await self._publish_loading()
        except QuireError as error:
            logger.warning("adapter could not be removed name=%s error=%s", adapter.name, error)
            return _CONNECTION_RETRY_S
        contents = {adapter.progress.active, adapter.progress.latest}
        adapter.apply(Removed())
        for content in contents:
            self._on_content_replaced(content, None)
        logger.info("adapter removed name=%s", adapter.name)
        return None

    # All adapters

    def _publish_if_empty(self) -> None:
        if self._catalog is not None and not self._desired_adapters():
            self._spawn(self._publish_names(), "publish empty catalog")

    async def _publish_names(self) -> None:
        """Send the names to the text process, even if there are none.

        Before the text process has received names, it reports every unknown name as not ready.
        """
        if (text := self._handles.text) is not None:
            # Errors are ignored, because a text process that restarts receives the names again.
            with contextlib.suppress(QuireError):
                await self._send_names(text)
        await self._publish_loading()

    async def _send_names(self, text: TextHandle) -> None:
        """Send the text process the names that requests can use."""
        findable_names = tuple(source.allow for source in self.catalog.sources)
        await text.set_adapters(
            self._digest_by_name,
            self._limits_by_name(),
            self._chat_template_by_name(),
            findable_names,
            self.catalog.sum_by_name,
            self._weights_by_name(),
        )

    async def _publish_loading(self) -> None:
        """Send the text process the names of adapters that are still loading. The text process reports them as not
        ready."""
        if (text := self._handles.text) is None:
            return

        def loading_names() -> set[str]:
            return {
                adapter.name
                for adapter in self._catalog_adapters()
                if adapter.name not in text.digest_by_name
                and (adapter.progress.active is not None or not adapter.progress.is_rejected)
            }

        with contextlib.suppress(QuireError):
            await text.set_loading_adapters(loading_names)

    async def _unload_unused(self) -> None:
        """Unload adapters that do not have a name any more."""
        while True:
            await self._unload_requested.wait()
            await asyncio.sleep(UNLOAD_DELAY_S)
            self._unload_requested.clear()
            core = self._handles.core
            if core is None:
                continue
            for digest in core.possibly_loaded() - self._required_digests():
                try:
                    await core.unload_adapter(digest, self._required_digests)
                    self._checks = {key: check for key, check in self._checks.items() if key[0] != digest}
                    logger.info("adapter unloaded digest=%s", digest)
                except QuireError as error:
                    logger.warning("adapter could not be unloaded digest=%s error=%s", digest, error)

    def _change_desired(self, adapter: ManagedAdapter, event: CatalogChanged) -> None:
        adapter.apply(event)
        adapter.cancel_other_fetch()
        adapter.changed.set()

    def _required_digests(self) -> set[AdapterDigest]:
        """Return the digests that the core must keep. They include digests that the text process can still use."""
        text = self._handles.text
        return self.digests_in_use(failed=False) | (text.published_digests if text is not None else set())

    def _on_content_replaced(self, previous: CachedAdapter | None, replacement: CachedAdapter | None) -> None:
        """Reconcile the other adapters that use the previous content.

        The previous content is not pinned any more if this adapter was the only pinned adapter that used it.
        """
        if previous in (None, replacement):
            return
        self._unload_requested.set()
        for adapter in self._desired_adapters():
            if previous in (adapter.progress.active, adapter.progress.latest):
                adapter.changed.set()

    def _is_slot_pinned(self, digest: AdapterDigest) -> bool:
        """Return whether any pinned adapter has this content."""
        return any(
            progress.desired is not None and progress.desired.pinned
            for progress in (adapter.progress for adapter in self._adapter_by_name.values())
            if any(content is not None and content.digest == digest for content in (progress.latest, progress.active))
        )

    def _weights_by_name(self) -> dict[AdapterName, dict[str, int]]:
        """Return the weights of the versions of each adapter that has versions."""
        return {
            AdapterName(adapter.name): {version.name: version.weight for version in adapter.versions}
            for adapter in self.catalog.adapters
            if adapter.versions
        }

    def _limits_by_name(self) -> dict[AdapterName, AdapterLimits]:
        """Return the limits of all published names that have limits."""
        return {
            adapter.name: adapter.progress.desired.limits
            for adapter in self._adapter_by_name.values()
            if adapter.progress.desired is not None
            and adapter.progress.desired.limits is not None
            and adapter.name in self._digest_by_name
        }

    def _chat_template_by_name(self) -> dict[AdapterName, str]:
        """Return the chat templates of all published adapters that have a chat template."""
        active_by_name = {name: self._adapter_by_name[name].progress.active for name in self._digest_by_name}
        return {
            name: str(content.chat_template)
            for name, content in active_by_name.items()
            if content is not None and content.chat_template is not None
        }

    def _desired_adapters(self) -> list[ManagedAdapter]:
        return [adapter for adapter in self._adapter_by_name.values() if adapter.progress.desired is not None]

    def _catalog_adapters(self) -> list[ManagedAdapter]:
        """Return the adapters of the catalog that requests can name."""
        return [a for a in self._desired_adapters() if not a.on_demand and not a.progress.held]

    def _spawn(self, coro: Coroutine[Any, Any, None], name: str) -> None:
        task = asyncio.create_task(coro, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _denied_version(adapter: ManagedAdapter) -> int | None:
    """Return the version of the Secret that the source rejected; None if it rejected none."""
    failure = adapter.progress.failure
    return None if failure is None else failure.denied_secret_version
