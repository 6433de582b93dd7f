# SPDX-License-Identifier: Apache-2.0
"""CoreLoop: the thread that drives the engine. Requests and calls come in by a queue, results go out by a callback.

The engine belongs to this thread alone. It never touches a socket and never reads a file: what it publishes is encoded
and sent by the event loop's thread while the next step runs, and adapters come to it read. It blocks while there is
nothing to run.
"""

import logging
import queue
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NoReturn, TypeVar

from quire_engine import process
from quire_engine.engine import Engine
from quire_engine.step import SlotLoad
from quire_spec.errors import Code, Internal, QuireError
from quire_spec.protocol.messages import AdapterEvent, SequenceDelta, SequenceRequest, StepResult

MAX_FAILED_STEPS = 3
"""Steps in a row that may fail. One may be a request's fault; three are the device's, and only a new process gets a
new context on it."""

IDLE_CHECK_S = 1.0
"""Idle time before the integrity check: never between two requests of one client, where it would cost latency."""

T = TypeVar("T")
_log = logging.getLogger("quire.core")


class CoreLoop:
    """The engine's thread. All methods but `run` may be called from any other thread and return at once.

    `owner` is a number for a connection of a text process. Sequences belong to the latest owner; when another begins
    or this one ends, they are aborted, and results carry the owner that they are for.
    """

    def __init__(
        self,
        engine: Engine,
        publish: Callable[[int, StepResult], None],
        fetch: Callable[[str, Path], None],
        carry: Callable[[SlotLoad, Callable[[], None]], None],
    ) -> None:
        """`publish(owner, result)`, `fetch(digest, path)` and `carry(load, work)` are called in this loop's thread and
        must not block.

        `fetch` asks for an adapter to be read: answer with `call` of the engine's add_adapter or fail_adapter. `carry`
        asks for `work` to be done, which fills a slot: answer with `call` of the engine's slot_loaded.
        """
        self._engine = engine
        engine.carry = carry
        self._publish = publish
        self._fetch = fetch
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._owner = 0
        self._ids: set[int] = set()
        """Open sequences of the owner."""
        self._stale = False
        """The engine changed since the last published result."""
        self._moves: list[AdapterEvent] = []
        """What became of adapters while there was nobody to count it."""
        self._checked = True
        self._num_steps = 0
        self._num_failed_steps = 0

    def begin(self, owner: int) -> None:
        """A text process connected."""
        self._inbox.put(partial(self._change_owner, owner))

    def end(self, owner: int) -> None:
        """A text process is gone."""
        self._inbox.put(lambda: self._change_owner(0) if owner == self._owner else None)

    def generate(self, owner: int, request: SequenceRequest) -> None:
        """Run a sequence."""
        self._inbox.put(partial(self._generate, owner, request))

    def abort(self, owner: int, ids: list[int]) -> None:
        """Stop sequences."""
        self._inbox.put(partial(self._abort, owner, ids))

    def call(self, action: Callable[[], T]) -> "Future[T]":
        """Do something with the engine between two steps; its result or exception comes in the future."""
        future: Future[T] = Future()
        self._inbox.put(partial(self._call, action, future))
        return future

    def run(self) -> NoReturn:
        """Run for ever, in the thread that loaded the engine. An exception ends the process: the engine's state is
        unknown."""
        while True:
            self._act()
            for digest, path in self._engine.take_fetches():
                self._fetch(digest, path)
            if self._engine.runnable:
                self._step()
            elif self._stale:
                self._report([])

    def _act(self) -> None:
        """Do what was asked; wait for the next thing if there is nothing to run."""
        try:
            if not self._engine.runnable:
                self._wait()()
            while True:
                self._inbox.get_nowait()()
        except queue.Empty:
            return

    def _wait(self) -> Callable[[], None]:
        if not self._checked:
            try:
                return self._inbox.get(timeout=IDLE_CHECK_S)
            except queue.Empty:
                self._engine.check_integrity()
                self._checked = True
        return self._inbox.get()

    def _step(self) -> None:
        result = self._engine.step()
        self._checked = False
        self._ids.difference_update(r.id for r in result.results if r.finish_reason or r.error_code)
        self._send(result)
        self._count_failures(result)

    def _report(self, results: list[SequenceDelta]) -> None:
        self._send(StepResult(results, [], self._engine.stats(), self._engine.take_moves()))

    def _send(self, result: StepResult) -> None:
        self._stale = False
        self._moves += result.adapter_events
        if self._owner:
            moves, self._moves = self._moves, []
            self._publish(self._owner, replace(result, adapter_events=moves))

    def _count_failures(self, result: StepResult) -> None:
        """The engine fails the sequences of a step that failed, all of them and only then."""
        ran = result.stats.num_steps > self._num_steps
        self._num_steps = result.stats.num_steps
        failed = bool(result.results) and all(r.error_code == Code.INTERNAL for r in result.results)
        self._num_failed_steps = self._num_failed_steps + 1 if ran and failed else 0
        if self._num_failed_steps >= MAX_FAILED_STEPS:
            _log.error("steps keep failing: ending this process num_failed_steps=%d", self._num_failed_steps)
            process.leave(process.EXIT_DEFECT)

    def _change_owner(self, owner: int) -> None:
        self._engine.abort(self._ids)
        self._ids.clear()
        self._owner = owner
        # A new text process learns at once what the engine looks like.
        self._stale = True

    def _generate(self, owner: int, request: SequenceRequest) -> None:
        if owner != self._owner:
            return
        try:
            self._engine.add(request)
        except QuireError as error:
            self._report([SequenceDelta(request.id, [], error_code=error.code, error=str(error))])
        except Exception as error:
            # Whatever a request holds, only that request fails.
            _log.exception("request failed id=%d", request.id)
            reason = f"the engine failed on this request: {type(error).__name__}"
            self._report([SequenceDelta(request.id, [], error_code=Internal.code, error=reason)])
        else:
            self._ids.add(request.id)

    def _abort(self, owner: int, ids: list[int]) -> None:
        if owner == self._owner:
            self._engine.abort(ids)
            self._ids.difference_update(ids)
            self._stale = True

    def _call(self, action: Callable[[], T], future: "Future[T]") -> None:
        try:
            result = action()
        except Exception as error:
            future.set_exception(error)
        else:
            future.set_result(result)
        self._stale = True
