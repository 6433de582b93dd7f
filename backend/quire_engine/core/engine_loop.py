# SPDX-License-Identifier: Apache-2.0
"""Engine loop: the loop that runs the engine in the compute thread. Requests and calls arrive in a queue; results leave
through a callback.

Only the compute thread uses the engine. The loop never uses sockets or files. The thread of the event loop encodes and
sends results, and other threads read adapters. The compute thread blocks while there is nothing to run. The core server
owns the engine loop.
"""

import logging
import queue
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import NoReturn, TypeVar

from msgspec.structs import replace

from quire_engine.core.engine import Engine
from quire_engine.core.internal_batch import InternalBatch
from quire_engine.ipc import process
from quire_engine.kv_cache.block_events import block_changes
from quire_engine.kv_events.publisher import KVEventPublisher
from quire_engine.lora.adapter_source import AdapterSource
from quire_engine.step.plan import SlotLoad
from quire_spec.constants import AdapterDigest
from quire_spec.errors import PROCESS_ENDS, Code, Internal, QuireError
from quire_spec.protocol.messages import AdapterEvent, AdapterResidency, SequenceDelta, SequenceRequest, StepResult

MAX_FAILED_STEPS = 3
"""Number of consecutive failed steps after which the process exits. A request can cause a single failed step, but three
failed steps in a row are caused by the device. Only a new process gets a new device context.
"""

IDLE_CHECK_S = 1.0
"""The integrity of the engine's state is checked after this many seconds without work. The check then does not delay a
client's next request."""

T = TypeVar("T")
logger = logging.getLogger(__name__)


class EngineLoop:
    """The loop that runs the engine in the ComputeThread. All methods except `run` are safe to call from other threads,
    and return at once.

    A client id identifies a connection of a text process. All sequences belong to the latest client. The sequences are
    aborted when this client disconnects or another client connects. Each result is published with the id of its client.
    """

    def __init__(
        self,
        engine: Engine,
        publish: Callable[[int, StepResult], None],
        on_adapter_needed: Callable[[AdapterDigest, AdapterSource], None],
        on_slot_copy: Callable[[SlotLoad, Callable[[], None]], None],
        on_image: Callable[[Callable[[], object]], None],
        event_publisher: KVEventPublisher | None = None,
        report_blocks: bool = False,
    ) -> None:
        """Create the loop. The callbacks run in the compute thread and must not block.

        Args:
            engine: the engine.
            publish: called with the id of a client and a result to send to it.
            on_adapter_needed: called with the digest and source of an adapter that must be read. After the read, call
                the engine's add_adapter or fail_adapter with `submit_call`.
            on_slot_copy: called with a slot load and a function that copies the adapter into the slot. Run this
                function, and then call the engine's on_slot_loaded with `submit_call`.
            on_image: called with a function that encodes an image. Run this function, and then call the engine's
                on_image_encoded or fail_image with `submit_call`.
            event_publisher: publishes the events of cached blocks after each step.
            report_blocks: whether results contain the changes of the prefix cache.
        """
        self._engine = engine
        engine.delegate_slot_copies(on_slot_copy)
        engine.delegate_image_encoding(on_image)
        engine.delegate_store_waits(lambda: self._inbox.put(engine.on_store_ready))
        self._publish = publish
        self._on_adapter_needed = on_adapter_needed
        self._event_publisher = event_publisher
        self._report_blocks = report_blocks
        if event_publisher is not None or report_blocks:
            engine.observe_blocks()
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._client_id = 0
        self._open_sequence_ids: set[int] = set()
        """Unfinished sequences of the client."""
        self._client_is_new = False
        """True until the first result is sent to the client."""
        self._stats_dirty = False
        """True if the state of the engine has changed since the last published result."""
        self._unsent_adapter_events: list[AdapterEvent] = []
        """Adapter events that occurred while no client was connected."""
        self._internal_batches: dict[int, InternalBatch] = {}
        """Unfinished internal batches, by the ids of their sequences."""
        self._integrity_checked = True
        self._num_steps = 0
        self._num_failed_steps = 0

    def attach_client(self, client_id: int) -> None:
        """Called when a text process connects."""
        self._inbox.put(partial(self._change_client, client_id))

    def detach_client(self, client_id: int) -> None:
        """Called when a text process disconnects."""
        self._inbox.put(lambda: self._change_client(0) if client_id == self._client_id else None)

    def generate(self, client_id: int, request: SequenceRequest) -> None:
        """Put a request into the inbox. The loop starts its sequence before the next step."""
        self._inbox.put(partial(self._add_request, client_id, request))

    def abort(self, client_id: int, sequence_ids: list[int]) -> None:
        """Abort sequences."""
        self._inbox.put(partial(self._abort, client_id, sequence_ids))

    def run_internal(self, batch: InternalBatch) -> None:
        """Put the sequences of an internal batch into the inbox."""
        self._inbox.put(partial(self._add_internal, batch))

    def abort_internal(self, batch: InternalBatch) -> None:
        """Abort the unfinished sequences of an internal batch. Its future stays open."""
        self._inbox.put(partial(self._end_internal, batch))

    def submit_call(self, action: Callable[[], T]) -> "Future[T]":
        """Run a function in the compute thread between two steps; return a future of its result."""
        future: Future[T] = Future()
        self._inbox.put(partial(self._run_call, action, future))
        return future

    def run(self) -> NoReturn:
        """Run forever, in the compute thread.

        If this method raises an exception, the process must end, because the state of the engine is then unknown.
        """
        while True:
            self._process_inbox()
            for digest, path in self._engine.pop_adapter_reads():
                self._on_adapter_needed(digest, path)
            if self._engine.has_runnable:
                self._step()
            elif self._stats_dirty:
                self._send_results([])

    def _process_inbox(self) -> None:
        """Run all queued calls. If the engine has nothing to run, wait for a call."""
        try:
            if not self._engine.has_runnable:
                self._next_inbox_item()()
            while True:
                self._inbox.get_nowait()()
        except queue.Empty:
            return

    def _next_inbox_item(self) -> Callable[[], None]:
        if (store_wait_s := self._engine.store_wait_s) is not None:
            try:
                return self._inbox.get(timeout=store_wait_s)
            except queue.Empty:
                return self._engine.on_store_ready
        if not self._integrity_checked:
            try:
                return self._inbox.get(timeout=IDLE_CHECK_S)
            except queue.Empty:
                self._engine.check_integrity()
                self._integrity_checked = True
        return self._inbox.get()

    def _step(self) -> None:
        result = self._engine.step()
        if block_events := self._engine.pop_block_events():
            if self._event_publisher is not None:
                self._event_publisher.publish(block_events)
            if self._report_blocks:
                result = replace(result, block_changes=block_changes(block_events))
        self._integrity_checked = False
        if self._internal_batches:
            result = self._take_internal_results(result)
        self._open_sequence_ids.difference_update(r.id for r in result.results if r.finish_reason or r.error_code)
        self._send_step_result(result)
        self._count_failures(result)

    def _send_results(self, results: list[SequenceDelta]) -> None:
        self._send_step_result(StepResult(results, [], self._engine.stats(), self._engine.pop_adapter_events()))

    def _send_step_result(self, result: StepResult) -> None:
        self._stats_dirty = False
        self._unsent_adapter_events += result.adapter_events
        if self._client_id:
            adapter_events, self._unsent_adapter_events = self._unsent_adapter_events, []
            result = replace(result, adapter_events=adapter_events, adapter_changes=self._adapter_changes())
            if self._event_publisher is not None and self._event_publisher.num_dropped:
                stats = replace(result.stats, num_dropped_kv_events=self._event_publisher.num_dropped)
                result = replace(result, stats=stats)
            if self._client_is_new and self._report_blocks:
                result = replace(result, block_changes=self._engine.cached_blocks())
            self._client_is_new = False
            self._publish(self._client_id, result)

    def _adapter_changes(self) -> list[AdapterResidency]:
        """Return what the client does not know yet of the adapters."""
        changes = self._engine.pop_adapter_changes()
        return self._engine.adapter_residencies() if self._client_is_new else changes

    def _count_failures(self, result: StepResult) -> None:
        """Count consecutive failed steps. A step failed if all its sequences have an internal error."""
        step_ran = result.stats.num_steps > self._num_steps
        self._num_steps = result.stats.num_steps
        all_failed = bool(result.results) and all(r.error_code == Code.INTERNAL for r in result.results)
        self._num_failed_steps = self._num_failed_steps + 1 if step_ran and all_failed else 0
        if self._num_failed_steps >= MAX_FAILED_STEPS:
            logger.error("steps keep failing: ending this process num_failed_steps=%d", self._num_failed_steps)
            process.exit_now(process.EXIT_SOFTWARE)

    def _change_client(self, client_id: int) -> None:
        self._engine.abort(self._open_sequence_ids)
        self._open_sequence_ids.clear()
        self._client_id, self._client_is_new = client_id, True
        # A new text process receives the state of the engine at once.
        self._stats_dirty = True

    def _add_request(self, client_id: int, request: SequenceRequest) -> None:
        if client_id != self._client_id:
            return
        try:
            self._engine.add(request)
        except QuireError as error:
            self._send_results([SequenceDelta.from_error(request.id, error)])
        except PROCESS_ENDS:
            raise
        except BaseException as error:
            # An exception ends only this request. A request must never be able to crash the engine.
            logger.exception("request failed id=%d", request.id)
            reason = Internal(f"the engine failed on this request: {type(error).__name__}")
            self._send_results([SequenceDelta.from_error(request.id, reason)])
        else:
            self._open_sequence_ids.add(request.id)

    def _add_internal(self, batch: InternalBatch) -> None:
        self._internal_batches |= dict.fromkeys(batch.ids, batch)
        try:
            for request in batch.requests:
                self._engine.add(request)
        except QuireError as error:
            self._end_internal(batch)
            batch.future.set_exception(error)

    def _take_internal_results(self, result: StepResult) -> StepResult:
        """Remove the results of internal sequences from a step's result, and give them to their batches."""
        for delta in result.results:
            batch = self._internal_batches.get(delta.id)
            if batch is not None and batch.on_result(delta):
                self._end_internal(batch)
        return replace(
            result,
            results=[delta for delta in result.results if delta.id >= 0],
            started=[started for started in result.started if started.id >= 0],
        )

    def _end_internal(self, batch: InternalBatch) -> None:
        self._engine.abort(batch.ids)
        for sequence_id in batch.ids:
            self._internal_batches.pop(sequence_id, None)
        self._stats_dirty = True

    def _abort(self, client_id: int, sequence_ids: list[int]) -> None:
        if client_id == self._client_id:
            self._engine.abort(sequence_ids)
            self._open_sequence_ids.difference_update(sequence_ids)
            self._stats_dirty = True

    def _run_call(self, action: Callable[[], T], future: "Future[T]") -> None:
        try:
            result = action()
        except PROCESS_ENDS:
            raise
        except BaseException as error:
            future.set_exception(error)
        else:
            future.set_result(result)
        self._stats_dirty = True
