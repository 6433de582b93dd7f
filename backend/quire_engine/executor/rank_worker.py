# SPDX-License-Identifier: Apache-2.0
"""Worker: a rank other than 0. The worker loads its part of the model, which are the shards of a tensor-parallel rank
of the layers of a pipeline stage, and computes its part of the steps that rank 0 sends.

A worker makes no decisions, and its whole state can be restored by a restart. Therefore, it exits on every error.
"""

import contextlib
import gc
import json
import logging
import queue
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from quire_engine.distributed.rank_links import RankLinks
from quire_engine.distributed.rendezvous import Rendezvous
from quire_engine.distributed.shm_ring import Doorbell, SharedMemoryRing
from quire_engine.distributed.worker_handle import WorkerChannels
from quire_engine.kv_cache.row_file import RowFile
from quire_engine.lora.adapter_source import WeightedFolder
from quire_engine.lora.io_threads import lower_thread_priority
from quire_engine.sequence import SlotId
from quire_engine.step.input import decode
from quire_engine.step.plan import SlotLoad, SwapCopy
from quire_engine.worker.model_runner import DeviceModelRunner
from quire_spec.constants import AdapterDigest
from quire_spec.engine.config import EngineConfig
from quire_spec.errors import Internal, QuireError
from quire_spec.model.model_config import ModelConfig
from quire_spec.protocol import rank_wire

_ADAPTER_CALLS = ("read_adapter", "copy_to_slot", "discard_adapter")
_ROW_CALLS = ("copy_rows", "copy_states", "synchronize_rows")
_MAX_ERROR_LENGTH = rank_wire.MAX_CALL_BYTES // 16
"""Maximum characters of an error message. A reply is one packet, and JSON can need six bytes for one character."""

logger = logging.getLogger(__name__)


class RankWorker:
    """Handles the calls and the steps that rank 0 sends."""

    def __init__(self, channels: WorkerChannels, on_disconnected: Callable[[], None]) -> None:
        """`on_disconnected` is called in a thread of its own when rank 0 has ended."""
        self._control = socket.socket(fileno=channels.control_fd)
        self._memory_fd = channels.memory_fd
        self._doorbell = Doorbell(channels.doorbell_fd)
        self._on_disconnected = on_disconnected
        self._call_queue: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self._runner: DeviceModelRunner | None = None
        self._is_running = True

    def run(self) -> None:
        """Handle calls and steps until `stop` is called.

        Raises:
            QuireError: this rank cannot load its shard; the error was sent to rank 0.
        """
        threading.Thread(target=self._serve_calls, name="rank-calls", daemon=True).start()
        call = self._next_call("load")
        logging.getLogger().setLevel(call["log_level"])
        config, folder = EngineConfig.from_json(call["config"]), Path(call["folder"])
        rank, call_row_file = call["rank"], call["row_file"]

        def rendezvous() -> Rendezvous:
            nonlocal call
            self._send_reply(call)
            call = self._next_call("rendezvous")
            return Rendezvous(**call["place"])

        try:
            shape = ModelConfig.load(folder, config.model_impl)
            links = RankLinks.of_rank(config, shape, rank, rendezvous, call["timeout_s"])
            row_file = None if call_row_file is None else RowFile.open(call_row_file)
            runner = DeviceModelRunner(config, shape, folder, links=links, row_file=row_file)
        except QuireError as error:
            self._send_reply(call, error)
            raise
        self._runner = runner
        # Freezing keeps garbage collections from traversing the model in the middle of a step, as in core/process.py.
        gc.collect()
        gc.freeze()
        self._send_reply(call)
        call = self._next_call("serve")
        ring = SharedMemoryRing(self._memory_fd, call["num_elements"], call["num_rows"])
        self._send_reply(call)
        logger.info("worker ready rank=%d size=%d", rank, config.ranks_per_core)
        self._doorbell.wait()
        while self._is_running:
            runner.execute_as_worker(decode(torch.frombuffer(ring.next_row(), dtype=torch.int64)))
            self._doorbell.wait()

    def stop(self) -> None:
        """Make `run` return when it next waits; used if the worker is a thread. Safe to call from any thread."""
        self._is_running = False
        self._doorbell.notify()
        self._call_queue.put({"call": "stop"})

    def close_control(self) -> None:
        """Close the socket; this tells rank 0 that the worker ends."""
        self._control.shutdown(socket.SHUT_RDWR)
        self._control.close()

    def _serve_calls(self) -> None:
        while frame := self._receive():
            call = json.loads(frame)
            if call["call"] == "ping":
                self._send_reply(call)
            elif call["call"] in _ADAPTER_CALLS:
                # Each call gets its own thread, as in rank 0 (lora/io_threads.py). So a disk that hangs blocks only
                # this adapter.
                threading.Thread(target=self._run_adapter_call, args=(call,), name="rank-adapter", daemon=True).start()
            elif call["call"] in _ROW_CALLS:
                threading.Thread(target=self._run_row_call, args=(call,), name="rank-rows", daemon=True).start()
            else:
                self._call_queue.put(call)
        self._on_disconnected()

    def _run_adapter_call(self, call: dict[str, Any]) -> None:
        """Read, load or discard an adapter; errors are sent to rank 0."""
        lower_thread_priority()
        runner, key, failure, num_pages = self._runner, AdapterDigest(str(call["key"])), None, 0
        assert runner is not None, "adapter calls come after the call serve"
        try:
            if call["call"] == "read_adapter":
                folders = tuple(WeightedFolder(Path(path), weight) for path, weight in call["folders"])
                adapter = runner.read_adapter(folders)
                num_pages = adapter.info.num_pages
                runner.store_adapter(key, adapter)
            elif call["call"] == "copy_to_slot":
                runner.load_adapter_slot(SlotLoad(key, SlotId(call["slot"]), call["first_page"]))()
            else:
                runner.discard_adapter(key)
        except QuireError as error:
            failure = error
        except Exception as error:
            logger.exception("adapter call failed call=%s", call["call"])
            failure = Internal(f"{type(error).__name__}: {error}")
        if call["id"] is not None:
            self._send_reply(call, failure, num_pages)

    def _run_row_call(self, call: dict[str, Any]) -> None:
        """Start copies between blocks and rows of host memory, or wait for them; errors are sent to rank 0."""
        assert self._runner is not None, "calls about rows come after the call serve"
        failure = None
        try:
            if call["call"] in ("copy_rows", "copy_states"):
                copy = self._runner.copy_rows if call["call"] == "copy_rows" else self._runner.copy_states
                copy(*([SwapCopy(*pair) for pair in pairs] for pairs in call["copies"]))
            else:
                self._runner.synchronize_rows()
        except Exception as error:
            logger.exception("copies to host memory failed")
            failure = Internal(f"{type(error).__name__}: {error}")
        self._send_reply(call, failure)

    def _receive(self) -> bytes:
        try:
            return self._control.recv(rank_wire.MAX_CALL_BYTES)
        except OSError:
            return b""

    def _next_call(self, name: str) -> dict[str, Any]:
        call = self._call_queue.get()
        if call["call"] != name:
            raise RuntimeError(f"rank 0 sent the call {call['call']!r}, expected {name!r}")
        return call

    def _send_reply(self, call: dict[str, Any], error: QuireError | None = None, value: int = 0) -> None:
        """Reply to a call. `value` is the number of pages of an adapter that was read."""
        error_fields = None if error is None else [error.code.value, str(error)[:_MAX_ERROR_LENGTH]]
        frame = json.dumps({"id": call["id"], "error": error_fields, "value": value}).encode()
        # Rank 0 or this worker may end before the reply; `_receive` notices it.
        with contextlib.suppress(OSError):
            self._control.send(frame)
