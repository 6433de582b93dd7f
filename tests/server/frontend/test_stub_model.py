# SPDX-License-Identifier: Apache-2.0
"""stub_model on a real server with real clients and a fake text process.

The tests need silence, floods and exact errors on demand. tests/e2e covers the same path with the real processes.
"""

import asyncio
import json
import os
import queue
import socket
import subprocess
import sys
import time

import aiohttp
import numpy as np
import pytest
import tritonclient.grpc as grpcclient
import tritonclient.grpc.aio as grpcaio
from support.frontend_harness import BASE, scripted_text, wait_until
from support.hostile_frames import PAYLOADS
from support.quire_serve import StreamedResponse, grpc_flag, grpc_text, run_concurrently

from quire_server.logs import is_noise
from quire_server.model_server import repository

pytestmark = pytest.mark.server

RETURNS = ("finish_reason", "cumulative_logprob", "logprobs", "num_input_tokens", "num_output_tokens", "output_ids")
CANCELLED = "[vllm] Cancelling the request"
"""The words of vllm_backend, which its own test searches for."""
EVERYTHING = {f"return_{name}": True for name in RETURNS}


@pytest.fixture(autouse=True)
def no_request_remains_open(running):
    """Check that every test leaves the text process without open requests."""
    yield
    wait_until(lambda: not running.num_open_requests(), 20, "free of open requests")


def echoed_request(response):
    """Return the GenerateRequest with which the fake text process answers a prompt with the word `submit`."""
    text = response.body["text_output"]
    return json.loads(text[text.index("{") :])


SURROGATE = json.dumps({"structured_outputs": {"json": {"enum": ["\ud800"]}}})
"""JSON can contain a lone surrogate; messages between processes cannot."""


class GrpcStream:
    """One bidirectional stream of the synchronous client, open for several requests."""

    def __init__(self, running):
        self.client = grpcclient.InferenceServerClient(f"127.0.0.1:{running.ports['grpc']}")
        self.responses = queue.SimpleQueue()
        self.client.start_stream(lambda result, error: self.responses.put((result, error)))

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.client.stop_stream()
        self.client.close()

    def send(self, model, inputs, **kwargs):
        self.client.async_stream_infer(model, inputs, enable_empty_final_response=True, **kwargs)

    def get(self):
        return self.responses.get(timeout=30)

    def until_final(self):
        """Return all responses to a request."""
        results = []
        while True:
            result, error = self.get()
            results.append(error or result)
            if error or final(result):
                return results


def final(result):
    return result.get_response().parameters["triton_final_response"].bool_param


class TestResponses:
    def test_http_stream_has_one_event_per_token_without_load(self, running):
        (stream,) = run_concurrently(running.http_stream(BASE, "step=0.2", max_tokens=5))
        assert stream.pieces == [f"t{i} " for i in range(5)]

    def test_additional_outputs_of_a_stream_cover_new_tokens(self, running):
        (stream,) = run_concurrently(running.http_stream(BASE, "step=0.2", max_tokens=3, logprobs=0, **EVERYTHING))
        assert [event["finish_reason"] for event in stream.events] == ["None", "None", "length"]
        assert [event["num_output_tokens"] for event in stream.events] == [1, 1, 1]
        assert [list(json.loads(event["logprobs"])[0]) for event in stream.events] == [["0"], ["1"], ["2"]]
        assert [event["cumulative_logprob"] for event in stream.events] == [-0.5, -1.0, -1.5]

    def test_grpc_request_of_vllm_backend_clients(self, running):
        """vllm_backend's samples/client.py sends sampling parameters both as tensor and as request parameters."""
        parameters = {"temperature": "0.1", "top_p": "0.95", "max_tokens": "5"}
        tensor = grpcclient.InferInput("sampling_parameters", [1], "BYTES")
        tensor.set_data_from_numpy(np.array([json.dumps(parameters).encode()], np.object_))
        with GrpcStream(running) as stream:
            stream.send(
                BASE,
                [grpc_text("submit"), grpc_flag("stream", False), tensor],
                parameters=parameters,
                request_id="42",
                outputs=[grpcclient.InferRequestedOutput("text_output")],
                priority=1,
                timeout=10_000_000,
            )
            (result,) = stream.until_final()
        sent = json.loads(result.as_numpy("text_output")[0].decode().removeprefix("submit"))
        assert sent["params"] == {"temperature": 0.1, "top_p": 0.95, "max_tokens": 5}
        assert result.get_response().id == "42"

    def test_request_parameters_of_every_type_and_server_fields(self, running):
        response = running.generate(
            BASE, "submit", max_tokens=5, temperature=0.25, ignore_eos=True, stop='["a", "b"]', id="x", priority=2
        )
        assert echoed_request(response)["params"] == {
            "max_tokens": 5,
            "temperature": 0.25,
            "ignore_eos": True,
            "stop": ["a", "b"],
        }

    def test_special_characters_are_preserved(self, running):
        odd = "submit \u00e9\u4e2d\U0001f600 \x00 \u2028 \\ \" '"
        response = running.generate(BASE, odd)
        assert response.body["text_output"].startswith(odd)
        assert echoed_request(response)["prompt"] == odd

    def test_large_prompt(self, running):
        assert running.text(BASE, "x" * 5_000_000, max_tokens=1) == "t0 "

    def test_flood_is_coalesced_and_complete(self, running):
        (stream,) = run_concurrently(running.http_stream(BASE, "flood", max_tokens=5000, **EVERYTHING))
        assert stream.text == scripted_text(5000)
        assert sum(event["num_output_tokens"] for event in stream.events) == 5000
        assert len(stream.events) < 2000


class TestErrors:
    @pytest.mark.parametrize("code", ["INVALID_ARG", "NOT_FOUND", "UNAVAILABLE", "CANCELLED", "INTERNAL"])
    def test_each_protocol_reports_the_code(self, running, code):
        response = running.generate(BASE, f"error={code}")
        assert (response.status, response.body) == (400, {"error": f"{code}: requested error"})
        (stream,) = run_concurrently(running.http_stream(BASE, f"error={code}"))
        assert stream.error == f"{code}: requested error"
        with GrpcStream(running) as stream:
            stream.send(BASE, [grpc_text(f"error={code}"), grpc_flag("stream", True)])
            _, error = stream.get()
        assert (error.status(), error.message()) == (None, f"{code}: requested error")

    @pytest.mark.parametrize("kind", ["OutputDeltas", "Reply", "unknown"])
    def test_a_hostile_frame_of_the_text_process_ends_only_its_request(self, running, kind):
        hostile = [
            running.http_stream(BASE, f"hostile={kind}:{name.replace(' ', '_')}", max_tokens=5) for name in PAYLOADS
        ]
        good, *failed = run_concurrently(running.http_stream(BASE, "step=0.02", max_tokens=20), *hostile)
        assert (good.text, good.error) == (scripted_text(20), None)
        assert all((stream.error or "").startswith("INTERNAL: the text process: ") for stream in failed)

    def test_each_request_on_a_stream_gets_its_final_response(self, running):
        with GrpcStream(running) as stream:
            for i in range(30):
                prompt = "error=NOT_FOUND" if i % 3 == 0 else "x" if i % 3 == 1 else b"\xff"
                stream.send(BASE, [grpc_text(prompt), grpc_flag("stream", False)], request_id=str(i))
            ends = [stream.get() for _ in range(30)]
            assert stream.responses.empty()
        assert sum(error is not None for _, error in ends) == 20
        assert all(final(result) for result, error in ends if error is None)

    @pytest.mark.parametrize(
        ("body", "message"),
        [
            ({"text_input": "x", "best_off": 2}, "INVALID_ARG: unknown sampling parameter 'best_off'"),
            ({"text_input": "x", "seed": 2**63}, "INVALID_ARG: sampling parameter 'seed'"),
            ({"text_input": "x" * (16 * 2**20 + 1)}, "INVALID_ARG: text_input: must have at most 16777216"),
            ({"text_input": "x" * (17 * 2**20)}, "INVALID_ARG: request body: must have at most 17825792 bytes"),
            (b'{"text_input": "\xff\xfe"}', "INVALID_ARG: text_input: invalid UTF-8"),
            (b'{"text_input": "x", "stop": "\xff\xfe"}', "INVALID_ARG: request parameters: invalid UTF-8"),
            (
                {"text_input": "x", "sampling_parameters": SURROGATE},
                "INVALID_ARG: sampling parameter 'structured_outputs'",
            ),
        ],
        ids=["unknown", "large-seed", "long-prompt", "long-body", "prompt-utf8", "parameter-utf8", "surrogate"],
    )
    def test_invalid_request_gets_its_error_and_the_next_one_works(self, running, body, message):
        response = running.request("http", f"/v2/models/{BASE}/generate", body)
        assert response.status == 400, response
        assert response.body["error"].startswith(message), response.body
        assert len(response.body["error"]) < 1000
        assert running.generate(BASE, "x", max_tokens=1).status == 200

    @pytest.mark.parametrize(
        "body",
        [{"text_input": ["a", "b"]}, {"text_input": None}, {"text_input": "x", "stream": 1}, b"{", {"input_ids": "x"}],
    )
    def test_request_that_the_server_itself_rejects(self, running, body):
        assert running.request("http", f"/v2/models/{BASE}/generate", body).status in (400, 500)
        assert running.generate(BASE, "x", max_tokens=1).status == 200

    def test_error_is_delayed_until_the_server_has_received_the_request(self, running):
        """The server can abort otherwise; see MIN_ERROR_DELAY_S."""
        before = time.monotonic()
        assert running.generate(BASE, "x", temperature=-1).status == 400
        assert time.monotonic() - before >= 0.02

    @pytest.mark.parametrize("protocol", ["http", "grpc"])
    def test_error_is_delayed_after_a_response(self, running, protocol):
        """The server can abort otherwise; see MIN_ERROR_DELAY_AFTER_RESPONSE_S."""
        call = running.http_stream if protocol == "http" else running.grpc_stream
        before = time.monotonic()
        (stream,) = run_concurrently(call(BASE, "flood fail=INTERNAL", max_tokens=5))
        assert (stream.text, "requested error" in (stream.error or "")) == (scripted_text(4), True)
        assert stream.ended_at - before >= 0.1


class TestCancellation:
    """The request of a client that disconnects is cancelled."""

    @pytest.fixture
    def cancelled(self, running):
        """Return a function that waits until the text process received `count` cancellations of open requests."""
        expected = sum(len(entry["was_open"]) for entry in running.journal_entries("cancel"))

        def wait(count=1, timeout=20):
            nonlocal expected
            expected += count
            return wait_until(
                lambda: sum(len(e["was_open"]) for e in running.journal_entries("cancel")) == expected,
                timeout,
                "cancelled",
            )

        return wait

    def test_http_disconnect(self, running, cancelled):
        async def disconnect() -> None:
            url = f"http://127.0.0.1:{running.ports['http']}/v2/models/{BASE}/generate_stream"
            body = {"text_input": "step=0.01", "stream": True, "max_tokens": 100_000}
            async with aiohttp.ClientSession() as session, session.post(url, json=body) as response:
                await response.content.readline()

        num_logged = running.log.read_text().count(CANCELLED)
        run_concurrently(*(disconnect() for _ in range(2)))
        assert cancelled(2) < 5
        wait_until(lambda: running.log.read_text().count(CANCELLED) == num_logged + 2, 10, "logged")
        lines = [line for line in running.log.read_text().splitlines() if CANCELLED in line]
        assert all(is_noise("server", line) for line in lines), "it is shown only with --verbose"

    def test_http_disconnect_while_silent_is_detected_at_the_first_token(self, running, cancelled):
        """Release 24.10 checks an idle connection only when it writes to it."""
        body = json.dumps({"text_input": "step=0.01 wait=60", "stream": True, "max_tokens": 100_000}).encode()
        before = len(running.journal_entries("submit"))
        with socket.create_connection(("127.0.0.1", running.ports["http"])) as connection:
            connection.sendall(
                f"POST /v2/models/{BASE}/generate_stream HTTP/1.1\r\nHost: localhost\r\n"
                f"Content-Length: {len(body)}\r\n\r\n".encode()
                + body
            )
            wait_until(lambda: len(running.journal_entries("submit")) > before, 20, "submitted")
        cancelled()

    @pytest.mark.parametrize("prompt", ["step=0.01", "silent"])
    @pytest.mark.parametrize("stream", [True, False])
    def test_aio_cancel(self, running, cancelled, prompt, stream):
        async def scenario() -> None:
            async def requests():
                inputs = [grpc_text(prompt if stream else "silent"), grpc_flag("stream", stream)]
                yield {"model_name": BASE, "inputs": inputs, "parameters": {"max_tokens": 100_000}}
                await asyncio.Event().wait()

            before = len(running.journal_entries("submit"))
            async with grpcaio.InferenceServerClient(f"127.0.0.1:{running.ports['grpc']}") as client:
                responses = client.stream_infer(requests())
                if prompt == "silent" or not stream:
                    read_task = asyncio.ensure_future(anext(responses))
                    while len(running.journal_entries("submit")) == before:
                        await asyncio.sleep(0.01)
                    responses.cancel()
                    with pytest.raises(
                        (asyncio.CancelledError, StopAsyncIteration, grpcclient.InferenceServerException)
                    ):
                        await read_task
                else:
                    await anext(responses)
                    responses.cancel()

        asyncio.run(scenario())
        assert cancelled() < 5

    def test_killed_client(self, running, cancelled):
        code = (
            "import sys, time, tritonclient.grpc as g; from support.quire_serve import grpc_text, grpc_flag\n"
            "client = g.InferenceServerClient(sys.argv[1])\n"
            "client.start_stream(lambda result, error: print('token', flush=True))\n"
            "for prompt in ('step=0.01', 'silent'):\n"
            f"    client.async_stream_infer({BASE!r}, [grpc_text(prompt), grpc_flag('stream', True)],"
            " parameters={'max_tokens': 100000})\n"
            "time.sleep(60)"
        )
        env = dict(os.environ, PYTHONPATH=os.pathsep.join(sys.path))
        arguments = [sys.executable, "-c", code, f"127.0.0.1:{running.ports['grpc']}"]
        with subprocess.Popen(arguments, env=env, stdout=subprocess.PIPE) as client:
            client.stdout.readline()
            wait_until(lambda: running.num_open_requests() == 2, 20, "open twice")
            client.kill()
        assert cancelled(2) < 5

    def test_many_silent_requests_cancelled_at_once(self, running, cancelled):
        with GrpcStream(running) as stream:
            for _ in range(64):
                stream.send(BASE, [grpc_text("silent"), grpc_flag("stream", True)])
            wait_until(lambda: running.num_open_requests() == 64, 10, "open")
            stream.client.stop_stream(cancel_requests=True)
        assert cancelled(64) < 5


def test_streams_continue_while_models_load(running):
    loads = []

    async def scenario() -> list[StreamedResponse]:
        streams, tasks = await running.open_streams([BASE] * 8, "step=0.005", max_tokens=100_000)
        async with running.client() as client:
            for name in ("first", "second", "third"):
                before = [len(stream.text.split()) for stream in streams]
                await client.load_model(running.write_model(name))
                loads.append([len(stream.text.split()) - n for stream, n in zip(streams, before, strict=True)])
        assert not any(task.done() for task in tasks), [stream.error for stream in streams]
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        return streams

    streams = asyncio.run(scenario())
    # A remaining stub would connect during later tests.
    for name in ("first", "second", "third"):
        running.remove_model(name)
    assert all(scripted_text(100_000).startswith(stream.text) for stream in streams), "tokens are missing or repeated"
    # A load takes at least 200 ms, and there is a token every 5 ms.
    assert all(num > 5 for num_tokens in loads for num in num_tokens), loads


def test_killed_text_process_ends_every_stream_and_service_recovers(running):
    async def scenario() -> tuple[list[StreamedResponse], float]:
        streams, tasks = await running.open_streams([BASE, BASE, "sql", "sql"] * 8, "step=0.01", max_tokens=100_000)
        killed = time.monotonic()
        running.kill_text()
        await asyncio.wait(tasks, timeout=20)
        return streams, killed

    streams, killed = asyncio.run(scenario())
    running.journal.write_text("")
    assert all("UNAVAILABLE" in (stream.error or "") for stream in streams), [s.error for s in streams]
    assert max(stream.ended_at for stream in streams) - killed < 10
    response = running.generate(BASE, "x")
    assert (response.status, "UNAVAILABLE: the text process is starting or restarting" in response.body["error"]) == (
        400,
        True,
    )
    running.start_text()
    wait_until(
        lambda: {entry["model"] for entry in running.journal_entries("hello")} >= {BASE, "sql"}, 20, "reconnected"
    )
    assert running.text(BASE, "x", max_tokens=2) == running.text("sql", "x", max_tokens=2) == "t0 t1 "


def test_unload_drains_open_requests_and_ends_the_stub(running):
    running.add_model("late")
    stub = running.stub("late")

    async def scenario() -> StreamedResponse:
        _, (task,) = await running.open_streams(["late"], "step=0.01", max_tokens=100)
        async with running.client() as client:
            await client.unload_model("late")
        assert running.generate("late", "x").status in (400, 404)
        return await task

    stream = asyncio.run(scenario())
    assert (stream.text, stream.error) == (scripted_text(100), None)
    wait_until(lambda: not stub.is_running(), 20, "without the stub")


def test_stub_imports_and_memory_are_small(running):
    """A stub needs about 20 MB, mostly numpy and the server's own code; the test compares with an empty model."""
    listing = running.folder / "modules"
    bare = "class TritonPythonModel:\n  def execute(self, requests):\n    return None\n"
    ours = repository.MODEL_PY + (
        "class TritonPythonModel(TritonPythonModel):\n"
        "  def initialize(self, args):\n"
        "    super().initialize(args)\n"
        f"    import sys; open({str(listing)!r}, 'w').write(' '.join(sys.modules))\n"
    )

    async def load(name, program):
        async with running.client() as client:
            await client.load_model(running.write_model(name, program))

    def memory(name):
        return running.stub(name).memory_full_info()

    asyncio.run(load("bare", bare))
    asyncio.run(load("ours", ours))
    assert running.text("ours", "x", max_tokens=2) == "t0 t1 "
    modules = set(listing.read_text().split())
    heavy = {"aiohttp", "torch", "tokenizers", "huggingface_hub", "quire_spec.engine.config"}
    assert "quire_server.frontend.stub_model" in modules
    assert not heavy & modules
    # The client of the text process, which is the same in all processes, needs asyncio and msgspec (about 1 MiB).
    assert memory("ours").uss - memory("bare").uss < 6 * 2**20
    assert memory("ours").pss < 30 * 2**20
