# SPDX-License-Identifier: Apache-2.0
"""SlotTable: which adapter is in which device slot, and who gets a slot next. Part of the adapter registry.

Policy only: no weights, no host memory, no sequences, just how many of them run per adapter. An adapter that runs
keeps its slot; an idle one loses it when somebody else needs it, least recently used first.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

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


class _Reservation(NamedTuple):
    digest: str
    slot: SlotId


class SlotTable:
    """A fixed number of slots.

    Fairness. An adapter that has waited for a slot longer than RESERVE_AFTER_S gets one reserved: an idle one, or that
    of the running adapter whose last start is longest ago. A reserved slot takes no new sequences of the adapter in
    it, so it drains: who waits longest is served after at most the longest sequence of one adapter. Once idle, it
    waits for its adapter only when that is in host memory or on its way there; otherwise whoever can use it, may.

    Pins. A pinned adapter is placed before any sequence asks and keeps its slot while idle. Only when every slot is
    pinned an idle pinned adapter yields to others: a promise to serve goes before one to keep warm.
    """

    def __init__(self, num_slots: int) -> None:
        self._slots = [_Slot() for _ in range(num_slots)]
        self._slot_of: dict[str, SlotId] = {}
        self._pinned: set[str] = set()
        self._tick = 0
        # Since when an adapter waits, oldest first.
        self._blocked: dict[str, float] = {}
        self._reserved: _Reservation | None = None
        # Whether the adapter that a slot is reserved for could use it, or soon will.
        self._reserved_near = False
        # Adapters for which this step's search failed: slots only fill up while a step is planned.
        self._missed: set[str] = set()
        self._loads: list[SlotLoad] = []
        self.num_evictions = 0
        """Adapters that lost their slot to another one."""

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
        """Before a step's first `can_start`: reserve a slot for who has waited too long.

        `near` tells adapters in host memory or on their way there; among those that wait they come first.
        """
        self._missed.clear()
        if self._reserved is None and self._blocked:
            late = [digest for digest, since in self._blocked.items() if now - since >= RESERVE_AFTER_S]
            if late:
                digest = next(filter(near, late), late[0])
                self._reserved = _Reservation(digest, self._slot_to_reserve(digest))
        self._reserved_near = self._reserved is not None and near(self._reserved.digest)

    def place(self, digest: str) -> None:
        """Give a pinned adapter its slot ahead of any sequence, unless all are taken."""
        slot = self._idle_slot(digest, pins_yield=False)
        if slot is not None:
            self._assign(digest, slot)

    def can_start(self, digest: str, *, new: bool) -> bool:
        """Whether `start` would find a slot. `new`: the sequence was not preempted before."""
        slot = self._slot_of.get(digest)
        if slot is not None:
            return not (new and self._reserved_for_other(slot, digest))
        if digest in self._missed:
            return False
        if self._idle_slot(digest) is None:
            self._missed.add(digest)
            return False
        return True

    def start(self, digest: str) -> SlotId:
        """A sequence begins to run, after `can_start`; a copy into the slot goes into the step's loads if need be."""
        slot = self._slot_of.get(digest)
        if slot is None:
            slot = self._idle_slot(digest)
            assert slot is not None, "start without can_start"
            self._assign(digest, slot)
        self._tick += 1
        state = self._slots[slot]
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
        if self._reserved is not None and self._reserved.digest == digest:
            self._reserved = None

    def vacate(self, digest: str) -> None:
        """Empty the slot of an idle adapter, if it has one."""
        slot = self._slot_of.pop(digest, None)
        if slot is not None:
            assert self._slots[slot].num_running == 0
            self._slots[slot] = _Slot()
            self._loads = [load for load in self._loads if load.digest != digest]

    def take_loads(self) -> list[SlotLoad]:
        """Copies into slots that the next step begins with."""
        loads, self._loads = self._loads, []
        return loads

    def lose(self, loads: Iterable[SlotLoad]) -> None:
        """A step failed, and with it its loads; what they were for does not run any more."""
        for load in loads:
            if self._slot_of.get(load.digest) == load.slot:
                self.vacate(load.digest)

    def faults(self, in_host: set[str], waiting: set[str]) -> list[str]:
        """What is wrong with the table, given the adapters in host memory and those that sequences wait for."""
        digests = {s.digest: SlotId(i) for i, s in enumerate(self._slots) if s.digest is not None}
        checks = {
            "slots and adapters do not match": digests != self._slot_of,
            "an empty slot runs": any(s.digest is None and s.num_running for s in self._slots),
            "an adapter in a slot has no host copy": not set(digests) <= in_host,
            "an adapter that nobody waits for is blocked": not set(self._blocked) <= waiting,
            "a slot is reserved for an adapter that is not blocked": self._reserved is not None
            and self._reserved.digest not in self._blocked,
            "a load goes to another adapter's slot": any(self._slot_of.get(x.digest) != x.slot for x in self._loads),
        }
        return [fault for fault, present in checks.items() if present]

    def _reserved_for_other(self, slot: SlotId, digest: str) -> bool:
        if self._reserved is None or self._reserved.slot != slot or self._reserved.digest == digest:
            return False
        return self._reserved_near or self._slots[slot].num_running > 0

    def _idle_slot(self, digest: str, *, pins_yield: bool | None = None) -> SlotId | None:
        """An empty slot, else the least recently used idle one, that `digest` may take."""
        pins_yield = self.pins_yield if pins_yield is None else pins_yield
        idle = [
            (state.digest is not None, state.digest in self._pinned, state.used, SlotId(i))
            for i, state in enumerate(self._slots)
            if state.num_running == 0
            and (pins_yield or state.digest not in self._pinned)
            and not self._reserved_for_other(SlotId(i), digest)
        ]
        return min(idle)[3] if idle else None

    def _slot_to_reserve(self, digest: str) -> SlotId:
        slot = self._slot_of.get(digest)
        if slot is None:
            slot = self._idle_slot(digest)
        if slot is None:
            running = enumerate(self._slots)
            slot = min((s.started, SlotId(i)) for i, s in running if self.pins_yield or s.digest not in self._pinned)[1]
        return slot

    def _assign(self, digest: str, slot: SlotId) -> None:
        loser = self._slots[slot].digest
        if loser is not None:
            self.vacate(loser)
            self.num_evictions += 1
        self._tick += 1
        self._slots[slot] = _Slot(digest, used=self._tick, started=self._tick)
        self._slot_of[digest] = slot
        self._loads.append(SlotLoad(digest, slot))
