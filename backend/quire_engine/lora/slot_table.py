# SPDX-License-Identifier: Apache-2.0
"""Table of adapter slots: knows which adapter is in which device slot, and decides which adapter gets a slot next.

The table is a part of the adapter registry. It contains only this policy: it does not hold weights or host memory. It
does not know individual sequences, only the number of running sequences of each adapter. An adapter with running
sequences keeps its slot. When an adapter needs a slot, the least recently used idle adapter loses its slot.
"""

from collections.abc import Callable
from dataclasses import dataclass

from quire_engine.sequence import SlotId
from quire_engine.step.plan import SlotLoad
from quire_spec.constants import AdapterDigest

RESERVE_AFTER_S = 1.0
"""Seconds that an adapter waits for a slot before a slot is reserved for it.

The reservation is not immediate, because draining a slot breaks up the batch of the slot's current adapter. A user
perceives about one second as a hang. In contrast, a step or a copy into a slot takes milliseconds.
"""


@dataclass(slots=True)
class _Slot:
    digest: AdapterDigest | None = None
    num_running: int = 0
    last_used: int = 0
    """Tick at which a sequence of the slot's adapter last arrived or started. The slot with the lowest tick is evicted
    first."""
    last_started: int = 0
    """Tick at which a sequence of the slot's adapter last started. The slot with the lowest tick is drained first."""
    loading: bool = False
    """True while an adapter is copied into the slot. If `digest` is None, the adapter was evicted during the copy.
    """
    held_for_waiters: bool = False
    """True if the slot's adapter was loaded for waiting sequences, and none of them has started yet. Until one of them
    starts, no other adapter gets the slot.
    """

    @property
    def is_idle(self) -> bool:
        return not (self.num_running or self.loading or self.held_for_waiters)


class SlotTable:
    """A fixed number of slots.

    Loads. A slot is filled while steps run. For this, the owner makes the copies that `pop_loads` returns, and calls
    `on_loaded` after each of them. Until `on_loaded` is called, the sequences of the adapter wait. After the call, the
    slot is held until the first of these sequences starts, so that no later adapter can take the slot.

    Fairness. A slot is reserved for an adapter that has waited longer than RESERVE_AFTER_S. If there is an idle slot,
    this slot is reserved. Otherwise, a slot with running sequences is reserved: the one whose last sequence started
    longest ago. From then on, no new sequences of the slot's current adapter start, so the slot drains. Only the
    sequence for which the current adapter was loaded can still start. An idle slot waits for its new adapter only if
    the new adapter has a host copy or is being read; otherwise, other adapters can use the slot. At most half of the
    slots are reserved at a time, for the adapters that have waited longest. The other slots keep their large batches.
    Therefore, if D adapters wait and R slots can be reserved, the last adapter gets its slot after at most ceil(D / R)
    drains. A drain takes as long as the longest sequence in the slot, plus one load.

    Slot pins. A slot-pinned adapter gets a slot before a sequence needs it, and keeps it while idle. It loses its
    slot while idle only if all slots are pinned, because serving requests has priority over keeping adapters warm.
    """

    def __init__(self, num_slots: int, changed: set[AdapterDigest] | None = None) -> None:
        """Create empty slots. The table adds to `changed` each adapter whose slot or pin changes."""
        self._changed: set[AdapterDigest] = set() if changed is None else changed
        self._slots = [_Slot() for _ in range(num_slots)]
        self._slot_by_digest: dict[AdapterDigest, SlotId] = {}
        self._slot_pinned: set[AdapterDigest] = set()
        self._tick = 0
        self._max_reserved = max(1, num_slots // 2)
        # For each adapter that waits, the time in monotonic seconds at which the wait began. The oldest comes first.
        self._waiting_since: dict[AdapterDigest, float] = {}
        self._reservations: dict[SlotId, AdapterDigest] = {}
        # Adapters for which a slot is reserved, and which have a host copy or are being read.
        self._usable_reservations: set[AdapterDigest] = set()
        # Adapters for which no slot was found in this step. It is useless to search again, because no slot becomes free
        # while a step is planned.
        self._without_slot: set[AdapterDigest] = set()
        self._pending_loads: list[SlotLoad] = []
        self.num_evictions = 0
        """Number of times that an adapter lost its slot because another adapter needed the slot or the host memory.
        """
        self._evicted: list[AdapterDigest] = []

    def __len__(self) -> int:
        return len(self._slots)

    def lookup(self, digest: AdapterDigest) -> SlotId | None:
        """Return the slot of an adapter, or None."""
        return self._slot_by_digest.get(digest)

    def adapters_in_slots(self) -> list[AdapterDigest]:
        """Return the adapters in slots, in the order of the slots."""
        return [slot.digest for slot in self._slots if slot.digest is not None]

    def num_running(self, digest: AdapterDigest) -> int:
        """Return how many sequences of an adapter are running."""
        slot = self._slot_by_digest.get(digest)
        return 0 if slot is None else self._slots[slot].num_running

    @property
    def slot_pinned_adapters(self) -> frozenset[AdapterDigest]:
        """Slot-pinned adapters, with or without a slot."""
        return frozenset(self._slot_pinned)

    @property
    def can_evict_slot_pinned(self) -> bool:
        """True if all slots are pinned, so that idle slot-pinned adapters can be evicted."""
        return len(self._slot_pinned) >= len(self._slots)

    def set_slot_pinned(self, digest: AdapterDigest, slot_pinned: bool) -> None:
        """Set or clear the slot pin of an adapter."""
        self._changed.add(digest)
        (self._slot_pinned.add if slot_pinned else self._slot_pinned.discard)(digest)

    def touch(self, digest: AdapterDigest) -> None:
        """Mark an adapter as recently used, because one of its sequences arrived."""
        if (slot := self._slot_by_digest.get(digest)) is not None:
            self._tick += 1
            self._slots[slot].last_used = self._tick

    def begin_step(
        self,
        now: float,
        is_on_host_or_reading: Callable[[AdapterDigest], bool],
        order_of_need: Callable[[AdapterDigest], float],
    ) -> None:
        """Reserve slots for adapters that have waited too long. Called before the first `can_start` of a step.

        Args:
            now: monotonic seconds.
            is_on_host_or_reading: returns whether an adapter has a host copy or is being read. Slots are reserved for
                these adapters first.
            order_of_need: returns a sort key for an adapter. Adapters with lower keys get host copies first, and slots
                are reserved in the same order. If the orders differed, an adapter with a host copy could take a slot
                that is reserved for another adapter, and could start only one sequence there.
        """
        self._without_slot.clear()
        if self._waiting_since and len(self._reservations) < self._max_reserved:
            self._reserve_slots(now, is_on_host_or_reading, order_of_need)
        self._usable_reservations = {digest for digest in self._reservations.values() if is_on_host_or_reading(digest)}

    def assign_slot_pinned(self, digest: AdapterDigest) -> None:
        """Assign a slot to a slot-pinned adapter before a sequence needs it, if a slot is free."""
        slot = self._find_idle_slot(digest, can_evict_slot_pinned=False)
        if slot is not None:
            self._assign(digest, slot)

    def can_start(self, digest: AdapterDigest, *, is_new: bool) -> bool:
        """Return whether the adapter is in a slot and a sequence can start. The caller must set `is_new` if the
        sequence was never preempted.

        If the adapter has no slot, it gets one if possible. The sequence can then start in a later step.
        """
        slot = self._slot_by_digest.get(digest)
        if slot is not None:
            state = self._slots[slot]
            # If a slot is held for waiting sequences, they can start even if the slot has been reserved for another
            # adapter. No other adapter can take a slot that is held, so otherwise both adapters would wait forever.
            return not state.loading and (
                state.held_for_waiters or not (is_new and self._reserved_for_other(slot, digest))
            )
        if digest not in self._without_slot:
            if (idle_slot := self._find_idle_slot(digest)) is None:
                self._without_slot.add(digest)
            else:
                self._assign(digest, idle_slot)
        return False

    def on_start(self, digest: AdapterDigest) -> SlotId:
        """Called when a sequence starts to run, after `can_start` returned True."""
        slot = self._slot_by_digest[digest]
        self._tick += 1
        state = self._slots[slot]
        assert not state.loading, "on_start without can_start"
        state.num_running += 1
        state.last_used = state.last_started = self._tick
        self.clear_waiting(digest)
        return slot

    def on_stop(self, digest: AdapterDigest) -> None:
        """Called when a running sequence finishes or is preempted. The adapter stays in its slot."""
        state = self._slots[self._slot_by_digest[digest]]
        state.num_running -= 1
        assert state.num_running >= 0

    def mark_waiting(self, digest: AdapterDigest, now: float) -> None:
        """Record that a sequence could not run because of its adapter."""
        self._waiting_since.setdefault(digest, now)

    def clear_waiting(self, digest: AdapterDigest) -> None:
        """Record that the adapter's last waiting sequence no longer waits."""
        self._waiting_since.pop(digest, None)
        self._reservations = {slot: other for slot, other in self._reservations.items() if other != digest}
        if (slot := self._slot_by_digest.get(digest)) is not None:
            self._slots[slot].held_for_waiters = False

    def evict(self, digest: AdapterDigest, *, count_eviction: bool = False) -> None:
        """Empty the slot of an idle adapter; do nothing if the adapter has no slot. The caller must set
        `count_eviction` if another adapter needs the slot or the memory."""
        slot = self._slot_by_digest.pop(digest, None)
        if slot is not None:
            self._changed.add(digest)
            if count_eviction:
                self.num_evictions += 1
                self._evicted.append(digest)
            state = self._slots[slot]
            assert state.num_running == 0
            copy_in_progress = state.loading and all(
                slot_load.adapter_slot != slot for slot_load in self._pending_loads
            )
            self._pending_loads = [load for load in self._pending_loads if load.adapter_slot != slot]
            self._slots[slot] = _Slot(loading=copy_in_progress)

    def pop_loads(self) -> list[SlotLoad]:
        """Return the copies into slots that the caller must make now. After each copy, the caller must call
        `on_loaded`."""
        slot_loads, self._pending_loads = self._pending_loads, []
        return slot_loads

    def pop_evicted(self) -> list[AdapterDigest]:
        """Return the adapters that lost their slot since the last call."""
        evicted, self._evicted = self._evicted, []
        return evicted

    def on_loaded(self, slot_load: SlotLoad, succeeded: bool = True) -> None:
        """Called when a copy into a slot is complete. If it failed, the slot becomes empty."""
        state = self._slots[slot_load.adapter_slot]
        assert state.loading
        state.loading = False
        state.held_for_waiters = state.digest in self._waiting_since
        if not succeeded and state.digest is not None:
            self.evict(state.digest)

    def integrity_errors(self, on_host: set[AdapterDigest], waiting: set[AdapterDigest]) -> list[str]:
        """Return the violated invariants; the arguments are the adapters with host copies and the adapters with waiting
        sequences."""
        digests = {s.digest: SlotId(i) for i, s in enumerate(self._slots) if s.digest is not None}
        violations = {
            "slots and adapters do not match": digests != self._slot_by_digest,
            "an empty slot has running sequences": any(s.digest is None and s.num_running for s in self._slots),
            "an adapter in a slot has no host copy": not set(digests) <= on_host,
            "an adapter is marked as waiting without waiting sequences": not set(self._waiting_since) <= waiting,
            "a slot is reserved for an adapter that does not wait": not set(self._reservations.values())
            <= set(self._waiting_since),
            "an adapter has two slots reserved": len(set(self._reservations.values())) < len(self._reservations),
            "too many slots are reserved": len(self._reservations) > self._max_reserved,
            "a pending load goes to the slot of another adapter": any(
                self._slot_by_digest.get(x.adapter_digest) != x.adapter_slot or not self._slots[x.adapter_slot].loading
                for x in self._pending_loads
            ),
            "a sequence runs while its slot is being loaded": any(s.loading and s.num_running for s in self._slots),
            "a slot is held without waiting sequences": any(
                s.held_for_waiters and s.digest not in self._waiting_since for s in self._slots
            ),
        }
        return [violation for violation, is_violated in violations.items() if is_violated]

    def _reserve_slots(
        self,
        now: float,
        is_on_host_or_reading: Callable[[AdapterDigest], bool],
        order_of_need: Callable[[AdapterDigest], float],
    ) -> None:
        """Reserve slots for overdue adapters without a slot. Adapters that have a host copy or are being read
        come first. In each of the two groups, adapters that have been needed longer come first.
        """
        served_digests = {*self._reservations.values(), *self._slot_by_digest}
        overdue = [
            d
            for d, waiting_since in self._waiting_since.items()
            if now - waiting_since >= RESERVE_AFTER_S and d not in served_digests
        ]
        overdue.sort(key=lambda d: (not is_on_host_or_reading(d), order_of_need(d)))
        for digest in overdue[: self._max_reserved - len(self._reservations)]:
            if (slot := self._slot_to_reserve(digest)) is None:
                return
            self._reservations[slot] = digest

    def _reserved_for_other(self, slot: SlotId, digest: AdapterDigest) -> bool:
        reserved_for = self._reservations.get(slot, digest)
        return reserved_for != digest and (
            reserved_for in self._usable_reservations or self._slots[slot].num_running > 0
        )

    def _find_idle_slot(self, digest: AdapterDigest, *, can_evict_slot_pinned: bool | None = None) -> SlotId | None:
        """Return an empty slot for the adapter. If there is none, return the least recently used idle slot.

        Return None if the adapter can get neither.
        """
        can_evict_slot_pinned = self.can_evict_slot_pinned if can_evict_slot_pinned is None else can_evict_slot_pinned
        idle_slots = [
            (state.digest is not None, state.digest in self._slot_pinned, state.last_used, SlotId(i))
            for i, state in enumerate(self._slots)
            if state.is_idle
            and (can_evict_slot_pinned or state.digest not in self._slot_pinned)
            and not self._reserved_for_other(SlotId(i), digest)
        ]
        return min(idle_slots)[3] if idle_slots else None

    def _slot_to_reserve(self, digest: AdapterDigest) -> SlotId | None:
        """Return an idle slot. If there is none, return a slot with running sequences: the one whose last sequence
        started longest ago.

        Return None if no slot is left.
        """
        unreserved = [(s, SlotId(i)) for i, s in enumerate(self._slots) if i not in self._reservations]
        candidates = [(s, i) for s, i in unreserved if self.can_evict_slot_pinned or s.digest not in self._slot_pinned]
        slot = self._find_idle_slot(digest)
        if slot is not None and slot not in self._reservations:
            return slot
        return min(((s.last_started, i) for s, i in candidates if s.num_running), default=(0, None))[1]

    def _assign(self, digest: AdapterDigest, slot: SlotId) -> None:
        evicted_digest = self._slots[slot].digest
        if evicted_digest is not None:
            self.evict(evicted_digest, count_eviction=True)
        self._tick += 1
        self._slots[slot] = _Slot(digest, last_used=self._tick, last_started=self._tick, loading=True)
        self._slot_by_digest[digest] = slot
        self._changed.add(digest)
        self._pending_loads.append(SlotLoad(digest, slot))
