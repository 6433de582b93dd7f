# SPDX-License-Identifier: Apache-2.0
"""A demo that takes one minute: it starts `quire serve` with the example, sends requests, and prints a table of the
results.

make demo                                   the example, on free ports, then stop
.venv/bin/python hack/demo.py --keep        leave it running until Ctrl-C, to try requests by hand
"""

import argparse
import json
import queue
import signal
import subprocess
import sys
import textwrap
import threading
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai
import tritonclient.grpc as grpcclient
from nodocker_cluster.ports import free_ports, is_free

ROOT = Path(__file__).resolve().parent.parent
EXAMPLE = ROOT / "examples/llmservice.yaml"
STORY = "Once upon a time"
QUESTION = "Question: list the names of customers in Paris\nSQL:"
CHAT = "Where is my order?"
TOOL_REQUEST = "What is the weather in Paris?"
WEATHER = {"name": "get_weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}
START_SECONDS = 180


@dataclass(frozen=True)
class Ports:
    """Ports of the servers."""

    http: int
    grpc: int
    metrics: int
    health: int
    openai: int


TextPiece = tuple[str, int]
"""A piece of text and the number of its tokens. While one piece is sent, the engine generates more tokens; all of them
are in the next piece."""


@dataclass(frozen=True)
class TableRow:
    """One line of the table at the end."""

    description: str
    tokens: int
    first_ms: float
    seconds: float


def default_or_free_ports() -> Ports:
    """Return the usual ports if they are free, otherwise other free ports."""
    return Ports(*(port if is_free(port) else free_ports(1)[0] for port in (8000, 8001, 8002, 8003, 8004)))


def serve(ports: Ports) -> subprocess.Popen[bytes]:
    """Start `quire serve` with the example. Its output appears in the output of this process."""
    flags = [f"--{name}-port={getattr(ports, name)}" for name in ("http", "grpc", "metrics", "health", "openai")]
    command = [str(Path(sys.executable).with_name("quire")), "serve", "-f", str(EXAMPLE), *flags]
    print_now(f"$ quire serve -f {EXAMPLE.relative_to(ROOT)}")
    return subprocess.Popen(command)


def wait_ready(process: subprocess.Popen[bytes], ports: Ports) -> float:
    """Wait until the health port reports that the server is ready. Return the number of seconds that this took."""
    started = time.monotonic()
    while time.monotonic() - started < START_SECONDS:
        if process.poll() is not None:
            raise SystemExit(
                f"demo: quire serve ended with exit code {process.returncode}; see its last lines for the reason"
            )
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{ports.health}/health/ready", timeout=2):
                return time.monotonic() - started
        except OSError:
            time.sleep(0.1)
    raise SystemExit(f"demo: the server is not ready after {START_SECONDS} s")


def http_generate(ports: Ports, model: str, body: dict[str, Any]) -> dict[str, Any]:
    """Send a request to POST /v2/models/MODEL/generate, and return the complete answer."""
    request = urllib.request.Request(
        f"http://127.0.0.1:{ports.http}/v2/models/{model}/generate",
        json.dumps({**body, "return_num_output_tokens": True}).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        answer: dict[str, Any] = json.load(response)
    return answer


def http_stream(ports: Ports, model: str, body: dict[str, Any]) -> Iterator[TextPiece]:
    """Send a request to POST /v2/models/MODEL/generate_stream, and yield the server-sent events as they arrive."""
    request = urllib.request.Request(
        f"http://127.0.0.1:{ports.http}/v2/models/{model}/generate_stream",
        json.dumps({**body, "stream": True, "return_num_output_tokens": True}).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        for line in response:
            if line.startswith(b"data: "):
                event = json.loads(line[6:])
                yield event["text_output"], int(event["num_output_tokens"])


def grpc_stream(ports: Ports, model: str, prompt: str, parameters: dict[str, Any]) -> Iterator[TextPiece]:
    """Send a ModelStreamInfer request with NVIDIA's client, and yield the pieces of text as they arrive."""
    import numpy as np

    answers: queue.SimpleQueue[tuple[Any, Any]] = queue.SimpleQueue()
    text = grpcclient.InferInput("text_input", [1], "BYTES")
    text.set_data_from_numpy(np.array([prompt.encode()], dtype=np.object_))
    flags = [grpcclient.InferInput(name, [1], "BOOL") for name in ("stream", "return_num_output_tokens")]
    for flag in flags:
        flag.set_data_from_numpy(np.array([True]))
    with grpcclient.InferenceServerClient(f"127.0.0.1:{ports.grpc}") as client:
        client.start_stream(lambda result, error: answers.put((result, error)))
        client.async_stream_infer(model, [text, *flags], parameters=parameters, enable_empty_final_response=True)
        while True:
            result, error = answers.get(timeout=60)
            if error is not None:
                raise SystemExit(f"demo: {model}: {error}")
            if (piece := result.as_numpy("text_output")) is not None:
                yield piece[0].decode(), int(result.as_numpy("num_output_tokens")[0])
            if result.get_response().parameters["triton_final_response"].bool_param:
                return


def openai_chat(ports: Ports, model: str, message: str, **parameters: Any) -> Iterator[TextPiece]:
    """Send a request to POST /v1/chat/completions with OpenAI's client. Yield the pieces of the answer and of the tool
    calls as they arrive."""
    options, num_tokens = {"include_usage": True, "continuous_usage_stats": True}, 0
    with openai.OpenAI(base_url=f"http://127.0.0.1:{ports.openai}/v1", api_key="none") as client:
        for chunk in client.chat.completions.create(
            model=model,
            messages=[{"role": "user", "content": message}],
            stream=True,
            stream_options=options,
            **parameters,
        ):
            if not chunk.choices or chunk.usage is None:
                continue
            delta = chunk.choices[0].delta
            calls = [call.function for call in delta.tool_calls or () if call.function]
            text = "".join(
                f"{call.name or ''} {call.arguments or ''}" if call.name else call.arguments or "" for call in calls
            )
            yield (delta.content or "") + text, chunk.usage.completion_tokens - num_tokens
            num_tokens = chunk.usage.completion_tokens


def print_stream(heading: str, pieces: Iterator[TextPiece]) -> TableRow:
    """Print a stream under a heading, and measure it."""
    started = time.monotonic()
    text, first_s, count = "", 0.0, 0
    for piece, tokens in pieces:
        first_s = first_s or time.monotonic() - started
        count += tokens
        text += piece
    seconds = time.monotonic() - started
    print_now(f"\n{heading}")
    print(textwrap.indent(textwrap.fill(text.strip(), 100), "    "), flush=True)
    return TableRow(heading, count, 1e3 * first_s, seconds)


def run_concurrent_streams(ports: Ports, models: list[str], streams: int) -> TableRow:
    """Run many concurrent streams of different models, and count their tokens."""
    counts, first_token_ms, lock = [], [], threading.Lock()

    def run_stream(index: int) -> None:
        started = time.monotonic()
        body = {"text_input": STORY, "max_tokens": 64, "temperature": 0.7, "seed": index, "ignore_eos": True}
        arrivals = [
            (time.monotonic() - started, tokens) for _, tokens in http_stream(ports, models[index % len(models)], body)
        ]
        with lock:
            counts.append(sum(tokens for _, tokens in arrivals))
            first_token_ms.append(1e3 * arrivals[0][0])

    started = time.monotonic()
    with ThreadPoolExecutor(streams) as pool:
        list(pool.map(run_stream, range(streams)))
    median = sorted(first_token_ms)[len(first_token_ms) // 2]
    return TableRow(f"{streams} HTTP streams at once, models mixed", sum(counts), median, time.monotonic() - started)


def run_requests(ports: Ports) -> list[TableRow]:
    """Run the demo."""
    greedy_params = {"temperature": 0.0, "max_tokens": 80}
    story_request = {"text_input": STORY, **greedy_params}
    started = time.monotonic()
    answer = http_generate(ports, "tales", story_request)
    print_now(f"\nbase model `tales`, HTTP generate: {STORY!r}")
    print(textwrap.indent(textwrap.fill(answer["text_output"].strip(), 100), "    "), flush=True)
    duration_ms = 1e3 * (time.monotonic() - started)
    return [
        TableRow("tales, HTTP generate", int(answer["num_output_tokens"]), duration_ms, duration_ms / 1e3),
        print_stream("adapter `pirate`, HTTP stream, the same prompt", http_stream(ports, "pirate", story_request)),
        print_stream(
            "adapter `sql`, gRPC stream: " + QUESTION.splitlines()[0],
            grpc_stream(ports, "sql", QUESTION, {"temperature": 0.0, "max_tokens": 40}),
        ),
        print_stream(
            "base with lora_name=pirate, HTTP stream",
            http_stream(ports, "tales", story_request | {"lora_name": "pirate"}),
        ),
        print_stream(
            f"adapter `pirate`, chat with OpenAI's client: {CHAT}",
            openai_chat(ports, "pirate", CHAT, max_tokens=80, temperature=0),
        ),
        print_stream(
            f"adapter `tools`, function call with OpenAI's client: {TOOL_REQUEST}",
            openai_chat(ports, "tools", TOOL_REQUEST, temperature=0, tools=[{"type": "function", "function": WEATHER}]),
        ),
        run_concurrent_streams(ports, ["tales", "pirate", "sql"], 24),
    ]


def print_table(rows: list[TableRow]) -> None:
    """Print the measurements."""
    print_now(f"\n{'what':<48} {'tokens':>7} {'first ms':>9} {'tokens/s':>9}")
    for row in rows:
        print(f"{row.description[:48]:<48} {row.tokens:>7} {row.first_ms:>9.0f} {row.tokens / row.seconds:>9.0f}")


def print_now(text: str) -> None:
    """Print a text immediately, without buffering, so that the output of all processes stays in order."""
    print(text, flush=True)


def main() -> int:
    """Start the server, send the requests, print the results, and stop the server. Return the exit code of the
    server."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keep", action="store_true", help="keep the server running until Ctrl-C")
    arguments = parser.parse_args()
    ports = default_or_free_ports()
    process = serve(ports)
    try:
        print_now(f"ready after {wait_ready(process, ports):.1f} s")
        print_table(run_requests(ports))
        if arguments.keep:
            print_now("\nleft running; Ctrl-C stops it")
            process.wait()
    except KeyboardInterrupt:
        pass
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
    code = process.wait(60)
    print_now(f"\nstopped with exit code {code}")
    return code


if __name__ == "__main__":
    sys.exit(main())
