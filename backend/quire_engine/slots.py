# SPDX-License-Identifier: Apache-2.0
"""SlotTable: which adapter is in which device slot, and who gets a slot next. Part of the adapter registry.

Policy only: no weights, no host memory, no sequences, just how many of them run per adapter. An adapter that runs
keeps its slot; an idle one loses it when somebody else needs it, least recently used first.
"""

from collections.abc import Callable
from dataclasses import dataclass

from quire_engine.request import SlotId
from quire_engine.step import SlotLoad

RESERVE_AFTER_S = 1.0
"""How long an adapter may wait for a slot before one is reserved for it.

A slot changes hands at the cost of the batch that its adapter had built up, so not at once; a second is about what a
person takes for 'it hangs', and long against a step and a copy into a slot (milliseconds).
"""


@dataclass(slots=True)
class _Slot:
    digest: str | None = None
    num_running: int = 0
    used: int = 0
    """Tick of the last arrival or start; the lowest is given up first."""
    started: int = 0
    """Tick of the last start; the lowest is drained first."""
    loading: bool = False
    """A copy into it is under way, for `digest` or, if None, for an adapter that is gone meanwhile."""
    fresh: bool = False
    """Loaded for sequences that have not begun to run: nobody else takes it until they do or are over."""

    @property
    def idle(self) -> bool:
        return not (self.num_running or self.loading or self.fresh)


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
        self._slot_of: dict[str, SlotId] = {}
        self._pinned: set[str] = set()
        self._tick = 0
        self._max_reserved = max(1, num_slots // 2)
        # Since when an adapter waits, oldest first.
        self._blocked: dict[str, float] = {}
        self._reserved: dict[SlotId, str] = {}
        # Adapters with a reserved slot that could use it, or soon will.
        self._near: set[str] = set()
        # Adapters for which this step's search failed: slots only fill up while a step is planned.
        self._missed: set[str] = set()
        self._loads: list[SlotLoad] = []
        self.num_evictions = 0
        """Adapters that lost their slot, or the host copy that goes with it, to another one."""
        self._evicted: list[str] = []

    def __len__(self) -> int:
        return len(self._slots)

    def find(self, digest: str) -> SlotId | None:
        """Slot of an adapter."""
        return self._slot_of.get(digest)

    def adapters(self) -> list[str]:
        """Adapters in slots, in the order of the slots."""
        return [slot.digest for slot in self._slots if slot.digest is not None]

    def num_running(self, digest: str) -> int:
        """Running sequences of an adapter."""
        slot = self._slot_of.get(digest)
        return 0 if slot is None else self._slots[slot].num_running

    @property
    def pins(self) -> frozenset[str]:
        """Pinned adapters, placed or not."""
        return frozenset(self._pinned)

    @property
    def pins_yield(self) -> bool:
        """True when every slot is pinned, so that idle pinned adapters make room."""
        return len(self._pinned) >= len(self._slots)

    def pin(self, digest: str, pinned: bool) -> None:
        """Set or clear an adapter's pin."""
        (self._pinned.add if pinned else self._pinned.discard)(digest)

    def touch(self, digest: str) -> None:
        """A sequence of the adapter arrived: it is worth keeping."""
        if (slot := self._slot_of.get(digest)) is not None:
            self._tick += 1
            self._slots[slot].used = self._tick

    def begin_step(self, now: float, near: Callable[[str], bool]) -> None:
        """Before a step's first `can_start`: reserve slots for who has waited too long.

        `near` tells adapters in host memory or on their way there; among those that wait they come first.
        """
        self._missed.clear()
        if self._blocked and len(self._reserved) < self._max_reserved:
            self._reserve(now, near)
        self._near = {digest for digest in self._reserved.values() if near(digest)}

    def place(self, digest: str) -> None:
        """Give a pinned adapter its slot ahead of any sequence, unless all are taken."""
        slot = self._idle_slot(digest, pins_yield=False)
        if slot is not None:
            self._assign(digest, slot)

    def can_start(self, digest: str, *, new: bool) -> bool:
        """Whether the adapter is in its slot, and `start` may follow. `new`: the sequence was not preempted before.

        An adapter without a slot is given one, if there is one to give, and it will be ready in a later step.
        """
        slot = self._slot_of.get(digest)
        if slot is not None:
            state = self._slots[slot]
            # One runs where its adapter was brought for it, also if the slot is reserved for another meanwhile: a fresh
            # slot is nobody else's, so otherwise both would wait for ever.
            return not state.loading and (state.fresh or not (new and self._reserved_for_other(slot, digest)))
        if digest not in self._missed:
            if (idle := self._idle_slot(digest)) is None:
                self._missed.add(digest)
            else:
                self._assign(digest, idle)
        return False

    def start(self, digest: str) -> SlotId:
        """A sequence begins to run, after `can_start`."""
        slot = self._slot_of[digest]
        self._tick += 1
        state = self._slots[slot]
        assert not state.loading, "start without can_start"
        state.num_running += 1
        state.used = state.started = self._tick
        self.unblock(digest)
        return slot

    def stop(self, digest: str) -> None:
        """A running sequence ends or is preempted; the adapter stays in its slot."""
        state = self._slots[self._slot_of[digest]]
        state.num_running -= 1
        assert state.num_running >= 0

    def block(self, digest: str, now: float) -> None:
        """A sequence of the adapter was passed over, because of its adapter."""
        self._blocked.setdefault(digest, now)

    def unblock(self, digest: str) -> None:
        """The adapter got its slot, or nobody waits for it any more."""
        self._blocked.pop(digest, None)
        self._reserved = {slot: other for slot, other in self._reserved.items() if other != digest}
        if (slot := self._slot_of.get(digest)) is not None:
            self._slots[slot].fresh = False

    def vacate(self, digest: str, *, evict: bool = False) -> None:
        """Empty the slot of an idle adapter, if it has one. `evict`: to make room, not because nobody wants it."""
        slot = self._slot_of.pop(digest, None)
        if slot is not None:
            if evict:
                self.num_evictions += 1
                self._evicted.append(digest)
            state = self._slots[slot]
            assert state.num_running == 0
            begun = state.loading and all(load.slot != slot for load in self._loads)
            self._loads = [load for load in self._loads if load.slot != slot]
            self._slots[slot] = _Slot(loading=begun)

    def take_loads(self) -> list[SlotLoad]:
        """Copies into slots that are to be made now; each is answered by `loaded`."""
        loads, self._loads = self._loads, []
        return loads

    def take_evicted(self) -> list[str]:
        """Adapters that lost their slot since the last call."""
        evicted, self._evicted = self._evicted, []
        return evicted

    def loaded(self, load: SlotLoad, done: bool = True) -> None:
        """A copy into a slot is made, or has failed: then the slot is empty."""
        state = self._slots[load.slot]
        assert state.loading
        state.loading = False
        state.fresh = state.digest in self._blocked
        if not done and state.digest is not None:
            self.vacate(state.digest)

    def faults(self, in_host: set[str], waiting: set[str]) -> list[str]:
        """What is wrong with the table, given the adapters in host memory and those that sequences wait for."""
        digests = {s.digest: SlotId(i) for i, s in enumerate(self._slots) if s.digest is not None}
        checks = {
            "slots and adapters do not match": digests != self._slot_of,
            "an empty slot runs": any(s.digest is None and s.num_running for s in self._slots),
            "an adapter in a slot has no host copy": not set(digests) <= in_host,
            "an adapter that nobody waits for is blocked": not set(self._blocked) <= waiting,
            "a slot is reserved for an adapter that is not blocked": not set(self._reserved.values())
            <= set(self._blocked),
            "an adapter has two slots reserved": len(set(self._reserved.values())) < len(self._reserved),
            "too many slots are reserved": len(self._reserved) > self._max_reserved,
            "a load goes to another adapter's slot": any(
                self._slot_of.get(x.digest) != x.slot or not self._slots[x.slot].loading for x in self._loads
            ),
            "a sequence runs while its slot is loaded": any(s.loading and s.num_running for s in self._slots),
            "a slot is kept for nobody": any(s.fresh and s.digest not in self._blocked for s in self._slots),
        }
        return [fault for fault, present in checks.items() if present]

    def _reserve(self, now: float, near: Callable[[str], bool]) -> None:
        """Slots for those who have waited too long and have none, the near and the oldest first."""
        served = {*self._reserved.values(), *self._slot_of}
        late = [d for d, since in self._blocked.items() if now - since >= RESERVE_AFTER_S and d not in served]
        for digest in sorted(late, key=near, reverse=True)[: self._max_reserved - len(self._reserved)]:
            if (slot := self._slot_to_reserve(digest)) is None:
                return
            self._reserved[slot] = digest

    def _reserved_for_other(self, slot: SlotId, digest: str) -> bool:
        owner = self._reserved.get(slot, digest)
        return owner != digest and (owner in self._near or self._slots[slot].num_running > 0)

    def _idle_slot(self, digest: str, *, pins_yield: bool | None = None) -> SlotId | None:
        """An empty slot, else the least recently used idle one, that `digest` may take."""
        pins_yield = self.pins_yield if pins_yield is None else pins_yield
        idle = [
            (state.digest is not None, state.digest in self._pinned, state.used, SlotId(i))
            for i, state in enumerate(self._slots)
            if state.idle
            and (pins_yield or state.digest not in self._pinned)
            and not self._reserved_for_other(SlotId(i), digest)
        ]
        return min(idle)[3] if idle else None

    def _slot_to_reserve(self, digest: str) -> SlotId | None:
        """An idle slot, else that of the running adapter that started least recently; None when all are spoken for."""
        open_ = [(s, SlotId(i)) for i, s in enumerate(self._slots) if i not in self._reserved]
        able = [(s, i) for s, i in open_ if self.pins_yield or s.digest not in self._pinned]
        slot = self._idle_slot(digest)
        if slot is not None and slot not in self._reserved:
            return slot
        return min(((s.started, i) for s, i in able if s.num_running), default=(0, None))[1]

    def _assign(self, digest: str, slot: SlotId) -> None:
        loser = self._slots[slot].digest
        if loser is not None:
            self.vacate(loser, evict=True)
        self._tick += 1
        self._slots[slot] = _Slot(digest, used=self._tick, started=self._tick, loading=True)
        self._slot_of[digest] = slot
        self._loads.append(SlotLoad(digest, slot))
