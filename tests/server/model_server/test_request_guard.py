# SPDX-License-Identifier: Apache-2.0
"""Requests that crash release 24.10 of the server: the preload library rejects them, and no other client is affected.

The scanner of requests (request_guard.h) is compared with h11: what it accepts, h11 splits at the same places.
"""

import contextlib
import ctypes
import json
import socket
import subprocess
import threading
from collections.abc import Iterator

import grpc
import h11
import pytest
import tritonclient.grpc as grpcclient
from hypothesis import given, settings
from hypothesis import strategies as st
from support.frontend_harness import BASE, FrontendHarness, running_frontend, scripted_text, wait_until
from support.quire_serve import StreamedResponse, grpc_text, run_concurrently
from tritonclient.grpc import service_pb2

from quire_server.model_server import launch
from quire_server.model_server.preload import preload

GENERATE = f"/v2/models/{BASE}/generate"
SCANNER = """
#include "request_guard.h"
RequestScanner *new_scanner(void) { RequestScanner *s = malloc(sizeof *s); start_request(s); return s; }
const char *scan(RequestScanner *s, const char *data, size_t size) { return scan_request(s, data, size); }
int between_requests(RequestScanner *s) { return s->phase == REQUEST_LINE && s->line_bytes == 0; }
"""
WRONG_REQUEST = service_pb2.ModelInferRequest(
    model_name=BASE,
    inputs=[{"name": "text_input", "datatype": "BYTES", "shape": [1]}],
    raw_input_contents=[b"\1\0\0\0x"],
    parameters={"temperature": {"double_param": 3000}},
)
NUM_CANCELLED = 200


# The scanner


@pytest.fixture(scope="module")
def scanner_library(tmp_path_factory) -> ctypes.CDLL:
    folder = tmp_path_factory.mktemp("scanner")
    (folder / "scanner.c").write_text(SCANNER)
    command = ["gcc", "-O1", "-g", "-Wall", "-Wextra", "-Werror", "-fPIC", "-shared", f"-I{preload._HEADER.parent}"]
    subprocess.run([*command, "-o", folder / "scanner.so", folder / "scanner.c"], check=True)
    library = ctypes.CDLL(str(folder / "scanner.so"))
    library.new_scanner.restype = ctypes.c_void_p
    library.scan.restype = ctypes.c_char_p
    library.scan.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_size_t]
    library.between_requests.argtypes = [ctypes.c_void_p]
    return library


def scan(library: ctypes.CDLL, *parts: bytes) -> tuple[str | None, bool]:
    """Return the error of a stream of bytes that arrives in parts, and whether it ends between two requests."""
    scanner = library.new_scanner()
    for part in parts:
        if error := library.scan(scanner, part, len(part)):
            return error.decode(), False
    return None, bool(library.between_requests(scanner))


def count_requests(data: bytes) -> int | None:
    """Return the number of complete requests that h11 finds in `data`; None if it finds an error or a rest."""
    connection, count = h11.Connection(h11.SERVER), 0
    connection.receive_data(data)
    try:
        while True:
            event = connection.next_event()
            if event is h11.NEED_DATA:
                return None if connection.their_state is not h11.IDLE or connection.trailing_data[0] else count
            if isinstance(event, h11.EndOfMessage):
                count += 1
                connection.send(h11.Response(status_code=200, headers=[("content-length", "0")]))
                connection.send(h11.EndOfMessage())
                if connection.our_state is not h11.DONE:
                    return count if not connection.trailing_data[0] else None
                connection.start_next_cycle()
    except h11.RemoteProtocolError:
        return None


@st.composite
def requests(draw: st.DrawFn) -> bytes:
    """A valid request with a JSON body, with a length or in chunks."""
    document = draw(
        st.recursive(st.text('ab\\"[]{}', max_size=8), lambda inner: st.lists(inner, max_size=3), max_leaves=9)
    )
    body = json.dumps(document).encode()
    head = f"POST /v2/{draw(st.text('abc/', max_size=150))} HTTP/1.1\r\nHost: a\r\n".encode()
    if draw(st.booleans()):
        return head + b"Content-Length: %d\r\n\r\n" % len(body) + body
    cuts = sorted(draw(st.sets(st.integers(1, len(body) - 1), max_size=3))) if len(body) > 1 else []
    chunks = [body[a:b] for a, b in zip([0, *cuts], [*cuts, len(body)], strict=True)]
    return (
        head + b"Transfer-Encoding: chunked\r\n\r\n" + b"".join(b"%x\r\n%s\r\n" % (len(c), c) for c in [*chunks, b""])
    )


@settings(max_examples=150, deadline=None)
@given(st.lists(requests(), min_size=1, max_size=3), st.data())
def test_valid_requests_pass_in_every_split(
    scanner_library: ctypes.CDLL, parts: list[bytes], data: st.DataObject
) -> None:
    stream = b"".join(parts)
    cuts = sorted(data.draw(st.sets(st.integers(0, len(stream)), max_size=8)))
    pieces = [stream[a:b] for a, b in zip([0, *cuts], [*cuts, len(stream)], strict=True)]
    assert scan(scanner_library, *pieces) == (None, True)
    assert count_requests(stream) == len(parts)


@settings(max_examples=300, deadline=None)
@given(requests(), st.data())
def test_accepted_streams_mean_the_same_to_h11(
    scanner_library: ctypes.CDLL, request: bytes, data: st.DataObject
) -> None:
    """A changed request that the scanner accepts as complete is one request to another parser, too."""
    head_end = request.index(b"\r\n\r\n") + 4
    position = data.draw(st.integers(0, head_end + 12))
    inserted = data.draw(
        st.sampled_from([b"\r", b"\n", b"\r\n", b" ", b"\t", b"0", b";", b":", b"Content-Length: 3\r\n", b"\0"])
    )
    length = data.draw(st.integers(0, 3))
    changed = request[:position] + inserted + request[position + length :]
    error, is_complete = scan(scanner_library, changed)
    if error is None and is_complete:
        # h11 is stricter about names and targets; where it accepts, both agree on the end of the request.
        assert count_requests(changed) in (None, 1)


@pytest.mark.parametrize(
    ("head", "body", "error"),
    [
        ("Content-Length: 3\r\nContent-Length: 3", "abc", "not one number"),
        ("Content-Length: +3", "abc", "not one number"),
        ("Content-Length: 3\r\nTransfer-Encoding: chunked", "0\r\n\r\n", "only chunked"),
        ("Transfer-Encoding: gzip, chunked", "0\r\n\r\n", "only chunked"),
        ("Transfer-Encoding: chunked", "1;a=b\r\nx\r\n0\r\n\r\n", "the size is not valid"),
        ("Transfer-Encoding: chunked", "1\r\nxy\r\n", "longer than its size"),
        ("Transfer-Encoding: chunked", "0\r\nX: y\r\n\r\n", "trailers are not supported"),
        ("Host : a", "", "the name is not valid"),
        ("A: b\r\n folded", "", "the name is not valid"),
        ("A: b\rContent-Length: 3", "", "control characters"),
        ("A: " + "b" * 70_000, "", "more than 64 KiB"),
        ("content-encoding: gzip", "", "only identity is supported"),
        ("Content-Encoding: identity" + " " * 200 + ", gzip", "", "only identity is supported"),
    ],
)
def test_ambiguous_requests_are_rejected(scanner_library: ctypes.CDLL, head: str, body: str, error: str) -> None:
    found, _ = scan(scanner_library, f"POST / HTTP/1.1\r\n{head}\r\n\r\n{body}".encode())
    assert found is not None and error in found


def test_json_depth_has_a_limit(scanner_library: ctypes.CDLL) -> None:
    def error(body: str) -> str | None:
        return scan(scanner_library, f"POST / HTTP/1.1\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode())[0]

    assert error("[" * 500 + "]" * 500) is None
    assert "nested more than 500 levels" in (error('{"a":' * 501) or "")
    # Brackets in strings, and bytes after the value (tensors in binary form), have no levels.
    assert error(json.dumps({"text_input": '[{"' * 1000})) is None
    assert error("{}" + "[" * 1000) is None


# The server


@pytest.fixture(scope="module")
def running(tmp_path_factory) -> Iterator[FrontendHarness]:
    with running_frontend(tmp_path_factory.mktemp("guard")) as running:
        yield running


def send_raw(running: FrontendHarness, head: str, *body: bytes) -> bytes:
    """Send a request on a new connection and return all that the server answers."""
    with socket.create_connection(("127.0.0.1", running.ports["http"]), timeout=60) as connection:
        sender = threading.Thread(target=send_all, args=(connection, (head.encode() + b"\r\n\r\n", *body)), daemon=True)
        sender.start()
        answer = b""
        while part := connection.recv(65536):
            answer += part
        sender.join(60)
    return answer


def send_all(connection: socket.socket, parts: tuple[bytes, ...]) -> None:
    try:
        for part in parts:
            connection.sendall(part)
    except OSError:
        pass  # the server has closed the connection, which the answer shows


def nested(running: FrontendHarness) -> str:
    body = b"[" * 1_000_000
    return send_raw(running, f"POST {GENERATE} HTTP/1.1\r\nHost: a\r\nContent-Length: {len(body)}", body).decode()


def many_chunks(running: FrontendHarness) -> str:
    chunks = b"1\r\n \r\n" * 1_000_000
    return send_raw(running, f"POST {GENERATE} HTTP/1.1\r\nTransfer-Encoding: chunked", chunks, b"0\r\n\r\n").decode()


def class_count(running: FrontendHarness) -> str:
    output = grpcclient.InferRequestedOutput("text_output", class_count=1)
    with grpcclient.InferenceServerClient(f"127.0.0.1:{running.ports['grpc']}") as client:
        done: list[object] = []
        event = threading.Event()
        client.start_stream(lambda result, error: (done.append(error), event.set()))
        client.async_stream_infer(BASE, [grpc_text("class")], outputs=[output], parameters={"max_tokens": 1})
        assert event.wait(30)
    return f"400 {done[0]}"


def cancelled_errors(running: FrontendHarness) -> str:
    """Cancel streams that request real statuses while their errors are sent; return the error of the last stream.

    Its stream stays open after an error, because the server ignores the header.
    """
    with grpc.insecure_channel(f"127.0.0.1:{running.ports['grpc']}") as channel:
        stream = channel.stream_stream(
            "/inference.GRPCInferenceService/ModelStreamInfer",
            lambda request: request.SerializeToString(),
            service_pb2.ModelStreamInferResponse.FromString,
        )
        for i in range(NUM_CANCELLED):
            call = stream(iter([WRONG_REQUEST] * 8), metadata=(("triton_grpc_error", "true"),), timeout=30)
            threading.Timer(i % 40 / 1000, call.cancel).start()
            with contextlib.suppress(grpc.RpcError):
                list(call)
        call = stream(iter([WRONG_REQUEST] * 2), metadata=(("triton_grpc_error", "true"),), timeout=30)
        errors = [response.error_message for response in call]
    assert len(errors) == 2 and errors[0] == errors[1]
    return f"400 {errors[0]}"


@pytest.mark.server
@pytest.mark.parametrize("crasher", [nested, many_chunks, class_count, cancelled_errors])
def test_crashing_requests_are_rejected_and_streams_continue(running: FrontendHarness, crasher) -> None:
    pid = running.process.pid
    results: list[str] = []
    thread = threading.Thread(target=lambda: results.extend(s.text for s in stream_all(running)))
    thread.start()
    wait_until(lambda: running.num_open_requests() == 32, 30, "streaming")
    answer = crasher(running)
    assert "400" in answer[:20], answer
    thread.join(60)
    assert results == [scripted_text(150)] * 32
    assert running.process.poll() is None and running.process.pid == pid


def stream_all(running: FrontendHarness) -> list[StreamedResponse]:
    streams = (running.http_stream, running.grpc_stream) * 16
    return run_concurrently(*(stream(BASE, "step=0.01", max_tokens=150) for stream in streams))


@pytest.mark.parametrize(("text", "needed"), [("2.51.0\n", True), ("2.59.0\n", False), ("3.0", False), ("x", True)])
def test_guard_runs_on_old_and_unknown_releases(tmp_path, text: str, needed: bool) -> None:
    install = launch.ServerInstall("image", tmp_path / "bin/tritonserver", tmp_path, {})
    assert launch.needs_guard(install)
    (tmp_path / "TRITON_VERSION").write_text(text)
    assert launch.needs_guard(install) == needed
