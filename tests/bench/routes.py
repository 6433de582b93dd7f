# SPDX-License-Identifier: Apache-2.0
"""Tokens per second of streams of the Messages API and of chat completions, with the same prompts and outputs.

The reader only counts bytes, so that its own cost is small beside that of the front. The prompts of a pair of runs are
the same, and the order of the two routes changes from pair to pair.
"""

import asyncio
import json
import statistics
import time

from support.openai_front import OpenAIFront

BODIES = {
    "chat": ("/v1/chat/completions", {"chat_template_kwargs": {"enable_thinking": False}}),
    "messages": ("/v1/messages", {"thinking": {"type": "disabled"}}),
}
MIN_MESSAGES_RATIO = 0.97


async def _stream(port: int, path: str, body: dict[str, object]) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
    writer.write(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
    tail = b""
    while not tail.endswith(b"\r\n0\r\n\r\n"):
        received = await reader.read(65536)
        assert received and (tail or received.startswith(b"HTTP/1.1 200")), received
        tail = (tail + received)[-65536:]
    assert b"error" not in tail.lower(), tail
    writer.close()


async def _run(front: OpenAIFront, route: str, num_streams: int, num_tokens: int, key: int) -> float:
    """Return the output tokens per second of one run."""
    path, fields = BODIES[route]
    common = {"model": "base", "max_tokens": num_tokens, "stream": True, "ignore_eos": True, "temperature": 0, **fields}
    contents = [f"Tell story {key}.{i} about a mouse." for i in range(num_streams)]
    bodies = [common | {"messages": [{"role": "user", "content": content}]} for content in contents]
    started = time.perf_counter()
    await asyncio.gather(*(_stream(front.port, path, body) for body in bodies))
    return num_streams * num_tokens / (time.perf_counter() - started)


def measure_routes(front: OpenAIFront, num_streams: int, num_tokens: int, num_pairs: int) -> dict[str, float]:
    """Return the medians of both routes in tokens per second, and of the ratio within a pair."""
    speeds: dict[str, list[float]] = {route: [] for route in BODIES}
    for pair in range(num_pairs + 1):
        for route in sorted(BODIES, reverse=pair % 2 == 1):
            speed = asyncio.run(_run(front, route, num_streams, num_tokens, pair))
            if pair:  # the first pair warms up
                speeds[route].append(speed)
    ratios = [m / c for m, c in zip(speeds["messages"], speeds["chat"], strict=True)]
    medians = {f"{route}_tokens_per_s": statistics.median(values) for route, values in speeds.items()}
    return {**medians, "ratio": statistics.median(ratios)}
