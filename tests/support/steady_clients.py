# SPDX-License-Identifier: Apache-2.0
"""Clients that send one request after the other without retries, while something happens to the pods behind a Service.

Each kind of client exists twice: one keeps its connection between its requests, the other opens a new one for each.
"""

import contextlib
import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx
import openai
import tritonclient.grpc as grpcclient
from support.pod_cluster import ServiceEndpoint
from support.quire_serve import grpc_flag, grpc_text

from quire_spec.net.addresses import format_for_url

PROMPT = "Once upon a time"
MODELS = ("tales", "pirate")
MAX_TOKENS = 8
KINDS = ("http", "grpc", "openai")
_TIMEOUT_S = 60
_CHANNEL_ARGS = [("grpc.use_local_subchannel_pool", 1)]
"""Without this option, the gRPC clients of a process share their connections to an address."""

Send = Callable[[str], None]
"""Sends one request to a model. Raises an error unless the response is complete."""


LONG = {"max_tokens": 1800, "ignore_eos": True}


@dataclass(frozen=True)
class FailedRequest:
    """A request that did not get a complete response."""

    client: str
    sent_at: float
    failed_at: float
    """Both times are of time.monotonic."""
    error: str


@dataclass
class SteadyClients:
    """The results of the clients so far."""

    num_answers: Counter[str] = field(default_factory=Counter)
    """Number of complete responses by client."""
    failures: list[FailedRequest] = field(default_factory=list)


@contextlib.contextmanager
def http_client(endpoint: ServiceEndpoint, keeps: bool) -> Iterator[Send]:
    """A client of the server's HTTP port."""
    url = f"http://{format_for_url(endpoint.host)}:{endpoint.ports['http']}/v2/models"
    with httpx.Client(limits=_limits(keeps), timeout=_TIMEOUT_S, trust_env=False) as client:

        def send(model: str) -> None:
            body = {"text_input": PROMPT, "max_tokens": MAX_TOKENS}
            response = client.post(f"{url}/{model}/generate", json=body)
            assert response.status_code == 200 and response.json()["text_output"], response.text

        yield send


@contextlib.contextmanager
def openai_client(endpoint: ServiceEndpoint, keeps: bool) -> Iterator[Send]:
    """OpenAI's client, with streams."""
    url = f"http://{format_for_url(endpoint.host)}:{endpoint.ports['openai']}/v1"
    http = httpx.Client(limits=_limits(keeps), timeout=_TIMEOUT_S, trust_env=False)
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0, http_client=http) as client:

        def send(model: str) -> None:
            chunks = list(client.completions.create(model=model, prompt=PROMPT, max_tokens=MAX_TOKENS, stream=True))
            assert chunks and chunks[-1].choices[0].finish_reason, chunks

        yield send


@contextlib.contextmanager
def grpc_client(endpoint: ServiceEndpoint, keeps: bool) -> Iterator[Send]:
    """Triton's client: a stream for each request."""
    address = f"{format_for_url(endpoint.host)}:{endpoint.ports['grpc']}"

    def connect() -> Any:
        return grpcclient.InferenceServerClient(address, channel_args=_CHANNEL_ARGS)

    def send_with(client: Any, model: str) -> None:
        answers: list[Any] = []
        client.start_stream(lambda result, error: answers.append(error or result))
        try:
            client.async_stream_infer(model, [grpc_text(PROMPT)], parameters={"max_tokens": MAX_TOKENS})
        finally:
            client.stop_stream()
        assert answers, "the stream ended without a response"
        for answer in answers:
            if isinstance(answer, Exception):
                raise answer

    def send_on_new(model: str) -> None:
        with connect() as client:
            send_with(client, model)

    if not keeps:
        yield send_on_new
        return
    with connect() as kept:
        yield lambda model: send_with(kept, model)


_CLIENTS = {"http": http_client, "grpc": grpc_client, "openai": openai_client}


@contextlib.contextmanager
def steady_clients(endpoint: ServiceEndpoint, kinds: tuple[str, ...] = KINDS) -> Iterator[SteadyClients]:
    """Run the clients in threads until the context ends. Of each kind, there is one client that opens a connection for
    each request, and two that keep theirs: one sends requests often, and one after pauses of 7 s."""
    results, stop = SteadyClients(), threading.Event()

    def run(name: str, kind: str, keeps: bool, pause_s: float) -> None:
        with _CLIENTS[kind](endpoint, keeps) as send:
            while not stop.is_set():
                sent_at = time.monotonic()
                try:
                    send(MODELS[results.num_answers[name] % len(MODELS)])
                except Exception as error:  # the clients' errors have no common type
                    text = f"{type(error).__name__}: {error}"
                    results.failures.append(FailedRequest(name, sent_at, time.monotonic(), text))
                else:
                    results.num_answers[name] += 1
                stop.wait(pause_s)

    variants = [("new", False, 0.2), ("kept", True, 0.1), ("kept, slow", True, 7.0)]
    threads = [
        threading.Thread(target=run, args=(f"{kind}, {name}", kind, keeps, pause_s), daemon=True)
        for kind in kinds
        for name, keeps, pause_s in variants
    ]
    for thread in threads:
        thread.start()
    try:
        yield results
    finally:
        stop.set()
        for thread in threads:
            thread.join(2 * _TIMEOUT_S)
            assert not thread.is_alive(), "a client hangs"


def read_long_stream(endpoint: ServiceEndpoint, kind: str, started: threading.Event) -> list[str]:
    """Read a long stream until its end, and return its errors. `started` is set by its first output. A stream that ends
    without its last part is an error, too."""
    errors: list[str] = []
    try:
        errors += _LONG_STREAMS[kind](endpoint, started)
    except Exception as error:  # the clients' errors have no common type
        errors.append(f"{type(error).__name__}: {error}")
    return errors


def _long_http_stream(endpoint: ServiceEndpoint, started: threading.Event) -> Iterator[str]:
    url = f"http://{format_for_url(endpoint.host)}:{endpoint.ports['http']}/v2/models/tales/generate_stream"
    body = {"text_input": PROMPT, "stream": True, "return_finish_reason": True} | LONG
    event: dict[str, Any] = {}
    with httpx.Client(timeout=_TIMEOUT_S, trust_env=False) as client, client.stream("POST", url, json=body) as response:
        for line in response.iter_lines():
            if line.startswith("data:"):
                started.set()
                event = json.loads(line[5:])
                if "error" in event:
                    yield event["error"]
    if not event.get("finish_reason"):
        yield "the stream ended without its last part"


def _long_openai_stream(endpoint: ServiceEndpoint, started: threading.Event) -> Iterator[str]:
    url = f"http://{format_for_url(endpoint.host)}:{endpoint.ports['openai']}/v1"
    http = httpx.Client(timeout=_TIMEOUT_S, trust_env=False)
    finish_reason = None
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0, http_client=http) as client:
        parameters = {"max_tokens": LONG["max_tokens"], "extra_body": {"ignore_eos": True}}
        for chunk in client.completions.create(model="tales", prompt=PROMPT, stream=True, **parameters):
            started.set()
            finish_reason = chunk.choices[0].finish_reason
    if finish_reason is None:
        yield "the stream ended without its last part"


def _long_grpc_stream(endpoint: ServiceEndpoint, started: threading.Event) -> Iterator[str]:
    answers: list[Any] = []

    def on_answer(result: Any, error: Any) -> None:
        started.set()
        answers.append(error or result)

    address = f"{format_for_url(endpoint.host)}:{endpoint.ports['grpc']}"
    with grpcclient.InferenceServerClient(address, channel_args=_CHANNEL_ARGS) as client:
        client.start_stream(on_answer)
        inputs = [grpc_text(PROMPT), grpc_flag("stream", True), grpc_flag("return_finish_reason", True)]
        client.async_stream_infer("tales", inputs, parameters=LONG)
        client.stop_stream()
    errors = [str(answer) for answer in answers if isinstance(answer, Exception)]
    yield from errors
    if not errors and not answers[-1].as_numpy("finish_reason")[0]:
        yield "the stream ended without its last part"


_LONG_STREAMS = {"http": _long_http_stream, "grpc": _long_grpc_stream, "openai": _long_openai_stream}


def _limits(keeps: bool) -> httpx.Limits:
    return httpx.Limits(max_keepalive_connections=1 if keeps else 0, keepalive_expiry=None)
