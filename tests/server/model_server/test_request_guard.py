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
from support.quire_serve import ROOT, StreamedResponse, grpc_text, run_concurrently
from tritonclient.grpc import service_pb2

from quire_server.model_server import defects
from quire_server.model_server.preload import preload

GENERATE = f"/v2/models/{BASE}/generate"
SCANNER = """
#include "grpc_guard.h"
#include "request_guard.h"
RequestScanner *new_scanner(int is_local) {
  RequestScanner *s = malloc(sizeof *s); start_connection(s, 1000000, is_local); return s;
}
const char *scan(RequestScanner *s, const char *data, size_t size) { return scan_request(s, data, size); }
Http2Scanner *new_http2_scanner(void) {
  Http2Scanner *s = calloc(1, sizeof *s); start_http2(s, 1000); return s;
}
int scan_grpc(Http2Scanner *s, const char *data, size_t size) { return scan_http2(s, (const uint8_t *)data, size); }
int num_open_messages(Http2Scanner *s) { return (int)s->num_messages; }
int between_requests(RequestScanner *s) { return is_between_requests(s); }
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
    command = ["gcc", "-O1", "-g", "-Wall", "-Wextra", "-Werror", "-fPIC", "-shared", f"-I{preload._SOURCE.parent}"]
    subprocess.run([*command, "-o", folder / "scanner.so", folder / "scanner.c"], check=True)
    library = ctypes.CDLL(str(folder / "scanner.so"))
    library.new_scanner.restype = ctypes.c_void_p
    library.scan.restype = ctypes.c_char_p
    library.scan.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_size_t]
    library.between_requests.argtypes = [ctypes.c_void_p]
    library.new_http2_scanner.restype = ctypes.c_void_p
    library.scan_grpc.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_size_t]
    library.num_open_messages.argtypes = [ctypes.c_void_p]
    return library


def scan(library: ctypes.CDLL, *parts: bytes, is_local: bool = False) -> tuple[str | None, bool]:
    """Return the error of a stream of bytes that arrives in parts, and whether it ends between two requests."""
    scanner = library.new_scanner(is_local)
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
        ("Accept-Encoding: gzip;q=1e400", "", "a weight is not a number"),
        ("accept-encoding: gzip;q=", "", "a weight is not a number"),
        ("Accept-Encoding: gzip;q=-1", "", "a weight is not a number"),
        ("Accept-Encoding: gzip; q=1.1, deflate", "", "a weight is not a number"),
        ("Accept-Encoding: gzip;q=0.1234", "", "a weight is not a number"),
        ("Accept-Encoding: gzip;level=3;q=nan", "", "a weight is not a number"),
        ("Accept-Encoding: " + "gzip, " * 40 + "br;q=nan", "", "too long"),
        ("Inference-Header-Content-Length: 99999999999", "", "not the number of bytes"),
        ("Inference-Header-Content-Length: -1", "", "not the number of bytes"),
        ("Content-Length: 1000001", "", "must have at most 1000000 bytes"),
        ("Transfer-Encoding: chunked", "f423f\r\n" + "x" * 999_999 + "\r\n2\r\n", "must have at most 1000000 bytes"),
    ],
)
def test_ambiguous_requests_are_rejected(scanner_library: ctypes.CDLL, head: str, body: str, error: str) -> None:
    found, _ = scan(scanner_library, f"POST / HTTP/1.1\r\n{head}\r\n\r\n{body}".encode())
    assert found is not None and error in found


def test_an_empty_line_is_refused_at_the_start_only(scanner_library):
    """The server would never answer."""
    request = b"GET / HTTP/1.1\r\nHost: a\r\n\r\n"
    for line in (b"\r\n", b"\n"):
        assert scan(scanner_library, line + request)[0] == "request line: is empty"
        assert scan(scanner_library, request + line + request) == (None, True)


@pytest.mark.parametrize(
    "value", ["gzip, deflate, br, zstd", "gzip;q=0.5, *;q=0", "gzip ; q=1.000 ,br;Q=0.123", "*", ""]
)
def test_usual_encodings_pass(scanner_library: ctypes.CDLL, value: str) -> None:
    assert scan(scanner_library, f"GET / HTTP/1.1\r\nAccept-Encoding: {value}\r\n\r\n".encode()) == (None, True)


@pytest.mark.parametrize(
    ("host", "is_accepted"),
    [
        *[
            (host, True)
            for host in ("localhost", "LOCALHOST:8000", "127.0.0.1:8000", "127.1.2.3", "[::1]:8000", "[::1]")
        ],
        *[
            (host, False)
            for host in ("evil.example", "localhost.evil.example", "127.0.0.1.evil.example:8000", "[::2]:80")
        ],
        *[(host, False) for host in ("", "10.0.0.1", "127.", "localhost:80:80", "a" * 200)],
    ],
)
def test_host_must_be_this_machine_on_local_ports(scanner_library: ctypes.CDLL, host: str, is_accepted: bool) -> None:
    request = f"GET / HTTP/1.1\r\nHost: {host}\r\n\r\n".encode()
    error, _ = scan(scanner_library, request, is_local=True)
    assert (error is None) == is_accepted
    assert scan(scanner_library, request) == (None, True)


def test_json_depth_has_a_limit(scanner_library: ctypes.CDLL) -> None:
    def error(body: str) -> str | None:
        return scan(scanner_library, f"POST / HTTP/1.1\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode())[0]

    assert error("[" * 500 + "]" * 500) is None
    assert "nested more than 500 levels" in (error('{"a":' * 501) or "")
    # Brackets in strings, and bytes after the value (tensors in binary form), have no levels.
    assert error(json.dumps({"text_input": '[{"' * 1000})) is None
    assert error("{}" + "[" * 1000) is None


PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"


def frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return len(payload).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + payload


@st.composite
def grpc_connections(draw: st.DrawFn) -> tuple[bytes, bool]:
    """The bytes of a connection with several streams, and whether all messages are within the limits."""
    sizes = draw(st.lists(st.tuples(st.sampled_from([1, 3, 5]), st.integers(0, 1200), st.booleans()), max_size=6))
    rest = dict.fromkeys((1, 3, 5), b"")
    for stream, size, is_compressed in sizes:
        rest[stream] += bytes([is_compressed]) + size.to_bytes(4, "big") + b"x" * size
    connection = PREFACE + frame(4, 0, 0, b"")
    while any(rest.values()):
        stream = draw(st.sampled_from([stream for stream, data in rest.items() if data]))
        size = draw(st.integers(1, 900))
        data, rest[stream] = rest[stream][:size], rest[stream][size:]
        padding = draw(st.sampled_from([None, 0, 7, 255]))
        if padding is not None:
            connection += frame(0, 8, stream, bytes([padding]) + data + b"\0" * padding)
        else:
            connection += frame(0, 0 if rest[stream] else 1, stream, data)
        # Frames of other kinds, and of streams without messages, come between the parts.
        connection += draw(
            st.sampled_from([b"", frame(6, 0, 0, b"12345678"), frame(1, 4, 7, b"h"), frame(3, 0, 9, b"1234")])
        )
    return connection, all(size <= (1000 // 256 if is_compressed else 1000) for _, size, is_compressed in sizes)


@settings(max_examples=300, deadline=None)
@given(grpc_connections(), st.data())
def test_grpc_messages_have_a_limit(
    scanner_library: ctypes.CDLL, connection: tuple[bytes, bool], data: st.DataObject
) -> None:
    stream, is_within_limits = connection
    cuts = sorted(data.draw(st.sets(st.integers(0, len(stream)), max_size=8)))
    scanner = scanner_library.new_http2_scanner()
    pieces = [stream[a:b] for a, b in zip([0, *cuts], [*cuts, len(stream)], strict=True)]
    assert all(scanner_library.scan_grpc(scanner, piece, len(piece)) for piece in pieces) == is_within_limits
    if is_within_limits:
        assert scanner_library.num_open_messages(scanner) == 0


def test_many_messages_without_an_end_are_rejected(scanner_library: ctypes.CDLL) -> None:
    scanner = scanner_library.new_http2_scanner()
    start = b"".join(frame(0, 0, 2 * i + 1, b"\0\0\0\0\5a") for i in range(4096))
    assert scanner_library.scan_grpc(scanner, PREFACE + start, len(PREFACE + start))
    reset = frame(3, 0, 1, b"1234") + frame(0, 0, 9999, b"\0")
    assert scanner_library.scan_grpc(scanner, reset, len(reset))
    assert not scanner_library.scan_grpc(scanner, frame(0, 0, 10001, b"\0"), 10)
    tls = scanner_library.new_http2_scanner()
    assert scanner_library.scan_grpc(tls, b"\x16\3\1" + b"\xff" * 1000, 1003)


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
    return send_raw(
        running, f"POST {GENERATE} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}", body
    ).decode()


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


def invalid_weight(running: FrontendHarness) -> str:
    return send_raw(running, "GET /v2 HTTP/1.1\r\nHost: localhost\r\nAccept-Encoding: gzip;q=1e400").decode()


def invalid_header_length(running: FrontendHarness) -> str:
    head = f"POST /v2/models/{BASE}/infer HTTP/1.1\r\nContent-Length: 2\r\nInference-Header-Content-Length: 99999999999"
    return send_raw(running, head, b"{}").decode()


def shape_overflow(running: FrontendHarness) -> str:
    return f"400 {stream_input(running, 'INT64', [2**61])} {stream_input(running, 'INT64', [2**32, 2**32])}"


def large_input(running: FrontendHarness) -> str:
    num_bytes = 18 * 2**20
    data = num_bytes.to_bytes(4, "little") + b"x" * num_bytes
    return f"400 {stream_input(running, 'BYTES', [1], 'text_input', [data])}"


def large_message(running: FrontendHarness) -> str:
    num_bytes = 100 * 2**20
    data = num_bytes.to_bytes(4, "little") + b"x" * num_bytes
    with pytest.raises(grpc.RpcError) as error:
        stream_input(running, "BYTES", [1], "text_input", [data])
    return f"400 {error.value}"


def compressed_message(running: FrontendHarness) -> str:
    """A message that is 1,000 times larger after it is decompressed."""
    data = (2**28).to_bytes(4, "little") + b"x" * 2**28
    with pytest.raises(grpc.RpcError) as error:
        stream_input(running, "BYTES", [1], "text_input", [data], compression=grpc.Compression.Gzip)
    return f"400 {error.value}"


def large_body(running: FrontendHarness) -> str:
    return send_raw(running, f"POST {GENERATE} HTTP/1.1\r\nContent-Length: 200000000", b" " * 60_000_000).decode()


def foreign_host(running: FrontendHarness) -> str:
    return send_raw(running, "GET /v2 HTTP/1.1\r\nHost: evil.example").decode()


def stream_input(
    running: FrontendHarness,
    datatype: str,
    shape: list[int],
    name: str = "input_ids",
    data: list[bytes] | None = None,
    compression: grpc.Compression | None = None,
) -> str:
    """Send a gRPC request with one input and return the server's error."""
    request = service_pb2.ModelInferRequest(
        model_name=BASE, inputs=[{"name": name, "datatype": datatype, "shape": shape}], raw_input_contents=data or [b""]
    )
    with grpc.insecure_channel(
        f"127.0.0.1:{running.ports['grpc']}", options=[("grpc.max_send_message_length", -1)]
    ) as channel:
        stream = channel.stream_stream(
            "/inference.GRPCInferenceService/ModelStreamInfer",
            lambda request: request.SerializeToString(),
            service_pb2.ModelStreamInferResponse.FromString,
        )
        [response] = stream(iter([request]), timeout=30, compression=compression)
    assert response.error_message
    return str(response.error_message)


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
@pytest.mark.parametrize(
    "crasher",
    [
        *(nested, many_chunks, class_count, cancelled_errors, invalid_weight, invalid_header_length, shape_overflow),
        *(large_input, large_message, compressed_message, large_body, foreign_host),
    ],
)
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


@pytest.mark.server
def test_requests_that_never_become_complete_are_closed(monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("QUIRE_GUARD_TIMEOUT_S", "2")
    with running_frontend(tmp_path) as slow:
        port = slow.ports["http"]
        complete = b"GET /v2/health/live HTTP/1.1\r\nHost: localhost\r\n\r\n"
        starts = [
            b"",
            b"\r\n",
            b"GET /v2 HTT",
            b"POST " + GENERATE.encode() + b" HTTP/1.1\r\nHost: localhost\r\nContent-Length: 90\r\n\r\n{",
            b"POST " + GENERATE.encode() + b" HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n1\r\n{",
            complete + b"GET /v2 HTT",
        ]
        connections = [socket.create_connection(("127.0.0.1", port), timeout=30) for _ in starts]
        for connection, start in zip(connections, starts, strict=True):
            connection.sendall(start)
        with (
            socket.create_connection(("127.0.0.1", port), timeout=30) as idle,
            grpc.insecure_channel(f"127.0.0.1:{slow.ports['grpc']}") as channel,
        ):
            ready = channel.unary_unary("/inference.GRPCInferenceService/ServerLive", response_deserializer=bytes)
            ready(b"", timeout=30)
            idle.sendall(complete)
            assert idle.recv(65536).startswith(b"HTTP/1.1 200")
            [stream] = run_concurrently(slow.http_stream(BASE, "step=0.05", max_tokens=120))
            assert stream.text == scripted_text(120) and stream.error is None
            for connection in connections:
                with connection:
                    connection.settimeout(5)
                    while connection.recv(65536):
                        pass
            # Connections of pools stay open.
            idle.sendall(complete)
            assert idle.recv(65536).startswith(b"HTTP/1.1 200")
            ready(b"", timeout=30)


def stream_all(running: FrontendHarness) -> list[StreamedResponse]:
    streams = (running.http_stream, running.grpc_stream) * 16
    return run_concurrently(*(stream(BASE, "step=0.01", max_tokens=150) for stream in streams))


@pytest.mark.parametrize(
    ("text", "release"),
    [
        ("2.51.0\n", (24, 10)),
        ("2.53.0", (24, 12)),
        ("2.54.0", (25, 1)),
        ("2.59.1", (25, 6)),
        ("2.60.0", (25, 8)),
        ("2.65.0", (26, 1)),
        ("2.50.0", None),
        ("3.0", None),
        ("x", None),
    ],
)
def test_release_follows_from_the_version(tmp_path, text: str, release: tuple[int, int] | None) -> None:
    binary = tmp_path / "bin/tritonserver"
    assert defects.release_of(binary) == defects.DEFAULT_RELEASE
    (tmp_path / "TRITON_VERSION").write_text(text)
    assert defects.release_of(binary) == release


def test_guard_knows_the_defects_of_each_release(tmp_path) -> None:
    def names(version: str) -> set[str]:
        (tmp_path / "TRITON_VERSION").write_text(version)
        return {defect.name for defect in defects.defects_of(tmp_path / "bin/tritonserver")}

    every = {defect.name for defect in defects.DEFECTS}
    assert names("2.51.0") == names("unknown") == names("2.10.0") == every
    assert every - names("2.60.0") == {"json-depth", "body-pieces", "compressed-body", "status-header"}
    # Releases without a known fix keep their guard.
    assert names("2.99.0") == {defect.name for defect in defects.DEFECTS if defect.fixed_in is None}


def test_security_page_contains_the_table_of_defects() -> None:
    rows = [
        f"| {d.request} | {d.effect} | {d.guard} | {'{}.{:02}'.format(*d.fixed_in) if d.fixed_in else '-'} |"
        for d in defects.DEFECTS
    ]
    assert "|---|---|---|---|\n" + "\n".join(rows) + "\n\n" in (ROOT / "SECURITY.md").read_text()
