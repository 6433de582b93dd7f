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

from quire_engine.lora.slot_table import SlotTable
from quire_engine.sequence import SlotId
from quire_spec.errors import Internal, InvalidArgument, NotFound


@dataclass(slots=True)
class _Adapter:
    path: Path
    removed: bool = False
    num_sequences: int = 0
    """Sequences from arrival to end, running or not."""
    needed_since: int | None = None
    """Tick since when sequences wait, while none runs."""
    starved_since: int | None = None
    """Tick since when sequences could not run because of the adapter, whether others of it run or not."""
    last_used: int = 0
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

    def __init__(self, max_loras: int, max_host_loras: int, max_host_bytes: int | None = None) -> None:
        """`host_bytes`: of all copies together, None for any; enough for the largest adapter in each slot."""
        self.slot_table = SlotTable(max_loras)
        self._max_host_loras = max_host_loras
        self._max_host_bytes = max_host_bytes
        self._adapters: dict[str, _Adapter] = {}
        self._on_host: set[str] = set()
        self._active: set[str] = set()
        # To be read, because sequences wait for them or they are pinned; then being read.
        self._read_queue: dict[str, None] = {}
        self._reading: set[str] = set()
        self._evicted_copies: list[str] = []
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
        self._reading.discard(digest)
        adapter.num_bytes = num_bytes
        if self._remove_if_unused(digest, adapter):
            return False
        return digest in self._on_host or self._add_host_copy(digest, adapter)

    def remove(self, digest: str) -> None:
        """Refuse new sequences of an adapter, and forget it with its last one. Unknown digests are ignored."""
        if adapter := self._adapters.get(digest):
            adapter.removed = True
            self.slot_table.set_pinned(digest, False)
            self._remove_if_unused(digest, adapter)

    def on_read_failed(self, digest: str) -> bool:
        """The copy that `take_fetches` asked for could not be read; the next sequence asks again.

        Returns whether the adapter is missing, so that the sequences that wait for it are to end.
        """
        self._reading.discard(digest)
        adapter = self._adapters.get(digest)
        return adapter is not None and not self._remove_if_unused(digest, adapter) and digest not in self._on_host

    def adapter_states(self) -> dict[str, str]:
        """Where each registered adapter is: slot, host or disk. Removed ones are not listed."""
        return {
            digest: "slot"
            if self.slot_table.lookup(digest) is not None
            else "host"
            if digest in self._on_host
            else "disk"
            for digest, adapter in self._adapters.items()
            if not adapter.removed
        }

    def add_sequence(self, digest: str) -> None:
        """A sequence arrives.

        Raises:
            NotFound: the adapter is not registered, or removed.
        """
        adapter = self._adapters.get(digest)
        if adapter is None or adapter.removed:
            raise NotFound(f"adapter {digest!r} is not loaded; load it first ({len(self._adapters)} others are)")
        adapter.num_sequences += 1
        self._touch(adapter)
        self.slot_table.touch(digest)
        self._active.add(digest)
        self._mark_needed(digest, adapter)
        self._request_read(digest, adapter)

    def can_run(self, digest: str, now: float, *, is_new: bool) -> bool:
        """Whether a sequence could run in this step; notes since when one could not. `new`: not preempted before."""
        if digest in self._on_host and self.slot_table.can_start(digest, is_new=is_new):
            return True
        self.slot_table.mark_waiting(digest, now)
        if (adapter := self._adapters[digest]).starved_since is None:
            self._tick += 1
            adapter.starved_since = self._tick
        return False

    def on_start(self, digest: str) -> None:
        """A sequence begins to run, after `ready`."""
        self.slot_table.on_start(digest)
        self._touch(self._adapters[digest])
        self._adapters[digest].needed_since = self._adapters[digest].starved_since = None

    def get_slot(self, digest: str) -> SlotId:
        """Slot of an adapter that runs."""
        adapter_slot = self.slot_table.lookup(digest)
        assert adapter_slot is not None
        return adapter_slot

    def on_stop(self, digest: str) -> None:
        """A running sequence ends or is preempted; the adapter stays in its slot."""
        self.slot_table.on_stop(digest)
        self._mark_needed(digest, self._adapters[digest])

    def remove_sequence(self, digest: str) -> None:
        """A sequence that does not run is over."""
        adapter = self._adapters[digest]
        adapter.num_sequences -= 1
        if adapter.num_sequences == self.slot_table.num_running(digest):
            self.slot_table.clear_waiting(digest)
            adapter.needed_since = adapter.starved_since = None
        if adapter.num_sequences == 0:
            self._active.discard(digest)
            if digest not in self.slot_table.pinned_adapters:
                self._read_queue.pop(digest, None)
        self._remove_if_unused(digest, adapter)

    def begin_step(self, now: float) -> None:
        """Before a step's first `ready`: pinned adapters get their slots."""
        for digest in sorted(self.slot_table.pinned_adapters):
            if self.slot_table.lookup(digest) is None and digest in self._on_host:
                self.slot_table.assign_pinned(digest)
        self.slot_table.begin_step(now, self._is_on_host_or_reading)

    def pop_reads(self) -> list[tuple[str, Path]]:
        """Adapters to read from disk, each once, as far as host memory has room; answered by `add` or `fail`."""
        reads = []
        while self._read_queue:
            digest = min(self._read_queue, key=lambda queued_digest: self._needed_since(queued_digest) or math.inf)
            if not self._make_host_room(digest):
                break
            del self._read_queue[digest]
            self._reading.add(digest)
            reads.append((digest, self._adapters[digest].path))
        return reads

    @property
    def host_bytes(self) -> int:
        """Bytes of host memory that copies take, those that are being read included."""
        return sum(map(self._copy_bytes, (*self._on_host, *self._reading)))

    @property
    def num_host(self) -> int:
        """Adapters in host memory."""
        return len(self._on_host)

    def pop_evicted_copies(self) -> list[str]:
        """Adapters whose host copies were given up since the last call."""
        evicted, self._evicted_copies = self._evicted_copies, []
        return evicted

    def running_adapters(self) -> list[str]:
        """Digests with running sequences."""
        return sorted(digest for digest in self._active if self.slot_table.num_running(digest))

    def waiting_adapters(self) -> list[str]:
        """Digests with sequences that do not run."""
        return sorted(d for d in self._active if self._adapters[d].num_sequences > self.slot_table.num_running(d))

    def check_integrity(self, num_sequences: Mapping[str, int], num_running: Mapping[str, int]) -> None:
        """Raise Internal, with the counts, unless the registry is whole and agrees with the sequences per digest."""
        adapters = self._adapters
        on_host = self._on_host
        not_on_host = {d for d, a in adapters.items() if a.num_sequences} - on_host
        violations = {
            "open sequences differ": {d: a.num_sequences for d, a in adapters.items() if a.num_sequences}
            != dict(num_sequences),
            "running sequences differ": {d: self.slot_table.num_running(d) for d in self.running_adapters()}
            != dict(num_running),
            "active adapters differ": self._active != set(num_sequences),
            "a host copy belongs to nobody": not on_host <= set(adapters),
            "host memory is overrun": not self._fits(0, 0),
            "a copy is read that is there": bool(self._reading & on_host),
            "an adapter that is waited for is not read": not_on_host
            != (set(self._read_queue) | self._reading) & not_on_host,
            "needs differ": any(
                (a.needed_since is not None) != (a.num_sequences > 0 and self.slot_table.num_running(d) == 0)
                for d, a in adapters.items()
            ),
            "an adapter is wanted for nothing": any(self._needed_since(d) is None for d in self._read_queue),
            "an adapter is read twice": bool(self._reading & set(self._read_queue)),
            "a removed adapter stays": any(
                a.removed and not a.num_sequences and d not in self._reading for d, a in adapters.items()
            ),
        }
        present_violations = [violation for violation, is_violated in violations.items() if is_violated]
        if present_violations := present_violations + self.slot_table.integrity_errors(
            on_host, set(self.waiting_adapters())
        ):
            raise Internal(
                f"adapter registry: {'; '.join(present_violations)}: {len(adapters)} adapters, {len(on_host)} in host "
                "memory of "
                f"{self._max_host_loras}, {self.host_bytes} bytes of {self._max_host_bytes}, {len(self._reading)} "
                "being read, "
                f"{len(self._read_queue)} wanted, "
                f"{sum(num_sequences.values())} open sequences, {sum(num_running.values())} running"
            )

    def _register(self, digest: str, path: Path, pinned: bool) -> _Adapter:
        if pinned and len(self.slot_table.pinned_adapters - {digest}) >= len(self.slot_table):
            raise InvalidArgument(
                f"adapter {digest!r}: cannot be pinned, all {len(self.slot_table)} slots are; raise max_loras or "
                "unpin one"
            )
        adapter = self._adapters.setdefault(digest, _Adapter(path))
        adapter.path, adapter.removed = path, False
        self.slot_table.set_pinned(digest, pinned)
        if not pinned and not adapter.num_sequences:
            self._read_queue.pop(digest, None)
        self._touch(adapter)
        return adapter

    def _add_host_copy(self, digest: str, adapter: _Adapter) -> bool:
        if not self._make_host_room(digest):
            self._request_read(digest, adapter)
            return False
        self._read_queue.pop(digest, None)
        self._on_host.add(digest)
        return True

    def _needed_since(self, digest: str) -> float | None:
        """How old the need for an adapter's copy is: a tick, inf to keep a pinned one warm, None for no need."""
        needed_since = self._adapters[digest].needed_since
        return (
            needed_since
            if needed_since is not None
            else math.inf
            if digest in self.slot_table.pinned_adapters
            else None
        )

    def _is_on_host_or_reading(self, digest: str) -> bool:
        return digest in self._on_host or digest in self._reading

    def _mark_needed(self, digest: str, adapter: _Adapter) -> None:
        if adapter.needed_since is None and self.slot_table.num_running(digest) == 0:
            # Those who wait did so before the last one that ran was over: copies go in the order in which slots do.
            self._tick += 1
            adapter.needed_since = adapter.starved_since or self._tick

    def _request_read(self, digest: str, adapter: _Adapter) -> None:
        is_needed = adapter.num_sequences > 0 or digest in self.slot_table.pinned_adapters
        if is_needed and digest not in self._on_host and digest not in self._reading:
            self._read_queue.setdefault(digest)

    def _touch(self, adapter: _Adapter) -> None:
        self._tick += 1
        adapter.last_used = self._tick

    def _copy_bytes(self, digest: str) -> int:
        return self._adapters[digest].num_bytes

    def _fits(self, num_copies: int, num_bytes: int) -> bool:
        """Whether there is room for so many more copies of so many bytes together."""
        if len(self._on_host) + len(self._reading) + num_copies > self._max_host_loras:
            return False
        return self._max_host_bytes is None or self.host_bytes + num_bytes <= self._max_host_bytes

    def _make_host_room(self, digest: str) -> bool:
        """Room for the copy of an adapter; gives up others that are needed less if need be."""
        needed_since, num_bytes = self._needed_since(digest), self._copy_bytes(digest)
        if self._fits(1, num_bytes):
            return True
        candidates = [
            (
                adapter.needed_since is not None,
                -(adapter.needed_since or 0),
                in_slot,
                adapter.last_used,
                candidate_digest,
            )
            for candidate_digest in self._on_host
            for adapter, in_slot in (
                (self._adapters[candidate_digest], self.slot_table.lookup(candidate_digest) is not None),
            )
            if self._is_evictable(candidate_digest, adapter, needed_since) and not (needed_since is None and in_slot)
        ]
        victims: list[str] = []
        for *_, other in sorted(candidates):
            victims.append(other)
            if self._fits(1 - len(victims), num_bytes - sum(map(self._copy_bytes, victims))):
                for victim in victims:
                    self._evict_host_copy(victim)
                return True
        return False

    def _is_evictable(self, digest: str, adapter: _Adapter, needed_since: float | None) -> bool:
        if digest in self.slot_table.pinned_adapters and not (
            self.slot_table.can_evict_pinned and needed_since is not None
        ):
            return False
        if self.slot_table.num_running(digest):
            return False
        return adapter.needed_since is None or (needed_since is not None and adapter.needed_since > needed_since)

    def _evict_host_copy(self, digest: str) -> None:
        adapter = self._adapters[digest]
        self.slot_table.evict(digest, count_eviction=not adapter.removed)
        self._on_host.remove(digest)
        self._evicted_copies.append(digest)
        self._request_read(digest, adapter)

    def _remove_if_unused(self, digest: str, adapter: _Adapter) -> bool:
        """Forget a removed adapter that no sequence and no reader is busy with."""
        if not adapter.removed or adapter.num_sequences or digest in self._reading:
            return False
        if digest in self._on_host:
            self._evict_host_copy(digest)
        self._read_queue.pop(digest, None)
        del self._adapters[digest]
        return True
