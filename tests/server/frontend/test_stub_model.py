# SPDX-License-Identifier: Apache-2.0
"""The program in the stubs, on a real server with real clients. Behind it stands the scripted text process: these tests
need silence, floods and exact errors on demand. tests/e2e runs the same path with the real text and core processes."""

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
from support.frontend_harness import BASE, running_frontend, scripted_text, wait_until
from support.quire_serve import StreamedResponse, grpc_flag, grpc_text, run_concurrently

from quire_server.model_server import repository

pytestmark = pytest.mark.server

RETURNS = ("finish_reason", "cumulative_logprob", "logprobs", "num_input_tokens", "num_output_tokens", "output_ids")
EVERYTHING = {f"return_{name}": True for name in RETURNS}


@pytest.fixture(scope="module")
def running(tmp_path_factory):
    with running_frontend(tmp_path_factory.mktemp("frontend")) as running:
        running.add_model("sql")
        yield running


@pytest.fixture(autouse=True)
def nothing_stays_open(running):
    """Every test leaves the text process without open requests, or it has lost one."""
    yield
    wait_until(lambda: not running.num_open_requests(), 20, "free of open requests")


def submitted(answer):
    """The Submit that a prompt with the word `submit` is answered by."""
    text = answer.body["text_output"]
    return json.loads(text[text.index("{") :])


class GrpcStream:
    """One bidirectional stream of the synchronous client, kept open over several requests."""

    def __init__(self, running, real_status=False):
        self.client = grpcclient.InferenceServerClient(f"127.0.0.1:{running.ports['grpc']}")
        self.answers = queue.SimpleQueue()
        headers = {"triton_grpc_error": "true"} if real_status else None
        self.client.start_stream(lambda result, error: self.answers.put((result, error)), headers=headers)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        # No cancel after the end: release 24.10 crashes, once in thousands, when a stream with triton_grpc_error is
        # cancelled just as its error goes out.
        self.client.stop_stream()
        self.client.close()

    def send(self, model, inputs, **kwargs):
        self.client.async_stream_infer(model, inputs, enable_empty_final_response=True, **kwargs)

    def get(self):
        return self.answers.get(timeout=30)

    def until_final(self):
        """All answers to a request."""
        results = []
        while True:
            result, error = self.get()
            results.append(error or result)
            if error or final(result):
                return results


def final(result):
    return result.get_response().parameters["triton_final_response"].bool_param


class TestAnswers:
    def test_http_generate(self, running):
        assert running.generate(BASE, "Hi ", max_tokens=3).body["text_output"] == "Hi t0 t1 t2 "
        assert running.text(BASE, "Hi ", max_tokens=3) == "t0 t1 t2 "

    def test_http_stream_has_one_event_per_token_when_there_is_time(self, running):
        (stream,) = run_concurrently(running.http_stream(BASE, "step=0.2", max_tokens=5))
        assert stream.pieces == [f"t{i} " for i in range(5)]

    def test_additional_outputs(self, running):
        body = running.generate(BASE, "Hi", max_tokens=2, logprobs=0, **EVERYTHING).body
        entries = [{str(i): {"logprob": -0.5, "rank": 1, "decoded_token": f"t{i}"}} for i in range(2)]
        assert json.loads(body.pop("logprobs")) == entries
        assert body == {
            "model_name": BASE,
            "model_version": "1",
            "text_output": "Hit0 t1 ",
            "finish_reason": "length",
            "cumulative_logprob": -1.0,
            "num_input_tokens": 2,
            "num_output_tokens": 2,
            "output_ids": [0, 1],
        }

    def test_additional_outputs_of_a_stream_are_of_its_new_tokens(self, running):
        (stream,) = run_concurrently(running.http_stream(BASE, "step=0.2", max_tokens=3, logprobs=0, **EVERYTHING))
        assert [event["finish_reason"] for event in stream.events] == ["None", "None", "length"]
        assert [event["num_output_tokens"] for event in stream.events] == [1, 1, 1]
        assert [list(json.loads(event["logprobs"])[0]) for event in stream.events] == [["0"], ["1"], ["2"]]
        assert [event["cumulative_logprob"] for event in stream.events] == [-0.5, -1.0, -1.5]

    def test_ids_in_and_out(self, running):
        body = {"input_ids": [7, 8, 9], "max_tokens": 3, "return_num_input_tokens": True}
        answer = running.request("http", f"/v2/models/{BASE}/generate", body).body
        assert (answer["output_ids"], answer["num_input_tokens"], answer["text_output"]) == ([0, 1, 2], 3, "t0 t1 t2 ")

    def test_grpc_with_the_tensors_and_fields_of_vllm_backends_clients(self, running):
        """Sampling parameters as tensor and as request parameters, as vllm_backend's samples/client.py sends both."""
        asked = {"temperature": "0.1", "top_p": "0.95", "max_tokens": "5"}
        tensor = grpcclient.InferInput("sampling_parameters", [1], "BYTES")
        tensor.set_data_from_numpy(np.array([json.dumps(asked).encode()], np.object_))
        with GrpcStream(running) as stream:
            stream.send(
                BASE,
                [grpc_text("submit"), grpc_flag("stream", False), tensor],
                parameters=asked,
                request_id="42",
                outputs=[grpcclient.InferRequestedOutput("text_output")],
                priority=1,
                timeout=10_000_000,
            )
            (result,) = stream.until_final()
        sent = json.loads(result.as_numpy("text_output")[0].decode().removeprefix("submit"))
        assert sent["params"] == {"temperature": 0.1, "top_p": 0.95, "max_tokens": 5}
        assert result.get_response().id == "42"

    def test_request_parameters_of_every_type_and_the_servers_own_fields(self, running):
        answer = running.generate(
            BASE, "submit", max_tokens=5, temperature=0.25, ignore_eos=True, stop='["a", "b"]', id="x", priority=2
        )
        assert submitted(answer)["params"] == {
            "max_tokens": 5,
            "temperature": 0.25,
            "ignore_eos": True,
            "stop": ["a", "b"],
        }

    def test_models_and_lora_name(self, running):
        assert submitted(running.generate("sql", "submit"))["model"] == "sql"
        assert submitted(running.generate(BASE, "submit", lora_name="pirate"))["model"] == "pirate"
        answer = running.generate("sql", "submit", lora_name="pirate")
        assert (answer.status, "INVALID_ARG: lora_name: 'pirate'" in answer.body["error"]) == (400, True)

    def test_odd_text_arrives_as_it_was_sent(self, running):
        odd = "submit \u00e9\u4e2d\U0001f600 \x00 \u2028 \\ \" '"
        answer = running.generate(BASE, odd)
        assert answer.body["text_output"].startswith(odd)
        assert submitted(answer)["prompt"] == odd

    def test_a_large_prompt(self, running):
        assert running.text(BASE, "x" * 5_000_000, max_tokens=1) == "t0 "

    def test_a_flood_is_coalesced_and_complete(self, running):
        (stream,) = run_concurrently(running.http_stream(BASE, "flood", max_tokens=5000, **EVERYTHING))
        assert stream.text == scripted_text(5000)
        assert sum(event["num_output_tokens"] for event in stream.events) == 5000
        assert len(stream.events) < 2000


class TestErrors:
    @pytest.mark.parametrize("code", ["INVALID_ARG", "NOT_FOUND", "UNAVAILABLE", "CANCELLED", "INTERNAL"])
    def test_http_says_400_with_the_code_in_the_body(self, running, code):
        answer = running.generate(BASE, f"error={code}")
        assert (answer.status, answer.body) == (400, {"error": f"{code}: as asked"})
        (stream,) = run_concurrently(running.http_stream(BASE, f"error={code}"))
        assert stream.error == f"{code}: as asked"

    @pytest.mark.parametrize(
        ("code", "status"),
        [
            ("INVALID_ARG", "INVALID_ARGUMENT"),
            ("NOT_FOUND", "NOT_FOUND"),
            ("UNAVAILABLE", "UNAVAILABLE"),
            ("CANCELLED", "CANCELLED"),
            ("INTERNAL", "INTERNAL"),
        ],
    )
    def test_grpc_gets_the_real_status_if_it_asks(self, running, code, status):
        with GrpcStream(running, real_status=True) as stream:
            stream.send(BASE, [grpc_text(f"error={code}"), grpc_flag("stream", True)])
            _, error = stream.get()
        assert error.status() == f"StatusCode.{status}"
        assert error.message() == f"{code}: as asked"

    def test_without_asking_the_stream_stays_open(self, running):
        with GrpcStream(running) as stream:
            stream.send(BASE, [grpc_text("error=NOT_FOUND"), grpc_flag("stream", True)])
            _, error = stream.get()
            assert "NOT_FOUND: as asked" in str(error)
            stream.send(BASE, [grpc_text("x"), grpc_flag("stream", True)], parameters={"max_tokens": 2})
            assert [r.as_numpy("text_output")[0] for r in stream.until_final()] == [b"t0 ", b"t1 "]

    def test_each_of_many_requests_on_a_stream_gets_its_own_end(self, running):
        with GrpcStream(running) as stream:
            for i in range(30):
                prompt = "error=NOT_FOUND" if i % 3 == 0 else "x" if i % 3 == 1 else b"\xff"
                stream.send(BASE, [grpc_text(prompt), grpc_flag("stream", False)], request_id=str(i))
            ends = [stream.get() for _ in range(30)]
            assert stream.answers.empty()
        assert sum(error is not None for _, error in ends) == 20
        assert all(final(result) for result, error in ends if error is None)

    @pytest.mark.parametrize(
        ("body", "said"),
        [
            ({"text_input": "x", "temperature": -1}, "INVALID_ARG: sampling parameter 'temperature'"),
            ({"text_input": "x", "best_off": 2}, "INVALID_ARG: unknown sampling parameter 'best_off'"),
            ({"text_input": "x", "lora_name": ""}, "INVALID_ARG: lora_name"),
            ({"text_input": "x", "input_ids": [1]}, "INVALID_ARG: text_input, input_ids: both"),
            ({"max_tokens": 5}, "INVALID_ARG: text_input, input_ids: neither"),
            ({"input_ids": []}, "INVALID_ARG: input_ids: empty"),
            ({"input_ids": [-1]}, "INVALID_ARG: input_ids: token -1"),
            ({"text_input": "x", "sampling_parameters": "{"}, "INVALID_ARG: sampling_parameters: not JSON"),
            ({"text_input": "x", "stream": True, "exclude_input_in_output": False}, "INVALID_ARG: exclude_input"),
            (b'{"text_input": "\xff\xfe"}', "INVALID_ARG: text_input: not valid UTF-8"),
            (b'{"text_input": "x", "stop": "\xff\xfe"}', "INVALID_ARG: request parameters: not valid UTF-8"),
            ({"text_input": "x", "seed": 2**63}, "INVALID_ARG: sampling parameter 'seed'"),
            ({"text_input": "x" * (17 * 2**20)}, "INVALID_ARG: text_input: 17825792 bytes"),
        ],
        ids=lambda value: None if isinstance(value, str) else "body",
    )
    def test_a_wrong_request_is_named_and_the_next_one_works(self, running, body, said):
        answer = running.request("http", f"/v2/models/{BASE}/generate", body)
        assert answer.status == 400, answer
        assert answer.body["error"].startswith(said), answer.body
        assert len(answer.body["error"]) < 1000
        assert running.generate(BASE, "x", max_tokens=1).status == 200

    @pytest.mark.parametrize(
        "body",
        [{"text_input": ["a", "b"]}, {"text_input": None}, {"text_input": "x", "stream": 1}, b"{", {"input_ids": "x"}],
    )
    def test_what_the_server_itself_refuses(self, running, body):
        assert running.request("http", f"/v2/models/{BASE}/generate", body).status in (400, 500)
        assert running.generate(BASE, "x", max_tokens=1).status == 200

    def test_no_error_overtakes_its_request_in_the_server(self, running):
        """Under load the server aborts when one does; see REFUSE_AFTER_S, whose value the stub's process has."""
        before = time.monotonic()
        assert running.generate(BASE, "x", temperature=-1).status == 400
        assert time.monotonic() - before >= 0.02

    @pytest.mark.parametrize("protocol", ["http", "grpc"])
    def test_an_error_lets_the_server_write_the_response_before_it(self, running, protocol):
        """Else the server may abort, too; see FAIL_AFTER_S."""
        call = running.http_stream if protocol == "http" else running.grpc_stream
        before = time.monotonic()
        (stream,) = run_concurrently(call(BASE, "flood fail=INTERNAL", max_tokens=5))
        assert (stream.text, "as asked" in (stream.error or "")) == (scripted_text(4), True)
        assert stream.ended - before >= 0.1


class TestCancellation:
    """A client that goes away takes its request along."""

    @pytest.fixture
    def cancelled(self, running):
        """Waits until the text process is told to stop `count` requests that were open; the seconds it took."""
        before = sum(len(note["was_open"]) for note in running.journal_entries("cancel"))

        def wait(count=1, timeout=10):
            return wait_until(
                lambda: sum(len(n["was_open"]) for n in running.journal_entries("cancel")) == before + count,
                timeout,
                "cancelled",
            )

        return wait

    def test_http_disconnect(self, running, cancelled):
        async def leave() -> None:
            url = f"http://127.0.0.1:{running.ports['http']}/v2/models/{BASE}/generate_stream"
            body = {"text_input": "step=0.01", "stream": True, "max_tokens": 100_000}
            async with aiohttp.ClientSession() as session, session.post(url, json=body) as response:
                await response.content.readline()

        run_concurrently(*(leave() for _ in range(4)))
        assert cancelled(4) < 1

    def test_http_disconnect_while_silent_is_found_out_at_the_first_token(self, running, cancelled):
        """Release 24.10 looks at a paused connection only when it writes to it."""
        body = json.dumps({"text_input": "step=0.01 wait=60", "stream": True, "max_tokens": 100_000}).encode()
        before = len(running.journal_entries("submit"))
        with socket.create_connection(("127.0.0.1", running.ports["http"])) as connection:
            connection.sendall(
                f"POST /v2/models/{BASE}/generate_stream HTTP/1.1\r\nHost: x\r\n"
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
                answers = client.stream_infer(requests())
                if prompt == "silent" or not stream:
                    reading = asyncio.ensure_future(anext(answers))
                    while len(running.journal_entries("submit")) == before:
                        await asyncio.sleep(0.01)
                    answers.cancel()
                    with pytest.raises(
                        (asyncio.CancelledError, StopAsyncIteration, grpcclient.InferenceServerException)
                    ):
                        await reading
                else:
                    await anext(answers)
                    answers.cancel()

        asyncio.run(scenario())
        assert cancelled() < 1

    def test_kill_of_the_client(self, running, cancelled):
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
        assert cancelled(2) < 1

    def test_many_silent_requests_cancelled_at_once(self, running, cancelled):
        with GrpcStream(running) as stream:
            for _ in range(64):
                stream.send(BASE, [grpc_text("silent"), grpc_flag("stream", True)])
            wait_until(lambda: running.num_open_requests() == 64, 10, "open")
            stream.client.stop_stream(cancel_requests=True)
        assert cancelled(64) < 1.5


def test_64_streams_at_once(running):
    calls = [
        (running.http_stream if i % 2 else running.grpc_stream)(
            (BASE, "sql")[i // 2 % 2], f"step=0.005 {i}", max_tokens=100 + i
        )
        for i in range(64)
    ]
    streams = run_concurrently(*calls, timeout=60)
    assert [s.error for s in streams] == [None] * 64
    assert [s.text for s in streams] == [scripted_text(100 + i) for i in range(64)]


def test_streams_go_on_while_models_load(running):
    """Adapters come and go in the middle of everybody's answers."""
    streams, loads = [StreamedResponse() for _ in range(8)], []

    async def scenario() -> None:
        tasks = [
            asyncio.create_task(
                (running.http_stream if i % 2 else running.grpc_stream)(BASE, "step=0.005", stream, max_tokens=100_000)
            )
            for i, stream in enumerate(streams)
        ]
        while not all(stream.pieces for stream in streams):
            await asyncio.sleep(0.01)
        async with running.client() as client:
            for name in ("first", "second", "third"):
                before = [len(stream.text.split()) for stream in streams]
                await client.load_model(
                    name, repository.model_config(name, BASE, running.socket), repository.model_files()
                )
                loads.append([len(stream.text.split()) - n for stream, n in zip(streams, before, strict=True)])
        assert not any(task.done() for task in tasks), [stream.error for stream in streams]
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)

    asyncio.run(scenario())
    # A stub that lingers would connect in tests to come.
    for name in ("first", "second", "third"):
        running.remove_model(name)
    assert all(scripted_text(100_000).startswith(stream.text) for stream in streams), "nothing lost, nothing twice"
    # A load takes 200 ms and more, and a token comes every 5.
    assert all(num > 5 for of_a_load in loads for num in of_a_load), loads


def test_a_killed_text_process_ends_every_stream_and_it_works_after_its_restart(running):
    streams = [StreamedResponse() for _ in range(32)]

    async def scenario() -> float:
        tasks = [
            asyncio.create_task(
                (running.http_stream if i % 2 else running.grpc_stream)(
                    (BASE, "sql")[i // 2 % 2], "step=0.01", into=stream, max_tokens=100_000
                )
            )
            for i, stream in enumerate(streams)
        ]
        while not all(stream.pieces for stream in streams):
            await asyncio.sleep(0.01)
        killed = time.monotonic()
        running.kill_text()
        await asyncio.wait(tasks, timeout=20)
        return killed

    killed = asyncio.run(scenario())
    running.journal.write_text("")
    assert all("UNAVAILABLE" in (stream.error or "") for stream in streams), [s.error for s in streams]
    assert max(stream.ended_at for stream in streams) - killed < 2
    answer = running.generate(BASE, "x")
    assert (answer.status, "UNAVAILABLE: text process is restarting" in answer.body["error"]) == (400, True)
    running.start_text()
    wait_until(
        lambda: {note["model"] for note in running.journal_entries("hello")} >= {BASE, "sql"}, 20, "connected by itself"
    )
    assert running.text(BASE, "x", max_tokens=2) == running.text("sql", "x", max_tokens=2) == "t0 t1 "


def test_unload_lets_open_requests_finish_and_ends_the_stub(running):
    running.add_model("late")
    stub = running.stub("late")
    into = StreamedResponse()

    async def scenario() -> None:
        task = asyncio.create_task(running.http_stream("late", "step=0.01", into=into, max_tokens=100))
        while not into.pieces:
            await asyncio.sleep(0.01)
        async with running.client() as client:
            await client.unload_model("late")
        assert running.generate("late", "x").status in (400, 404)
        await task

    asyncio.run(scenario())
    assert (into.text, into.error) == (scripted_text(100), None)
    wait_until(lambda: not stub.is_running(), 20, "rid of the stub")


def test_a_stub_imports_little_and_stays_small(running):
    """About 20 MB a stub, most of it numpy and the server's own; ours is what it has more than an empty model."""
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
            config = repository.model_config(name, BASE, running.socket)
            await client.load_model(name, config, {repository.MODEL_FILE: program.encode()})

    def memory(name):
        return running.stub(name).memory_full_info()

    asyncio.run(load("bare", bare))
    asyncio.run(load("ours", ours))
    assert running.text("ours", "x", max_tokens=2) == "t0 t1 "
    modules = set(listing.read_text().split())
    heavy = {"asyncio", "aiohttp", "ssl", "torch", "tokenizers", "huggingface_hub", "quire_spec.engine.config"}
    assert "quire_server.frontend.stub_model" in modules
    assert not heavy & modules
    assert memory("ours").uss - memory("bare").uss < 5 * 2**20
    assert memory("ours").pss < 30 * 2**20
