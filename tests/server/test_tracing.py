# SPDX-License-Identifier: Apache-2.0
"""Spans of a real `quire serve`, which a receiver of OTLP gets, with requests on all ports."""

import contextlib
import os
import secrets
import socket
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import numpy as np
import pytest
import tritonclient.grpc as grpcclient
from support.otlp_receiver import OtlpReceiver, attributes, running_collector
from support.quire_serve import QuireServeProcess, example_document

pytestmark = [pytest.mark.server, pytest.mark.timeout(180)]


def new_parent():
    """Return a header traceparent, the id of its trace, and the id of its span."""
    trace_id, span_id = secrets.token_hex(16), secrets.token_hex(8)
    return f"00-{trace_id}-{span_id}-01", trace_id, span_id


def wait_for(receiver, trace_id, names):
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline and not names <= receiver.trace(trace_id).keys():
        time.sleep(0.05)
    spans = receiver.trace(trace_id)
    assert names <= spans.keys(), f"{names - spans.keys()} missing among {[span.name for span in receiver.spans]}"
    return spans


@pytest.fixture(scope="module", params=["grpc", "http", "collector"])
def traced(request):
    """Yield a server and the receiver to which it sends spans, directly or through a real collector."""
    with contextlib.ExitStack() as stack:
        receiver = stack.enter_context(OtlpReceiver())
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        url = f"http://127.0.0.1:{receiver.grpc_port}"
        if request.param == "http":
            url = f"http://127.0.0.1:{receiver.http_port}/v1/traces"
        elif request.param == "collector":
            url = f"http://127.0.0.1:{stack.enter_context(running_collector(receiver, Path(folder)))}"
        env = {**os.environ, "OTEL_BSP_SCHEDULE_DELAY": "100", "OTEL_RESOURCE_ATTRIBUTES": "deployment=blue"}
        server = QuireServeProcess(
            example_document(), Path(folder), f"--otlp-traces-endpoint={url}", "--openai-enable-log-requests", env=env
        )
        try:
            server.wait_ready()
            yield server, receiver
        finally:
            server.stop()


def complete(server, model="sql", max_tokens=8, **headers):
    body = {"model": model, "prompt": "Once upon a time", "max_tokens": max_tokens, "ignore_eos": True}
    url = f"http://127.0.0.1:{server.ports['openai']}/v1/completions"
    httpx.post(url, json=body, headers=headers, timeout=60).raise_for_status()


def generate(server, **headers):
    # The generate routes of the server forward no headers, so the body contains it.
    body = {"text_input": "Once upon a time", "max_tokens": 8, "ignore_eos": True, **headers}
    url = f"http://127.0.0.1:{server.ports['http']}/v2/models/sql/generate"
    httpx.post(url, json=body, timeout=60).raise_for_status()


def infer(server, **headers):
    text = grpcclient.InferInput("text_input", [1], "BYTES")
    text.set_data_from_numpy(np.array([b"Once upon a time"], object))
    answers = []
    with grpcclient.InferenceServerClient(f"127.0.0.1:{server.ports['grpc']}") as client:
        client.start_stream(lambda result, error: answers.append(error or result), headers=headers)
        client.async_stream_infer("sql", [text], parameters={"max_tokens": 8, "ignore_eos": True})
    (answer,) = answers
    assert not isinstance(answer, Exception), answer


@pytest.mark.parametrize("send", [complete, generate, infer])
def test_request_belongs_to_the_trace_of_its_client(traced, send):
    server, receiver = traced
    parent, trace_id, span_id = new_parent()
    before = time.time_ns()
    send(server, traceparent=parent)
    after = time.time_ns()
    spans = wait_for(receiver, trace_id, {"text_completion sql", "queue", "prefill", "decode"})
    root = spans["text_completion sql"]
    assert root.parent_span_id.hex() == span_id and root.kind == root.SPAN_KIND_SERVER
    found = attributes(root)
    assert found["gen_ai.usage.output_tokens"] == found["gen_ai.request.max_tokens"] == 8
    assert found["gen_ai.response.finish_reasons"] == ["length"] and found["quire.adapter.name"] == "sql"
    assert before <= root.start_time_unix_nano and root.end_time_unix_nano <= after
    queue, prefill, decode = (spans[name] for name in ("queue", "prefill", "decode"))
    assert {span.parent_span_id for span in (queue, prefill, decode)} == {root.span_id}
    assert root.start_time_unix_nano == queue.start_time_unix_nano
    assert queue.end_time_unix_nano == prefill.start_time_unix_nano < prefill.end_time_unix_nano
    assert prefill.end_time_unix_nano == decode.start_time_unix_nano < decode.end_time_unix_nano
    resource = receiver.resources[-1]
    assert resource["service.name"] == "quire-tales" and resource["deployment"] == "blue"


def test_client_decides_what_is_sampled(traced):
    server, receiver = traced
    parent, trace_id, _ = new_parent()
    complete(server, traceparent=parent[:-2] + "00")
    complete(server, traceparent="garbage")
    parent, last_trace_id, _ = new_parent()
    complete(server, traceparent=parent)
    wait_for(receiver, last_trace_id, {"decode"})
    assert not receiver.trace(trace_id)


def test_request_that_is_cancelled(traced):
    server, receiver = traced
    parent, trace_id, _ = new_parent()
    with pytest.raises(httpx.TimeoutException):
        httpx.post(
            f"http://127.0.0.1:{server.ports['openai']}/v1/chat/completions",
            json={"model": "tales", "messages": [{"role": "user", "content": "x"}], "ignore_eos": True},
            headers={"traceparent": parent},
            timeout=0.3,
        )
    root = wait_for(receiver, trace_id, {"chat tales"})["chat tales"]
    assert attributes(root)["gen_ai.response.finish_reasons"] == ["abort"]


def test_wait_for_a_slot_and_last_spans_when_the_server_stops():
    with OtlpReceiver() as receiver, tempfile.TemporaryDirectory() as folder:
        flag = f"--otlp-traces-endpoint=http://127.0.0.1:{receiver.grpc_port}"
        env = {**os.environ, "OTEL_BSP_SCHEDULE_DELAY": "60000"}
        document = example_document()
        document["spec"]["lora"]["maxLoaded"] = 1
        server = QuireServeProcess(document, Path(folder), flag, env=env)
        server.wait_ready()
        parent, trace_id, _ = new_parent()
        with ThreadPoolExecutor() as threads:
            # The only slot is in use as long as this request runs.
            other = threads.submit(complete, server, "pirate", 300)
            time.sleep(0.2)
            complete(server, traceparent=parent)
            other.result()
        assert server.stop() == 0
        spans = receiver.trace(trace_id)
        assert spans["adapter_wait"].parent_span_id == spans["queue"].span_id
        waited_ns, queued_ns = (
            spans[name].end_time_unix_nano - spans[name].start_time_unix_nano for name in ("adapter_wait", "queue")
        )
        assert 0.5 * queued_ns < waited_ns <= queued_ns


def test_collector_that_hangs_delays_nothing():
    """The receiver accepts connections and never answers."""
    with tempfile.TemporaryDirectory() as folder, socket.create_server(("127.0.0.1", 0)) as hanging:
        flag = f"--otlp-traces-endpoint=http://127.0.0.1:{hanging.getsockname()[1]}/v1/traces"
        server = QuireServeProcess(example_document(), Path(folder), flag)
        server.wait_ready()
        for _ in range(3):
            complete(server)
        started = time.monotonic()
        assert server.stop() == 0
        assert time.monotonic() - started < 10
