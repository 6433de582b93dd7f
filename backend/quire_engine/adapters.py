# SPDX-License-Identifier: Apache-2.0
"""AdapterRegistry: which adapters exist, which of them are in host memory, and which to read or give up.

Policy only: it never sees a weight or opens a file. The scheduler asks it who can run; the engine tells it what was
read and carries out what it decides (`take_fetches`, `take_dropped`). Slots are slots.py's. An adapter is its content
digest everywhere.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from quire_engine.request import SlotId
from quire_engine.slots import SlotTable
from quire_spec.errors import Internal, InvalidArgument, NotFound


@dataclass(slots=True)
class _Adapter:
    path: Path
    removed: bool = False
    num_open: int = 0
    """Sequences from arrival to end, running or not."""
    needed: int | None = None
    """Tick since when sequences wait, while none runs."""
    blocked: int | None = None
    """Tick since when sequences could not run because of the adapter, whether others of it run or not."""
    used: int = 0
    """Tick of the last arrival or start; the lowest is given up first."""
    num_bytes: int = 0
    """Of its copy; known, because an adapter is registered once it was read."""


class AdapterRegistry:
    """Adapters by digest: any number registered, some in host memory, some of those in slots.

    Host memory has room for a number of copies and a number of bytes, whichever is less.

    registered -> in host memory -> in a slot, each within the one before. What is missing when a sequence arrives is
    read from disk, the oldest need first. When memory is full, a copy that nobody needs goes first, the least recently
    used; then one that sequences wait for, but not as long as for the one that it makes room for. So the oldest need
    is always met, however many adapters are asked for at once. The copy of an adapter that runs stays.
    """

    def __init__(self, max_loras: int, host_loras: int, host_bytes: int | None = None) -> None:
        """`host_bytes`: of all copies together, None for any; enough for the largest adapter in each slot."""
        self.slots = SlotTable(max_loras)
        self._host_loras = host_loras
        self._host_bytes = host_bytes
        self._adapters: dict[str, _Adapter] = {}
        self._host: set[str] = set()
        self._active: set[str] = set()
        # To be read, because sequences wait for them or they are pinned; then being read.
        self._wanted: dict[str, None] = {}
        self._asked: set[str] = set()
        self._dropped: list[str] = []
        self._tick = 0

    def add(self, digest: str, path: Path, pinned: bool | None = None, num_bytes: int = 0) -> bool:
        """Register an adapter whose copy was just read; `pinned` None supplies the copy of a registered one again.

        `num_bytes`: of the copy.

        Returns whether the copy is to be kept: not when memory is full of copies that are needed more, nor when the
        adapter was removed meanwhile.

        Raises:
            InvalidArgument: more pinned adapters than slots.
        """
        adapter = self._adapters.get(digest)
        if adapter is None or pinned is not None:
            adapter = self._register(digest, path, bool(pinned))
        self._asked.discard(digest)
        adapter.num_bytes = num_bytes
        if self._forget_if_over(digest, adapter):
            return False
        return digest in self._host or self._take_in(digest, adapter)

    def remove(self, digest: str) -> None:
        """Refuse new sequences of an adapter, and forget it with its last one. Unknown digests are ignored."""
        if adapter := self._adapters.get(digest):
            adapter.removed = True
            self.slots.pin(digest, False)
            self._forget_if_over(digest, adapter)

    def fail(self, digest: str) -> bool:
        """The copy that `take_fetches` asked for could not be read; the next sequence asks again.

        Returns whether the adapter is missing, so that the sequences that wait for it are to end.
        """
        self._asked.discard(digest)
        adapter = self._adapters.get(digest)
        return adapter is not None and not self._forget_if_over(digest, adapter) and digest not in self._host

    def states(self) -> dict[str, str]:
        """Where each registered adapter is: slot, host or disk. Removed ones are not listed."""
        return {
            digest: "slot" if self.slots.find(digest) is not None else "host" if digest in self._host else "disk"
            for digest, adapter in self._adapters.items()
            if not adapter.removed
        }

    def open(self, digest: str) -> None:
        """A sequence arrives.

        Raises:
            NotFound: the adapter is not registered, or removed.
        """
        adapter = self._adapters.get(digest)
        if adapter is None or adapter.removed:
            raise NotFound(f"adapter {digest!r} is not loaded; load it first ({len(self._adapters)} others are)")
        adapter.num_open += 1
        self._use(adapter)
        self.slots.touch(digest)
        self._active.add(digest)
        self._set_needed(digest, adapter)
        self._want(digest, adapter)

    def ready(self, digest: str, now: float, *, new: bool) -> bool:
        """Whether a sequence could run in this step; notes since when one could not. `new`: not preempted before."""
        if digest in self._host and self.slots.can_start(digest, new=new):
            return True
        self.slots.block(digest, now)
        if (adapter := self._adapters[digest]).blocked is None:
            self._tick += 1
            adapter.blocked = self._tick
        return False

    def start(self, digest: str) -> None:
        """A sequence begins to run, after `ready`."""
        self.slots.start(digest)
        self._use(self._adapters[digest])
        self._adapters[digest].needed = self._adapters[digest].blocked = None

    def slot(self, digest: str) -> SlotId:
        """Slot of an adapter that runs."""
        slot = self.slots.find(digest)
        assert slot is not None
        return slot

    def stop(self, digest: str) -> None:
        """A running sequence ends or is preempted; the adapter stays in its slot."""
        self.slots.stop(digest)
        self._set_needed(digest, self._adapters[digest])

    def close(self, digest: str) -> None:
        """A sequence that does not run is over."""
        adapter = self._adapters[digest]
        adapter.num_open -= 1
        if adapter.num_open == self.slots.num_running(digest):
            self.slots.unblock(digest)
            adapter.needed = adapter.blocked = None
        if adapter.num_open == 0:
            self._active.discard(digest)
            if digest not in self.slots.pins:
                self._wanted.pop(digest, None)
        self._forget_if_over(digest, adapter)

    def begin_step(self, now: float) -> None:
        """Before a step's first `ready`: pinned adapters get their slots."""
        for digest in sorted(self.slots.pins):
            if self.slots.find(digest) is None and digest in self._host:
                self.slots.place(digest)
        self.slots.begin_step(now, self._near)

    def take_fetches(self) -> list[tuple[str, Path]]:
        """Adapters to read from disk, each once, as far as host memory has room; answered by `add` or `fail`."""
        fetches = []
        while self._wanted:
            digest = min(self._wanted, key=lambda wanted: self._since(wanted) or math.inf)
            if not self._make_room(digest):
                break
            del self._wanted[digest]
            self._asked.add(digest)
            fetches.append((digest, self._adapters[digest].path))
        return fetches

    @property
    def host_bytes(self) -> int:
        """Bytes of host memory that copies take, those that are being read included."""
        return sum(map(self._bytes, (*self._host, *self._asked)))

    @property
    def num_host(self) -> int:
        """Adapters in host memory."""
        return len(self._host)

    def take_dropped(self) -> list[str]:
        """Adapters whose host copies were given up since the last call."""
        dropped, self._dropped = self._dropped, []
        return dropped

    def running(self) -> list[str]:
        """Digests with running sequences."""
        return sorted(digest for digest in self._active if self.slots.num_running(digest))

    def waiting(self) -> list[str]:
        """Digests with sequences that do not run."""
        return sorted(d for d in self._active if self._adapters[d].num_open > self.slots.num_running(d))

    def check_integrity(self, num_open: Mapping[str, int], num_running: Mapping[str, int]) -> None:
        """Raise Internal, with the counts, unless the registry is whole and agrees with the sequences per digest."""
        adapters = self._adapters
        host = self._host
        missing = {d for d, a in adapters.items() if a.num_open} - host
        checks = {
            "open sequences differ": {d: a.num_open for d, a in adapters.items() if a.num_open} != dict(num_open),
            "running sequences differ": {d: self.slots.num_running(d) for d in self.running()} != dict(num_running),
            "active adapters differ": self._active != set(num_open),
            "a host copy belongs to nobody": not host <= set(adapters),
            "host memory is overrun": not self._fits(0, 0),
            "a copy is read that is there": bool(self._asked & host),
            "an adapter that is waited for is not read": missing != (set(self._wanted) | self._asked) & missing,
            "needs differ": any(
                (a.needed is not None) != (a.num_open > 0 and self.slots.num_running(d) == 0)
                for d, a in adapters.items()
            ),
            "an adapter is wanted for nothing": any(self._since(d) is None for d in self._wanted),
            "an adapter is read twice": bool(self._asked & set(self._wanted)),
            "a removed adapter stays": any(
                a.removed and not a.num_open and d not in self._asked for d, a in adapters.items()
            ),
        }
        found = [fault for fault, present in checks.items() if present]
        if found := found + self.slots.faults(host, set(self.waiting())):
            raise Internal(
                f"adapter registry: {'; '.join(found)}: {len(adapters)} adapters, {len(host)} in host memory of "
                f"{self._host_loras}, {self.host_bytes} bytes of {self._host_bytes}, {len(self._asked)} being read, "
                f"{len(self._wanted)} wanted, "
                f"{sum(num_open.values())} open sequences, {sum(num_running.values())} running"
            )

    def _register(self, digest: str, path: Path, pinned: bool) -> _Adapter:
        if pinned and len(self.slots.pins - {digest}) >= len(self.slots):
            raise InvalidArgument(
                f"adapter {digest!r}: cannot be pinned, all {len(self.slots)} slots are; raise max_loras or unpin one"
            )
        adapter = self._adapters.setdefault(digest, _Adapter(path))
        adapter.path, adapter.removed = path, False
        self.slots.pin(digest, pinned)
        if not pinned and not adapter.num_open:
            self._wanted.pop(digest, None)
        self._use(adapter)
        return adapter

    def _take_in(self, digest: str, adapter: _Adapter) -> bool:
        if not self._make_room(digest):
            self._want(digest, adapter)
            return False
        self._wanted.pop(digest, None)
        self._host.add(digest)
        return True

    def _since(self, digest: str) -> float | None:
        """How old the need for an adapter's copy is: a tick, inf to keep a pinned one warm, None for no need."""
        needed = self._adapters[digest].needed
        return needed if needed is not None else math.inf if digest in self.slots.pins else None

    def _near(self, digest: str) -> bool:
        return digest in self._host or digest in self._asked

    def _set_needed(self, digest: str, adapter: _Adapter) -> None:
        if adapter.needed is None and self.slots.num_running(digest) == 0:
            # Those who wait did so before the last one that ran was over: copies go in the order in which slots do.
            self._tick += 1
            adapter.needed = adapter.blocked or self._tick

    def _want(self, digest: str, adapter: _Adapter) -> None:
        needed = adapter.num_open > 0 or digest in self.slots.pins
        if needed and digest not in self._host and digest not in self._asked:
            self._wanted.setdefault(digest)

    def _use(self, adapter: _Adapter) -> None:
        self._tick += 1
        adapter.used = self._tick

    def _bytes(self, digest: str) -> int:
        return self._adapters[digest].num_bytes

    def _fits(self, num: int, num_bytes: int) -> bool:
        """Whether there is room for so many more copies of so many bytes together."""
        if len(self._host) + len(self._asked) + num > self._host_loras:
            return False
        return self._host_bytes is None or self.host_bytes + num_bytes <= self._host_bytes

    def _make_room(self, digest: str) -> bool:
        """Room for the copy of an adapter; gives up others that are needed less if need be."""
        since, num_bytes = self._since(digest), self._bytes(digest)
        if self._fits(1, num_bytes):
            return True
        spare = [
            (adapter.needed is not None, -(adapter.needed or 0), in_slot, adapter.used, other)
            for other in self._host
            for adapter, in_slot in ((self._adapters[other], self.slots.find(other) is not None),)
            if self._spare(other, adapter, since) and not (since is None and in_slot)
        ]
        leavers: list[str] = []
        for *_, other in sorted(spare):
            leavers.append(other)
            if self._fits(1 - len(leavers), num_bytes - sum(map(self._bytes, leavers))):
                for leaver in leavers:
                    self._drop(leaver)
                return True
        return False

    def _spare(self, digest: str, adapter: _Adapter, since: float | None) -> bool:
        if digest in self.slots.pins and not (self.slots.pins_yield and since is not None):
            return False
        if self.slots.num_running(digest):
            return False
        return adapter.needed is None or (since is not None and adapter.needed > since)

    def _drop(self, digest: str) -> None:
        adapter = self._adapters[digest]
        self.slots.vacate(digest, evict=not adapter.removed)
        self._host.remove(digest)
        self._dropped.append(digest)
        self._want(digest, adapter)

    def _forget_if_over(self, digest: str, adapter: _Adapter) -> bool:
        """Forget a removed adapter that no sequence and no reader is busy with."""
        if not adapter.removed or adapter.num_open or digest in self._asked:
            return False
        if digest in self._host:
            self._drop(digest)
        self._wanted.pop(digest, None)
        del self._adapters[digest]
        return True
