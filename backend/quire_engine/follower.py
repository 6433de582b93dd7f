# SPDX-License-Identifier: Apache-2.0
"""Follower: a rank other than the first. Loads its part of the model, does the steps that rank 0 hands out (group.py).

It decides nothing and holds nothing that is not told again at a start: whatever goes wrong, it ends.
"""

import json
import logging
import queue
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from quire_engine.loader import give_way
from quire_engine.member import MAX_CALL_BYTES, Ends
from quire_engine.ranks import Ranks
from quire_engine.request import SlotId
from quire_engine.ring import Bell, Ring
from quire_engine.runner import TorchRunner
from quire_engine.step import SlotLoad
from quire_engine.work import decode
from quire_spec.engine.config import EngineConfig
from quire_spec.errors import Internal, QuireError
from quire_spec.model.model_config import ModelConfig
from quire_spec.model.tensor_parallel import TensorParallelShard

_ADAPTER_CALLS = ("read", "fill", "forget")
_MAX_ERROR = MAX_CALL_BYTES // 16
"""Characters; a reply is one packet, and JSON may need six bytes for one."""

_log = logging.getLogger("quire.rank")


class Follower:
    """One rank's side of the calls and of the ring."""

    def __init__(self, ends: Ends, on_gone: Callable[[], None]) -> None:
        """`on_gone` is called in a thread of its own when rank 0 is gone."""
        self._control = socket.socket(fileno=ends.control)
        self._memory = ends.memory
        self._bell = Bell(ends.bell)
        self._on_gone = on_gone
        self._calls: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self._runner: TorchRunner | None = None
        self._open = True

    def run(self) -> None:
        """Do what rank 0 says until `stop`.

        Raises:
            QuireError: this rank cannot serve; rank 0 knows why.
        """
        threading.Thread(target=self._listen, name="calls", daemon=True).start()
        call = self._next("load")
        logging.getLogger().setLevel(call["log_level"])
        config, folder = EngineConfig.from_json(call["config"]), Path(call["folder"])
        shard = TensorParallelShard(ModelConfig.load(folder), call["rank"], config.tensor_parallel_size)

        def meet() -> Path:
            nonlocal call
            self._answer(call)
            call = self._next("meet")
            return Path(call["path"])

        try:
            ranks = Ranks(shard, meet, call["timeout_s"])
            runner = TorchRunner(config, shard.model_config, folder, ranks=ranks)
        except QuireError as error:
            self._answer(call, error)
            raise
        self._runner = runner
        self._answer(call)
        call = self._next("serve")
        ring = Ring(self._memory, call["num_elements"])
        self._answer(call)
        _log.info("rank serves rank=%d size=%d", shard.rank, shard.size)
        self._bell.wait()
        while self._open:
            runner.follow(decode(ring.turn()))
            self._bell.wait()

    def stop(self) -> None:
        """Have `run` return when it waits next; for a rank that is a thread. From any thread."""
        self._open = False
        self._bell.ring()
        self._calls.put({"call": "stop"})

    def hang_up(self) -> None:
        """Let rank 0 see that this rank has ended, as the end of a process does."""
        self._control.shutdown(socket.SHUT_RDWR)
        self._control.close()

    def _listen(self) -> None:
        while frame := self._receive():
            call = json.loads(frame)
            if call["call"] in _ADAPTER_CALLS:
                # A thread for each, as in rank 0 (loader.py): a disk that hangs holds up nobody else.
                threading.Thread(target=self._do, args=(call,), name="adapter", daemon=True).start()
            else:
                self._calls.put(call)
        self._on_gone()

    def _do(self, call: dict[str, Any]) -> None:
        """Carry an adapter; what goes wrong with it is rank 0's to say."""
        give_way()
        runner, key, failure = self._runner, str(call["key"]), None
        assert runner is not None, "adapters come when steps do"
        try:
            if call["call"] == "read":
                runner.hold(key, runner.read(Path(call["path"])))
            elif call["call"] == "fill":
                runner.load(SlotLoad(key, SlotId(call["slot"])))()
            else:
                runner.drop(key)
        except QuireError as error:
            failure = error
        except Exception as error:
            _log.exception("adapter failed call=%s", call["call"])
            failure = Internal(f"{type(error).__name__}: {error}")
        if call["id"] is not None:
            self._answer(call, failure)

    def _receive(self) -> bytes:
        try:
            return self._control.recv(MAX_CALL_BYTES)
        except OSError:
            return b""

    def _next(self, name: str) -> dict[str, Any]:
        call = self._calls.get()
        if call["call"] != name:
            raise RuntimeError(f"rank 0 said {call['call']!r}, not {name!r}")
        return call

    def _answer(self, call: dict[str, Any], error: QuireError | None = None) -> None:
        said = None if error is None else [error.code.value, str(error)[:_MAX_ERROR]]
        self._control.send(json.dumps({"id": call["id"], "error": said}).encode())
