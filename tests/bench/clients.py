# SPDX-License-Identifier: Apache-2.0
"""Clients of the real server, in a separate process: HTTP generate_stream, gRPC ModelStreamInfer, OpenAI completions.

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
    """`settings`: model, and the ports http, grpc and openai."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self._settings = settings

    def run(self, requests: list[tuple[list[int], int]], offsets: list[float] | None, via: str) -> dict[str, Any]:
        """See measure.py; `via` is http, grpc or openai. Every request has its own stream."""
        offsets = offsets or [0.0] * len(requests)
        model, port = self._settings["model"], self._settings[via]
        if via == "grpc":
            read, sending = grpc_tokens, self._send_grpc(requests, offsets)
        elif via == "openai":
            read = openai_tokens
            sending = self._send_http(port, [openai_request(model, *request) for request in requests], offsets)
        else:
            path = f"/v2/models/{model}/generate_stream"
            read = http_tokens
            sending = self._send_http(port, [http_request(path, *request) for request in requests], offsets)
        start, streams = asyncio.run(sending)
        recorder = TokenArrivals(start)
        for i, arrivals in enumerate(streams):
            for arrived_at, tokens in read(i, arrivals):
                recorder.add(i, tokens, arrived_at - start)
        return recorder.to_reply()

    async def _send_http(
        self, port: int, messages: list[bytes], offsets: list[float]
    ) -> tuple[float, list[list[TimedChunk]]]:
        """One connection for each request."""

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

        async def send_one(message: bytes, offset: float) -> list[TimedChunk]:
            await asyncio.sleep(start + offset - time.perf_counter())
            return [(time.perf_counter(), data) async for data in stream_call(_single_request(message))]

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
    return _post(path, body)


def openai_request(model: str, prompt: list[int], num_tokens: int) -> bytes:
    """A request for a completion as it goes over the wire."""
    body = {"model": model, "prompt": prompt, "stream": True, "return_token_ids": True}
    return _post("/v1/completions", body | _parameters(num_tokens, "openai"))


def _post(path: str, body: dict[str, Any]) -> bytes:
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data


def http_tokens(request_index: int, arrivals: list[TimedChunk]) -> list[tuple[float, list[int]]]:
    """Tokens of one answer by the time that their line was complete.

    Raises:
        RuntimeError: the answer is an error, or was cut off.
    """
    # The server writes a list of one as its only element.
    return [
        (arrived_at, [token for ids in (event["output_ids"] for event in events) for token in _as_list(ids)])
        for arrived_at, events in _events(request_index, arrivals)
    ]


def openai_tokens(request_index: int, arrivals: list[TimedChunk]) -> list[tuple[float, list[int]]]:
    """As http_tokens, for the chunks of a completion."""
    return [
        (arrived_at, [token for event in events for choice in event["choices"] for token in choice["token_ids"] or ()])
        for arrived_at, events in _events(request_index, arrivals)
    ]


def _as_list(ids: int | list[int]) -> list[int]:
    return ids if isinstance(ids, list) else [ids]


def _events(request_index: int, arrivals: list[TimedChunk]) -> list[tuple[float, list[dict[str, Any]]]]:
    """Server-sent events by the time that their line was complete."""
    events_by_time, partial_line = [], b""
    for arrived_at, data in arrivals:
        *lines, partial_line = (partial_line + data).split(b"\n")
        payloads = [line[6:].strip() for line in lines if line.startswith(b"data: ")]
        events = [json.loads(payload) for payload in payloads if payload != b"[DONE]"]
        if errors := [event["error"] for event in events if "error" in event]:
            raise RuntimeError(f"request {request_index}: {errors[0]}")
        events_by_time.append((arrived_at, events))
    full_response = b"".join(data for _, data in arrivals)
    if not full_response.startswith(b"HTTP/1.1 200") or not full_response.endswith(_LAST_CHUNK):
        raise RuntimeError(f"request {request_index}: {full_response[:500]!r} ... {full_response[-100:]!r}")
    return events_by_time


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
