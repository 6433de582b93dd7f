# SPDX-License-Identifier: Apache-2.0
"""The server's own ports: wrong values of every input over HTTP, and wrong tensors over gRPC."""

import asyncio
import contextlib
import json
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

from attack import Attack, Target, json_with
from tritonclient.grpc import service_pb2

from quire_server.model_server.model_interface import INPUTS

MIB = 2**20
MODEL = "tales"
GENERATE = f"/v2/models/{MODEL}/generate"
INFER = f"/v2/models/{MODEL}/infer"
WRONG_VALUES = (
    *("null", "true", "-1", "0", "1", "1e400", "-1e400", "NaN", "9223372036854775808", "1.5", "1e-400"),
    *('""', '"x"', r'"\ud800"', r'"\u0000"', '"' + "x" * 100_000 + '"', '"{"', '"[1]"', r'"{\"n\": 0}"'),
    *("[]", "[[]]", "[1, 2]", '["a", "b"]', "[null]", "[" * 400 + "]" * 400, "[1e400]", '[{"a": 1}]'),
    *("{}", '{"a": 1}', "[" + "1," * 10_000 + "1]"),
)
PARAMETERS = ("lora_name", "priority", "cache_salt", "stop", "n", "seed")
RESTRICTED = (
    *("/v2/repository/index", f"/v2/repository/models/{MODEL}/load", f"/v2/repository/models/{MODEL}/unload"),
    *("/v2/systemsharedmemory/status", "/v2/systemsharedmemory/region/x/register", "/v2/cudasharedmemory/status"),
    *("/v2/trace/setting", "/v2/logging", f"/v2/models/{MODEL}/trace/setting"),
)
SPELLINGS = ("{}", "{}/", "/{}", "{}?x=1", "{}#x", "{}%00", "/.{}", "/v2/..{}")


def http() -> Iterator[Attack]:
    """Wrong values of every input, restricted APIs, and shapes, over HTTP."""
    for name in [name for name, _, _ in INPUTS] + list(PARAMETERS):
        rest = {"max_tokens": 1} | ({} if name == "text_input" else {"text_input": "x"})
        for i, value in enumerate(WRONG_VALUES):
            yield _post(f"{name}: {value[:12]} ({i})", GENERATE, json_with(rest, name, value))
    for path in RESTRICTED:
        for spelling in SPELLINGS:
            yield Attack(
                "server HTTP", f"restricted {spelling.format(path)}", partial(_restricted, path=spelling.format(path))
            )
    tensor = {"name": "text_input", "datatype": "BYTES", "shape": [1], "data": ["x"]}
    for name, change in _tensor_changes().items():
        yield _post(f"tensor: {name}", INFER, json.dumps({"inputs": [tensor | change]}).encode())
    for depth in (490, 510, 5_000, 200_000):
        yield _post(f"depth {depth}", GENERATE, b"[" * depth)
    for version in ("0", "-1", "9" * 30, "x", "1e5", "%00"):
        yield _post(f"version {version[:5]}", f"/v2/models/{MODEL}/versions/{version}/infer", b"{}")
    for size in (16, 17, 18, 64, 200):
        yield Attack("server HTTP", f"{size} MiB", partial(_large, size=size * MIB), limit_s=30.0)
    yield Attack("server HTTP", "500 cancelled streams", partial(_cancel, count=500), limit_s=60.0)


def largest() -> Iterator[Attack]:
    """The largest requests that the server accepts."""
    yield Attack("server HTTP", "largest", partial(_large, size=16 * MIB))
    yield Attack("gRPC", "largest", partial(_large_grpc, size=16 * MIB))


def _tensor_changes() -> dict[str, dict[str, Any]]:
    shapes = ([], [0], [-1], [2], [2**31], [2**61], [2**63 - 1], [2**32, 2**32], [1] * 1000, ["x"], [1.5], [None])
    changes: dict[str, dict[str, Any]] = {f"shape {str(shape)[:20]}": {"shape": shape} for shape in shapes}
    changes |= {f"type {kind}": {"datatype": kind} for kind in ("FP64", "INT64", "BF16", "X", "", "BYTES" * 1000)}
    for name, value in {"shm": "x", "size": -1, "offset": 2**64, "class": 10**9}.items():
        parameters = {"shared_memory_region": value, "shared_memory_byte_size": value, "classification": value}
        changes[f"parameters {name}"] = {"parameters": parameters | {"binary_data_size": value}}
    return changes


async def _large(target: Target, size: int) -> str:
    return await target.request("http", GENERATE, b'{"text_input": "' + b"x" * size + b'"}', headers={})


async def _large_grpc(target: Target, size: int) -> str:
    text = {"name": "text_input", "datatype": "BYTES", "shape": [1]}
    request = _request(inputs=[text], raw_input_contents=[size.to_bytes(4, "little") + b"x" * size])
    return await target.grpc("ModelStreamInfer", [request], is_stream=True)


async def _restricted(target: Target, path: str) -> str:
    answer = await target.request("http", path, b"{}", headers={})
    return f"wrong: open without a key: {answer}" if answer.startswith("200") else answer


def _post(name: str, path: str, body: bytes) -> Attack:
    async def send(target: Target, body: bytes) -> str:
        return await target.request("http", path, body, headers={"Content-Type": "application/json"})

    return Attack("server HTTP", name, partial(send, body=body), limit_s=20.0)


async def _cancel(target: Target, count: int) -> str:
    body = json.dumps({"text_input": "x", "stream": True, "max_tokens": 200}).encode()
    head = f"POST {GENERATE}_stream HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    for i in range(count):
        _, writer = await asyncio.open_connection("127.0.0.1", target.ports["http"])
        writer.write(head + body)
        with contextlib.suppress(ConnectionError):
            await writer.drain()
        if i % 2:
            writer.transport.abort()
        writer.close()
        await asyncio.sleep(0.005)
    return await target.request("http", GENERATE, {"text_input": "x", "max_tokens": 1}, headers={})


def grpc() -> Iterator[Attack]:
    """Wrong tensors and parameters over gRPC."""
    for datatype in ("BYTES", "INT64", "BOOL", "FP32", "X", ""):
        for shape in ([1], [0], [], [-1], [2], [2**31], [2**61], [2**63 - 1], [2**32, 2**32], [1] * 100):
            for name in ("text_input", "input_ids"):
                request = _request(
                    inputs=[{"name": name, "datatype": datatype, "shape": shape}], raw_input_contents=[b""]
                )
                yield _call(f"{name} {datatype} {str(shape)[:20]}", [request])
    text = {"name": "text_input", "datatype": "BYTES", "shape": [1]}
    for size in (0, 3, 4, 5, 2**31 - 1, 2**32 - 1):
        request = _request(inputs=[text], raw_input_contents=[size.to_bytes(4, "little") + b"x"])
        yield _call(f"string of length {size}", [request])
    for parameters in _parameters():
        request = _request(inputs=[text], raw_input_contents=[b"\1\0\0\0x"], parameters=parameters)
        yield _call(f"parameters {str(parameters)[:30]}", [request])
    for name, requests in {
        "no input": [_request()],
        "missing data": [_request(inputs=[text])],
        "more data": [_request(inputs=[text], raw_input_contents=[b"\1\0\0\0x"] * 5)],
        "input twice": [_request(inputs=[text, text], raw_input_contents=[b"\1\0\0\0x"] * 2)],
        "1,000 inputs": [_request(inputs=[text] * 1000, raw_input_contents=[b"\1\0\0\0x"] * 1000)],
        "unknown output": [_request(inputs=[text], raw_input_contents=[b"\1\0\0\0x"], outputs=[{"name": "x"}])],
        "sequence": [_request(inputs=[text], raw_input_contents=[b"\1\0\0\0x"], id="x" * 10**6)],
        "no message": [b"\xff" * 100],
        "empty message": [b""],
        "100 requests": [_request(inputs=[text], raw_input_contents=[b"\1\0\0\0"])] * 100,
        "unknown model": [_request(model_name="x" * 10_000)],
        "unknown version": [_request(model_version="9" * 30)],
        "classes": [
            _request(
                inputs=[text],
                raw_input_contents=[b"\1\0\0\0x"],
                outputs=[{"name": "text_output", "parameters": {"classification": {"int64_param": 3}}}],
            )
        ],
    }.items():
        yield _call(name, requests)
    for size in (16, 18, 100):
        yield Attack("gRPC", f"{size} MiB", partial(_large_grpc, size=size * MIB), limit_s=30.0)
    for method in ("RepositoryIndex", "RepositoryModelLoad", "SystemSharedMemoryStatus", "TraceSetting", "LogSettings"):
        yield Attack("gRPC", f"restricted {method}", partial(_restricted_grpc, method=method))


def _parameters() -> Iterator[dict[str, dict[str, Any]]]:
    for name in ("max_tokens", "temperature", "n", "stop", "lora_name", "priority"):
        for kind, value in (("int64_param", -(2**63)), ("double_param", float("nan")), ("string_param", "\0" * 10)):
            yield {name: {kind: value}}


def _request(**fields: Any) -> bytes:
    fields = {"model_name": MODEL} | fields
    # The library of the client rejects values that do not fit into the message.
    return service_pb2.ModelInferRequest(**fields).SerializeToString()


def _call(name: str, requests: Iterable[bytes]) -> Attack:
    async def send(target: Target, requests: list[bytes]) -> str:
        return await target.grpc("ModelStreamInfer", requests, is_stream=True)

    return Attack("gRPC", name, partial(send, requests=list(requests)), limit_s=30.0)


async def _restricted_grpc(target: Target, method: str) -> str:
    answer = await target.grpc(method, [b""])
    return f"wrong: open without a key: {answer}" if answer.startswith("OK") else answer
