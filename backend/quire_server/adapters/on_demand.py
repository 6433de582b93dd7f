# SPDX-License-Identifier: Apache-2.0
"""Adapters that are found by name: the catalog does not contain them, but a place that it names as an adapter source.

The text process asks for an adapter when a request names it for the first time. The adapter is then downloaded once,
and the adapter manager serves it like one of the catalog. Each source has a cache folder of its own, in which only this
supervisor works. The number and the size of the adapters of a source are limited; on_demand_shares.py chooses those
that leave. A name that no source has costs one question to each source, and leaves nothing behind.
"""

import asyncio
import contextlib
import logging
import time
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from weakref import WeakValueDictionary

from quire_server.adapters.fetcher import AdapterFetcher, AdapterTrust, CachedAdapter
from quire_server.adapters.manager import AdapterManager
from quire_server.adapters.on_demand_shares import OnDemandAdapter, select_leaving
from quire_server.clients.handles import ProcessHandles
from quire_server.downloads.adapter_cache import AdapterCache, source_key
from quire_sources.factory import SourceOptions
from quire_sources.readers.blocking import run_in_daemon_thread
from quire_spec.constants import AdapterDigest, AdapterName, check_model_name
from quire_spec.documents.adapter_catalog import AdapterSource
from quire_spec.documents.pod_status import AdapterState, OnDemandStatus
from quire_spec.documents.sources import Source
from quire_spec.errors import AccessDenied, InvalidArgument, NotFound, QuireError, Unavailable

logger = logging.getLogger(__name__)

CACHE_FOLDER = "on-demand"
"""Folder in the cache folder. It contains one folder for each run folder, and in it one for each source."""
_MAX_FETCHES_PER_SOURCE = 8
_MAX_LOOKUPS_PER_CLIENT = 4
"""Further lookups of a client wait, so that one client does not delay all others."""
_POLL_S = 0.01
_RECLAIM_INTERVAL_S = 0.5
_PRUNE_INTERVAL_S = 3600.0


@dataclass(frozen=True, slots=True)
class _Found:
    """An adapter that is served, or is about to be."""

    prefix: AdapterSource
    adapter: OnDemandAdapter
    found_at: float


class OnDemandAdapters(AsyncExitStack):
    """The adapters of the catalog's adapter sources. It must be used as an async context manager."""

    def __init__(
        self,
        manager: AdapterManager,
        handles: ProcessHandles,
        folder: Path,
        options: SourceOptions,
        max_adapter_bytes: int,
        trust: AdapterTrust | None = None,
    ) -> None:
        """`folder` is the part of the cache folder that only this supervisor uses."""
        super().__init__()
        self._manager = manager
        self._handles = handles
        self._folder = folder
        self._options = options
        self._max_adapter_bytes = max_adapter_bytes
        self._trust = trust
        self._fetchers: dict[tuple[str, int], AdapterFetcher] = {}
        """By the key of the source and its limit of bytes."""
        self._found: dict[AdapterName, _Found] = {}
        self._lookups: dict[AdapterName, asyncio.Task[None]] = {}
        self._client_turns: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()
        self._source_turns: dict[str, asyncio.Semaphore] = {}
        self._making_room = asyncio.Lock()
        """Held while files become an adapter that is served, and while files are removed."""
        self._reclaim_requested = asyncio.Event()
        self._pruned_at = time.monotonic()

    async def find_adapter(self, name: str, client: str) -> None:
        """Find the adapter `name`, and wait until requests can use it. A call that repeats a running one waits for the
        same lookup.

        Raises:
            NotFound: no source has the adapter, or the catalog has no sources.
            InvalidArgument: the adapter is invalid or too large.
            Unavailable: a source does not answer, or there is no room because all adapters have open requests.
        """
        check_model_name(name, "model")
        adapter_name = AdapterName(name)
        if (lookup := self._lookups.get(adapter_name)) is None:
            lookup = asyncio.create_task(self._find(adapter_name, client), name=f"find {name}")
            self._lookups[adapter_name] = lookup
            lookup.add_done_callback(lambda _: self._lookups.pop(adapter_name))
        await asyncio.wait({lookup})
        lookup.result()

    def status(self) -> OnDemandStatus:
        """Return the number of adapters that were found, and the size of their files."""
        self._forget_removed()
        return OnDemandStatus(len(self._found), sum(found.adapter.num_bytes for found in self._found.values()))

    async def run(self) -> None:
        """Remove the files of adapters that have left, until this task is cancelled."""
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_PRUNE_INTERVAL_S):
                    await self._reclaim_requested.wait()
            self._reclaim_requested.clear()
            await asyncio.sleep(_RECLAIM_INTERVAL_S)
            await self._reclaim()

    async def _find(self, name: AdapterName, client: str) -> None:
        turn = self._client_turns.setdefault(client, asyncio.Semaphore(_MAX_LOOKUPS_PER_CLIENT))
        async with turn:
            self._forget_removed()
            if name in self._manager.on_demand_names():
                await self._wait_ready(name)  # after a restart of the text process
                return
            if any(adapter.name == name for adapter in self._manager.catalog.adapters):
                raise NotFound(f"model {name!r}: the adapter of the catalog is not served; see the status of the pod")
            unreachable: Unavailable | None = None
            for prefix in self._manager.catalog.sources:
                if not prefix.allows(name):
                    continue
                try:
                    content = await self._fetch(prefix, prefix.source_of(name))
                except NotFound:
                    continue
                except AccessDenied as error:
                    # Without the right to list files, stores and the hub answer so for what does not exist.
                    logger.info("adapter source denies access name=%s error=%s", name, error)
                except Unavailable as error:
                    unreachable = unreachable or error
                else:
                    while not await self._serve(name, client, prefix, content):
                        content = await self._fetch(prefix, prefix.source_of(name))
                    return
            # A source that does not answer may have the adapter.
            raise unreachable or NotFound(f"model {name!r}: no adapter source has an adapter of this name")

    async def _fetch(self, prefix: AdapterSource, source: Source) -> CachedAdapter:
        fetcher = await self._fetcher(prefix)
        async with self._source_turns.setdefault(_key(prefix), asyncio.Semaphore(_MAX_FETCHES_PER_SOURCE)):
            await fetcher.check_exists(source)
            return await fetcher.fetch(source)

    async def _serve(self, name: AdapterName, client: str, prefix: AdapterSource, content: CachedAdapter) -> bool:
        """Serve an adapter. Return False if its files were removed again, because the cache was over its limit."""
        source = prefix.source_of(name)
        async with self._making_room:
            try:
                num_bytes = await run_in_daemon_thread(content.num_bytes)
            except FileNotFoundError:
                return False
            if not self._manager.catalog.finds(name, source):
                raise NotFound(f"model {name!r}: its adapter source was removed")
            await self._make_room(prefix, OnDemandAdapter(name, client, num_bytes))
            self._found[name] = _Found(prefix, OnDemandAdapter(name, client, num_bytes), time.monotonic())
            self._manager.add_on_demand(name, source, content)
            self._reclaim_requested.set()  # files of adapters that have left may still be there
        try:
            await self._wait_ready(name)
        except BaseException:
            self._remove(name)
            raise
        logger.info("adapter found name=%s digest=%s bytes=%d", name, content.digest, num_bytes)
        return True

    async def _wait_ready(self, name: AdapterName) -> None:
        while True:
            state, error = self._manager.result(name)
            if state is AdapterState.READY and self._manager.is_served(name):
                return
            if error is not None:
                raise error
            await asyncio.sleep(_POLL_S)

    async def _make_room(self, prefix: AdapterSource, newcomer: OnDemandAdapter) -> None:
        if newcomer.num_bytes > prefix.maxBytes:
            self._reclaim_requested.set()
            raise InvalidArgument(
                f"model {newcomer.name!r}: has {newcomer.num_bytes} bytes, but its adapter source may have "
                f"{prefix.maxBytes} in total; raise limit.size of the source"
            )
        others = [found for found in self._found.values() if _key(found.prefix) == _key(prefix)]
        num_bytes = sum(found.adapter.num_bytes for found in others) + newcomer.num_bytes
        if len(others) < prefix.maxAdapters and num_bytes <= prefix.maxBytes:
            return
        idle_times = await self._idle_times()
        now = time.monotonic()
        adapters = [
            replace(found.adapter, idle_s=min(idle_times.get(found.adapter.name, now), now - found.found_at))
            for found in others
        ]
        leaving = select_leaving(adapters, newcomer, prefix.maxAdapters, prefix.maxBytes)
        if leaving is None:
            self._reclaim_requested.set()
            raise Unavailable(
                f"model {newcomer.name!r}: no room, because the other adapters of its source have open requests; try "
                "again, or raise the limit of the adapter source",
                retry_after_s=1.0,
            )
        for name in leaving:
            logger.info("adapter leaves for another one name=%s client=%s", name, newcomer.client)
            self._remove(name)

    async def _idle_times(self) -> dict[AdapterName, float]:
        if (text := self._handles.text) is None:
            return {}
        try:
            return await text.adapter_idle_times()
        except QuireError:
            return {}

    def _remove(self, name: AdapterName) -> None:
        self._manager.remove_on_demand(name)
        self._found.pop(name, None)
        self._reclaim_requested.set()

    def _forget_removed(self) -> None:
        """Forget adapters that the manager has removed, because the catalog has changed."""
        served = self._manager.on_demand_names()
        for name in self._found.keys() - served:
            del self._found[name]
            self._reclaim_requested.set()

    async def _fetcher(self, prefix: AdapterSource) -> AdapterFetcher:
        key = _key(prefix), prefix.maxBytes
        if (fetcher := self._fetchers.get(key)) is not None:
            return fetcher
        cache = await run_in_daemon_thread(AdapterCache, self._folder / _key(prefix))
        options = replace(self._options, link_root=self._link_root(prefix))
        limit, field = self._max_adapter_bytes, "limits.maxAdapterBytes in pod.json"
        if prefix.maxBytes < limit:
            limit, field = prefix.maxBytes, "limit.size of the adapter source"
        fetcher = await self.enter_async_context(AdapterFetcher(cache, options, limit, field, self._trust))
        self._reclaim_requested.set()  # an earlier process may have left more files than the limit allows
        # Another lookup may have opened one in the meantime.
        return self._fetchers.setdefault(key, fetcher)

    def _link_root(self, prefix: AdapterSource) -> Path | None:
        """Return the folder of a source that is a folder."""
        if prefix.pvc is not None and prefix.pvc.claimName in self._options.pvcs:
            return self._options.pvcs[prefix.pvc.claimName] / prefix.pvc.path
        return None if prefix.path is None else Path(prefix.path)

    async def _reclaim(self) -> None:
        """Remove files until each source is within its limit. Files that a core may still read stay, and this is tried
        again. Once an hour, also remove interrupted downloads of the day before, which the limit does not count."""
        must_prune = time.monotonic() - self._pruned_at >= _PRUNE_INTERVAL_S
        self._pruned_at = time.monotonic() if must_prune else self._pruned_at
        for prefix in self._manager.catalog.sources:
            if (fetcher := self._fetchers.get((_key(prefix), prefix.maxBytes))) is None:
                continue
            try:
                async with self._making_room:
                    used = self._used_digests()
                    removed, num_bytes = await run_in_daemon_thread(fetcher.shrink_cache, prefix.maxBytes, used)
                    if must_prune:
                        removed += await run_in_daemon_thread(fetcher.prune_cache, used)
            except OSError as error:
                logger.warning("cache of an adapter source could not be shrunk error=%s", error)
                continue
            for digest in removed:
                logger.info("adapter removed from the cache digest=%s", digest)
            if num_bytes > prefix.maxBytes:
                self._reclaim_requested.set()

    def _used_digests(self) -> set[AdapterDigest]:
        core = self._handles.core
        return self._manager.digests_in_use() | (core.possibly_loaded() if core is not None else set())


def _key(prefix: AdapterSource) -> str:
    """Return the name of the cache folder of a source. Its limits and its pattern can change without a new download."""
    return source_key(prefix.source)


def private_folder(cache_dir: Path, run_dir: Path) -> Path:
    """Return the cache folder that only the supervisor of a run folder uses."""
    return cache_dir / CACHE_FOLDER / sha256(str(run_dir.absolute()).encode()).hexdigest()[:16]
