# SPDX-License-Identifier: Apache-2.0
"""SlotTable: which adapter is in which device slot, and who gets a slot next. Part of the adapter registry.

Policy only: no weights, no host memory, no sequences, just how many of them run per adapter. An adapter that runs
keeps its slot; an idle one loses it when somebody else needs it, least recently used first.
"""

from collections.abc import Callable
from dataclasses import dataclass

from quire_engine.sequence import SlotId
from quire_engine.step.plan import SlotLoad

RESERVE_AFTER_S = 1.0
"""How long an adapter may wait for a slot before one is reserved for it.

A slot changes hands at the cost of the batch that its adapter had built up, so not at once; a second is about what a
person takes for 'it hangs', and long against a step and a copy into a slot (milliseconds).
"""


@dataclass(slots=True)
class _Slot:
    digest: str | None = None
    num_running: int = 0
    last_used: int = 0
    """Tick of the last arrival or start; the lowest is given up first."""
    last_started: int = 0
    """Tick of the last start; the lowest is drained first."""
    loading: bool = False
    """A copy into it is under way, for `digest` or, if None, for an adapter that is gone meanwhile."""
    held_for_waiters: bool = False
    """Loaded for sequences that have not begun to run: nobody else takes it until they do or are over."""

    @property
    def is_idle(self) -> bool:
        return not (self.num_running or self.loading or self.held_for_waiters)


class SlotTable:
    """A fixed number of slots.

    Loads. A slot is filled beside the steps, by whoever carries out `take_loads` and answers `loaded`; until then its
    sequences wait. It is then kept for them until the first runs, so that nobody who comes meanwhile takes it away.

    Fairness. An adapter that has waited for a slot longer than RESERVE_AFTER_S gets one reserved: an idle one, or that
    of the running adapter whose last start is longest ago. A reserved slot takes no new sequences of the adapter in it,
    the first one that it was filled for excepted, so it drains. Once idle, it waits for its adapter only when that is
    in host memory or on its way there; otherwise whoever can use it, may. At most half of the slots are reserved at a
    time, for those who have waited longest: the others go on building up large batches. So of D adapters that wait, the
    last has its slot after at most ceil(D / R) drains, R being the slots that may be reserved, and a drain the longest
    sequence and a load.

    Pins. A pinned adapter is placed before any sequence asks and keeps its slot while idle. Only when every slot is
    pinned an idle pinned adapter yields to others: a promise to serve goes before one to keep warm.
    """

    def __init__(self, num_slots: int) -> None:
        self._slots = [_Slot() for _ in range(num_slots)]
        self._slot_by_digest: dict[str, SlotId] = {}
        self._pinned: set[str] = set()
        self._tick = 0
        self._max_reserved = max(1, num_slots // 2)
        # Since when an adapter waits, oldest first.
        self._waiting_since: dict[str, float] = {}
        self._reservations: dict[SlotId, str] = {}
        # Adapters with a reserved slot that could use it, or soon will.
        self._usable_reservations: set[str] = set()
        # Adapters for which this step's search failed: slots only fill up while a step is planned.
        self._without_slot: set[str] = set()
        self._pending_loads: list[SlotLoad] = []
        self.num_evictions = 0
        """Adapters that lost their slot, or the host copy that goes with it, to another one."""
        self._evicted: list[str] = []

    def __len__(self) -> int:
        return len(self._slots)

    def lookup(self, digest: str) -> SlotId | None:
        """Slot of an adapter."""
        return self._slot_by_digest.get(digest)

    def resident_adapters(self) -> list[str]:
        """Adapters in slots, in the order of the slots."""
        return [slot.digest for slot in self._slots if slot.digest is not None]

    def num_running(self, digest: str) -> int:
        """Running sequences of an adapter."""
        slot = self._slot_by_digest.get(digest)
        return 0 if slot is None else self._slots[slot].num_running

    @property
    def pinned_adapters(self) -> frozenset[str]:
        """Pinned adapters, placed or not."""
        return frozenset(self._pinned)

    @property
    def can_evict_pinned(self) -> bool:
        """True when every slot is pinned, so that idle pinned adapters make room."""
        return len(self._pinned) >= len(self._slots)

    def set_pinned(self, digest: str, pinned: bool) -> None:
        """Set or clear an adapter's pin."""
        (self._pinned.add if pinned else self._pinned.discard)(digest)

    def touch(self, digest: str) -> None:
        """A sequence of the adapter arrived: it is worth keeping."""
        if (slot := self._slot_by_digest.get(digest)) is not None:
            self._tick += 1
            self._slots[slot].last_used = self._tick

    def begin_step(self, now: float, is_on_host_or_reading: Callable[[str], bool]) -> None:
        """Before a step's first `can_start`: reserve slots for who has waited too long.

        `near` tells adapters in host memory or on their way there; among those that wait they come first.
        """
        self._without_slot.clear()
        if self._waiting_since and len(self._reservations) < self._max_reserved:
            self._reserve_slots(now, is_on_host_or_reading)
        self._usable_reservations = {digest for digest in self._reservations.values() if is_on_host_or_reading(digest)}

    def assign_pinned(self, digest: str) -> None:
        """Give a pinned adapter its slot ahead of any sequence, unless all are taken."""
        slot = self._find_idle_slot(digest, can_evict_pinned=False)
        if slot is not None:
            self._assign(digest, slot)

    def can_start(self, digest: str, *, is_new: bool) -> bool:
        """Whether the adapter is in its slot, and `start` may follow. `new`: the sequence was not preempted before.

        An adapter without a slot is given one, if there is one to give, and it will be ready in a later step.
        """
        slot = self._slot_by_digest.get(digest)
        if slot is not None:
            state = self._slots[slot]
            # One runs where its adapter was brought for it, also if the slot is reserved for another meanwhile: a fresh
            # slot is nobody else's, so otherwise both would wait for ever.
            return not state.loading and (
                state.held_for_waiters or not (is_new and self._reserved_for_other(slot, digest))
            )
        if digest not in self._without_slot:
            if (idle_slot := self._find_idle_slot(digest)) is None:
                self._without_slot.add(digest)
            else:
                self._assign(digest, idle_slot)
        return False

    def on_start(self, digest: str) -> SlotId:
        """A sequence begins to run, after `can_start`."""
        slot = self._slot_by_digest[digest]
        self._tick += 1
        state = self._slots[slot]
        assert not state.loading, "start without can_start"
        state.num_running += 1
        state.last_used = state.last_started = self._tick
        self.clear_waiting(digest)
        return slot

    def on_stop(self, digest: str) -> None:
        """A running sequence ends or is preempted; the adapter stays in its slot."""
        state = self._slots[self._slot_by_digest[digest]]
        state.num_running -= 1
        assert state.num_running >= 0

    def mark_waiting(self, digest: str, now: float) -> None:
        """A sequence of the adapter was passed over, because of its adapter."""
        self._waiting_since.setdefault(digest, now)

    def clear_waiting(self, digest: str) -> None:
        """The adapter got its slot, or nobody waits for it any more."""
        self._waiting_since.pop(digest, None)
        self._reservations = {slot: other for slot, other in self._reservations.items() if other != digest}
        if (slot := self._slot_by_digest.get(digest)) is not None:
            self._slots[slot].held_for_waiters = False

    def evict(self, digest: str, *, count_eviction: bool = False) -> None:
        """Empty the slot of an idle adapter, if it has one. `evict`: to make room, not because nobody wants it."""
        slot = self._slot_by_digest.pop(digest, None)
        if slot is not None:
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
        """Copies into slots that are to be made now; each is answered by `loaded`."""
        slot_loads, self._pending_loads = self._pending_loads, []
        return slot_loads

    def pop_evicted(self) -> list[str]:
        """Adapters that lost their slot since the last call."""
        evicted, self._evicted = self._evicted, []
        return evicted

    def on_loaded(self, slot_load: SlotLoad, succeeded: bool = True) -> None:
        """A copy into a slot is made, or has failed: then the slot is empty."""
        state = self._slots[slot_load.adapter_slot]
        assert state.loading
        state.loading = False
        state.held_for_waiters = state.digest in self._waiting_since
        if not succeeded and state.digest is not None:
            self.evict(state.digest)

    def integrity_errors(self, on_host: set[str], waiting: set[str]) -> list[str]:
        """What is wrong with the table, given the adapters in host memory and those that sequences wait for."""
        digests = {s.digest: SlotId(i) for i, s in enumerate(self._slots) if s.digest is not None}
        violations = {
            "slots and adapters do not match": digests != self._slot_by_digest,
            "an empty slot runs": any(s.digest is None and s.num_running for s in self._slots),
            "an adapter in a slot has no host copy": not set(digests) <= on_host,
            "an adapter that nobody waits for is blocked": not set(self._waiting_since) <= waiting,
            "a slot is reserved for an adapter that is not blocked": not set(self._reservations.values())
            <= set(self._waiting_since),
            "an adapter has two slots reserved": len(set(self._reservations.values())) < len(self._reservations),
            "too many slots are reserved": len(self._reservations) > self._max_reserved,
            "a load goes to another adapter's slot": any(
                self._slot_by_digest.get(x.adapter_digest) != x.adapter_slot or not self._slots[x.adapter_slot].loading
                for x in self._pending_loads
            ),
            "a sequence runs while its slot is loaded": any(s.loading and s.num_running for s in self._slots),
            "a slot is kept for nobody": any(
                s.held_for_waiters and s.digest not in self._waiting_since for s in self._slots
            ),
        }
        return [violation for violation, is_violated in violations.items() if is_violated]

    def _reserve_slots(self, now: float, is_on_host_or_reading: Callable[[str], bool]) -> None:
        """Slots for those who have waited too long and have none, the near and the oldest first."""
        served_digests = {*self._reservations.values(), *self._slot_by_digest}
        overdue = [
            d
            for d, waiting_since in self._waiting_since.items()
            if now - waiting_since >= RESERVE_AFTER_S and d not in served_digests
        ]
        for digest in sorted(overdue, key=is_on_host_or_reading, reverse=True)[
            : self._max_reserved - len(self._reservations)
        ]:
            if (slot := self._slot_to_reserve(digest)) is None:
                return
            self._reservations[slot] = digest

    def _reserved_for_other(self, slot: SlotId, digest: str) -> bool:
        owner = self._reservations.get(slot, digest)
        return owner != digest and (owner in self._usable_reservations or self._slots[slot].num_running > 0)

    def _find_idle_slot(self, digest: str, *, can_evict_pinned: bool | None = None) -> SlotId | None:
        """An empty slot, else the least recently used idle one, that `digest` may take."""
        can_evict_pinned = self.can_evict_pinned if can_evict_pinned is None else can_evict_pinned
        idle_slots = [
            (state.digest is not None, state.digest in self._pinned, state.last_used, SlotId(i))
            for i, state in enumerate(self._slots)
            if state.is_idle
            and (can_evict_pinned or state.digest not in self._pinned)
            and not self._reserved_for_other(SlotId(i), digest)
        ]
        return min(idle_slots)[3] if idle_slots else None

    def _slot_to_reserve(self, digest: str) -> SlotId | None:
        """An idle slot, else that of the running adapter that started least recently; None when all are spoken for."""
        unreserved = [(s, SlotId(i)) for i, s in enumerate(self._slots) if i not in self._reservations]
        candidates = [(s, i) for s, i in unreserved if self.can_evict_pinned or s.digest not in self._pinned]
        slot = self._find_idle_slot(digest)
        if slot is not None and slot not in self._reservations:
            return slot
        return min(((s.last_started, i) for s, i in candidates if s.num_running), default=(0, None))[1]

    def _assign(self, digest: str, slot: SlotId) -> None:
        evicted_digest = self._slots[slot].digest
        if evicted_digest is not None:
            self.evict(evicted_digest, count_eviction=True)
        self._tick += 1
        self._slots[slot] = _Slot(digest, last_used=self._tick, last_started=self._tick, loading=True)
        self._slot_by_digest[digest] = slot
        self._pending_loads.append(SlotLoad(digest, slot))
