# SPDX-License-Identifier: Apache-2.0
"""Group: rank 0's hold on the processes that share the model's layers with it. Starts them, tells them, watches them.

    scheduler, sampler, rank 0 --Ring: a step's work----> rank 1 .. n-1 (follower.py)
                               --socket: calls, JSON-->
                               <-------replies---------
                               <--torch.distributed--->   (ranks.py)

Calls are what happens seldom: load, meet, serve, adapters. One rank that ends ends them all: the others are killed,
whoever waits for a reply, begins a step or takes what one computed gets RunnerLost, and `on_lost` is told. A rank that
hangs is found by the others, in the next thing that they do together, after `ranks.TIMEOUT_S`.
"""

import json
import logging
import os
import selectors
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any, TypeVar

from quire_engine.member import MAX_CALL_BYTES, Ends, Member, RankProcess
from quire_engine.ranks import TIMEOUT_S, Ranks
from quire_engine.ring import Bell, Ring, ring_all
from quire_engine.step import RunnerLost
from quire_engine.work import GraphWork, Work, encode
from quire_spec.engine.config import EngineConfig
from quire_spec.errors import ConfigError, QuireError, error_from_code
from quire_spec.model.model_config import ModelConfig
from quire_spec.model.tensor_parallel import TensorParallelShard

_SEEN_S = 1.0
"""How long it may take until the end of a rank is seen."""
_POLL_S = 20e-6
"""Between two looks at a device; the system makes about 80 us of it, where a step takes milliseconds."""

T = TypeVar("T")
_log = logging.getLogger("quire.group")


@dataclass(slots=True)
class _Call:
    missing: set[int]
    """Ranks that have not answered."""
    errors: list[QuireError] = field(default_factory=list)


class Group:
    """The other ranks. `ranks` is this one among them; `step` and `call` may be used when `open` has returned."""

    def __init__(
        self,
        config: EngineConfig,
        shape: ModelConfig,
        folder: Path,
        start: Callable[[Ends], Member] = RankProcess,
        on_lost: Callable[[str], None] | None = None,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        """Start the ranks and have them load the model in `folder`; returns at once.

        `on_lost(why)` is called in a thread of the group's when a rank has ended that was not to.
        """
        size = config.tensor_parallel_size
        self.ranks = Ranks(TensorParallelShard(shape, 0, size), self._meet, timeout_s)
        self._timeout_s = timeout_s
        self._in_step = threading.Lock()
        self._on_lost = on_lost
        self._numbers = range(1, size)
        self._changed = threading.Condition()
        self._calls: dict[int, _Call] = {}
        self._ids = count()
        self._lost: RunnerLost | None = None
        self._closing = False
        self._meeting = tempfile.TemporaryDirectory(prefix="quire-ranks-")
        self._memory = os.memfd_create("quire-ring")
        self._ring: Ring | None = None
        self._eventfds = [os.eventfd(0, os.EFD_SEMAPHORE | os.EFD_CLOEXEC) for _ in self._numbers]
        self._bells = [Bell(fd) for fd in self._eventfds]
        self._sockets: dict[int, socket.socket] = {}
        self._members: dict[int, Member] = {}
        started = threading.Event()
        self._watch = threading.Thread(target=self._run, args=(start, started), name="ranks", daemon=True)
        self._watch.start()
        started.wait()
        load = {"config": config.to_json(), "folder": str(folder), "timeout_s": timeout_s}
        level = logging.getLogger().getEffectiveLevel()
        self._loading = [
            self._send({"call": "load", "rank": rank, "log_level": level, **load}, {rank}) for rank in self._numbers
        ]

    def open(self, num_elements: int) -> None:
        """Rank 0 is ready, and work takes rows of `num_elements` at most: have the others take it.

        Raises:
            QuireError: a rank refuses, or has ended.
        """
        Ring.create(self._memory, num_elements)
        self._ring = Ring(self._memory, num_elements)
        self.call("serve", num_elements=num_elements)
        self._meeting.cleanup()

    def call(self, name: str, **args: Any) -> None:
        """Have every other rank do something, and wait until all have; from any thread.

        Raises:
            QuireError: what the first rank that failed says, or a rank has ended.
        """
        self._wait(self.begin(name, **args))

    def begin(self, name: str, **args: Any) -> int:
        """The same without the wait: `end` takes the number."""
        return self._send({"call": name, **args}, set(self._numbers))

    def tell(self, name: str, **args: Any) -> None:
        """Have every other rank do something that nobody waits for; nothing if they are gone. From any thread."""
        frame = json.dumps({"id": None, "call": name, **args}).encode()
        for control in self._sockets.values():
            with suppress(OSError):
                control.send(frame)

    def end(self, number: int) -> None:
        """Wait until all ranks have done what was begun; raises as `call`."""
        self._wait(number)

    @contextmanager
    def step(self, work: Work | GraphWork) -> Iterator[None]:
        """Hand out a step's work; within, rank 0 does or begins its own. The step handed out last may be in flight
        still, no other.

        Raises:
            RunnerLost: a rank has ended, or this one has left the step before its end.
        """
        with _uninterrupted(), self._in_step:
            self._check()
            assert self._ring is not None, "open comes first"
            encode(work, self._ring.turn())
            ring_all(self._bells)
            with self._sharing_fate():
                yield

    def take(self, outcome: Callable[[], T]) -> T:
        """What `outcome` makes of a step that was begun; raises as `step`."""
        with self._sharing_fate():
            found = outcome()
        # With a rank gone, a device ends its waiting for it and has computed nothing.
        self._check()
        return found

    def until(self, done: Callable[[], bool]) -> None:
        """Wait until something on the device is done, which may need the other ranks.

        Raises:
            RunnerLost: a rank has ended, or hangs.
        """
        deadline = time.monotonic() + self._timeout_s
        while not done():
            self._check()
            if time.monotonic() > deadline:
                raise self._lose(f"a step was not over after {self._timeout_s:g} s")
            time.sleep(_POLL_S)

    def close(self) -> None:
        """End all other ranks."""
        self._closing = True
        for member in self._members.values():
            member.kill()
        self.ranks.abandon(self._in_step)
        if threading.current_thread() is not self._watch:
            self._watch.join()
        self._meeting.cleanup()

    def refusal(self, error: Exception) -> Exception:
        """Why rank 0 could not start, when it failed with `error`: what another rank said, if one did."""
        said = [said for call in self._calls.values() for said in call.errors]
        return ConfigError(str(said[0])) if said else error

    def _meet(self) -> Path:
        for number in self._loading:
            self._wait(number)
        path = Path(self._meeting.name) / "store"
        self.begin("meet", path=str(path))
        return path

    def _send(self, call: dict[str, Any], ranks: set[int]) -> int:
        number = next(self._ids)
        with self._changed:
            self._check()
            self._calls[number] = _Call(set(ranks))
        frame = json.dumps({"id": number, **call}).encode()
        for rank in ranks:
            # Its end is seen by the thread that watches.
            with suppress(OSError):
                self._sockets[rank].send(frame)
        return number

    def _wait(self, number: int) -> None:
        with self._changed:
            call = self._calls[number]
            self._changed.wait_for(lambda: not call.missing or call.errors or self._lost is not None)
            if call.errors:
                raise call.errors[0]
            self._check()
            del self._calls[number]

    @contextmanager
    def _sharing_fate(self) -> Iterator[None]:
        """What fails here is the end of all ranks."""
        try:
            yield
        except Exception as error:
            # A rank that has ended is the reason of what failed here, and is seen a moment later.
            with self._changed:
                self._changed.wait_for(lambda: self._lost is not None, _SEEN_S)
            raise self._lose(f"a step failed in rank 0: {type(error).__name__}: {error}") from error

    def _check(self) -> None:
        if self._lost is not None:
            raise RunnerLost(str(self._lost))

    def _run(self, start: Callable[[Ends], Member], started: threading.Event) -> None:
        """Start the ranks, then watch them until all have ended."""
        with selectors.DefaultSelector() as selector:
            for rank, eventfd in zip(self._numbers, self._eventfds, strict=True):
                ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                with theirs:
                    self._members[rank] = start(Ends(theirs.fileno(), self._memory, eventfd))
                self._sockets[rank] = ours
                selector.register(ours, selectors.EVENT_READ, rank)
            started.set()
            while selector.get_map():
                for key, _ in selector.select():
                    rank = int(key.data)
                    frame = self._receive(rank)
                    if frame:
                        self._answered(rank, json.loads(frame))
                    else:
                        selector.unregister(self._sockets[rank])
                        self._sockets[rank].close()
                        self._ended(rank)
        for fd in (self._memory, *self._eventfds):
            os.close(fd)

    def _receive(self, rank: int) -> bytes:
        """b"" at the end."""
        try:
            return self._sockets[rank].recv(MAX_CALL_BYTES)
        except OSError:
            return b""

    def _answered(self, rank: int, reply: dict[str, Any]) -> None:
        with self._changed:
            call = self._calls.get(reply["id"])
            if call is not None:
                call.missing.discard(rank)
                if reply["error"]:
                    call.errors.append(error_from_code(*reply["error"]))
            self._changed.notify_all()

    def _ended(self, rank: int) -> None:
        how = self._members[rank].join()
        if not self._closing:
            lost = self._lose(f"rank {rank} of {len(self._numbers) + 1} ended: {how}")
            if self._on_lost is not None:
                self._on_lost(str(lost))

    def _lose(self, why: str) -> RunnerLost:
        """No step will ever run again; the first reason is the one that counts."""
        with self._changed:
            if self._lost is None:
                self._lost = RunnerLost(f"{why}; the ranks that share the model's layers end together: start again")
                _log.error("ranks lost: %s", why)
            self._closing = True
            self._changed.notify_all()
        for member in self._members.values():
            member.kill()
        self.ranks.abandon(self._in_step)
        return self._lost


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """Keep Control-C until the step is over: once a rank has left one in its midst, the others wait for it in vain."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    kept: list[Any] = []
    handler = signal.signal(signal.SIGINT, lambda *args: kept.append(args))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if kept and callable(handler):
            handler(*kept[0])
