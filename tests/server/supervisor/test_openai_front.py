# SPDX-License-Identifier: Apache-2.0
"""The OpenAI front under a real supervisor and server, with fake text and core: start, death, drain."""

import asyncio
import os
import re
import signal
import ssl
import time
import urllib.request

import openai
import psutil
import pytest
from nodocker_cluster.pki import CertificateAuthority
from nodocker_cluster.ports import free_ports
from support.quire_serve import StreamedResponse
from support.supervisor_harness import adapter_folder, catalog, started_supervisor

pytestmark = [pytest.mark.server, pytest.mark.timeout(120)]

LONG = {"model": "tales", "prompt": "x", "max_tokens": 5000, "stream": True}


@pytest.fixture
def pod(tmp_path):
    document = catalog(1, a=adapter_folder(tmp_path / "a"))
    (port,) = free_ports(1)
    config = {"openai": {"port": port}, "limits": {"drainSeconds": 20}}
    with started_supervisor(tmp_path / "pod", document, config) as pod:
        pod.ports["openai"] = port
        pod.wait_ready(30)
        yield pod


def async_client(pod):
    return openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{pod.ports['openai']}/v1", api_key="none", max_retries=0)


async def first_chunk(stream):
    return await anext(aiter(stream))


def test_a_killed_front_restarts_and_leaves_the_server_alone(pod):
    pod.wait(lambda: "Quire" in pod.stdout.read_text(), 5, "announced")
    assert f"OpenAI    http://127.0.0.1:{pod.ports['openai']}/v1\n" in pod.stdout.read_text()
    assert [model["id"] for model in pod.request("openai", "/v1/models").body["data"]] == ["tales", "a"]
    before = {name: pod.pid(name) for name in ("core", "text", "server", "openai")}

    async def scenario():
        served = StreamedResponse()
        task = asyncio.create_task(pod.http_stream("tales", "x", served, max_tokens=5000))
        async with async_client(pod) as client:
            stream = await client.completions.create(**LONG)
            await first_chunk(stream)
            os.kill(before["openai"], signal.SIGKILL)
            with pytest.raises(Exception):  # noqa: B017 - the HTTP library of the client has errors of its own
                async for _ in stream:
                    pass
        started = time.monotonic()
        while pod.request("openai", "/v1/models").status != 200:
            assert time.monotonic() - started < 60
            await asyncio.sleep(0.05)
        num_pieces = len(served.pieces)
        await asyncio.sleep(0.5)
        assert not task.done() and len(served.pieces) > num_pieces
        task.cancel()
        return time.monotonic() - started

    print(f"\nthe front is back after {asyncio.run(scenario()):.2f} s")
    pod.wait_ready(60)
    after = {name: pod.pid(name) for name in before}
    assert {name for name in before if before[name] != after[name]} == {"openai"}
    assert pod.status()["processes"]["openai"]["restarts"] == 1
    pod.wait(lambda: pod.num_open_requests() == 0, 10, "idle")


def test_sigterm_lets_open_streams_end(pod):
    async def scenario():
        async with async_client(pod) as client:
            stream = await client.completions.create(**LONG | {"max_tokens": 150})
            chunks = [await first_chunk(stream)]
            pod.process.send_signal(signal.SIGTERM)
            chunks += [chunk async for chunk in stream]
            return chunks

    chunks = asyncio.run(scenario())
    assert chunks[-1].choices[0].finish_reason == "length" and len(chunks) == 150
    assert pod.process.wait(20) == 0
    pod.assert_nothing_left()


def test_two_fronts_share_a_port_with_tls_and_one_may_die(tmp_path):
    CertificateAuthority(tmp_path).issue("front", "front", hosts=["localhost", "127.0.0.1"])
    [port] = free_ports(1)
    openai = {"port": port, "apiServerCount": 2, "enableLogRequests": True}
    openai |= {"sslCertfile": tmp_path / "front.crt", "sslKeyfile": tmp_path / "front.key"}
    context = ssl.create_default_context(cafile=tmp_path / "ca.crt")
    traceparent = "00-" + "a" * 32 + "-" + "b" * 16 + "-01"

    def get(path, **headers):
        """Send a request on a connection of its own."""
        request = urllib.request.Request(f"https://127.0.0.1:{port}{path}", headers=headers)
        with urllib.request.urlopen(request, timeout=20, context=context) as response:
            return response.headers["x-request-id"], response.read().decode()

    def fronts_that_answered(pod):
        return set(re.findall(r"^(openai\S*) *\|.*request_id=same", pod.log.read_text(), re.MULTILINE))

    with started_supervisor(tmp_path / "pod", catalog(1), {"openai": openai}) as pod:
        pod.wait_ready(30)
        pod.wait(lambda: f"https://127.0.0.1:{port}/v1" in pod.stdout.read_text(), 10, "announced")

        def both_answered():
            assert get("/version", **{"X-Request-Id": "same", "traceparent": traceparent})[0] == "same"
            return fronts_that_answered(pod) == {"openai", "openai-1"}

        pod.wait(both_answered, 20, "answered by both")
        assert "path='/version' status=200" in pod.log.read_text()
        assert f"request_id=same traceparent={traceparent}" in pod.log.read_text()
        get("/version", **{"X-Request-Id": "same", "traceparent": "forged=1"})
        assert "forged" not in pod.log.read_text()
        assert {get("/metrics")[1] for _ in range(8)} == {get("/metrics")[1]}, "one scrape gives all"
        victim = psutil.Process(pod.pid("openai-1"))
        victim.kill()
        pod.wait(lambda: not victim.is_running(), 10, "gone")
        pod.wait(lambda: get("/v1/models") and pod.status()["processes"]["openai-1"]["restarts"] == 1, 20, "restarted")
        pod.wait(lambda: pod.health()[0] == 200, 20, "ready")
        assert pod.status()["processes"]["openai"]["restarts"] == 0
        pod.process.send_signal(signal.SIGTERM)
        assert pod.process.wait(30) == 0
        pod.assert_nothing_left()
        assert not pod.run_dir.exists()
