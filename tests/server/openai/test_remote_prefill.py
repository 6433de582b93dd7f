# SPDX-License-Identifier: Apache-2.0
"""A prompt that another pod computes: which pod gets what, and what every failure of that pod costs."""

import asyncio
import re
import ssl
from pathlib import Path

import msgspec
import pytest
from nodocker_cluster.pki import CertificateAuthority

from quire_server.openai.http import prefillers
from quire_server.openai.http import remote_prefill as module
from quire_server.openai.http.message import HttpRequest
from quire_server.openai.http.prefillers import PrefillError, Prefillers
from quire_server.openai.http.remote_prefill import RemotePrefill
from quire_server.openai.settings import FrontSettings
from quire_spec.documents.pod_config import OpenAIConfig
from quire_spec.engine.config import EngineConfig
from quire_spec.engine.kv_transfer_config import KVTransferConfig, PeerAddress
from quire_spec.engine.sampling_params import SamplingParams
from quire_spec.protocol.allowed_peers import AllowedPeers
from quire_spec.protocol.kv_transfer_params import KVTransferParams
from quire_spec.protocol.messages import GenerateRequest
from quire_spec.protocol.results import UncachedPrompt


def remote_prefill():
    transfer = KVTransferConfig("key", allowed_peers=("10.0.0.0/8:8005",))
    engine = EngineConfig("", kv_transfer=transfer)
    settings = FrontSettings(Path(), "m", "0.0.0.0", OpenAIConfig(8004), engine=engine)
    return RemotePrefill(settings, AllowedPeers(transfer))


ANSWER = {"kv_transfer_params": {"do_remote_prefill": True, "remote_host": "10.0.0.9", "remote_port": 8005}}


USED = KVTransferParams(do_remote_prefill=True, remote_host="10.0.0.9", remote_port=8005)


class PrefillPod:
    """A fake prefill pod, which answers `reply` and records the requests. It hangs if the reply is empty."""

    def __init__(self, reply: bytes) -> None:
        self.reply, self.requests, self.is_closed = reply, [], asyncio.Event()

    async def __aenter__(self) -> "PrefillPod":
        self.server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.address = f"127.0.0.1:{self.server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        self.server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        length = next(line for line in head.lower().splitlines() if line.startswith("content-length"))
        self.requests.append((head, msgspec.json.decode(await reader.readexactly(int(length.split()[1])))))
        writer.write(self.reply)
        if not self.reply:
            await reader.read()
            self.is_closed.set()
        writer.close()


def http(status: int, body: object, *headers: str) -> bytes:
    content = body if isinstance(body, bytes) else msgspec.json.encode(body)
    return (
        "\r\n".join(
            [f"HTTP/1.1 {status} x", f"content-length: {len(content)}", "connection: close", *headers, "", ""]
        ).encode()
        + content
    )


class FakeText:
    """The text process: every prompt has 600 tokens that are not cached."""

    def __init__(self, num_tokens: int = 600) -> None:
        self.num_tokens, self.results = num_tokens, []

    async def call(self, method: str, result_type: type, args: dict) -> UncachedPrompt:
        assert method == "uncached_prompt" and args["num_local_tokens"] == 512
        return UncachedPrompt(self.num_tokens, 0.0)

    def report_prefill(self, result: str) -> None:
        self.results.append(result)


@pytest.fixture
async def end():
    yield (end := remote_prefill())
    await end.close()


def prompt(end, address, document=None, headers=(), **params):
    scope = {"method": "POST", "path": "/v1/completions", "headers": list(headers)}
    request = HttpRequest.from_scope(scope, None, 0, None)
    request.prefiller = address
    return end.prompt(request, "/v1/completions", document or {"prompt": "x"}, SamplingParams(**params))


ENGINE_REQUESTS = [GenerateRequest(1, "m", "x", None, SamplingParams(), False)]


async def test_a_prefill_pod_gets_the_prompt_for_the_same_client(end):
    headers = [(b"authorization", b"Bearer k"), (b"x-session-id", b"s"), (b"x-data-parallel-rank", b"3")]
    headers += [(name, b"10.0.0.7:8004") for name in (b"x-prefiller-host-port", b"x-kv-cache-source-host-port")]
    document = {"model": "a", "prompt": "x", "cache_salt": "c", "n": 4, "stream": True, "max_tokens": 99, "logprobs": 2}
    async with PrefillPod(http(200, ANSWER)) as pod:
        assert await prompt(end, pod.address, document, headers).compute(text := FakeText(), ENGINE_REQUESTS)
    assert text.results == ["used"]
    [(head, body)] = pod.requests
    assert head.startswith("POST /v1/completions HTTP/1.1")
    assert "authorization: Bearer k\r\n" in head and "x-session-id: s\r\n" in head
    assert not re.search("prefiller|cache-source|parallel-rank", head)
    role = {"do_remote_decode": True, "do_remote_prefill": False}
    kept = {"model": "a", "prompt": "x", "cache_salt": "c"}
    assert body == kept | {"stream": False, "max_tokens": 1, "kv_transfer_params": role}


@pytest.mark.parametrize(
    ("reply", "result"),
    [
        (http(401, {"error": {}}), "rejected"),
        (http(503, {"error": {}}), "failed"),
        (http(307, b"", "location: http://127.0.0.1:1/"), "failed"),
        (http(200, b"[1]"), "invalid"),
        (http(200, b"\xff{"), "invalid"),
        (http(200, b" " * 2**21), "invalid"),
        (http(200, {}), "invalid"),
        (http(200, {"kv_transfer_params": {"do_remote_prefill": True, "remote_host": 7}}), "invalid"),
        (http(200, {"kv_transfer_params": {"do_remote_prefill": True, "remote_host": "1.1.1.1", "remote_port": 8005}}),
         "invalid"),
        (http(200, ANSWER)[:-3], "unreachable"),
        (b"QKVP", "unreachable"),
        (b"", "deadline"),
    ],
)  # fmt: skip
async def test_every_failure_of_a_prefill_pod_only_costs_time(end, monkeypatch, reply, result):
    monkeypatch.setattr(module, "_MIN_TIMEOUT_S", 0.3)
    text = FakeText()
    async with PrefillPod(reply) as pod:
        for _ in range(2):
            assert await prompt(end, pod.address).compute(text, ENGINE_REQUESTS) is None
    # A pod that has failed is not asked again at once, unless it gives a valid answer without a valid object.
    is_asked_again = result == "rejected" or (result == "invalid" and b"{" in reply and b"\xff" not in reply)
    assert text.results == [result, result if is_asked_again else "skipped"]


async def test_a_pod_that_failed_is_tried_by_one_request_and_cancelled_with_its_client(end, monkeypatch):
    monkeypatch.setattr(prefillers, "_RETRY_S", 0.0)
    text = FakeText()
    async with PrefillPod(http(503, b"")) as pod:
        assert await prompt(end, pod.address).compute(text, ENGINE_REQUESTS) is None
        pod.reply = b""
        trial = asyncio.create_task(prompt(end, pod.address).compute(text, ENGINE_REQUESTS))
        while len(pod.requests) < 2:
            await asyncio.sleep(0.01)
        assert await prompt(end, pod.address).compute(text, ENGINE_REQUESTS) is None
        trial.cancel()
        await asyncio.wait_for(pod.is_closed.wait(), 5)
        pod.reply = http(200, ANSWER)
        for _ in range(2):
            assert await prompt(end, pod.address).compute(text, ENGINE_REQUESTS) == USED
    assert text.results == ["failed", "skipped", "used", "used"]


async def test_a_pod_that_answers_others_has_a_queue_and_does_not_hang(end, monkeypatch):
    monkeypatch.setattr(module, "_MIN_TIMEOUT_S", 0.3)
    text, reply = FakeText(), http(200, ANSWER)
    async with PrefillPod(b"") as pod:
        waiting = asyncio.create_task(prompt(end, pod.address).compute(text, ENGINE_REQUESTS))
        while not pod.requests:
            await asyncio.sleep(0.01)
        pod.reply = reply
        started = asyncio.get_running_loop().time()
        for _ in range(4):
            await asyncio.sleep(0.2)
            assert await prompt(end, pod.address).compute(text, ENGINE_REQUESTS) == USED
        assert await waiting is None and asyncio.get_running_loop().time() - started > 1.0
    assert text.results == ["used"] * 4 + ["deadline"]


async def test_only_long_prompts_are_sent_and_only_by_one_driver(end):
    async with PrefillPod(http(200, ANSWER)) as pod:
        assert await prompt(end, pod.address).compute(text := FakeText(512), ENGINE_REQUESTS) is None
        assert text.results == ["local"] and not pod.requests
    assert prompt(end, "") is None
    assert prompt(end, pod.address, {"kv_transfer_params": {"do_remote_decode": True}}) is None
    assert prompt(end, pod.address, prompt_logprobs=1) is None


async def test_a_prefill_pod_with_the_certificate_of_this_front_is_reached_over_tls(tmp_path):
    authority = CertificateAuthority(tmp_path)
    pods = Prefillers(tmp_path / "front.crt")
    for name, result in (("front", None), ("other", "unreachable")):
        authority.issue(name, name, hosts=["service"])
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(tmp_path / f"{name}.crt", tmp_path / f"{name}.key")
        pod = PrefillPod(http(200, ANSWER))
        server = await asyncio.start_server(pod._serve, "127.0.0.1", 0, ssl=context)
        address = PeerAddress("127.0.0.1", server.sockets[0].getsockname()[1])
        try:
            assert await pods.post(address, "/v1/completions", {}, b"{}", 5.0) == ANSWER and result is None
        except PrefillError as error:
            assert error.result == result and not pod.requests
        server.close()
    await pods.close()
