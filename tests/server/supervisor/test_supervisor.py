# SPDX-License-Identifier: Apache-2.0
"""The supervisor with a real server and fake text and core: startup, adapters, process deaths, shutdown."""

import asyncio
import os
import signal
import socket
import threading
import time
import urllib.request

import pytest
import tritonclient.grpc.aio as grpcaio
from support.quire_serve import grpc_flag, grpc_text, is_alive
from support.supervisor_harness import adapter_folder, catalog, running_supervisor, started_supervisor

pytestmark = [pytest.mark.server, pytest.mark.timeout(120)]

LONG = {"max_tokens": 5000}
KILL_S = 2.0
"""Deadline for every open stream to end after a death."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    folder = tmp_path_factory.mktemp("adapters")
    return {
        "a": adapter_folder(folder / "a", weights=b"a" * 1000),
        "b": adapter_folder(folder / "b", weights=b"b" * 1000),
        "wrong": adapter_folder(folder / "wrong", rank=0),
    }


@pytest.fixture(scope="module")
def pod(tmp_path_factory, folders):
    """A shared pod for tests that restore its state, including tests that kill processes."""
    folder = tmp_path_factory.mktemp("pod")
    hidden = {"source": {"path": str(folders["b"])}, "expose": "Parameter", "pinned": True}
    absent = {"source": {"path": str(folder / "absent")}}
    document = catalog(7, a=folders["a"], b=folders["b"], hidden=hidden, wrong=folders["wrong"], absent=absent)
    with running_supervisor(folder, document) as pod:
        pod.initial_catalog = document
        yield pod


def words(pod, model, **parameters):
    return set(pod.text(model, "x", max_tokens=3, **parameters).split())


def digest(pod, name):
    return pod.adapter(name)["digest"]


def test_ready_banner_and_log(pod):
    pod.wait(lambda: "Quire" in pod.stdout.read_text(), 5, "announced")
    out = pod.stdout.read_text()
    assert f"HTTP      http://127.0.0.1:{pod.ports['http']}/v2/models/tales/generate\n" in out
    assert "models    tales, a, b\n" in out
    assert "OpenAI" not in out
    assert "adapters  hidden (lora_name on tales)\n" in out
    assert "failed    wrong: rank must be positive, got 0\n" in out
    assert "failed    absent: " in out and "does not exist" in out
    log = pod.log.read_text()
    assert "core  | core is up" in log
    assert "I1" not in [line[8:10] for line in log.splitlines() if line.startswith("server|")]


def test_status_contains_each_adapter(pod, folders):
    status = pod.status()
    assert (status["ready"], status["generation"], status["models"]) == (True, 7, ["tales", "a", "b"])
    states = {a["name"]: (a["state"], a["model"]) for a in status["adapters"]}
    assert states == {
        "a": ("Ready", "a"),
        "b": ("Ready", "b"),
        "hidden": ("Ready", None),
        "wrong": ("Failed", "wrong"),
        "absent": ("Failed", "absent"),
    }
    assert status["memory"]["dtype"] == "float32"
    assert digest(pod, "b") == digest(pod, "hidden") != digest(pod, "a")
    assert pod.core_adapter_digests() == {digest(pod, "a"): "host", digest(pod, "b"): "slot"}


def test_every_model_name_serves(pod):
    assert words(pod, "tales") == {"base"}
    assert words(pod, "a") == {digest(pod, "a")[-8:]}
    assert words(pod, "tales", lora_name="hidden") == {digest(pod, "hidden")[-8:]}
    assert pod.generate("wrong", "x").status in (400, 404)


def test_metrics_contain_text_server_and_supervisor(pod):
    page = pod.metrics()
    assert 'fake_aliases{format=""} 3\n' in page
    assert "nv_inference_request_success" in page
    assert 'quire_adapters{state="Failed"} 2\n' in page
    assert "quire_ready 1\n" in page
    with urllib.request.urlopen(f"http://127.0.0.1:{pod.ports['health']}/metrics/vllm_backend", timeout=20) as response:
        page = response.read().decode()
    assert 'fake_aliases{format="vllm_backend"} 3\n' in page and "nv_inference_request_success" in page
    assert "quire_ready" not in page


def serves(pod):
    return all(pod.generate(m, "x", max_tokens=2).status == 200 for m in ("tales", "a", "b"))


def num_restarts(pod, name):
    return pod.status()["processes"][name]["restarts"]


def test_reload_of_idle_stub_does_not_affect_other_models(pod):
    before = {name: pod.pid(name) for name in ("core", "text", "server")}
    stub = pod.stub("b")

    async def scenario():
        _, tasks = await pod.open_streams(["tales", "a"], **LONG)
        stub.kill()
        started_at = time.monotonic()
        while (await asyncio.to_thread(pod.generate, "b", "x", max_tokens=2)).status != 200:
            assert time.monotonic() - started_at < 40
            await asyncio.sleep(0.02)
        assert not any(task.done() for task in tasks)
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        return time.monotonic() - started_at

    print(f"\nidle stub: its model is back after {asyncio.run(scenario()):.2f} s")
    assert {name: pod.pid(name) for name in before} == before
    assert pod.stub("b") != stub


def test_reloads_idle_stub_of_the_base_model(pod):
    pod.wait(lambda: pod.num_open_requests() == 0, 5, "idle")
    server = pod.pid("server")
    with pod.sampled_unreadiness() as reasons:
        pod.stub("tales").kill()
        pod.wait(lambda: reasons, 5, "noticed")
        pod.wait(lambda: serves(pod), 10, "serving again")
    pod.wait(lambda: pod.health()[0] == 200, 10, "ready")
    assert pod.pid("server") == server


def test_stub_death_before_the_last_response_ends_the_clients_streams(pod):
    """The text process has no open request left, but the clients have not received the end."""
    stub, server = pod.stub("a"), pod.pid("server")

    async def scenario():
        streams, tasks = await pod.open_streams(["a", "a"], max_tokens=40)
        stub.suspend()
        while await asyncio.to_thread(pod.num_open_requests):
            await asyncio.sleep(0.02)
        assert not any(task.done() for task in tasks)
        stub.kill()
        killed = time.monotonic()
        await asyncio.wait(tasks, timeout=20)
        return streams, killed

    streams, killed = asyncio.run(scenario())
    assert all(s.error for s in streams), [s.error for s in streams]
    assert max(s.ended_at for s in streams) - killed < KILL_S
    pod.wait(lambda: serves(pod), 30, "serving again")
    assert pod.pid("server") != server


def test_replacing_and_removing_adapters_fails_no_request(pod, folders, tmp_path):
    changed = adapter_folder(tmp_path / "changed", weights=b"c" * 1000)
    old, server = digest(pod, "a"), pod.pid("server")
    responses, stop = [], threading.Event()

    def send_requests():
        while not stop.is_set():
            responses.append(pod.generate("a", "x", max_tokens=2, exclude_input_in_output=True))

    client = threading.Thread(target=send_requests)
    client.start()
    try:
        pod.wait(lambda: responses, 30, "served by the old one")
        assert pod.put_adapters(catalog(8, a=changed, b=folders["b"])).status == 202
        duration_s = pod.wait(lambda: digest(pod, "a") != old and pod.adapter("a")["state"] == "Ready", 10, "replaced")
        new = digest(pod, "a")
        pod.wait(lambda: responses[-1].body["text_output"].startswith(new[-8:]), 5, "served by the new one")
    finally:
        stop.set()
        client.join()
    assert {r.status for r in responses} == {200}, responses
    outputs = [r.body["text_output"].split()[0] for r in responses]
    assert outputs == sorted(outputs, key=lambda word: word == new[-8:]), "old content served after the new one"
    print(f"\nreplaced after {duration_s:.2f} s, {len(responses)} requests meanwhile")
    pod.wait(lambda: old not in pod.core_adapter_digests(), 5, "old content unloaded")
    assert not pod.adapter("hidden") and not pod.adapter("wrong")
    assert pod.put_adapters(catalog(7, a=changed)).status == 409
    assert pod.status()["generation"] == 8

    assert pod.put_adapters(catalog(9, a=changed)).status == 202
    pod.wait(lambda: not pod.adapter("b") and pod.status()["models"] == ["tales", "a"], 10, "removed")
    pod.wait(lambda: pod.generate("b", "x").status in (400, 404), 5, "refused")
    pod.wait(lambda: list(pod.core_adapter_digests()) == [new], 5, "unloaded")
    assert pod.put_adapters(pod.initial_catalog | {"generation": 10}).status == 202
    pod.wait(lambda: serves(pod), 10, "as before")
    assert pod.pid("server") == server


def test_request_in_flight_continues_after_adapter_removal(pod, folders):
    generation = pod.status()["generation"]

    async def scenario():
        (stream,), (task,) = await pod.open_streams(["b"], **LONG)
        await asyncio.to_thread(pod.put_adapters, catalog(generation + 1, a=folders["a"]))
        pod.wait(lambda: pod.status()["models"] == ["tales", "a"], 10, "removed")
        count = len(stream.pieces)
        await asyncio.sleep(0.5)
        assert len(stream.pieces) > count and not task.done()
        task.cancel()
        await asyncio.wait([task])

    asyncio.run(scenario())
    pod.put_adapters(pod.initial_catalog | {"generation": generation + 2})
    pod.wait(lambda: serves(pod), 10, "as before")


def test_exposing_and_hiding_an_adapter(pod, folders):
    generation = pod.status()["generation"]
    exposed = {"source": {"path": str(folders["b"])}, "expose": "Model"}
    pod.put_adapters(catalog(generation + 1, a=folders["a"], hidden=exposed))
    pod.wait(lambda: "hidden" in pod.status()["models"], 10, "a model")
    assert words(pod, "hidden") == {digest(pod, "hidden")[-8:]}
    pod.put_adapters(pod.initial_catalog | {"generation": generation + 2})
    pod.wait(lambda: "hidden" not in pod.status()["models"] and serves(pod), 10, "only a parameter")


def test_failed_replacement_keeps_the_previous_version_serving(pod, folders):
    generation, before = pod.status()["generation"], digest(pod, "a")
    pod.put_adapters(catalog(generation + 1, a=folders["wrong"], b=folders["b"]))
    pod.wait(lambda: pod.adapter("a")["state"] == "Failed", 10, "rejected")
    assert pod.adapter("a")["error"] == f"rank must be positive, got 0 (still serving {before})"
    assert words(pod, "a") == {before[-8:]}
    restarts = num_restarts(pod, "core")
    os.kill(pod.pid("core"), signal.SIGKILL)
    pod.wait(lambda: num_restarts(pod, "core") > restarts, 20, "noticed")
    pod.wait(lambda: pod.generate("a", "x", max_tokens=2).status == 200, 10, "serving the previous version again")
    pod.put_adapters(pod.initial_catalog | {"generation": generation + 2})
    pod.wait(lambda: pod.adapter("a")["state"] == "Ready" and serves(pod), 10, "as before")


def test_lost_request_does_not_keep_the_stub_of_a_removed_adapter(pod, folders):
    """Release 24.10 loses some requests whose gRPC stream is cancelled on the last response, and waits for them."""

    async def cancel_on_last_response():
        request = {"model_name": "b", "inputs": [grpc_text("x"), grpc_flag("stream", True)]}
        request |= {"parameters": {"max_tokens": 4}, "enable_empty_final_response": False}

        async def requests():
            yield request

        async with grpcaio.InferenceServerClient(f"127.0.0.1:{pod.ports['grpc']}") as client:
            stream, num_responses = client.stream_infer(requests()), 0
            async for _ in stream:
                num_responses += 1
                if num_responses == 4:
                    break
            stream.cancel()

    async def scenario():
        for _ in range(3):
            await asyncio.gather(*(cancel_on_last_response() for _ in range(24)))

    stub, server = pod.stub("b"), pod.pid("server")
    asyncio.run(scenario())
    pod.wait(lambda: pod.num_open_requests() == 0, 5, "free of requests")
    generation = pod.status()["generation"]
    assert pod.put_adapters(catalog(generation + 1, a=folders["a"])).status == 202
    pod.wait(lambda: not is_alive(stub), 10, "without the stub")
    print("\nthe server had lost a request:", "killing stub of an unloaded model" in pod.log.read_text())
    assert pod.put_adapters(pod.initial_catalog | {"generation": generation + 2}).status == 202
    pod.wait(lambda: serves(pod), 10, "serving again")
    assert pod.pid("server") == server


# Shutdown


def test_sigterm_drains_open_requests_and_rejects_new_ones(tmp_path, folders):
    with running_supervisor(tmp_path / "pod", catalog(1, a=folders["a"])) as pod:
        pod.child_processes()

        async def scenario():
            (stream,), (task,) = await pod.open_streams(["a"], max_tokens=60)
            pod.process.send_signal(signal.SIGTERM)
            while (await asyncio.to_thread(pod.health))[0] == 200:
                await asyncio.sleep(0.005)
            assert "draining" in (await asyncio.to_thread(pod.health))[1]["reason"]
            response = await asyncio.to_thread(pod.generate, "a", "x")
            await asyncio.wait_for(task, 20)
            return stream, response

        stream, response = asyncio.run(scenario())
        assert (stream.error, len(stream.text.split())) == (None, 60)
        assert response.status != 200
        assert pod.process.wait(20) == 0


def test_drain_timeout_ends_requests_with_an_error(tmp_path):
    with running_supervisor(tmp_path / "pod", catalog(1), {"limits": {"drainSeconds": 0.5}}) as pod:
        pod.child_processes()

        async def scenario():
            streams, tasks = await pod.open_streams(["tales"] * 2, **LONG)
            pod.process.send_signal(signal.SIGTERM)
            await asyncio.wait(tasks, timeout=20)
            return streams

        streams = asyncio.run(scenario())
        assert all("the text process ended" in s.error for s in streams), [s.error for s in streams]
        assert pod.process.wait(20) == 0


def test_second_signal_stops_at_once(tmp_path):
    with started_supervisor(tmp_path / "pod", catalog(1)) as pod:
        pod.wait_ready(30)
        prefix = pod.shm_prefix()
        assert pod.shared_memory_regions()

        async def scenario():
            _, tasks = await pod.open_streams(["tales"] * 2, **LONG)
            pod.process.send_signal(signal.SIGTERM)
            # A signal that arrives before the first is handled is merged with it.
            while (await asyncio.to_thread(pod.health))[0] == 200:
                await asyncio.sleep(0.005)
            assert not any(task.done() for task in tasks)
            pod.process.send_signal(signal.SIGTERM)
            await asyncio.wait(tasks, timeout=20)

        started_at = time.monotonic()
        asyncio.run(scenario())
        assert pod.process.wait(20) == 128 + signal.SIGTERM
        assert time.monotonic() - started_at < 20, "the streams last for more than a minute"
        pod.assert_nothing_left()
        assert not [name for name in os.listdir("/dev/shm") if name.startswith(prefix)]
        assert list(pod.run_dir.iterdir()) == []


def test_killed_supervisor_leaves_no_process_and_the_next_one_cleans_up(tmp_path, folders):
    with started_supervisor(tmp_path / "pod", catalog(1, a=folders["a"])) as pod:
        pod.wait_ready(30)
        regions = pod.shared_memory_regions()
        pod.kill()
        pod.assert_nothing_left()
        assert regions and regions <= set(os.listdir("/dev/shm"))
        with running_supervisor(tmp_path / "next", catalog(1), run_dir=pod.run_dir) as next_pod:
            next_pod.run_dir = tmp_path / "next/run"
            assert not regions & set(os.listdir("/dev/shm"))
        assert list(pod.run_dir.iterdir()) == []


def test_cleans_up_shared_memory_of_killed_servers(tmp_path, folders):
    with running_supervisor(tmp_path / "pod", catalog(1, a=folders["a"])) as pod:
        first = pod.shared_memory_regions()
        os.kill(pod.pid("server"), signal.SIGKILL)
        pod.wait(lambda: num_restarts(pod, "server") > 0, 20, "noticed")
        pod.wait_ready(20)
        assert first and not first & pod.shared_memory_regions()
        pod.wait(lambda: "a" in pod.status()["models"], 20, "serving the adapter again")
        prefix = pod.shm_prefix()
    assert not [name for name in os.listdir("/dev/shm") if name.startswith(prefix)]


@pytest.mark.parametrize(("host", "displayed"), [("::1", "::1"), ("0.0.0.0", "::")])
def test_ipv6(host, displayed, tmp_path, folders, monkeypatch):
    """An explicit IPv6 address, and 0.0.0.0 in a pod with an IPv6 address."""
    monkeypatch.setenv("POD_IP", "fd00::7")
    with started_supervisor(tmp_path / "pod", catalog(1, a=folders["a"]), {"host": host}) as pod:
        pod.wait(lambda: "is ready" in pod.stdout.read_text(), 30, "ready")
        pod.child_processes()
        assert f"gRPC      [{displayed}]:{pod.ports['grpc']}\n" in pod.stdout.read_text()
        with urllib.request.urlopen(f"http://[::1]:{pod.ports['health']}/metrics", timeout=5) as response:
            assert b"nv_inference" in response.read()
        for port in ("http", "grpc"):
            socket.create_connection(("::1", pod.ports[port]), 5).close()
        assert pod.stop() == 0


def test_a_hidden_protocol_listens_on_loopback_only(tmp_path, folders):
    """`host` is another address of this machine than the one that the supervisor uses for a hidden protocol."""
    config = {"host": "127.0.0.2", "server": {"expose": ["grpc"]}}
    with started_supervisor(tmp_path / "pod", catalog(1, a=folders["a"]), config) as pod:
        pod.wait(lambda: "is ready" in pod.stdout.read_text(), 30, "ready")
        pod.child_processes()
        banner = pod.stdout.read_text()
        assert f"gRPC      127.0.0.2:{pod.ports['grpc']}" in banner and "HTTP   " not in banner
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.2", pod.ports["http"]), 5)
        for host, port in (("127.0.0.1", "http"), ("127.0.0.2", "grpc"), ("127.0.0.2", "health")):
            socket.create_connection((host, pod.ports[port]), 5).close()
        assert pod.stop() == 0
