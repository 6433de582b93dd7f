# SPDX-License-Identifier: Apache-2.0
"""Brings adapters from where the catalogue says into the cache: bounded, resumed, verified, and complete or not there.

Knows every protocol by its Place and no more. What is returned never changes: names move, digests do not. Two files of
an adapter are read and nothing else, so a source can hold no code that anyone would run. adapters.py calls this.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self
from weakref import WeakValueDictionary

from quire_server.background import in_thread
from quire_server.cache import Cache, Partial, Record, key_of
from quire_server.places import Place
from quire_server.sources import SourceOptions, Sources
from quire_server.transfer import MAX_CHANGES, Transfer, ask_version
from quire_spec.catalogue import Source
from quire_spec.digest import ADAPTER_FILES, WEIGHTS_FILE
from quire_spec.errors import Unavailable

log = logging.getLogger(__name__)

_LOCKED_PAUSE_S = 0.2


@dataclass(frozen=True, slots=True)
class Fetched:
    """An adapter in the cache."""

    digest: str
    folder: Path


class Fetcher:
    """One cache and its sources. Use it as an async context manager."""

    def __init__(self, cache: Cache, options: SourceOptions) -> None:
        self._cache = cache
        self._options = options
        self._sources = Sources(options)
        self._transfer = Transfer(self._limit)
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    async def __aenter__(self) -> Self:
        await self._sources.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._sources.__aexit__(kind, error, trace)

    async def fetch(self, source: Source) -> Fetched:
        """Bring what `source` holds now; quick when it has not changed since the last time.

        A source that cannot be reached but was fetched before is answered from the cache, with a warning.

        Raises:
            InvalidArgument: the source is wrong, too large, not allowed, or not what its sha256 says. Do not retry.
            NotFound: nothing is there. Unavailable: right, but not now.
        """
        place = self._sources.place(source)
        key = key_of(source)
        lock = self._locks.setdefault(key, asyncio.Lock())
        async with lock:
            record = await self._unchanged(place, key)
            with _disk_errors():
                if record is None or not self._cache.touch(record.digest):
                    record = await self._bring_all(place, key)
        return Fetched(record.digest, self._cache.folder(record.digest))

    def secret_mark(self, source: Source) -> int:
        """Another number once the Secret of a source holds something else; raises InvalidArgument as `fetch` does."""
        return self._sources.secret_mark(source)

    def sweep(self, used: set[str]) -> list[str]:
        """Remove from the cache what nobody uses; blocking."""
        return self._cache.sweep(used)

    async def _unchanged(self, place: Place, key: str) -> Record | None:
        """The cached record, if the source still has that content."""
        record = self._cache.record(key)
        if record is None or place.fixed:
            return record
        try:
            for name in ADAPTER_FILES:
                version = await ask_version(place, name)
                if version is None or version != record.versions.get(name):
                    return None
        except Unavailable as error:
            log.warning("source cannot be reached, using the cached adapter digest=%s error=%s", record.digest, error)
        return record

    async def _bring_all(self, place: Place, key: str) -> Record:
        async with self._partial(key) as partial:
            stale = list(ADAPTER_FILES)
            for _ in range(MAX_CHANGES):
                for name in stale:
                    await self._transfer.bring(place, partial, name)
                    await self._transfer.verify(place, partial, name)
                stale = [] if place.fixed else await self._transfer.changed(place, partial.versions())
                if not stale:
                    return await self._commit(key, partial)
                for name in stale:
                    partial.drop(name)
        raise Unavailable(
            f"{place.where(stale[0])}: it changed while it was read, {MAX_CHANGES} times; write a new adapter beside "
            "the old one, and put it in its place by renaming"
        )

    async def _commit(self, key: str, partial: Partial) -> Record:
        # When we are cancelled, the thread goes on: until it is done, nobody else may write to what it hashes.
        held = partial.held()

        def commit() -> Record:
            with held:
                return self._cache.commit(key, partial)

        return await in_thread(commit)

    def _limit(self, name: str) -> tuple[int, str]:
        if name == WEIGHTS_FILE:
            return self._options.max_weights_bytes, "; raise --max-adapter-bytes"
        return self._options.max_config_bytes, ""

    @contextlib.asynccontextmanager
    async def _partial(self, key: str) -> AsyncIterator[Partial]:
        """Wait for our turn where another supervisor shares the cache and is at the same source."""
        with contextlib.ExitStack() as stack:
            waits = False
            while True:
                try:
                    partial = stack.enter_context(self._cache.partial(key))
                    break
                except BlockingIOError:
                    if not waits:
                        log.info(
                            "another supervisor that shares the cache fetches the same source, waiting key=%s", key
                        )
                    waits = True
                    await asyncio.sleep(_LOCKED_PAUSE_S)
            yield partial


@contextlib.contextmanager
def _disk_errors() -> Iterator[None]:
    """A full or read-only cache is worth another try later, and a message that says which it is."""
    try:
        yield
    except OSError as error:
        raise Unavailable(f"cache: {error}; make room, or give another --cache-dir") from error
