# SPDX-License-Identifier: Apache-2.0
"""`quire bench` on a real server: its figures, and that it reports none if outputs are wrong or requests fail."""

import asyncio
import contextlib
import json
import subprocess
import sys
import threading
import xml.etree.ElementTree as ET
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web

pytestmark = pytest.mark.server

QUIRE = Path(sys.executable).with_name("quire")
SHORT = ("--input-len=24", "--output-len=12")


def bench(url, *flags):
    command = [QUIRE, "bench", f"--url={url}", *SHORT, *flags]
    return subprocess.run(command, capture_output=True, text=True, timeout=150, check=False)


@pytest.fixture
def url(service):
    return f"http://127.0.0.1:{service.ports['openai']}"


class Proxy:
    """A proxy before the real server. `change(body, num_open)` changes a request, or returns the status of an error."""

    def __init__(self, url, change):
        self._url, self._change, self._num_open = url, change, 0

    async def handle(self, request):
        body = await request.json() if request.can_read_body else None
        status = self._change(body, self._num_open) if body else None
        if status:
            return web.json_response({"error": {"message": "too much"}}, status=status)
        self._num_open += 1
        try:
            async with (
                aiohttp.ClientSession() as session,
                session.request(request.method, self._url + request.path, json=body) as answer,
            ):
                response = web.StreamResponse(status=answer.status, headers={"Content-Type": answer.content_type})
                await response.prepare(request)
                async for chunk in answer.content.iter_any():
                    await response.write(chunk)
                return response
        finally:
            self._num_open -= 1


@contextlib.contextmanager
def running_proxy(url, change):
    loop, started, ports = asyncio.new_event_loop(), threading.Event(), []

    async def start():
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", Proxy(url, change).handle)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        ports.append(site._server.sockets[0].getsockname()[1])
        started.set()
        return runner

    def serve():
        asyncio.set_event_loop(loop)
        runner = loop.run_until_complete(start())
        loop.run_forever()
        loop.run_until_complete(runner.cleanup())
        loop.close()

    thread = threading.Thread(target=serve)
    thread.start()
    started.wait(20)
    try:
        yield f"http://127.0.0.1:{ports[0]}"
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(20)


def test_a_sweep_over_adapters(url, tmp_path):
    files = f"-o={tmp_path / 'bench.json'}", f"--svg={tmp_path / 'bench.svg'}"
    flags = ("--concurrency=1,6", "--num-prompts=24", "--adapters=uniform", "--goodput", "ttft:60000", "tpot:0.0001")
    done = bench(url, *flags, *files)
    assert done.returncode == 0, done.stderr
    assert "concurrency 6" in done.stdout and "TTFT, ms" in done.stdout and "p99" in done.stdout
    document = json.loads((tmp_path / "bench.json").read_text())
    assert document["models"] == {"pirate": 1, "sql": 1, "tools": 1}
    assert document["outputs"]["num_compared"] == 12 and document["outputs"]["num_different"] == 0
    for load, concurrency in zip(document["loads"], (1, 6), strict=True):
        assert (load["concurrency"], load["requests"], load["failed_requests"]) == (concurrency, 24, 0)
        assert load["output_tokens"] == 24 * 12 and abs(load["input_tokens"] / 24 - 24) < 6
        assert load["output_tokens_per_s"] == pytest.approx(load["output_tokens"] / load["seconds"])
        assert 0 < load["ttft_ms"]["p50"] <= load["ttft_ms"]["p99"] <= load["e2el_ms"]["p99"]
        assert load["goodput"]["share"] == 0.0, "no request has a TPOT of 0.1 us"
        assert sum(model["requests"] for model in load["models"].values()) == 24 - 6
    assert ET.fromstring((tmp_path / "bench.svg").read_text()).tag.endswith("svg")


def test_a_sweep_over_rates_with_real_prompts_in_chats(url, tmp_path):
    lines = [{"messages": [{"role": "user", "content": "Hello"}], "output_tokens": 5}, {"prompt": "Hi", "model": "sql"}]
    (tmp_path / "prompts.jsonl").write_text("\n".join(map(json.dumps, lines)))
    flags = (f"--dataset={tmp_path / 'prompts.jsonl'}", "--endpoint=chat", "--request-rate=5,20", "--seconds=2")
    done = bench(url, *flags, f"-o={tmp_path / 'bench.json'}")
    assert done.returncode == 0, done.stderr
    slow, fast = json.loads((tmp_path / "bench.json").read_text())["loads"]
    assert (slow["request_rate"], fast["request_rate"]) == (5, 20) and slow["requests"] < fast["requests"]
    assert {*slow["models"]} <= {"tales", "sql"} and slow["seconds"] > 1


def test_outputs_of_another_model_under_load_are_not_reported(url, tmp_path):
    def mix_up(body, num_open):
        if num_open > 1:  # as a server that confuses the adapters of a batch
            body["model"] = {"pirate": "sql", "sql": "pirate"}[body["model"]]

    with running_proxy(url, mix_up) as proxy:
        flags = ("--concurrency=8", "--num-prompts=40", "--adapters=pirate=1,sql=1", f"-o={tmp_path / 'bench.json'}")
        done = bench(proxy, *flags)
        assert done.returncode == 1 and done.stdout == "" and not (tmp_path / "bench.json").exists()
        assert "outputs under load differ" in done.stderr and "alone and" in done.stderr, done.stderr
        done = bench(proxy, *flags, "--report-anyway")
        assert done.returncode == 1 and "are different: the figures are those" in done.stdout
        assert json.loads((tmp_path / "bench.json").read_text())["outputs"]["num_different"] > 0


def test_a_load_with_failed_requests_is_named_and_not_reported(url):
    def refuse(body, num_open):
        return 429 if num_open > 3 else None

    with running_proxy(url, refuse) as proxy:
        done = bench(proxy, "--concurrency=1,8,1", "--num-prompts=24")
    assert done.returncode == 1 and "requests failed: status 429: too much" in done.stderr
    assert done.stdout.count("concurrency 1") > 0 and "concurrency 8" not in done.stdout


@pytest.mark.parametrize(
    ("flags", "code", "message"),
    [
        (("--concurrency=0",), 2, "not an integer of at least 1"),
        (("--concurrency=1", "--request-rate=1"), 2, "not allowed with"),
        (("--model=sql", "--adapters=uniform"), 2, "not allowed with"),
        (("--goodput", "itl:3"), 2, "ttft, tpot, e2el"),
        (("--input-len=9-3",), 2, "greater than the second"),
        (("--adapters=sql",), 1, "is not NAME=WEIGHT"),
        (("--model=absent",), 1, "model absent: a request alone failed: status 404"),
        (("--svg=/absent/x.svg",), 1, "the folder does not exist"),
        (("--url=ftp://x",), 1, "is not the URL of a server"),
        (("--url=http://127.0.0.1:9",), 1, "no connection"),
    ],
)
def test_wrong_usage_is_one_message(url, flags, code, message):
    done = bench(url, *flags)
    assert (done.returncode, done.stdout) == (code, "") and message in done.stderr and "Traceback" not in done.stderr
