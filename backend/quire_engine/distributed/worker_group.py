# SPDX-License-Identifier: Apache-2.0
"""Worker group: rank 0 uses it to start the workers of the other ranks, to send them steps and calls, and to watch
them. A rank is a tensor-parallel rank of a pipeline stage.

    scheduler, sampler, rank 0 --ring: input of a step--> rank 1 .. n-1 (executor/rank_worker.py)
                               --socket: calls, JSON---->
                               <-------replies-----------
                               <--torch.distributed----->   (communicator.py, pipeline_link.py)

Calls are rare: load, rendezvous, serve, and the calls about adapters and rows of host memory. If one rank ends, the
group is lost: the other ranks are killed, every method that waits or starts a step raises RunnerLost, and `on_lost` is
called. The same happens if a rank hangs: it must answer a ping within `HANG_S`.
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
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from itertools import count
from pathlib import Path
from typing import Any, TypeVar

import torch

from quire_engine.distributed.communicator import TIMEOUT_S
from quire_engine.distributed.other_nodes import OtherNodes
from quire_engine.distributed.rank_links import RankLinks
from quire_engine.distributed.rendezvous import Rendezvous
from quire_engine.distributed.shm_ring import ELEMENT_BYTES, Doorbell, SharedMemoryRing, notify_all
from quire_engine.distributed.worker_handle import WorkerChannels, WorkerHandle, WorkerProcess
from quire_engine.step.input import StepMessage, encode
from quire_engine.step.plan import RunnerLost
from quire_spec.engine.config import EngineConfig
from quire_spec.errors import ConfigError, QuireError, error_from_code
from quire_spec.model.model_config import ModelConfig
from quire_spec.protocol import rank_wire

HANG_S = 10.0
"""A rank that answers no ping for this many seconds hangs. A thread of its own answers, also while a step runs."""
_PING_INTERVAL_S = 2.0
_EXIT_DETECTION_S = 1.0
"""Maximum seconds until the exit of a worker is noticed."""
_POLL_S = 20e-6
"""Seconds between two polls of a device. The operating system extends this to about 80 us. This is short compared with
a step, which takes milliseconds."""

T = TypeVar("T")
logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _PendingCall:
    missing_ranks: set[int]
    """Ranks that have not replied."""
    errors: dict[int, QuireError] = field(default_factory=dict)
    """The error of each rank that failed."""
    values: list[Any] = field(default_factory=list)


class WorkerGroup:
    """The workers of a model, which are all ranks except rank 0. `links` are the connections of rank 0. Call
    `start_serving` before `broadcast_step`."""

    def __init__(
        self,
        config: EngineConfig,
        shape: ModelConfig,
        folder: Path,
        start_worker: Callable[[WorkerChannels], WorkerHandle] = WorkerProcess,
        on_lost: Callable[[str], None] | None = None,
        timeout_s: float = TIMEOUT_S,
        hang_s: float | None = None,
        nodes: OtherNodes | None = None,
        row_file: str | None = None,
    ) -> None:
        """Start the workers and return at once; the workers load the model in `folder`.

        `on_lost(reason)` is called in a thread of the group when a worker has ended unexpectedly or hangs. `nodes` are
        the other nodes, if there are any; the group closes them. `row_file` is the path of the
        file for the rows of host memory; None if no store uses them.
        """
        size = config.ranks_per_core
        self._nodes = nodes
        self.links = RankLinks.of_rank(config, shape, 0, self._rendezvous, timeout_s)
        self._num_rows = 2 * config.pipeline_parallel_size + (2 if config.pipeline_parallel_size > 1 else 0)
        self._hang_s = hang_s or HANG_S
        self._heard_at: dict[int, float] = {}
        """When each worker last replied, on the monotonic clock; empty until the workers serve."""
        self._timeout_s = timeout_s
        self._step_lock = threading.Lock()
        self._on_lost = on_lost
        self._worker_ranks = range(1, size)
        self._ranks_per_node = config.ranks_per_node
        self._local_ranks = range(1, config.ranks_per_node)
        self._condition = threading.Condition()
        self._pending_calls: dict[int, _PendingCall] = {}
        self._call_ids = count()
        self._lost_error: RunnerLost | None = None
        self._closing = False
        self._rendezvous_dir = tempfile.TemporaryDirectory(prefix="quire-ranks-")
        self._memory_fd = os.memfd_create("quire-ring")
        self._ring: SharedMemoryRing | None = None
        self._eventfds = [os.eventfd(0, os.EFD_SEMAPHORE | os.EFD_CLOEXEC) for _ in self._local_ranks]
        self._doorbells = [Doorbell(fd) for fd in self._eventfds]
        self._sockets: dict[int, socket.socket] = {}
        self._workers: dict[int, WorkerHandle] = {}
        started = threading.Event()
        self._watch_thread = threading.Thread(
            target=self._start_and_watch, args=(start_worker, started), name="rank-watch", daemon=True
        )
        self._watch_thread.start()
        started.wait()
        load_args = {
            "config": config.to_json(),
            "folder": str(folder),
            "timeout_s": timeout_s,
            "row_file": row_file,
        }
        level = logging.getLogger().getEffectiveLevel()
        self._load_call_ids = [
            self._send_call({"call": "load", "rank": rank, "log_level": level, **load_args}, {rank})
            for rank in self._worker_ranks
        ]

    def start_serving(self, num_elements: int) -> None:
        """Make the workers ready to compute steps, once rank 0 is ready.

        Args:
            num_elements: number of elements of the largest row of the ring.

        Raises:
            QuireError: a worker failed or has ended.
        """
        SharedMemoryRing.allocate(self._memory_fd, num_elements, self._num_rows)
        self._ring = SharedMemoryRing(self._memory_fd, num_elements, self._num_rows)
        self.call("serve", num_elements=num_elements, num_rows=self._num_rows)
        self._heard_at = dict.fromkeys(self._worker_ranks, time.monotonic())
        self._rendezvous_dir.cleanup()

    def call(self, name: str, **args: Any) -> None:
        """Call every worker and wait for all replies. Safe to call from any thread.

        Raises:
            QuireError: a worker failed (the first error is raised), or a worker has ended.
        """
        self._wait_for_replies(self.start_call(name, **args))

    def start_call(self, name: str, **args: Any) -> int:
        """Call every worker without waiting; return the id for `wait_call`."""
        return self._send_call({"call": name, **args}, set(self._worker_ranks))

    def start_node_call(self, node_rank: int, name: str, **args: Any) -> int:
        """Call another node without waiting; return the id for `wait_call`."""
        return self._send_call({"call": name, **args}, {self._first_rank(node_rank)})

    def notify_node(self, node_rank: int, name: str, **args: Any) -> None:
        """Call another node without waiting for a reply; do nothing if it has ended. Safe to call from any thread."""
        with suppress(OSError):
            frame = json.dumps({"id": None, "call": name, **args}).encode()
            self._sockets[self._first_rank(node_rank)].send(frame)

    @property
    def nodes(self) -> OtherNodes | None:
        """The other nodes; None if there are none."""
        return self._nodes

    def notify(self, name: str, **args: Any) -> None:
        """Call every worker without waiting for a reply; do nothing if the workers have ended. Safe to call from any
        thread.
        """
        frame = json.dumps({"id": None, "call": name, **args}).encode()
        for control in self._sockets.values():
            with suppress(OSError):
                control.send(frame)

    def wait_call(self, call_id: int) -> list[Any]:
        """Wait for all replies to a started call, and return their values; raises the same errors as `call`."""
        return self._wait_for_replies(call_id)

    def is_replied(self, call_id: int, timeout_s: float) -> bool:
        """Wait for all replies to a started call, at most `timeout_s`; return whether `wait_call` would not wait."""
        with self._condition:
            call = self._pending_calls[call_id]
            return self._condition.wait_for(
                lambda: bool(not call.missing_ranks or call.errors or self._lost_error is not None), timeout_s
            )

    def send_adapter(self, key: int, folders: Sequence[Path]) -> None:
        """Send the files of an adapter to the other nodes, which read them in a call `read_adapter`; see OtherNodes."""
        if self._nodes is not None:
            self._nodes.send_adapter(key, folders)

    @contextmanager
    def broadcast_step(self, step_input: StepMessage) -> Iterator[None]:
        """Send the input of a step to the workers.

        The body of the context must run or launch the step on rank 0.

        At most one earlier step may still be in flight, or with pipeline stages, as many as there are stages, this one
        included.

        Raises:
            RunnerLost: a worker has ended, or the body of the context failed.
        """
        with _defer_sigint(), self._step_lock:
            self._raise_if_lost()
            assert self._ring is not None, "start_serving was not called"
            row = self._ring.next_row()
            num_elements = encode(step_input, torch.frombuffer(row, dtype=torch.int64))
            notify_all(self._doorbells)
            with self._abort_all_on_error():
                if self._nodes is not None:
                    self._nodes.send_step(row[: num_elements * ELEMENT_BYTES])
                yield

    def wait_result(self, get_result: Callable[[], T]) -> T:
        """Call `get_result`, which waits for a launched step, and return its result.

        The method raises the same errors as `broadcast_step`.
        """
        self._raise_if_lost()
        with self._abort_all_on_error():
            result = get_result()
        # If a rank is lost, the device stops waiting for it and the result is undefined.
        self._raise_if_lost()
        return result

    def wait_until(self, is_done: Callable[[], bool]) -> None:
        """Poll `is_done` until it returns True.

        The device has then finished work that may depend on other ranks.

        Raises:
            RunnerLost: a worker has ended or hangs.
        """
        deadline = time.monotonic() + self._timeout_s
        while not is_done():
            self._raise_if_lost()
            if time.monotonic() > deadline:
                raise self._mark_lost(f"a step did not finish within {self._timeout_s:g} s")
            time.sleep(_POLL_S)

    def close(self) -> None:
        """Stop all workers. Threads that still wait for a reply get RunnerLost."""
        self._closing = True
        with self._condition:
            if self._lost_error is None:
                self._lost_error = RunnerLost("the engine was closed")
            self._condition.notify_all()
        self._kill_workers()
        self._abort_communicator()
        if threading.current_thread() is not self._watch_thread:
            self._watch_thread.join()
        self._rendezvous_dir.cleanup()

    def startup_error(self, error: Exception) -> Exception:
        """Return the cause of a failed startup.

        The cause is the error that a worker reported. If no worker reported an error, the cause is `error`, the error
        of rank 0. An error on another node can pass. The configuration of this one need not be wrong.
        """
        errors = [rank_error for call in self._pending_calls.values() for rank_error in call.errors.items()]
        if not errors:
            return error
        rank, worker_error = errors[0]
        if rank not in self._local_ranks:
            return RunnerLost(f"rank {rank} cannot load: {worker_error}")
        return ConfigError(str(worker_error))

    def _rendezvous(self) -> Rendezvous:
        for call_id in self._load_call_ids:
            self._wait_for_replies(call_id)
        for rank in self._worker_ranks:
            self._send_call({"call": "rendezvous", "place": asdict(self._place(rank))}, {rank})
        return self._place(0)

    def _place(self, rank: int) -> Rendezvous:
        """Return where a rank meets the others."""
        return Rendezvous(self._rendezvous_dir.name) if self._nodes is None else self._nodes.rendezvous(rank)

    def _first_rank(self, node_rank: int) -> int:
        """Return the rank for which calls of a node itself are sent."""
        return node_rank * self._ranks_per_node

    def _send_call(self, call: dict[str, Any], ranks: set[int]) -> int:
        call_id = next(self._call_ids)
        with self._condition:
            self._raise_if_lost()
            self._pending_calls[call_id] = _PendingCall(set(ranks))
        frame = json.dumps({"id": call_id, **call}).encode()
        for rank in ranks:
            # If the worker has ended, the watch thread notices it.
            with suppress(OSError):
                self._sockets[rank].send(frame)
        return call_id

    def _wait_for_replies(self, call_id: int) -> list[Any]:
        with self._condition:
            call = self._pending_calls[call_id]
            self._condition.wait_for(lambda: not call.missing_ranks or call.errors or self._lost_error is not None)
            if call.errors:
                raise next(iter(call.errors.values()))
            self._raise_if_lost()
            del self._pending_calls[call_id]
            return call.values

    @contextmanager
    def _abort_all_on_error(self) -> Iterator[None]:
        """Stop all ranks if the body of the context fails."""
        try:
            yield
        except Exception as error:
            # The step may have failed because a worker has ended. The watch thread notices this a moment later.
            with self._condition:
                self._condition.wait_for(lambda: self._lost_error is not None, _EXIT_DETECTION_S)
            raise self._mark_lost(f"a step failed in rank 0: {type(error).__name__}: {error}") from error

    def _raise_if_lost(self) -> None:
        if self._lost_error is not None:
            raise RunnerLost(str(self._lost_error))

    def _start_and_watch(
        self, start_worker: Callable[[WorkerChannels], WorkerHandle], started: threading.Event
    ) -> None:
        """Start the workers, then handle their replies until all have ended."""
        with selectors.DefaultSelector() as selector:
            for rank in self._worker_ranks:
                local_socket, worker_socket = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                with worker_socket:
                    if rank in self._local_ranks:
                        channels = WorkerChannels(worker_socket.fileno(), self._memory_fd, self._eventfds[rank - 1])
                        self._workers[rank] = start_worker(channels)
                    else:
                        assert self._nodes is not None, "several nodes need OtherNodes"
                        self._workers[rank] = self._nodes.start_worker(rank, worker_socket)
                self._sockets[rank] = local_socket
                selector.register(local_socket, selectors.EVENT_READ, rank)
            started.set()
            next_ping = time.monotonic()
            while selector.get_map():
                if self._heard_at and not self._closing and time.monotonic() >= next_ping:
                    self.notify("ping")
                    self._check_hanging()
                    next_ping = time.monotonic() + min(_PING_INTERVAL_S, self._hang_s / 4)
                for key, _ in selector.select(min(_PING_INTERVAL_S, self._hang_s / 4)):
                    rank = int(key.data)
                    frame = self._receive(rank)
                    if frame:
                        self._on_reply(rank, json.loads(frame))
                    else:
                        selector.unregister(self._sockets[rank])
                        self._sockets[rank].close()
                        self._on_worker_exit(rank)
        for fd in (self._memory_fd, *self._eventfds):
            os.close(fd)

    def _receive(self, rank: int) -> bytes:
        """Return the next reply of a worker; b"" if the worker has ended."""
        try:
            return self._sockets[rank].recv(rank_wire.MAX_CALL_BYTES)
        except OSError:
            return b""

    def _check_hanging(self) -> None:
        """Mark the group as lost if a worker has not replied for too long."""
        for rank, heard_at in self._heard_at.items():
            if time.monotonic() - heard_at > self._hang_s:
                error = self._mark_lost(
                    f"rank {rank} of {len(self._worker_ranks) + 1} hangs: no answer for {self._hang_s:g} s"
                )
                if self._on_lost is not None:
                    self._on_lost(str(error))
                return

    def _on_reply(self, rank: int, reply: dict[str, Any]) -> None:
        if rank in self._heard_at:
            self._heard_at[rank] = time.monotonic()
        with self._condition:
            call = self._pending_calls.get(reply["id"])
            if call is not None:
                call.missing_ranks.discard(rank)
                call.values.append(reply["value"])
                if reply["error"]:
                    call.errors[rank] = error_from_code(*reply["error"])
            self._condition.notify_all()

    def _on_worker_exit(self, rank: int) -> None:
        exit_description = self._workers[rank].join()
        if not self._closing:
            error = self._mark_lost(f"rank {rank} of {len(self._worker_ranks) + 1} ended: {exit_description}")
            if self._on_lost is not None:
                self._on_lost(str(error))

    def _mark_lost(self, reason: str) -> RunnerLost:
        """Mark the group as lost for good, kill the workers, and return the error. Only the first reason is kept."""
        with self._condition:
            if self._lost_error is None:
                self._lost_error = RunnerLost(f"{reason}; all ranks stop together; restart the engine")
                logger.error("group of ranks lost reason=%s", reason)
            self._closing = True
            self._condition.notify_all()
        self._kill_workers()
        self._abort_communicator()
        return self._lost_error

    def _kill_workers(self) -> None:
        for worker in self._workers.values():
            worker.kill()
        if self._nodes is not None:
            self._nodes.close()

    def _abort_communicator(self) -> None:
        if self.links.communicator is not None:
            self.links.communicator.abort(self._step_lock)


@contextmanager
def _defer_sigint() -> Iterator[None]:
    """Defer SIGINT until the context ends, because the other ranks block if rank 0 leaves a step halfway."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    deferred_signals: list[Any] = []
    handler = signal.signal(signal.SIGINT, lambda *args: deferred_signals.append(args))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if deferred_signals and callable(handler):
            handler(*deferred_signals[0])
