# SPDX-License-Identifier: Apache-2.0
"""The program of every model of ours on the server: hands requests to the text process, and sends back what comes.

The only module that touches the server's Python API. `execute` never blocks and never raises: each request's failure is
its own error response. Threads of a stub: the server's own, text_client.py's writer and reader, NUM_SENDERS that send
responses, one that asks for silent requests whether their client is gone, one that keeps early errors back for a
moment, and one that ends the stub with its server. Nothing heavy is imported here: a pod has one such process for the
base and for each exposed adapter.
"""

import itertools
import json
import logging
import os
import queue
import select
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import triton_python_backend_utils as pb_utils

from quire_server import interface, wire
from quire_server.ledger import Ledger
from quire_server.stream import Stream
from quire_server.text_client import TextClient
from quire_spec.errors import Cancelled, Internal, InvalidArgument, QuireError, error_from
from quire_spec.messages import Event

log = logging.getLogger(__name__)

NUM_SENDERS = 4
"""A send is a blocking round trip of about 0.1 ms; on two cores four in parallel carry 14k responses/s, and sixteen
hardly more."""
CHECK_S = 0.1
"""How long a client may be gone before its request is found out, while few are open."""
MAX_CHECKS_PER_S = 100
"""Asking is a round trip to the server, 65 us of CPU for both sides: less than 1 % of a core. With more than 10
requests open each is asked less often: with 64 every 0.6 s, in which an answer may be computed for nobody."""
REFUSE_AFTER_S = 0.02
"""How old a request is at least when it gets an error. On a busy machine, release 24.10 aborts once in some thousand
times, with everybody's streams, when a gRPC client that asks for real statuses (`triton_grpc_error`) gets an error
while the server still takes in its request."""
FAIL_AFTER_S = 0.1
"""The same of an error that follows a response, which the server may still be writing."""
_FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL


class TritonPythonModel:
    """What the server calls: `initialize` once, `execute` per batch of requests, `finalize` when unloaded."""

    def initialize(self, args: Mapping[str, str]) -> None:
        """Server: the model is loaded. `args` has the model's name and its config as JSON."""
        _forward_logs()
        _end_with_server()
        parameters = json.loads(args["model_config"])["parameters"]
        self._model = args["model_name"]
        self._base = parameters[interface.PARAM_BASE]["string_value"]
        self._ids = itertools.count(1)
        self._streams: dict[int, Stream] = {}
        self._to_send: queue.SimpleQueue[Stream | None] = queue.SimpleQueue()
        self._failed: queue.SimpleQueue[tuple[float, Stream] | None] = queue.SimpleQueue()
        """Held, with when each may have its error."""
        self._closing = threading.Event()
        socket = Path(parameters[interface.PARAM_SOCKET]["string_value"])
        self._ledger = Ledger(socket.parent)
        self._text = TextClient(socket, self._model, self._deliver)
        self._threads = [threading.Thread(target=self._send_loop, daemon=True) for _ in range(NUM_SENDERS)]
        self._threads += [threading.Thread(target=loop, daemon=True) for loop in (self._check_loop, self._fail_loop)]
        for thread in self._threads:
            thread.start()

    def execute(self, requests: Sequence[Any]) -> None:
        """Server: requests came. Their responses are sent later, from other threads."""
        for request in requests:
            self._ledger.opened()
            self._accept(request)

    def finalize(self) -> None:
        """Server: the model is unloaded; its requests are over by then."""
        self._closing.set()
        self._text.close()
        self._failed.put(None)
        for _ in range(NUM_SENDERS):
            self._to_send.put(None)
        for thread in self._threads:
            thread.join(timeout=5)

    def _accept(self, request: Any) -> None:
        request_id, sender, now = next(self._ids), request.get_response_sender(), time.monotonic()
        try:
            inputs = {tensor.name(): tensor.as_numpy() for tensor in request.inputs()}
            submit, wanted = wire.read_request(request_id, self._model, self._base, inputs, request.parameters())
            self._streams[request_id] = Stream(request_id, wanted, sender, now)
            self._text.submit(submit)
        except Exception as error:
            refused = self._streams[request_id] = Stream(request_id, None, sender, now)
            event = _event_of(request_id, error)
            self._text.refused(event.error_code or "")
            self._put(refused, event)

    def _deliver(self, event: Event) -> None:
        stream = self._streams.get(event.id)
        if stream is not None:
            self._put(stream, event)

    def _put(self, stream: Stream, event: Event) -> None:
        self._queue_if(stream.put(event), stream)

    def _queue_if(self, wanted: bool, stream: Stream) -> None:
        if wanted:
            self._to_send.put(stream)

    def _fail_loop(self) -> None:
        while (entry := self._failed.get()) is not None:
            due, stream = entry
            time.sleep(max(0.0, due - time.monotonic()))
            self._to_send.put(stream)

    def _send_loop(self) -> None:
        while (stream := self._to_send.get()) is not None:
            due = None
            try:
                due = self._send(stream, stream.take())
            except Exception as error:
                log.exception("response failed model=%s", self._model)
                self._give_up(stream, error)
            if due is None:
                self._queue_if(stream.release(), stream)
            else:
                self._failed.put((due, stream))

    def _send(self, stream: Stream, events: list[Event]) -> float | None:
        """One response for all of `events`. An error may have to wait: returns until when, in monotonic seconds."""
        last = events[-1]
        if not last.final and self._is_gone(stream):
            return None
        if last.error_code is None:
            stream.sender.send(_response(stream, events), flags=_FINAL if last.final else 0)
        elif (due := self._send_before(stream, events)) > time.monotonic():
            stream.give_back(last)
            return due
        else:
            stream.sender.send(_error_response(last), flags=_FINAL)
        if last.final:
            self._end(stream, tell_text=stream.cut_off)
        else:
            stream.sent_at = time.monotonic()
        return None

    def _send_before(self, stream: Stream, events: list[Event]) -> float:
        """Send what came before an error; returns when that may follow, in monotonic seconds."""
        if len(events) > 1 and stream.wanted is not None and stream.wanted.stream:
            stream.sender.send(_response(stream, events[:-1]), flags=0)
            stream.sent_at = time.monotonic()
        return max(stream.opened_at + REFUSE_AFTER_S, stream.sent_at + FAIL_AFTER_S)

    def _end(self, stream: Stream, tell_text: bool) -> None:
        """Forget a stream. The sender must go too: the server keeps the request until it does."""
        if self._streams.pop(stream.id, None) is not None:
            self._ledger.closed()
            if tell_text:
                self._text.cancel(stream.id)
        stream.sender = None

    def _give_up(self, stream: Stream, error: Exception) -> None:
        """Sending failed: end the request as far as the server still lets us."""
        try:
            stream.sender.send(_error_response(_event_of(stream.id, error)), flags=_FINAL)
        except Exception:
            log.exception("request left without an end model=%s", self._model)
        self._end(stream, tell_text=True)

    def _is_gone(self, stream: Stream) -> bool:
        """True when the client is gone; asks the server if it was not asked lately. Cuts the stream then."""
        now = time.monotonic()
        if stream.sender is None or now - stream.checked_at < self._check_interval_s():
            return False
        stream.checked_at = now
        if not stream.sender.is_cancelled():
            return False
        self._queue_if(stream.cut(Cancelled("the client has cancelled the request or closed its connection")), stream)
        return True

    def _check_loop(self) -> None:
        while not self._closing.wait(self._check_interval_s()):
            for stream in list(self._streams.values()):
                if stream.hold():
                    self._check(stream)

    def _check(self, stream: Stream) -> None:
        try:
            self._is_gone(stream)
        except Exception:
            log.exception("cancellation check failed model=%s", self._model)
        self._queue_if(stream.release(), stream)

    def _check_interval_s(self) -> float:
        return max(CHECK_S, len(self._streams) / MAX_CHECKS_PER_S)


def _response(stream: Stream, events: list[Event]) -> Any:
    assert stream.wanted is not None, "a refused request has only an error"
    news = wire.news(events, stream.told)
    tensors = wire.output_tensors(news, stream.wanted, stream.told)
    stream.told = news
    return pb_utils.InferenceResponse([pb_utils.Tensor(name, array) for name, array in tensors.items()])


def _error_response(event: Event) -> Any:
    code, message = wire.error_of(error_from(event.error_code or "", event.error))
    return pb_utils.InferenceResponse(error=pb_utils.TritonError(message, getattr(pb_utils.TritonError, code)))


def _event_of(request_id: int, error: Exception) -> Event:
    """The final event of a request that could not be handed on."""
    if isinstance(error, UnicodeDecodeError):
        # The server passes strings on unread, and its Python API decodes them on the way to us.
        error = InvalidArgument(f"request parameters: not valid UTF-8 at byte {error.start}: {error.reason}")
    if not isinstance(error, QuireError):
        log.error("request failed in the frontend", exc_info=error)
        error = Internal(f"the frontend failed on this request: {type(error).__name__}")
    return Event(request_id, error_code=error.code, error=str(error))


def _end_with_server() -> None:
    """Have this process end when the server does, however that happens.

    The kernel's parent-death signal would not do: it comes when the thread that started the stub ends, and the server
    loads each model in a thread of its own.
    """
    # It leads its process group (processes.py); our parent is another one where it has ended by now.
    server = os.getpgrp()
    try:
        pidfd = os.pidfd_open(server)
    except OSError:
        os._exit(1)
    if os.getppid() != server:
        os._exit(1)

    def wait() -> None:
        select.select([pidfd], [], [])
        os._exit(1)

    threading.Thread(target=wait, name="server-watch", daemon=True).start()


class _ServerLog(logging.Handler):
    """Forwards records to the server's logger."""

    def emit(self, record: logging.LogRecord) -> None:
        text = f"{record.name}: {self.format(record)}"
        if record.levelno >= logging.ERROR:
            pb_utils.Logger.log_error(text)
        elif record.levelno >= logging.WARNING:
            pb_utils.Logger.log_warn(text)
        else:
            pb_utils.Logger.log_info(text)


def _forward_logs() -> None:
    root = logging.getLogger()
    root.setLevel(logging.INFO)
    root.handlers = [_ServerLog()]
