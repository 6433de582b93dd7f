# SPDX-License-Identifier: Apache-2.0
"""Registry of LoRA adapters.

The registry knows which adapters are registered or in host memory. It decides which adapters are read or evicted.
It contains only this policy: it does not hold weights or open files. The scheduler calls it to check whether a sequence
can run. The engine reports what was read, and executes the decisions (`pop_reads`, `pop_evicted_copies`). `slot_table`
owns the adapter slots. An adapter is always identified by its content digest.
"""

import math
import sys
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from quire_engine.lora.adapter_info import AdapterInfo, combined_info
from quire_engine.lora.adapter_source import AdapterSource, WeightedFolder
from quire_engine.lora.invocation import adapter_start
from quire_engine.lora.slot_table import SlotTable
from quire_engine.sequence import SlotId
from quire_spec.constants import AdapterDigest
from quire_spec.errors import Internal, InvalidArgument, NotFound
from quire_spec.protocol.messages import AdapterResidency


@dataclass(slots=True)
class _Adapter:
    path: Path
    """Its folder; not used for a sum."""
    parts: "tuple[tuple[AdapterDigest, _Adapter, float], ...]" = ()
    """If it is a weighted sum: digest, adapter and weight of each part. A sum is registered by its first sequence, and
    only as long as it has a sequence or a host copy, and all parts are registered."""
    removed: bool = False
    num_sequences: int = 0
    """Number of unfinished sequences, both running and waiting."""
    needed_since: int | None = None
    """Tick at which the sequences of the adapter started to wait. None if the adapter has no sequences, or if one of
    them runs."""
    starved_since: int | None = None
    """Tick at which a sequence first had to wait for the adapter, even if other sequences of the adapter run."""
    last_used: int = 0
    """Tick at which a sequence of the adapter last arrived or started. The adapter with the lowest tick is evicted
    first."""
    client: str | None = None
    """The client whose sequence first used the host copy. It counts against the client's share of host memory."""
    info: AdapterInfo = field(default_factory=AdapterInfo)
    """Known, because an adapter is registered only after it was read."""


class AdapterRegistry:
    """Adapters by digest. Any number of adapters can be registered. Some have a host copy, and some adapters with a
    host copy also have a slot.

    Both the number and the total bytes of host copies are limited. An adapter without a host copy is read from disk
    when a sequence of that adapter arrives. The adapter whose sequence has waited longest is read first.

    Eviction. When host memory is full, the least recently used copy without waiting sequences is evicted first. Copies
    of clients that have more than an equal share go before all others, so a client that uses many adapters evicts its
    own. If every copy has waiting sequences, a copy is evicted only for an adapter that has been needed for longer.
    Therefore, the adapter that has been needed longest always gets its copy, no matter how many adapters are needed.
    The copy of an adapter with running sequences is never evicted.
    """

    def __init__(
        self,
        max_loras: int,
        max_host_loras: int,
        max_host_bytes: int | None = None,
        max_rank: int = sys.maxsize,
        num_pages: int = 0,
    ) -> None:
        """Create an empty registry.

        `max_rank` is the largest rank of a weighted sum of adapters. `num_pages` is the number of pages that the
        adapters in slots share.
        `max_host_bytes` limits all host copies together; None means no limit. The limit must leave room for adapters
        that fill all pages.
        """
        self._changed: set[AdapterDigest] = set()
        """Adapters whose residency may have changed since `pop_changes`."""
        self.slot_table = SlotTable(max_loras, self._changed, num_pages, self._num_pages)
        self._max_host_loras = max_host_loras
        self._max_host_bytes = max_host_bytes
        self._max_rank = max_rank
        self._adapter_by_digest: dict[AdapterDigest, _Adapter] = {}
        self._on_host: set[AdapterDigest] = set()
        self._active: set[AdapterDigest] = set()
        # `_read_queue` contains adapters that must be read, because they are pinned or because sequences wait for them.
        # `_reading` contains the adapters that are being read.
        self._read_queue: dict[AdapterDigest, None] = {}
        self._reading: set[AdapterDigest] = set()
        self._evicted_copies: list[AdapterDigest] = []
        self._tick = 0

    def add(
        self,
        digest: AdapterDigest,
        source: AdapterSource,
        slot_pinned: bool | None = None,
        info: AdapterInfo | None = None,
    ) -> bool:
        """Register an adapter that was just read. If `slot_pinned` is None, only restore the host copy of a registered
        adapter.

        Returns:
            Whether the caller must keep the copy. It is False if host memory is full of copies that have been needed
            for longer, or if the adapter was removed during the read.

        Raises:
            InvalidArgument: every slot is pinned already, or the pinned adapters leave too few pages.
        """
        adapter, info = self._adapter_by_digest.get(digest), info or AdapterInfo()
        if adapter is None or slot_pinned is not None:
            assert isinstance(source, Path), "only its sequences register a sum"
            adapter = self._register(digest, source, bool(slot_pinned), info)
        self._reading.discard(digest)
        adapter.info = info
        if self._remove_if_unused(digest, adapter):
            return False
        return digest in self._on_host or self._add_host_copy(digest, adapter)

    def set_path(self, digest: AdapterDigest, path: Path) -> None:
        """Change the folder from which a registered adapter is read again. Ignore unknown digests."""
        if adapter := self._adapter_by_digest.get(digest):
            adapter.path = path

    def remove(self, digest: AdapterDigest) -> None:
        """Reject new sequences of an adapter, and unregister the adapter when its last sequence has ended. Ignore
        unknown digests."""
        if adapter := self._adapter_by_digest.get(digest):
            adapter.removed = True
            self._changed.add(digest)
            self.slot_table.set_slot_pinned(digest, False)
            self._remove_if_unused(digest, adapter)
            for sum_digest in self._sums_of(digest):
                self.remove(sum_digest)

    def on_read_failed(self, digest: AdapterDigest) -> bool:
        """Called when an adapter from `pop_reads` could not be read. The next sequence requests it again.

        Returns:
            Whether the adapter has no host copy, so that the caller must fail the sequences that wait for it.
        """
        self._reading.discard(digest)
        adapter = self._adapter_by_digest.get(digest)
        return adapter is not None and not self._remove_if_unused(digest, adapter) and digest not in self._on_host

    def adapter_states(self) -> dict[AdapterDigest, str]:
        """Return the state of each registered adapter: slot, host or disk. Removed adapters are not included."""
        return {
            digest: self._state(digest) for digest, adapter in self._adapter_by_digest.items() if not adapter.removed
        }

    def pop_changes(self) -> list[AdapterResidency]:
        """Return the adapters that were registered, moved, pinned or removed since the last call."""
        if not self._changed:
            return []
        changes = [self._residency(digest) for digest in sorted(self._changed)]
        self._changed.clear()
        return changes

    def residencies(self) -> list[AdapterResidency]:
        """Return where each registered adapter is. Removed adapters are not included."""
        return [self._residency(digest) for digest in self.adapter_states()]

    def adapter_start(self, digest: AdapterDigest, prompt_token_ids: Sequence[int]) -> int:
        """Return the position of the first token of a sequence that an adapter changes. An adapter that is not
        registered seems to have no invocation tokens."""
        adapter = self._adapter_by_digest.get(digest)
        return adapter_start(prompt_token_ids, () if adapter is None else adapter.info.invocation_tokens)

    def add_sequence(
        self, digest: AdapterDigest, parts: Sequence[tuple[AdapterDigest, float]] = (), client: str = ""
    ) -> None:
        """Count a new sequence, and request a read of its adapter if necessary.

        `parts` are the digests and weights of the adapters of a sum.

        Raises:
            NotFound: the adapter, or one of the parts, is not registered, or has been removed.
            InvalidArgument: the parts cannot be added.
        """
        adapter = self._adapter_by_digest.get(digest)
        if parts and (adapter is None or adapter.removed):
            adapter = self._register_sum(digest, parts)
        if adapter is None or adapter.removed:
            raise NotFound(
                f"adapter {digest!r} is not loaded ({len(self._adapter_by_digest)} others are); load it first"
            )
        adapter.num_sequences += 1
        if digest not in self._on_host or adapter.client is None:
            adapter.client = client
        self._touch(adapter)
        self.slot_table.touch(digest)
        self._active.add(digest)
        self._mark_needed(digest, adapter)
        self._request_read(digest, adapter)

    def can_run(self, digest: AdapterDigest, now: float, *, is_new: bool) -> bool:
        """Return whether a sequence can run in this step; if not, record the wait. The caller must set `is_new` if the
        sequence was never preempted."""
        if digest in self._on_host and self.slot_table.can_start(digest, is_new=is_new):
            return True
        self.slot_table.mark_waiting(digest, now)
        if (adapter := self._adapter_by_digest[digest]).starved_since is None:
            self._tick += 1
            adapter.starved_since = self._tick
        return False

    def on_start(self, digest: AdapterDigest) -> None:
        """Called when a sequence starts to run, after `can_run` returned True."""
        self.slot_table.on_start(digest)
        self._touch(self._adapter_by_digest[digest])
        self._adapter_by_digest[digest].needed_since = self._adapter_by_digest[digest].starved_since = None

    def get_slot(self, digest: AdapterDigest) -> SlotId:
        """Return the slot of an adapter with running sequences."""
        adapter_slot = self.slot_table.lookup(digest)
        assert adapter_slot is not None
        return adapter_slot

    def on_stop(self, digest: AdapterDigest) -> None:
        """Called when a running sequence finishes or is preempted. The adapter stays in its slot."""
        self.slot_table.on_stop(digest)
        self._mark_needed(digest, self._adapter_by_digest[digest])

    def remove_sequence(self, digest: AdapterDigest) -> None:
        """Called when a sequence ends while it is not running."""
        adapter = self._adapter_by_digest[digest]
        adapter.num_sequences -= 1
        if adapter.num_sequences == self.slot_table.num_running(digest):
            self.slot_table.clear_waiting(digest)
            adapter.needed_since = adapter.starved_since = None
        if adapter.num_sequences == 0:
            self._active.discard(digest)
            if digest not in self.slot_table.slot_pinned_adapters:
                self._read_queue.pop(digest, None)
        self._remove_if_unused(digest, adapter)

    def begin_step(self, now: float) -> None:
        """Assign slots to slot-pinned adapters. Called before the first `can_run` of a step."""
        for digest in sorted(self.slot_table.slot_pinned_adapters):
            if self.slot_table.lookup(digest) is None and digest in self._on_host:
                self.slot_table.assign_slot_pinned(digest)
        self.slot_table.begin_step(now, self._is_on_host_or_reading, self._order_of_need)

    def pop_reads(self) -> list[tuple[AdapterDigest, AdapterSource]]:
        """Return the adapters that must be read from disk now. Only as many are returned as fit in host memory.

        Each is returned once. For each of them, the caller must call `add` or `on_read_failed`.
        """
        reads = []
        while self._read_queue:
            digest = min(self._read_queue, key=self._order_of_need)
            if not self._make_host_room(digest):
                break
            del self._read_queue[digest]
            self._reading.add(digest)
            reads.append((digest, self._source(digest)))
        return reads

    @property
    def host_bytes(self) -> int:
        """Bytes of all host copies, including copies that are being read."""
        return sum(map(self._copy_bytes, (*self._on_host, *self._reading)))

    @property
    def num_host(self) -> int:
        """Adapters in host memory."""
        return len(self._on_host)

    def pop_evicted_copies(self) -> list[AdapterDigest]:
        """Return the adapters whose host copies were evicted since the last call."""
        evicted, self._evicted_copies = self._evicted_copies, []
        return evicted

    def running_adapters(self) -> list[AdapterDigest]:
        """Return the digests of adapters that have running sequences."""
        return sorted(digest for digest in self._active if self.slot_table.num_running(digest))

    def waiting_adapters(self) -> list[AdapterDigest]:
        """Return the digests of adapters that have waiting sequences."""
        return sorted(
            d for d in self._active if self._adapter_by_digest[d].num_sequences > self.slot_table.num_running(d)
        )

    def check_integrity(
        self, num_sequences: Mapping[AdapterDigest, int], num_running: Mapping[AdapterDigest, int]
    ) -> None:
        """Check that the registry does not contradict itself or these counts.

        Otherwise, raise Internal with the counts.
        """
        adapters = self._adapter_by_digest
        on_host = self._on_host
        not_on_host = {d for d, a in adapters.items() if a.num_sequences} - on_host
        violations = {
            "unfinished sequences differ": {d: a.num_sequences for d, a in adapters.items() if a.num_sequences}
            != dict(num_sequences),
            "running sequences differ": {d: self.slot_table.num_running(d) for d in self.running_adapters()}
            != dict(num_running),
            "active adapters differ": self._active != set(num_sequences),
            "a host copy has no adapter": not on_host <= set(adapters),
            "host memory is overcommitted": not self._fits(0, 0),
            "an adapter with a host copy is being read": bool(self._reading & on_host),
            "an adapter with sequences has no host copy and is not being read": not_on_host
            != (set(self._read_queue) | self._reading) & not_on_host,
            "needs differ": any(
                (a.needed_since is not None) != (a.num_sequences > 0 and self.slot_table.num_running(d) == 0)
                for d, a in adapters.items()
            ),
            "an adapter that nothing needs is queued for reading": any(
                self._needed_since(d) is None for d in self._read_queue
            ),
            "an adapter is read twice": bool(self._reading & set(self._read_queue)),
            "an unused removed adapter is registered": any(
                a.removed and not a.num_sequences and d not in self._reading for d, a in adapters.items()
            ),
            "a sum of adapters is registered that nothing needs": any(
                a.parts and not a.num_sequences and d not in self._reading | on_host for d, a in adapters.items()
            ),
            "a sum has an adapter that is not registered": any(
                adapters.get(part) is not registered or registered.removed
                for a in adapters.values()
                for part, registered, _ in a.parts
                if not a.removed
            ),
        }
        present_violations = [violation for violation, is_violated in violations.items() if is_violated]
        if present_violations := present_violations + self.slot_table.integrity_errors(
            on_host, set(self.waiting_adapters())
        ):
            raise Internal(
                f"adapter registry: {'; '.join(present_violations)}: {len(adapters)} adapters, "
                f"{len(on_host)} of at most {self._max_host_loras} host copies, "
                f"{self.host_bytes} bytes of {self._max_host_bytes}, {len(self._reading)} being read, "
                f"{len(self._read_queue)} queued, "
                f"{sum(num_sequences.values())} unfinished sequences, {sum(num_running.values())} running"
            )

    def _residency(self, digest: AdapterDigest) -> AdapterResidency:
        adapter = self._adapter_by_digest.get(digest)
        if adapter is None or adapter.removed:
            return AdapterResidency(digest, "removed")
        is_pinned = digest in self.slot_table.slot_pinned_adapters
        info = adapter.info
        return AdapterResidency(digest, self._state(digest), is_pinned, info.rank, list(info.invocation_tokens))

    def _state(self, digest: AdapterDigest) -> str:
        if self.slot_table.lookup(digest) is not None:
            return "slot"
        return "host" if digest in self._on_host else "disk"

    def _register(self, digest: AdapterDigest, path: Path, slot_pinned: bool, info: AdapterInfo) -> _Adapter:
        pinned, num_pages = self.slot_table.slot_pinned_adapters - {digest}, self.slot_table.num_pages
        if slot_pinned and len(pinned) >= len(self.slot_table):
            raise InvalidArgument(
                f"adapter {digest!r} cannot be pinned: all {len(self.slot_table)} slots are pinned; "
                "raise max_loras or unpin another adapter"
            )
        if slot_pinned and (num_pinned_pages := sum(map(self._num_pages, pinned))) + info.num_pages > num_pages:
            raise InvalidArgument(
                f"adapter {digest!r} cannot be pinned: it needs {info.num_pages} pages of LoRA rank, and other pinned "
                f"adapters have {num_pinned_pages} of {num_pages}; raise max_loaded_lora_ranks or unpin another adapter"
            )
        adapter = self._adapter_by_digest.setdefault(digest, _Adapter(path))
        adapter.path, adapter.removed = path, False
        self.slot_table.set_slot_pinned(digest, slot_pinned)
        if not slot_pinned and not adapter.num_sequences:
            self._read_queue.pop(digest, None)
        self._touch(adapter)
        return adapter

    def _register_sum(self, digest: AdapterDigest, parts: Sequence[tuple[AdapterDigest, float]]) -> _Adapter:
        registered = [(part, self._adapter_by_digest.get(part), weight) for part, weight in parts]
        known = [(part, a, weight) for part, a, weight in registered if a is not None and not a.removed]
        if missing := {part for part, _ in parts} - {part for part, _, _ in known}:
            raise NotFound(f"adapter {min(missing)!r} of a sum is not loaded; load it first")
        info = combined_info([part.info for _, part, _ in known], self._max_rank)
        adapter = self._adapter_by_digest.setdefault(digest, _Adapter(Path()))
        if digest not in self._on_host:
            adapter.info = info
        adapter.parts, adapter.removed = tuple(known), False
        self._changed.add(digest)
        return adapter

    def _sums_of(self, digest: AdapterDigest) -> list[AdapterDigest]:
        """Return the sums that an adapter is a part of."""
        return [d for d, a in self._adapter_by_digest.items() if any(part == digest for part, *_ in a.parts)]

    def _source(self, digest: AdapterDigest) -> AdapterSource:
        adapter = self._adapter_by_digest[digest]
        return tuple(WeightedFolder(part.path, weight) for _, part, weight in adapter.parts) or adapter.path

    def _add_host_copy(self, digest: AdapterDigest, adapter: _Adapter) -> bool:
        if not self._make_host_room(digest):
            self._request_read(digest, adapter)
            return False
        self._read_queue.pop(digest, None)
        self._on_host.add(digest)
        self._changed.add(digest)
        return True

    def _needed_since(self, digest: AdapterDigest) -> float | None:
        """Return the tick at which a host copy began to be needed.

        Return inf for an idle pinned adapter, and None if no copy is needed.
        """
        needed_since = self._adapter_by_digest[digest].needed_since
        if needed_since is None and digest in self.slot_table.slot_pinned_adapters:
            return math.inf
        return needed_since

    def _is_on_host_or_reading(self, digest: AdapterDigest) -> bool:
        return digest in self._on_host or digest in self._reading

    def _order_of_need(self, digest: AdapterDigest) -> float:
        """Return the sort key of an adapter; adapters with lower keys get host copies and reserved slots first."""
        needed_since = self._needed_since(digest)
        return math.inf if needed_since is None else needed_since

    def _mark_needed(self, digest: AdapterDigest, adapter: _Adapter) -> None:
        if adapter.needed_since is None and self.slot_table.num_running(digest) == 0:
            # Sequences can wait while other sequences of the same adapter run. starved_since also counts that time, so
            # that adapters get host copies in the same order as slots.
            self._tick += 1
            adapter.needed_since = adapter.starved_since or self._tick

    def _request_read(self, digest: AdapterDigest, adapter: _Adapter) -> None:
        is_needed = adapter.num_sequences > 0 or digest in self.slot_table.slot_pinned_adapters
        if is_needed and digest not in self._on_host and digest not in self._reading:
            self._read_queue.setdefault(digest)

    def _touch(self, adapter: _Adapter) -> None:
        self._tick += 1
        adapter.last_used = self._tick

    def _copy_bytes(self, digest: AdapterDigest) -> int:
        return self._adapter_by_digest[digest].info.num_bytes

    def _num_pages(self, digest: AdapterDigest) -> int:
        return self._adapter_by_digest[digest].info.num_pages

    def _fits(self, num_copies: int, num_bytes: int) -> bool:
        """Return whether `num_copies` further copies fit if they have `num_bytes` bytes in total."""
        if len(self._on_host) + len(self._reading) + num_copies > self._max_host_loras:
            return False
        return self._max_host_bytes is None or self.host_bytes + num_bytes <= self._max_host_bytes

    def _make_host_room(self, digest: AdapterDigest) -> bool:
        """Ensure that the host copy of an adapter fits. If necessary, evict copies of adapters that are not needed or
        have been needed for a shorter time. If even this would not free enough memory, evict nothing and return False.
        """
        needed_since, num_bytes = self._needed_since(digest), self._copy_bytes(digest)
        if self._fits(1, num_bytes):
            return True
        protected_clients = self._protected_clients(digest)
        can_evict_slot_pinned = self.slot_table.can_evict_slot_pinned or (
            needed_since not in (None, math.inf) and not self._fits_beside_slot_pinned(digest)
        )
        candidates = sorted(
            (d for d in self._on_host if self._is_evictable(d, needed_since, protected_clients, can_evict_slot_pinned)),
            key=lambda candidate: self._eviction_key(candidate, protected_clients),
        )
        for num_victims in range(1, len(candidates) + 1):
            victims = candidates[:num_victims]
            if self._fits(1 - len(victims), num_bytes - sum(map(self._copy_bytes, victims))):
                for victim in victims:
                    self._evict_host_copy(victim)
                    self._remove_if_unused(victim, self._adapter_by_digest[victim])
                return True
        return False

    def _fits_beside_slot_pinned(self, digest: AdapterDigest) -> bool:
        """Return whether the host copy of an adapter fits if those of the slot-pinned adapters stay."""
        num_bytes = sum(map(self._copy_bytes, {digest, *(self.slot_table.slot_pinned_adapters & self._on_host)}))
        return self._max_host_bytes is None or num_bytes <= self._max_host_bytes

    def _protected_clients(self, newcomer: AdapterDigest) -> set[str]:
        """Return the clients that have at most an equal share of the host copies, in number and bytes, with the copy of
        the newcomer. A client that is alone has nothing to share."""
        counts, sizes = Counter[str](), Counter[str]()
        for digest in {newcomer, *self._on_host, *self._reading}:
            if (client := self._adapter_by_digest[digest].client) is not None:
                counts[client] += 1
                sizes[client] += self._copy_bytes(digest)
        if len(counts) < 2:
            return set()
        max_count, max_bytes = self._max_host_loras / len(counts), (self._max_host_bytes or math.inf) / len(counts)
        return {client for client in counts if counts[client] <= max_count and sizes[client] <= max_bytes}

    def _eviction_key(
        self, digest: AdapterDigest, protected_clients: Collection[str]
    ) -> tuple[bool, int, bool, bool, bool, int, str]:
        """Return the sort key of a host copy; the lowest is evicted first."""
        adapter, in_slot = self._adapter_by_digest[digest], self.slot_table.lookup(digest) is not None
        need = adapter.needed_since is not None, -(adapter.needed_since or 0)
        is_slot_pinned = digest in self.slot_table.slot_pinned_adapters
        return *need, is_slot_pinned, adapter.client in protected_clients, in_slot, adapter.last_used, digest

    def _is_evictable(
        self,
        digest: AdapterDigest,
        needed_since: float | None,
        protected_clients: Collection[str],
        can_evict_slot_pinned: bool,
    ) -> bool:
        """Return whether a host copy can be evicted to make room for a copy that has been needed since the tick
        `needed_since`. A copy that nothing needs yet does not evict one of a protected client: when a sequence needs
        it, it counts against the share of its client."""
        adapter, is_slot_pinned = self._adapter_by_digest[digest], digest in self.slot_table.slot_pinned_adapters
        is_kept = is_slot_pinned or self.slot_table.lookup(digest) is not None or adapter.client in protected_clients
        if needed_since is None and is_kept:
            return False
        if self.slot_table.num_running(digest) or (is_slot_pinned and not can_evict_slot_pinned):
            return False
        return adapter.needed_since is None or (needed_since is not None and adapter.needed_since > needed_since)

    def _evict_host_copy(self, digest: AdapterDigest) -> None:
        adapter = self._adapter_by_digest[digest]
        self.slot_table.evict(digest, count_eviction=not adapter.removed)
        self._on_host.remove(digest)
        self._changed.add(digest)
        self._evicted_copies.append(digest)
        self._request_read(digest, adapter)

    def _remove_if_unused(self, digest: AdapterDigest, adapter: _Adapter) -> bool:
        """Unregister an adapter if it was removed, or is a sum without host copy, has no sequences and is not being
        read."""
        is_needed = not (adapter.removed or (adapter.parts and digest not in self._on_host))
        if is_needed or adapter.num_sequences or digest in self._reading:
            return False
        if digest in self._on_host:
            self._evict_host_copy(digest)
        self._read_queue.pop(digest, None)
        del self._adapter_by_digest[digest]
        if adapter.parts:
            self._changed.add(digest)
        return True
