# SPDX-License-Identifier: Apache-2.0
"""Random requests of the KServe protocol, valid and changed, on both ports: the server survives all of them.

QUIRE_TEST_FUZZ_S sets the seconds (default 8), QUIRE_TEST_FUZZ_SEED the first seed.
"""

import contextlib
import json
import os
import random
import socket
import time
import urllib.request
from collections.abc import Callable
from typing import Any

import grpc
import pytest
from support.frontend_harness import BASE, FrontendHarness, running_frontend
from support.other_models import write_repository
from tritonclient.grpc import service_pb2

pytestmark = pytest.mark.server

SECONDS = float(os.environ.get("QUIRE_TEST_FUZZ_S", "8"))
SEED = int(os.environ.get("QUIRE_TEST_FUZZ_SEED", "0"))
REQUESTS_PER_SEED = 40
SERVICE = "/inference.GRPCInferenceService/"
OTHERS = ("plain", "bls", "ensemble")
MODELS = (BASE, *OTHERS, "none", "", "base/x", "\N{SNOWMAN}", "a" * 300)
DATATYPES = ("BYTES", "BOOL", "INT32", "UINT64", "FP16", "FP32", "BF16", "STRING", "")
TENSORS = ("x", "y", "text_input", "stream", "sampling_parameters", "input_ids", "text_output", "finish_reason", "")
PARAMETERS = (
    *("max_tokens", "classification", "binary_data", "binary_data_size", "sequence_id", "sequence_start", "priority"),
    *("timeout", "triton_enable_empty_final_response", "headers", "temperature", "x"),
    *("shared_memory_region", "shared_memory_byte_size", "shared_memory_offset", "triton_grpc_error"),
)
METHODS: tuple[tuple[str, Any], ...] = (
    *[("ModelInfer", service_pb2.ModelInferRequest), ("ModelStreamInfer", service_pb2.ModelInferRequest)] * 4,
    ("ModelReady", service_pb2.ModelReadyRequest),
    ("ModelMetadata", service_pb2.ModelMetadataRequest),
    ("ModelConfig", service_pb2.ModelConfigRequest),
    ("ModelStatistics", service_pb2.ModelStatisticsRequest),
    ("RepositoryIndex", service_pb2.RepositoryIndexRequest),
    ("RepositoryModelLoad", service_pb2.RepositoryModelLoadRequest),
    ("SystemSharedMemoryRegister", service_pb2.SystemSharedMemoryRegisterRequest),
    ("SystemSharedMemoryStatus", service_pb2.SystemSharedMemoryStatusRequest),
    ("CudaSharedMemoryRegister", service_pb2.CudaSharedMemoryRegisterRequest),
    ("TraceSetting", service_pb2.TraceSettingRequest),
    ("LogSettings", service_pb2.LogSettingsRequest),
)
PATHS = (
    *("generate", "generate_stream", "infer", "ready", "config", "stats", "trace/setting", "versions/1/generate"),
    *("versions/-1/infer", "versions/99999999999999999999/infer", ""),
)
OTHER_PATHS = (
    *("/v2", "/v2/", "/v2/health/live", "/v2/health/ready", "/v2/repository/index", "/v2/logging", "/v2/trace/setting"),
    *("/v2/systemsharedmemory/status", "/v2/systemsharedmemory/region/a/register", "/v2/cudasharedmemory/status"),
    *("/v2/repository/models/base/load", "/metrics", "/v2/models/stats", "/..", "/%00", "/v2/models/%ff/ready", "*"),
)


def random_value(rng: random.Random, depth: int = 0) -> Any:
    leaves = (None, True, 0, -1, 2**31, 2**63, 2**64, 1e308, -0.0, "", "x", "\0", "\ud800", "a" * 5000, "NaN")
    kind = rng.random()
    if depth > 3 or kind < 0.6:
        return rng.choice(leaves)
    if kind < 0.8:
        return [random_value(rng, depth + 1) for _ in range(rng.randrange(4))]
    return {rng.choice((*TENSORS, *PARAMETERS)): random_value(rng, depth + 1) for _ in range(rng.randrange(4))}


def random_shape(rng: random.Random) -> list[int]:
    return [rng.choice((0, 1, 1, 1, 2, -1, 2**31, 2**62)) for _ in range(rng.choice((0, 1, 1, 1, 2, 9)))]


# HTTP


def random_body(rng: random.Random) -> bytes:
    """Return the body of an infer or a generate request, sometimes changed."""
    if rng.random() < 0.3:
        tensor = {"name": "x", "shape": [1], "datatype": "BYTES", "data": ["x"]}
        document: Any = {"inputs": [tensor], "outputs": [{"name": "y"}]}
    elif rng.random() < 0.5:
        document = {"text_input": "x", "max_tokens": 2, "stream": rng.random() < 0.5}
    else:
        tensor = {"name": "text_input", "shape": [1], "datatype": "BYTES", "data": ["x"]}
        document = {
            "id": "1",
            "inputs": [tensor],
            "outputs": [{"name": "text_output"}],
            "parameters": {"max_tokens": 2},
        }
    for _ in range(rng.randrange(4)):
        target = rng.choice([document, *document.get("inputs", []), *document.get("outputs", [])])
        if isinstance(target, dict):
            name = rng.choice((*target, "name", "shape", "datatype", "data", "parameters", "inputs", "outputs", "x"))
            target[name] = random_shape(rng) if name == "shape" else random_value(rng)
            for key in ("inputs", "outputs"):
                if not isinstance(document.get(key, []), list):
                    document[key] = [document[key]]
    body = json.dumps(document).encode()
    return changed(rng, body) if rng.random() < 0.4 else body


def changed(rng: random.Random, data: bytes) -> bytes:
    """Return `data` with bytes replaced, inserted, repeated or removed."""
    result = bytearray(data)
    for _ in range(rng.randrange(1, 6)):
        position = rng.randrange(len(result) + 1)
        end = min(len(result), position + rng.randrange(8))
        part = bytes(rng.choice((b"\0", b"\xff", b"[", b"{", b'"', b"9", b",", b"\x80")) * rng.randrange(4))
        result[position:end] = rng.choice((part, bytes(result[position:end]) * 3))
    return bytes(result)


def send_http(rng: random.Random, port: int) -> None:
    known = (BASE, BASE, BASE, *OTHERS, "none")
    model = rng.choice(MODELS).encode("utf-8").hex() if rng.random() < 0.1 else rng.choice(known)
    path = rng.choice(OTHER_PATHS) if rng.random() < 0.3 else f"/v2/models/{model}/{rng.choice(PATHS)}"
    body = random_body(rng)
    headers = [f"Content-Length: {len(body)}"]
    if rng.random() < 0.2:
        headers = ["Transfer-Encoding: chunked"]
        cut = rng.randrange(len(body) + 1)
        body = (
            b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in (body[:cut], body[cut:], b"") if part)
            + b"0\r\n\r\n"
        )
    extra = ("Content-Encoding: gzip", "Content-Encoding: x", "Accept-Encoding: gzip", "Expect: 100-continue")
    extra += ("Inference-Header-Content-Length: 5", "Inference-Header-Content-Length: -1", "Connection: close")
    headers += rng.sample(extra, rng.choice((0, 0, 1, 2)))
    method = rng.choice(("POST", "POST", "POST", "GET", "PUT", "DELETE", "OPTIONS", "HEAD"))
    head = f"{method} {path} HTTP/1.{rng.choice('1110')}\r\nHost: localhost\r\n" + "\r\n".join(headers) + "\r\n\r\n"
    data = head.encode() + body
    if rng.random() < 0.1:
        data = changed(rng, data)
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=2) as connection:
        connection.settimeout(0.05)
        connection.sendall(data)
        if rng.random() < 0.8:
            connection.recv(4096)


# gRPC


def fill(rng: random.Random, message: Any) -> None:
    """Fill the fields of a protobuf message at random."""
    for descriptor in message.DESCRIPTOR.fields:
        if rng.random() < 0.4:
            continue
        value = getattr(message, descriptor.name)
        if descriptor.message_type is not None and descriptor.message_type.GetOptions().map_entry:
            for _ in range(rng.randrange(3)):
                entry = value[rng.choice(PARAMETERS)]
                with contextlib.suppress(AttributeError):
                    fill(rng, entry)
        elif descriptor.is_repeated:
            for _ in range(rng.randrange(3)):
                if descriptor.message_type is not None:
                    fill(rng, value.add())
                else:
                    value.append(scalar(rng, descriptor))
        elif descriptor.message_type is not None:
            fill(rng, value)
        else:
            setattr(message, descriptor.name, scalar(rng, descriptor))


def scalar(rng: random.Random, descriptor: Any) -> Any:
    if descriptor.cpp_type == descriptor.CPPTYPE_STRING:
        if descriptor.type == descriptor.TYPE_BYTES:
            return rng.choice((b"", b"x", b"\1\0\0\0x", b"\xff" * 9, b"\1"))
        return rng.choice(
            {"name": TENSORS, "datatype": DATATYPES, "model_name": (BASE, *OTHERS)}.get(descriptor.name, MODELS)
        )
    if descriptor.cpp_type == descriptor.CPPTYPE_BOOL:
        return rng.random() < 0.5
    if descriptor.cpp_type in (descriptor.CPPTYPE_DOUBLE, descriptor.CPPTYPE_FLOAT):
        return rng.choice((0.0, -1.0, 1e300 if descriptor.cpp_type == descriptor.CPPTYPE_DOUBLE else 1.0, float("nan")))
    large = 2**31 - 1 if descriptor.cpp_type in (descriptor.CPPTYPE_INT32, descriptor.CPPTYPE_UINT32) else 2**62
    return rng.choice((0, 1, 2, large))


def infer_request(rng: random.Random) -> Any:
    """Return a request for our model or another one, with some fields changed."""
    request = service_pb2.ModelInferRequest(model_name=rng.choice((BASE, BASE, *OTHERS)))
    name = "text_input" if request.model_name == BASE else "x"
    tensor = request.inputs.add(name=name, datatype="BYTES", shape=[1])
    request.raw_input_contents.append(b"\1\0\0\0x")
    if request.model_name == BASE:
        request.parameters["max_tokens"].int64_param = 2
    for _ in range(rng.randrange(3)):
        change = rng.randrange(5)
        if change == 0:
            tensor.shape[:] = [n for n in random_shape(rng) if n < 2**62]
        elif change == 1:
            tensor.datatype = rng.choice(DATATYPES)
        elif change == 2:
            request.raw_input_contents.append(b"\xff" * rng.randrange(9))
        elif change == 3:
            fill(rng, request.parameters[rng.choice(PARAMETERS)])
        else:
            output = request.outputs.add(name=rng.choice(TENSORS))
            fill(rng, output.parameters[rng.choice(PARAMETERS)])
    return request


def send_grpc(rng: random.Random, channel: grpc.Channel) -> None:
    name, request_type = rng.choice(METHODS)
    if request_type is service_pb2.ModelInferRequest and rng.random() < 0.7:
        request = infer_request(rng)
    else:
        request = request_type()
        fill(rng, request)
    data = request.SerializeToString()
    if rng.random() < 0.2 and data:
        data = changed(rng, data)
    with contextlib.suppress(grpc.RpcError):
        if name == "ModelStreamInfer":
            headers = (("triton_grpc_error", "true"),) if rng.random() < 0.3 else ()
            requests = iter([data] * rng.randrange(3))
            call = channel.stream_stream(SERVICE + name)(requests, timeout=0.3, metadata=headers)
            for _ in call:
                if rng.random() < 0.2:
                    call.cancel()
        else:
            channel.unary_unary(SERVICE + name)(data, timeout=0.3)


def test_random_requests_do_not_end_the_server(tmp_path) -> None:
    deadline, seed, crashes = time.monotonic() + SECONDS, SEED, []
    repository = write_repository(tmp_path / "others", BASE)
    while time.monotonic() < deadline and len(crashes) < 5:
        folder = tmp_path / f"server-{len(crashes)}-{seed}"
        folder.mkdir()
        with contextlib.suppress(AssertionError), running_frontend(folder, repository) as running:
            for name in OTHERS:
                running.load_model(name)
            seed = fuzz(running, deadline, seed)
            if running.process.poll() is not None:
                crashes.append((seed - 1, running.process.returncode))
                continue
            assert_answers(running)
    assert not crashes, f"the server ended (seed, exit code): {crashes}; reproduce with QUIRE_TEST_FUZZ_SEED"


def fuzz(running: FrontendHarness, deadline: float, seed: int) -> int:
    """Send random requests until the deadline or the server's end; return the next seed."""
    senders: list[Callable[[random.Random], None]]
    with grpc.insecure_channel(f"127.0.0.1:{running.ports['grpc']}") as channel:
        senders = [lambda rng: send_http(rng, running.ports["http"]), lambda rng: send_grpc(rng, channel)]
        while time.monotonic() < deadline and running.process.poll() is None:
            rng = random.Random(seed)
            for _ in range(REQUESTS_PER_SEED):
                rng.choice(senders)(rng)
            seed += 1
    time.sleep(0.5)
    return seed


def assert_answers(running: FrontendHarness) -> None:
    url = f"http://127.0.0.1:{running.ports['http']}/v2/models/{BASE}/generate"
    with urllib.request.urlopen(url, b'{"text_input": "x", "max_tokens": 2}', timeout=30) as response:
        assert json.loads(response.read())["text_output"] == "xt0 t1 "
