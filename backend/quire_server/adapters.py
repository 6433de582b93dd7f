# SPDX-License-Identifier: Apache-2.0
"""From the catalogue to adapters that serve: one task per adapter brings the world to what the catalogue says.

Level-triggered: a task looks at what is (what the links hold), does what is missing, and looks again when anything has
changed: the catalogue, or a process that was started anew. So a restart of any process needs no code of its own here,
and one broken adapter holds up nobody. It knows no protocol of sources and no process beyond its link.

    Fetching   source -> cache            retried after 30 s, 1 min ... 5 min, or what the source asks for up to that
    Loading    core, alias in text, server model
    Ready      or Failed, with the reason; what is wrong in itself is not retried until the catalogue changes
"""

import asyncio
import contextlib
import logging
from collections.abc import Coroutine
from typing import Any
from weakref import WeakValueDictionary

from quire_server.background import in_thread
from quire_server.control import LinkLost
from quire_server.entry import Entry
from quire_server.fetcher import Fetched, Fetcher
from quire_server.links import Links
from quire_server.sources import place_of
from quire_spec.catalogue import Adapter, AdapterLimits, Catalogue, Mark, Source
from quire_spec.errors import AccessDenied, ConfigError, Internal, InvalidArgument, QuireError, Unavailable
from quire_spec.status import AdapterState, AdapterStatus

log = logging.getLogger(__name__)

_MAX_FETCHES = 8
"""From one place: one that hangs holds each of them for a minute, and then it keeps only its own adapters waiting."""
_MAX_FETCHES_IN_ALL = 32
_MAX_LOADS = 4
_MAX_REGISTRATIONS = 6
"""The server starts a process for each; more at once only queue for the processor."""
_FIRST_RETRY_S = 30.0
_MAX_RETRY_S = 300.0
_LINK_RETRY_S = 5.0
_SECRET_LOOK_S = 5.0
"""How often a Secret is looked at, where a source did not let us in: somebody has just been told to mend it."""
LINGER_S = 2.0
"""How long a digest that no name stands for stays loaded: requests on their way to the core still name it."""
HOLD_S = 120.0
"""How long adapters that are being loaded may keep a pod that has just come up from being ready."""


class Stale(InvalidArgument):
    """A catalogue with a lower generation than the current one, which it is not said to replace."""


class _Superseded(Exception):
    """The catalogue changed before a source was read."""


class AdapterBoard:
    """All adapters of a pod. Make it inside a running event loop."""

    def __init__(self, served_name: str, fetcher: Fetcher, links: Links) -> None:
        self._served_name = served_name
        self._fetcher = fetcher
        self._links = links
        self._catalogue: Catalogue | None = None
        self._mark = Mark(0, "")
        self._entries: dict[str, Entry] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._aliases: dict[str, str] = {}
        self._fetches = asyncio.Semaphore(_MAX_FETCHES_IN_ALL)
        self._fetches_from: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()
        self._loads = asyncio.Semaphore(_MAX_LOADS)
        self._registrations = asyncio.Semaphore(_MAX_REGISTRATIONS)
        self._held: set[str] = set()
        self._hold_until = 0.0
        self._unneeded = asyncio.Event()
        self._spawn(self._collect(), "adapter collector")

    # What others ask

    @property
    def mark(self) -> Mark:
        """Of the catalogue that is worked on; generation 0 and no digest before there is one."""
        return self._mark

    def check(self, catalogue: Catalogue, replaces: str = "") -> None:
        """Refuse a catalogue before anything of it is done; `replaces` is the digest of one that may be newer than it.

        Raises:
            ConfigError: an adapter has the base model's name. Stale: a newer catalogue is already here.
        """
        if any(adapter.name == self._served_name for adapter in catalogue.adapters):
            raise ConfigError(f"adapters: {self._served_name!r} is the base model's name; give the adapter another")
        replaced = replaces != "" and replaces == self._mark.digest
        if self._catalogue is not None and catalogue.generation < self._mark.generation and not replaced:
            raise Stale(
                f"generation {catalogue.generation} is older than {self._mark.generation}, which this pod works on"
            )

    def apply(self, catalogue: Catalogue, replaces: str = "") -> None:
        """Work towards this catalogue from now on; parameters and errors are those of `check`."""
        self.check(catalogue, replaces)
        if catalogue == self._catalogue:
            return
        self._catalogue, self._mark = catalogue, catalogue.mark
        exposed = catalogue.exposed()
        wanted = {adapter.name: adapter for adapter in catalogue.adapters}
        for name, entry in self._entries.items():
            if name not in wanted:
                self._want(entry, None, entry.exposed)
        # Pinned ones first: the semaphores serve in order.
        for adapter in sorted(catalogue.adapters, key=lambda a: not a.pinned):
            if adapter.name in self._entries:
                self._want(self._entries[adapter.name], adapter, adapter.name in exposed)
            else:
                entry = self._entries[adapter.name] = Entry(adapter.name, adapter, adapter.name in exposed)
                self._spawn(self._work(entry), f"adapter {adapter.name}")
        self._tell_of_none()

    def look(self) -> None:
        """A process has come up or gone: every adapter looks whether it is still in place."""
        for entry in self._entries.values():
            entry.wake.set()
        self._tell_of_none()

    def hold(self) -> None:
        """Have `pending` name all adapters that are not settled now, for HOLD_S at most."""
        self._held = {entry.name for entry in self._wanted()}
        self._hold_until = asyncio.get_running_loop().time() + HOLD_S

    def pending(self) -> list[str]:
        """Adapters that were there when the pod last came up and are still on their way."""
        if asyncio.get_running_loop().time() > self._hold_until:
            self._held.clear()
        self._held &= {e.name for e in self._wanted() if not e.settled}
        return sorted(self._held)

    def unsettled(self) -> list[Entry]:
        """Adapters that are neither Ready nor Failed."""
        return [entry for entry in self._wanted() if not entry.settled]

    def statuses(self) -> list[AdapterStatus]:
        """Every adapter of the catalogue, by name."""
        return sorted((entry.status() for entry in self._wanted()), key=lambda status: status.name)

    def serving(self) -> set[str]:
        """Names that requests reach something by now: an adapter that is being replaced still has the one before."""
        core, text = self._links.core, self._links.text
        if core is None or text is None:
            return set()
        live = {e.name: e.live.digest for e in self._wanted() if e.live is not None}
        return {name for name, digest in live.items() if digest in core.adapters and text.aliases.get(name) == digest}

    def digests(self) -> set[str]:
        """Digests that are wanted or stood for now."""
        return {x.digest for entry in self._entries.values() for x in (entry.fetched, entry.live) if x}

    async def sweep(self) -> list[str]:
        """Remove from the cache what nobody uses; returns the digests removed."""
        return await in_thread(self._fetcher.sweep, self.digests())

    async def close(self) -> None:
        """Stop working; what is in place stays."""
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)

    # One adapter's task

    async def _work(self, entry: Entry) -> None:
        while True:
            entry.wake.clear()
            if entry.wanted is not None:
                pause_s = await self._try(entry)
            else:
                pause_s = await self._try_to_remove(entry)
                if pause_s is None and entry.wanted is None:
                    del self._entries[entry.name]
                    return
            await self._pause(entry, pause_s)

    async def _pause(self, entry: Entry, seconds: float | None) -> None:
        """Until there is something to do, but no longer; None: however long that takes."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while not entry.wake.is_set() and not self._has_another_secret(entry):
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(_SECRET_LOOK_S if entry.denied else None):
                            await entry.wake.wait()

    def _has_another_secret(self, entry: Entry) -> bool:
        """Whether a source that did not let us in may do so now."""
        if not entry.denied or entry.wanted is None:
            return False
        return self._fetcher.secret_mark(entry.wanted.source) != entry.secret_mark

    async def _try(self, entry: Entry) -> float | None:
        """Do what is missing; returns the seconds after which to try again, None for not before something changes."""
        entry.denied = False
        if entry.blocked:
            restored = await self._restore(entry)
            await self._tell()
            return None if restored else _LINK_RETRY_S
        asked = entry.asked
        try:
            await self._converge(entry)
            entry.failures = 0
            return None
        except _Superseded:
            return 0.0
        except LinkLost:
            entry.set(AdapterState.LOADING)
            return _LINK_RETRY_S
        except Exception as error:
            # What failed may not be what is wanted by now.
            return await self._failed(entry, error) if entry.asked == asked else 0.0

    async def _failed(self, entry: Entry, error: Exception) -> float | None:
        if not isinstance(error, QuireError):
            log.error("adapter task failed name=%s", entry.name, exc_info=error)
            error = Internal(f"{type(error).__name__}: {error}")
        entry.set(AdapterState.FAILED, entry.explain(error))
        # Before anything is waited for: a catalogue that comes meanwhile takes it back.
        entry.blocked = isinstance(error, InvalidArgument)
        entry.denied = isinstance(error, AccessDenied)
        restored = await self._restore(entry)
        await self._tell()
        if entry.blocked:
            return None if restored else _LINK_RETRY_S
        entry.failures += 1
        asked_s = error.retry_after_s if isinstance(error, Unavailable) else None
        return min(max(_FIRST_RETRY_S * 2.0 ** (entry.failures - 1), asked_s or 0.0), _MAX_RETRY_S)

    async def _restore(self, entry: Entry) -> bool:
        """Keep the one before in its place, while its replacement fails; False when that has failed, too."""
        try:
            if entry.live is not None:
                await self._place(entry, entry.live)
        except LinkLost:
            return False
        except QuireError as error:
            log.warning("adapter before cannot be put back yet name=%s error=%s", entry.name, error)
            return False
        return True

    async def _converge(self, entry: Entry) -> None:
        if entry.looked != entry.asked:
            await self._fetch(entry)
        assert entry.fetched is not None, "fetch returns or raises"
        # Again: another name of the content may have had it pinned otherwise meanwhile.
        while not self._in_place(entry, entry.fetched):
            entry.set(AdapterState.LOADING)
            await self._place(entry, entry.fetched)
        entry.set(AdapterState.READY)

    async def _fetch(self, entry: Entry) -> None:
        assert entry.wanted is not None, "an adapter on its way out fetches nothing"
        asked, source = entry.asked, entry.wanted.source
        changed = source != entry.fetched_from
        if changed:
            entry.set(AdapterState.FETCHING)
        of_place = self._fetches_from.setdefault(place_of(source), asyncio.Semaphore(_MAX_FETCHES))
        try:
            async with of_place, self._fetches:
                if entry.asked != asked:
                    raise _Superseded
                entry.secret_mark = self._fetcher.secret_mark(source)
                before, entry.fetched = entry.fetched, await self._fetch_cancellably(entry, source)
            self._left(before, entry.fetched)
            entry.fetched_from = source
        except QuireError as error:
            if changed:
                raise
            log.warning("source cannot be looked at again, adapter stays name=%s error=%s", entry.name, error)
        entry.looked = asked

    async def _fetch_cancellably(self, entry: Entry, source: Source) -> Fetched:
        entry.fetching_from = source
        entry.fetching = asyncio.create_task(self._fetcher.fetch(source), name=f"fetch {entry.name}")
        try:
            return await entry.fetching
        except asyncio.CancelledError:
            # Of the fetch alone, by `_want`; what is wanted now may be the same source again.
            if (task := asyncio.current_task()) is None or not task.cancelling():
                raise _Superseded from None
            raise
        finally:
            entry.fetching = None

    async def _place(self, entry: Entry, fetched: Fetched) -> None:
        """Load it, then let the name stand for it, then open its model: at no time does a name lead nowhere."""
        core, text, server = self._links.need()
        pinned = self._pinned(fetched.digest)
        async with self._loads:
            if core.adapters.get(fetched.digest) != pinned:
                await core.load(fetched.digest, fetched.folder, pinned)
        self._aliases[entry.name] = fetched.digest
        before, entry.live = entry.live, fetched
        self._left(before, fetched)
        await text.publish(self._aliases, self._limits())
        self._unneeded.set()
        async with self._registrations:
            await (server.register if entry.exposed else server.unregister)(entry.name)

    def _in_place(self, entry: Entry, fetched: Fetched) -> bool:
        core, text, server = self._links.need()
        return (
            # As long as it is not, the next that is published would be the one before.
            entry.live == fetched
            and core.adapters.get(fetched.digest) == self._pinned(fetched.digest)
            and text.aliases.get(entry.name) == fetched.digest
            and text.limits.get(entry.name) == (entry.wanted and entry.wanted.limits)
            and (entry.name in server.models) == entry.exposed
        )

    async def _try_to_remove(self, entry: Entry) -> float | None:
        """Take the model, then the name, away; None when done."""
        try:
            if self._links.server is not None:
                await self._links.server.unregister(entry.name)
            self._aliases.pop(entry.name, None)
            if self._links.text is not None:
                await self._links.text.publish(self._aliases, self._limits())
        except QuireError as error:
            log.warning("adapter cannot be removed yet name=%s error=%s", entry.name, error)
            return _LINK_RETRY_S
        had = {entry.live, entry.fetched}
        entry.live = entry.fetched = entry.fetched_from = None
        for before in had:
            self._left(before, None)
        log.info("adapter removed name=%s", entry.name)
        return None

    # All adapters

    def _tell_of_none(self) -> None:
        if self._catalogue is not None and not self._wanted():
            self._spawn(self._tell(), "tell of no adapter")

    async def _tell(self) -> None:
        """Have text know the names that there are, be it none: until then it calls any other one not announced yet."""
        if (text := self._links.text) is not None:
            # If it is gone, its successor is told.
            with contextlib.suppress(QuireError):
                await text.publish(self._aliases, self._limits())

    async def _collect(self) -> None:
        """Unload what no name stands for any more."""
        while True:
            await self._unneeded.wait()
            await asyncio.sleep(LINGER_S)
            self._unneeded.clear()
            core = self._links.core
            if core is None:
                continue
            for digest in core.held() - self._needed():
                try:
                    await core.unload(digest, self._needed)
                    log.info("adapter unloaded digest=%s", digest)
                except QuireError as error:
                    log.warning("adapter cannot be unloaded digest=%s error=%s", digest, error)

    def _want(self, entry: Entry, wanted: Adapter | None, exposed: bool) -> None:
        if wanted is not None and (entry.wanted is None or wanted.source != entry.wanted.source):
            # At once: whoever has just told us the catalogue must not read that its content is here already.
            entry.set(AdapterState.FETCHING)
        entry.wanted, entry.exposed = wanted, exposed
        entry.asked += 1
        entry.blocked = False
        if entry.fetching is not None and (wanted is None or wanted.source != entry.fetching_from):
            entry.fetching.cancel()
        entry.wake.set()

    def _needed(self) -> set[str]:
        """Digests that the core has to hold: also those that text may take names for while it is being told."""
        text = self._links.text
        return self.digests() | (text.digests if text is not None else set())

    def _left(self, before: Fetched | None, after: Fetched | None) -> None:
        """A name has another content than before: the others of that one look whether it is still to be pinned."""
        if before in (None, after):
            return
        self._unneeded.set()
        for entry in self._wanted():
            if before in (entry.live, entry.fetched):
                entry.wake.set()

    def _pinned(self, digest: str) -> bool:
        """An adapter of two names is pinned when one of them is."""
        held = [e for e in self._wanted() if digest in (e.fetched and e.fetched.digest, e.live and e.live.digest)]
        return any(entry.wanted and entry.wanted.pinned for entry in held)

    def _limits(self) -> dict[str, AdapterLimits]:
        """Of every adapter that a name stands for and that has limits."""
        held = {entry.name: entry.wanted.limits for entry in self._wanted() if entry.wanted is not None}
        return {name: limits for name, limits in held.items() if limits is not None and name in self._aliases}

    def _wanted(self) -> list[Entry]:
        return [entry for entry in self._entries.values() if entry.wanted is not None]

    def _spawn(self, work: Coroutine[Any, Any, None], name: str) -> None:
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
