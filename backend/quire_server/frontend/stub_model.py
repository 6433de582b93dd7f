# SPDX-License-Identifier: Apache-2.0
"""The model that the server's Python backend runs. It passes requests to the text process. The text process returns
deltas, which the model sends as responses.

Quire adds one model to the server for the base model, and one for each exposed adapter. Each of these models runs this
program in a stub process. This module is the only one that uses the server's Python API. `execute` never blocks and
never raises. If a request fails, that request gets an error response.

A stub runs the threads that the server itself starts, the thread of text_client.py, and
NUM_SENDER_THREADS threads that send responses. It also has three threads of its own: one checks idle requests for
cancellation, one delays early errors, and one ends the stub when its server ends. This module must not import large
packages, because a pod runs one stub for the base model and one for each exposed adapter.
"""

import itertools
import json
import logging
import os
import queue
import re
import select
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import triton_python_backend_utils as pb_utils

from quire_server.frontend import tensors
from quire_server.frontend.open_requests import OpenRequestCounter
from quire_server.frontend.response_stream import ResponseStream
from quire_server.frontend.text_client import TextClient
from quire_server.model_server import model_interface
from quire_spec.errors import Cancelled, Code, Internal, InvalidArgument, QuireError, error_from_code
from quire_spec.protocol.messages import OutputDelta

logger = logging.getLogger(__name__)

NUM_SENDER_THREADS = 4
"""Number of threads that send responses. To send a response, a thread waits about 0.1 ms for the server. On two cores,
4 threads send 14,000 responses/s, and 16 threads do not send many more."""
CANCEL_CHECK_INTERVAL_S = 0.1
"""If few requests are open, each request is checked for cancellation at this interval, in seconds."""
MAX_CANCEL_CHECKS_PER_S = 100
"""Maximum number of checks for cancellation per second, over all requests. A check takes 65 us of CPU time in the stub
and the server together, so all checks use less than 1 % of a core. If more than 10 requests are open, the interval
between the checks of one request grows. With 64 open requests, a request continues for up to 0.6 s after the client has
cancelled it."""
MIN_ERROR_DELAY_S = 0.02
"""An error is sent only when the request is at least this many seconds old. A server of release 24.10 can abort if it
sends an error while it is still receiving the request. This happens only if a gRPC client requests real statuses
(`triton_grpc_error`). On a busy machine, about one in several thousand such errors causes the abort. The abort ends the
streams of all clients. The preload library also prevents the abort, but it must be built with a C compiler."""
MIN_ERROR_DELAY_AFTER_RESPONSE_S = 0.1
"""An error is sent at least this many seconds after the last response, because the server may still be writing that
response."""
_FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL


class TritonPythonModel:
    """The interface that the server calls: `initialize` when it loads the model, `execute` for each batch of requests,
    and `finalize` when it unloads the model."""

    def initialize(self, args: Mapping[str, str]) -> None:
        """Start the stub; the server calls this on load. `args` contains the model's name and its config as JSON."""
        _forward_logs()
        _exit_with_server()
        parameters = json.loads(args["model_config"])["parameters"]
        self._model_name = args["model_name"]
        self._base_model_name = parameters[model_interface.PARAM_BASE]["string_value"]
        self._request_ids = itertools.count(1)
        self._streams: dict[int, ResponseStream] = {}
        self._send_queue: queue.SimpleQueue[ResponseStream | None] = queue.SimpleQueue()
        self._delayed_errors: queue.SimpleQueue[tuple[float, ResponseStream] | None] = queue.SimpleQueue()
        """Streams that this module has acquired, and that still wait until their error can be sent. Each stream is
        stored with the time at which this is possible."""
        self._closing = threading.Event()
        headers = os.environ.get(model_interface.FORWARDED_HEADERS_VARIABLE)
        self._forwarded_headers = re.compile(headers) if headers else None
        socket = Path(parameters[model_interface.PARAM_SOCKET]["string_value"])
        self._open_requests = OpenRequestCounter(socket.parent)
        self._text_client = TextClient(socket, self._model_name, self._on_delta)
        self._threads = [threading.Thread(target=self._send_loop, daemon=True) for _ in range(NUM_SENDER_THREADS)]
        self._threads += [
            threading.Thread(target=loop, daemon=True) for loop in (self._cancel_check_loop, self._delayed_error_loop)
        ]
        for thread in self._threads:
            thread.start()

    def execute(self, requests: Sequence[Any]) -> None:
        """Pass new requests to the text process. The responses are sent later, by other threads."""
        for request in requests:
            self._open_requests.increment()
            self._submit(request)

    def finalize(self) -> None:
        """Stop the stub; the server calls this on unload, after the last request."""
        self._closing.set()
        self._text_client.close()
        self._delayed_errors.put(None)
        for _ in range(NUM_SENDER_THREADS):
            self._send_queue.put(None)
        for thread in self._threads:
            thread.join(timeout=5)

    def _submit(self, request: Any) -> None:
        request_id, sender, now = next(self._request_ids), request.get_response_sender(), time.monotonic()
        try:
            inputs = {tensor.name(): tensor.as_numpy() for tensor in request.inputs()}
            generate_request, options = tensors.parse_request(
                request_id,
                self._model_name,
                self._base_model_name,
                inputs,
                request.parameters(),
                self._forwarded_headers,
            )
            self._streams[request_id] = ResponseStream(request_id, options, sender, now)
            self._text_client.submit(generate_request)
        except Exception as error:
            stream = self._streams[request_id] = ResponseStream(request_id, None, sender, now)
            error_delta = _error_delta(request_id, error)
            self._text_client.report_rejected(error_delta.error_code or Code.INTERNAL)
            self._push(stream, error_delta)

    def _on_delta(self, delta: OutputDelta) -> None:
        stream = self._streams.get(delta.id)
        if stream is not None:
            self._push(stream, delta)

    def _push(self, stream: ResponseStream, delta: OutputDelta) -> None:
        self._enqueue_if(stream.push(delta), stream)

    def _enqueue_if(self, must_enqueue: bool, stream: ResponseStream) -> None:
        if must_enqueue:
            self._send_queue.put(stream)

    def _delayed_error_loop(self) -> None:
        while (delayed_error := self._delayed_errors.get()) is not None:
            due_at, stream = delayed_error
            time.sleep(max(0.0, due_at - time.monotonic()))
            self._send_queue.put(stream)

    def _send_loop(self) -> None:
        while (stream := self._send_queue.get()) is not None:
            due_at = None
            try:
                due_at = self._send(stream, stream.pop_deltas())
            except Exception as error:
                logger.exception("response failed model=%s", self._model_name)
                self._send_failure(stream, error)
            if due_at is None:
                self._enqueue_if(stream.release(), stream)
            else:
                self._delayed_errors.put((due_at, stream))

    def _send(self, stream: ResponseStream, deltas: list[OutputDelta]) -> float | None:
        """Send one response that contains all `deltas`. If the last delta is an error that must wait, do not send it
        yet. Instead, return the time at which it can be sent, in monotonic seconds."""
        last_delta = deltas[-1]
        if not last_delta.final and self._is_cancelled(stream):
            return None
        if last_delta.error_code is None:
            stream.sender.send(_to_response(stream, deltas), flags=_FINAL if last_delta.final else 0)
        elif (due_at := self._send_before_error(stream, deltas)) > time.monotonic():
            stream.push_back(last_delta)
            return due_at
        else:
            stream.sender.send(_error_response(last_delta), flags=_FINAL)
        if last_delta.final:
            self._close(stream, notify_text=stream.failed_locally)
        else:
            stream.sent_at = time.monotonic()
        return None

    def _send_before_error(self, stream: ResponseStream, deltas: list[OutputDelta]) -> float:
        """Send the deltas that come before an error. Return the time at which the error can be sent, in monotonic
        seconds."""
        if len(deltas) > 1 and stream.options is not None and stream.options.stream:
            stream.sender.send(_to_response(stream, deltas[:-1]), flags=0)
            stream.sent_at = time.monotonic()
        return max(stream.opened_at + MIN_ERROR_DELAY_S, stream.sent_at + MIN_ERROR_DELAY_AFTER_RESPONSE_S)

    def _close(self, stream: ResponseStream, notify_text: bool) -> None:
        """Remove a stream and delete its response sender. The server keeps the request in memory until the sender is
        deleted."""
        if self._streams.pop(stream.request_id, None) is not None:
            self._open_requests.decrement()
            if notify_text:
                self._text_client.cancel(stream.request_id)
        stream.sender = None

    def _send_failure(self, stream: ResponseStream, error: Exception) -> None:
        """Try to end a request with an error response, because its normal response could not be sent."""
        try:
            stream.sender.send(_error_response(_error_delta(stream.request_id, error)), flags=_FINAL)
        except Exception:
            logger.exception("request could not be ended model=%s", self._model_name)
        self._close(stream, notify_text=True)

    def _is_cancelled(self, stream: ResponseStream) -> bool:
        """Check whether a request was cancelled, but at most once per check interval. If the client has left, make the
        stream fail and return True."""
        now = time.monotonic()
        if stream.sender is None or now - stream.checked_at < self._cancel_check_interval_s():
            return False
        stream.checked_at = now
        if not stream.sender.is_cancelled():
            return False
        # These sentences are those of vllm_backend. Its users search for them in logs.
        logger.info("[vllm] Cancelling the request model=%s request_id=%d", self._model_name, stream.request_id)
        self._enqueue_if(stream.fail(Cancelled("the client cancelled the request or closed its connection")), stream)
        logger.info("[vllm] Successfully cancelled the request request_id=%d", stream.request_id)
        return True

    def _cancel_check_loop(self) -> None:
        while not self._closing.wait(self._cancel_check_interval_s()):
            for stream in list(self._streams.values()):
                if stream.try_acquire():
                    self._check_cancelled(stream)

    def _check_cancelled(self, stream: ResponseStream) -> None:
        try:
            self._is_cancelled(stream)
        except Exception:
            logger.exception("cancellation check failed model=%s", self._model_name)
        self._enqueue_if(stream.release(), stream)

    def _cancel_check_interval_s(self) -> float:
        return max(CANCEL_CHECK_INTERVAL_S, len(self._streams) / MAX_CANCEL_CHECKS_PER_S)


def _to_response(stream: ResponseStream, deltas: list[OutputDelta]) -> Any:
    assert stream.options is not None, "a rejected request has only an error"
    output_deltas = tensors.merge_by_output(deltas, stream.last_sent)
    arrays = tensors.to_output_tensors(output_deltas, stream.options, stream.last_sent)
    stream.last_sent = output_deltas
    return pb_utils.InferenceResponse([pb_utils.Tensor(name, array) for name, array in arrays.items()])


def _error_response(delta: OutputDelta) -> Any:
    code, message = tensors.error_response(error_from_code(delta.error_code or "", delta.error))
    return pb_utils.InferenceResponse(error=pb_utils.TritonError(message, getattr(pb_utils.TritonError, code)))


def _error_delta(request_id: int, error: Exception) -> OutputDelta:
    """Return the final delta of a request that failed in the frontend."""
    if isinstance(error, UnicodeDecodeError):
        # The server does not validate strings; its Python API decodes them here.
        error = InvalidArgument(f"request parameters: invalid UTF-8 at byte {error.start}: {error.reason}")
    if not isinstance(error, QuireError):
        logger.error("request failed in the frontend", exc_info=error)
        error = Internal(f"the frontend failed on this request with {type(error).__name__}; see the log of the pod")
    return OutputDelta.from_error(request_id, error)


def _exit_with_server() -> None:
    """End this process when the server ends, even if the server crashes or is killed.

    The kernel's parent-death signal cannot be used. The kernel sends it as soon as the thread that started the stub
    ends. The server loads each model in a separate thread, so the signal would arrive too early.
    """
    # The server is the leader of its process group (child_process.py). If the parent of this process is another
    # process, the server has already ended.
    server_pid = os.getpgrp()
    try:
        pidfd = os.pidfd_open(server_pid)
    except OSError:
        os._exit(1)
    if os.getppid() != server_pid:
        os._exit(1)

    def wait_for_server() -> None:
        select.select([pidfd], [], [])
        os._exit(1)

    threading.Thread(target=wait_for_server, name="server-watch", daemon=True).start()


def _forward_logs() -> None:
    """Write log records to stderr, which is the server's log, in the format of the server.

    The server's own logger cannot be used: it waits for the server while it holds the interpreter's lock. After the
    server has ended, a second record would wait forever, so that the thread of `_exit_with_server` could not run.
    """
    handler = logging.StreamHandler(sys.stderr)
    log_format = "%(levelname).1s%(asctime)s.%(msecs)03d000 %(process)d %(name)s] %(message)s"
    handler.setFormatter(logging.Formatter(log_format, "%m%d %H:%M:%S"))
    root = logging.getLogger()
    root.setLevel(logging.INFO)
    root.handlers = [handler]
