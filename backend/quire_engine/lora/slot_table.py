# SPDX-License-Identifier: Apache-2.0
"""Table of adapter slots: knows which adapter is in which device slot, and decides which adapter gets a slot next.

The table is a part of the adapter registry. It contains only this policy: it does not hold weights or host memory. It
does not know individual sequences, only the number of running sequences of each adapter. An adapter with running
sequences keeps its slot. When an adapter needs a slot or pages, the least recently used idle adapters lose their slots.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass

from quire_engine.lora.slot_pages import choose_victims, find_pages
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
    pages: range = range(0)
    """The pages of its adapter, also while a copy into the slot runs of an adapter that was evicted."""
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


@dataclass(frozen=True, slots=True)
class _Reservation:
    """The slot and the pages that an adapter gets next. Adapters that have them now are drained."""

    slot: SlotId
    pages: range

    def touches(self, slot: SlotId, pages: range) -> bool:
        """Return whether an adapter in `slot`, with these pages, must leave."""
        return slot == self.slot or bool(range(max(pages.start, self.pages.start), min(pages.stop, self.pages.stop)))


class SlotTable:
    """A fixed number of slots, which share a fixed number of pages.

    Pages. An adapter in a slot has as many consecutive pages as it needs. Evicted are the least recently used idle
    adapters that leave a slot and enough consecutive pages, and no others.

    Loads. A slot is filled while steps run. For this, the owner makes the copies that `pop_loads` returns, and calls
    `on_loaded` after each of them. Until `on_loaded` is called, the sequences of the adapter wait. After the call, the
    slot is held until the first of these sequences starts, so that no later adapter can take the slot.

    Fairness. A slot and pages are reserved for an adapter that has waited longer than RESERVE_AFTER_S. If it is enough
    that idle adapters leave, theirs are reserved. Otherwise, adapters with running sequences must leave, too: those
    whose last sequence started longest ago. From then on, no new sequences of these adapters start, so their slots
    drain. Only the sequence for which an adapter was loaded can still start. An idle slot waits for its new adapter
    only if the new adapter has a host copy or is being read; otherwise, other adapters can use the slot and the pages.
    At most half of the slots are reserved at a time, for the adapters that have waited longest. More slots drain only
    if a single adapter needs their pages. The other slots keep their large batches.
    Therefore, if D adapters wait and R slots can be reserved, the last adapter gets its slot after at most ceil(D / R)
    drains. A drain takes as long as the longest sequence in the slot, plus one load.

    Slot pins. A slot-pinned adapter gets a slot before a sequence needs it, and keeps it while idle. It loses its
    slot while idle only if all slots are pinned, or if another adapter needs pages that only pinned adapters have,
    because serving requests has priority over keeping adapters warm.
    """

    def __init__(
        self,
        num_slots: int,
        changed: set[AdapterDigest] | None = None,
        num_pages: int = 0,
        count_pages: Callable[[AdapterDigest], int] = lambda digest: 0,
    ) -> None:
        """Create empty slots. The table adds to `changed` each adapter whose slot or pin changes.

        `count_pages` returns how many of the `num_pages` pages an adapter needs. By default, pages are not limited.
        """
        self.num_pages = num_pages
        self._count_pages = count_pages
        self._changed: set[AdapterDigest] = set() if changed is None else changed
        self._slots = [_Slot() for _ in range(num_slots)]
        self._slot_by_digest: dict[AdapterDigest, SlotId] = {}
        self._slot_pinned: set[AdapterDigest] = set()
        self._tick = 0
        self._max_reserved = max(1, num_slots // 2)
        # For each adapter that waits, the time in monotonic seconds at which the wait began. The oldest comes first.
        self._waiting_since: dict[AdapterDigest, float] = {}
        self._reservations: dict[AdapterDigest, _Reservation] = {}
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
    def num_used_pages(self) -> int:
        """Pages of the adapters in slots."""
        return sum(len(slot.pages) for slot in self._slots)

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
        for digest in [d for d in self._reservations if not self._can_drain(d)]:
            del self._reservations[digest]
        if self._waiting_since and len(self._reservations) < self._max_reserved:
            self._reserve_slots(now, is_on_host_or_reading, order_of_need)
        self._usable_reservations = {digest for digest in self._reservations if is_on_host_or_reading(digest)}

    def assign_slot_pinned(self, digest: AdapterDigest) -> None:
        """Assign a slot to a slot-pinned adapter before a sequence needs it, if a slot is free."""
        self._assign(digest, can_evict_slot_pinned=False)

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
        if digest not in self._without_slot and not self._assign(digest, self._may_evict_slot_pinned(digest)):
            self._without_slot.add(digest)
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
        self._reservations.pop(digest, None)
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
            pages = state.pages if copy_in_progress else range(0)
            self._slots[slot] = _Slot(pages=pages, loading=copy_in_progress)

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
        if state.digest is None:
            state.pages = range(0)
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
            "two slots have the same pages": len({page for s in self._slots for page in s.pages}) < self.num_used_pages,
            "an adapter has other pages than it needs": any(
                s.digest is not None and len(s.pages) != self._count_pages(s.digest) for s in self._slots
            ),
            "a slot is reserved for an adapter that does not wait": not set(self._reservations)
            <= set(self._waiting_since),
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
        served_digests = {*self._reservations, *self._slot_by_digest}
        overdue = [
            d
            for d, waiting_since in self._waiting_since.items()
            if now - waiting_since >= RESERVE_AFTER_S and d not in served_digests
        ]
        overdue.sort(key=lambda d: (not is_on_host_or_reading(d), order_of_need(d)))
        for digest in overdue[: self._max_reserved - len(self._reservations)]:
            if (reservation := self._find_reservation(digest)) is None:
                return
            self._reservations[digest] = reservation

    def _drained_slots(self, reservation: _Reservation) -> list[SlotId]:
        return [SlotId(i) for i, s in enumerate(self._slots) if reservation.touches(SlotId(i), s.pages)]

    def _can_drain(self, digest: AdapterDigest) -> bool:
        """Return whether the adapters can leave that have the slot and the pages that are reserved for an adapter."""
        slots = (self._slots[slot] for slot in self._drained_slots(self._reservations[digest]))
        return self._may_evict_slot_pinned(digest) or all(slot.digest not in self._slot_pinned for slot in slots)

    def _reserved_for_other(self, slot: SlotId, digest: AdapterDigest) -> bool:
        state = self._slots[slot]
        owners = [d for d, reservation in self._reservations.items() if reservation.touches(slot, state.pages)]
        return digest not in owners and any(d in self._usable_reservations or state.num_running for d in owners)

    def _may_evict_slot_pinned(self, digest: AdapterDigest) -> bool:
        """Return whether an adapter with sequences can get no slot or no pages beside the slot-pinned adapters."""
        if self.can_evict_slot_pinned:
            return True
        pinned_pages = [slot.pages for slot in self._slots if slot.digest in self._slot_pinned]
        return find_pages(pinned_pages, self.num_pages, self._count_pages(digest)) is None

    def _find_place(
        self, digest: AdapterDigest, vacated: Collection[SlotId], respected: Collection[AdapterDigest]
    ) -> _Reservation | None:
        """Return the slot and the pages that an adapter would get if the `vacated` slots were empty, or None. It does
        not get those that are reserved for the adapters in `respected`."""
        reservations = [r for d, r in self._reservations.items() if d != digest and d in respected]
        reserved_slots = {reservation.slot for reservation in reservations}
        free_slots = [
            (state.digest is not None, SlotId(i))
            for i, state in enumerate(self._slots)
            if (i in vacated or (state.digest is None and state.is_idle)) and i not in reserved_slots
        ]
        if not free_slots:
            return None
        taken = [slot.pages for i, slot in enumerate(self._slots) if i not in vacated]
        taken += [reservation.pages for reservation in reservations]
        pages = find_pages(taken, self.num_pages, self._count_pages(digest))
        return None if pages is None else _Reservation(min(free_slots)[1], pages)

    def _idle_slots(self, can_evict_slot_pinned: bool) -> list[SlotId]:
        """Return the slots of adapters that can be evicted now, the least recently used first."""
        idle_slots = [
            (state.digest in self._slot_pinned, state.last_used, SlotId(i))
            for i, state in enumerate(self._slots)
            if state.digest is not None
            and state.is_idle
            and (can_evict_slot_pinned or state.digest not in self._slot_pinned)
        ]
        return [slot for *_, slot in sorted(idle_slots)]

    def _find_reservation(self, digest: AdapterDigest) -> _Reservation | None:
        """Return the slot and the pages to reserve for an adapter, or None if there are none without those that are
        reserved already."""
        can_evict_slot_pinned, reservations = self._may_evict_slot_pinned(digest), self._reservations
        running_slots = sorted(
            (state.last_started, SlotId(i))
            for i, state in enumerate(self._slots)
            if state.num_running and (can_evict_slot_pinned or state.digest not in self._slot_pinned)
        )
        candidates = [*self._idle_slots(can_evict_slot_pinned), *(slot for _, slot in running_slots)]
        drained = {slot for reservation in reservations.values() for slot in self._drained_slots(reservation)}
        candidates = [slot for slot in candidates if slot not in drained]
        victims = choose_victims(candidates, lambda slots: self._find_place(digest, slots, reservations) is not None)
        if victims is None or (drained and len(drained) + len(victims) > self._max_reserved):
            return None
        return self._find_place(digest, victims, reservations)

    def _assign(self, digest: AdapterDigest, can_evict_slot_pinned: bool) -> bool:
        """Give an adapter a slot and pages, if it can get them without running adapters losing theirs."""
        idle_slots = [
            slot for slot in self._idle_slots(can_evict_slot_pinned) if not self._reserved_for_other(slot, digest)
        ]
        usable = self._usable_reservations
        victims = choose_victims(idle_slots, lambda slots: self._find_place(digest, slots, usable) is not None)
        if victims is None:
            return False
        for slot in victims:
            if (evicted_digest := self._slots[slot].digest) is not None:
                self.evict(evicted_digest, count_eviction=True)
        place = self._find_place(digest, (), usable)
        assert place is not None
        self._tick += 1
        self._slots[place.slot] = _Slot(
            digest, place.pages, last_used=self._tick, last_started=self._tick, loading=True
        )
        self._slot_by_digest[digest] = place.slot
        self._changed.add(digest)
        self._pending_loads.append(SlotLoad(digest, place.slot, place.pages.start))
        return True
