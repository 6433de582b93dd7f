# SPDX-License-Identifier: Apache-2.0
"""A client that streams on each port during the attacks, and checks each text. It runs in a process of its own, so that
the work of the attackers' process does not delay it.
"""

import asyncio
import json
import multiprocessing
import statistics
import time
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import tritonclient.grpc.aio as grpcaio
from support.quire_serve import grpc_flag, grpc_text

PROMPT = "Once upon a time"
GREEDY = {"temperature": 0.0, "max_tokens": 200, "ignore_eos": True}
PAUSE_S = 0.2
"""Pause between two streams. The neighbour does not use the whole engine."""


@dataclass
class Report:
    """The streams of the neighbour on one port."""

    num_streams: int = 0
    broken: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    """Seconds between two parts of a stream."""
    ends: list[float] = field(default_factory=list)
    """For each gap, its end on the clock that all processes share (`time.monotonic`)."""

    @property
    def largest_gap(self) -> float:
        return max(self.gaps, default=0.0)

    def largest_gaps(self, count: int) -> list[tuple[float, float]]:
        """Return the start and the end of the largest gaps."""
        longest = sorted(zip(self.gaps, self.ends, strict=True), reverse=True)[:count]
        return [(end - gap, end) for gap, end in longest]

    @property
    def p99(self) -> float:
        return statistics.quantiles(self.gaps, n=100)[-1] if len(self.gaps) > 1 else 0.0


class Neighbour:
    """The process of the neighbour."""

    def __init__(self, ports: Mapping[str, int], key: str) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, other = context.Pipe()
        self._process = context.Process(target=_main, args=(dict(ports), key, other), daemon=True)
        self._process.start()

    def reports(self) -> dict[str, Report]:
        """Return what was seen since the last call, by port. Streams that are running count in the next report."""
        self._connection.send("report")
        reports: dict[str, Report] = self._connection.recv()
        return reports

    def stop(self) -> dict[str, Report]:
        """Wait for the running streams, end the process, and return what was seen since the last call."""
        self._connection.send("stop")
        reports: dict[str, Report] = self._connection.recv()
        self._process.join(10)
        return reports


def _main(ports: dict[str, int], key: str, connection: Any) -> None:
    asyncio.run(_run(ports, key, connection))


async def _run(ports: dict[str, int], key: str, connection: Any) -> None:
    streams: dict[str, Callable[[], AsyncIterator[str]]] = {
        "openai": lambda: _openai(ports["openai"], key),
        "http": lambda: _http(ports["http"]),
        "grpc": lambda: _grpc(ports["grpc"]),
    }
    expected = {name: "".join([part async for part in stream()]) for name, stream in streams.items()}
    assert len(set(expected.values())) == 1 and len(expected["http"]) > 100, expected
    reports = {name: Report() for name in streams}
    is_stopping = asyncio.Event()

    async def repeat(name: str) -> None:
        while not is_stopping.is_set():
            await _stream_once(streams[name], expected[name], lambda: reports[name])
            await asyncio.sleep(PAUSE_S)

    tasks = [asyncio.create_task(repeat(name)) for name in streams]
    while not is_stopping.is_set():
        if await asyncio.to_thread(connection.recv) == "stop":
            is_stopping.set()
            await asyncio.gather(*tasks)
        connection.send(reports)
        reports = {name: Report() for name in streams}


async def _stream_once(stream: Callable[[], AsyncIterator[str]], expected: str, report: Callable[[], Report]) -> None:
    text, last_at = "", None
    try:
        async for part in stream():
            now = time.monotonic()
            if last_at is not None:
                report().gaps.append(now - last_at)
                report().ends.append(now)
            text, last_at = text + part, now
    except Exception as error:
        report().broken.append(f"{type(error).__name__}: {str(error)[:200]}")
        # Without a pause, a port that is closed would count as thousands of broken streams.
        await asyncio.sleep(1)
    else:
        report().num_streams += 1
        if text != expected:
            report().wrong.append(text)


async def _openai(port: int, key: str) -> AsyncIterator[str]:
    body = {"model": "tales", "prompt": PROMPT, "stream": True, **GREEDY}
    async for event in _events(f"http://127.0.0.1:{port}/v1/completions", body, {"Authorization": f"Bearer {key}"}):
        yield str(event["choices"][0]["text"])


async def _http(port: int) -> AsyncIterator[str]:
    body = {"text_input": PROMPT, "stream": True, **GREEDY}
    async for event in _events(f"http://127.0.0.1:{port}/v2/models/tales/generate_stream", body, {}):
        yield str(event["text_output"])


async def _events(url: str, body: dict[str, Any], headers: dict[str, str]) -> AsyncIterator[dict[str, Any]]:
    timeout = aiohttp.ClientTimeout(total=None, sock_read=120)
    async with (
        aiohttp.ClientSession(timeout=timeout) as session,
        session.post(url, json=body, headers=headers) as answer,
    ):
        assert answer.status == 200, await answer.text()
        async for line in answer.content:
            if line.startswith(b"data: ") and line.strip() != b"data: [DONE]":
                event = json.loads(line[6:])
                assert "error" not in event, event
                yield event


async def _grpc(port: int) -> AsyncIterator[str]:
    async def requests() -> AsyncIterator[dict[str, Any]]:
        inputs = [grpc_text(PROMPT), grpc_flag("stream", True)]
        yield {
            "model_name": "tales",
            "inputs": inputs,
            "parameters": GREEDY,
        }

    async with grpcaio.InferenceServerClient(f"127.0.0.1:{port}") as client:
        async for result, error in client.stream_infer(requests()):
            if error is not None:
                raise error
            yield result.as_numpy("text_output")[0].decode()
