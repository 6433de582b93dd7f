# SPDX-License-Identifier: Apache-2.0
"""Clients of the real server, in a separate process: HTTP generate_stream and gRPC ModelStreamInfer, asyncio.

They share the processor with the measured server, so during a run they only store bytes and arrival times. They parse
the bytes after the run.
"""

import asyncio
import json
import sys
import time
from collections.abc import AsyncIterator
from typing import Any

import child
import grpc.aio
import numpy as np
from token_arrivals import TokenArrivals
from tritonclient.grpc import service_pb2

_STREAM = "/inference.GRPCInferenceService/ModelStreamInfer"
_LAST_CHUNK = b"0\r\n\r\n"

TimedChunk = tuple[float, bytes]


class Clients:
    """`settings`: model, and the ports http and grpc."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self._settings = settings

    def run(self, requests: list[tuple[list[int], int]], offsets: list[float] | None, via: str) -> dict[str, Any]:
        """See measure.py; `via` is http or grpc. Every request has its own stream."""
        send, read = {"http": (self._send_http, http_tokens), "grpc": (self._send_grpc, grpc_tokens)}[via]
        start, streams = asyncio.run(send(requests, offsets or [0.0] * len(requests)))
        recorder = TokenArrivals(start)
        for i, arrivals in enumerate(streams):
            for arrived_at, tokens in read(i, arrivals):
                recorder.add(i, tokens, arrived_at - start)
        return recorder.to_reply()

    async def _send_http(self, requests: Any, offsets: list[float]) -> tuple[float, list[list[TimedChunk]]]:
        """One connection for each request."""
        port, path = self._settings["http"], f"/v2/models/{self._settings['model']}/generate_stream"
        messages = [http_request(path, prompt, num_tokens) for prompt, num_tokens in requests]

        async def send_one(message: bytes, offset: float) -> list[TimedChunk]:
            await asyncio.sleep(start + offset - time.perf_counter())
            loop = asyncio.get_running_loop()
            _, stream = await loop.create_connection(lambda: _HttpStream(message), "127.0.0.1", port)
            return await stream.arrivals

        start = time.perf_counter()
        return start, await asyncio.gather(*map(send_one, messages, offsets))

    async def _send_grpc(self, requests: Any, offsets: list[float]) -> tuple[float, list[list[TimedChunk]]]:
        """One connection, a stream on it for each request."""
        messages = [grpc_request(self._settings["model"], *request) for request in requests]
        headers = (("triton_grpc_error", "true"),)

        async def send_one(message: bytes, offset: float) -> list[TimedChunk]:
            await asyncio.sleep(start + offset - time.perf_counter())
            return [
                (time.perf_counter(), data) async for data in stream_call(_single_request(message), metadata=headers)
            ]

        async with grpc.aio.insecure_channel(f"127.0.0.1:{self._settings['grpc']}") as channel:
            # Without functions that read messages: they come as bytes.
            stream_call = channel.stream_stream(_STREAM)
            start = time.perf_counter()
            return start, await asyncio.gather(*map(send_one, messages, offsets))


class _HttpStream(asyncio.Protocol):
    """One HTTP request and the pieces of its answer."""

    def __init__(self, message: bytes) -> None:
        self.arrivals: asyncio.Future[list[TimedChunk]] = asyncio.get_running_loop().create_future()
        self._message = message
        self._chunks: list[TimedChunk] = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        transport.write(self._message)

    def data_received(self, data: bytes) -> None:
        self._chunks.append((time.perf_counter(), data))
        if data.endswith(_LAST_CHUNK):
            self._transport.close()

    def connection_lost(self, error: Exception | None) -> None:
        self.arrivals.set_result(self._chunks)


async def _single_request(message: bytes) -> AsyncIterator[bytes]:
    yield message


def http_request(path: str, prompt: list[int], num_tokens: int) -> bytes:
    """A request as it goes over the wire."""
    body = {"input_ids": prompt, "stream": True, "return_output_ids": True, **_parameters(num_tokens, "http")}
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data


def http_tokens(request_index: int, arrivals: list[TimedChunk]) -> list[tuple[float, list[int]]]:
    """Tokens of one answer by the time that their line was complete.

    Raises:
        RuntimeError: the answer is an error, or was cut off.
    """
    tokens_by_time, partial_line = [], b""
    for arrived_at, data in arrivals:
        *lines, partial_line = (partial_line + data).split(b"\n")
        events = [json.loads(line[6:]) for line in lines if line.startswith(b"data: ")]
        if errors := [event["error"] for event in events if "error" in event]:
            raise RuntimeError(f"request {request_index}: {errors[0]}")
        # The server writes a list of one as its only element.
        ids = [event["output_ids"] for event in events]
        tokens_by_time.append(
            (
                arrived_at,
                [
                    token
                    for output_ids in ids
                    for token in (output_ids if isinstance(output_ids, list) else [output_ids])
                ],
            )
        )
    full_response = b"".join(data for _, data in arrivals)
    if not full_response.startswith(b"HTTP/1.1 200") or not full_response.endswith(_LAST_CHUNK):
        raise RuntimeError(f"request {request_index}: {full_response[:500]!r} ... {full_response[-100:]!r}")
    return tokens_by_time


def grpc_request(model: str, prompt: list[int], num_tokens: int) -> bytes:
    """A ModelInferRequest as it goes over the wire."""
    request = service_pb2.ModelInferRequest(model_name=model)
    tensors = (("input_ids", "INT64", prompt), ("stream", "BOOL", [True]), ("return_output_ids", "BOOL", [True]))
    for name, kind, values in tensors:
        request.inputs.add(name=name, datatype=kind, shape=[len(values)])
        request.raw_input_contents.append(np.array(values, {"INT64": np.int64, "BOOL": np.bool_}[kind]).tobytes())
    fields = {bool: "bool_param", int: "int64_param", float: "double_param", str: "string_param"}
    for name, value in _parameters(num_tokens, "grpc").items():
        setattr(request.parameters[name], fields[type(value)], value)
    return bytes(request.SerializeToString())


def grpc_tokens(request_index: int, arrivals: list[TimedChunk]) -> list[tuple[float, list[int]]]:
    """Tokens of one answer by the time that their message came.

    Raises:
        RuntimeError: the answer is an error.
    """
    tokens_by_time = []
    for arrived_at, data in arrivals:
        message = service_pb2.ModelStreamInferResponse.FromString(data)
        if message.error_message:
            raise RuntimeError(f"request {request_index}: {message.error_message}")
        response = message.infer_response
        names = [output.name for output in response.outputs]
        tokens_by_time.append(
            (arrived_at, np.frombuffer(response.raw_output_contents[names.index("output_ids")], np.int64).tolist())
        )
    return tokens_by_time


def _parameters(num_tokens: int, via: str) -> dict[str, Any]:
    # The salt keeps the prompts that both send out of each other's prefix cache.
    return {"max_tokens": num_tokens, "temperature": 0.0, "ignore_eos": True, "cache_salt": via}


if __name__ == "__main__":
    clients = Clients(json.loads(sys.argv[1]))
    child.serve_commands(child.reserve_stdout(), run=clients.run)
