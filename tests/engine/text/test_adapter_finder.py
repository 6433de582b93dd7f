# SPDX-License-Identifier: Apache-2.0
"""Requests that name an adapter of an adapter source, with a supervisor on a real socket."""

import asyncio
import re
import tempfile
from pathlib import Path

import pytest
from support.recording_cores import RecordingCores
from support.tokenizer import byte_level, save_tokenizer

from quire_engine.requests.limits import RequestLimits
from quire_engine.requests.processor import RequestProcessor, run_inline
from quire_engine.text import adapter_finder
from quire_engine.text.adapter_finder import AdapterFinder
from quire_engine.text.admission.admission_controller import AdmissionController
from quire_engine.text.admission.api_key_access import ApiKeyAccess
from quire_engine.text.metrics import RequestMetrics
from quire_engine.text.request_manager import RequestManager
from quire_engine.tokenization.tokenizer import Tokenizer
from quire_spec.documents.api_key_rule import ApiKeyRule
from quire_spec.engine.config import EngineConfig
from quire_spec.engine.sampling_params import SamplingParams
from quire_spec.errors import Code, InvalidArgument, NotFound, Unavailable
from quire_spec.protocol.messages import GenerateRequest
from quire_spec.protocol.server import Server

LIMITS = RequestLimits(max_model_len=32, vocab_size=384, max_prompt_bytes=2000)
with tempfile.TemporaryDirectory() as _folder:
    TOKENIZER = Tokenizer(save_tokenizer(byte_level(), Path(_folder)))


class RecordingFrontend:
    """A frontend that records the output deltas that it receives, by request."""

    def __init__(self):
        self.deltas = {}

    def send(self, delta):
        self.deltas.setdefault(delta.id, []).append(delta)


class Pod:
    """A request manager and its supervisor."""

    def __init__(self, folder):
        self.now, self.calls, self.sent = 100.0, [], []
        self.adapters, self.errors = {}, {}
        self.gate = asyncio.Event()
        self.gate.set()
        access = ApiKeyAccess([ApiKeyRule(name="key", adapters=("a*",)), ApiKeyRule(name="other")])
        self.admission = AdmissionController(LIMITS, "base", 100, access)
        self.metrics = RequestMetrics(EngineConfig("m", enable_lora=True, max_loras=4), "base", LIMITS.max_model_len)
        processor = RequestProcessor(LIMITS, TOKENIZER, None, None, run_inline)
        self.finder = AdapterFinder(self.admission, folder / "supervisor.sock", lambda: self.now)
        self.manager = RequestManager(
            self.admission, processor, self.metrics, RecordingCores(self.sent), lambda: self.now, self.finder
        )
        self.manager.on_core_connected()
        self.frontend = RecordingFrontend()
        self.set_adapters()
        self.manager.set_loading_adapters(frozenset())

    def set_adapters(self):
        self.manager.set_adapters(self.adapters, findable_names=["a*", "b*", "x*"])

    async def find_adapter(self, name: str, client: str) -> None:
        """A method of the supervisor."""
        self.calls.append((name, client))
        await self.gate.wait()
        if name in self.errors:
            raise self.errors[name]
        self.adapters[name] = f"sha256:{name}"
        self.set_adapters()

    def submit(self, id, model, key="", client=""):
        params = SamplingParams.from_mapping({})
        request = GenerateRequest(id, model, "fox", None, params, True, api_key_name=key, client=client)
        self.manager.submit(self.frontend, request)

    async def until(self, condition):
        async with asyncio.timeout(5):
            while not condition():
                await asyncio.sleep(0.002)

    async def error(self, id):
        await self.until(lambda: id in self.frontend.deltas)
        [delta] = self.frontend.deltas[id]
        return delta.error_code, delta.error


@pytest.fixture
async def pod(tmp_path):
    pod = Pod(tmp_path)
    async with Server([pod.find_adapter]).listening(tmp_path / "supervisor.sock"):
        yield pod
        await pod.finder.close()


async def test_requests_of_one_adapter_share_a_lookup_and_run(pod):
    pod.gate.clear()
    for i in range(5):
        pod.submit(i, "a1", client=f"client-{i}")
    await pod.until(lambda: pod.calls)
    assert not pod.sent and pod.manager.num_open == pod.manager.num_queued == 5
    pod.gate.set()
    await pod.until(lambda: len(pod.sent) == 5)
    assert pod.calls == [("a1", "client-0")]
    assert {request.adapter_digest for request in pod.sent} == {"sha256:a1"}
    assert re.search(r'adapter_requests_total{[^}]*"a1"[^}]*} 5.0', pod.metrics.render())
    pod.submit(9, "a1")
    await pod.until(lambda: len(pod.sent) == 6)
    assert len(pod.calls) == 1


async def test_a_missing_name_costs_its_sender_one_404_and_one_lookup(pod):
    pod.errors["a-none"] = NotFound("no adapter source has it")
    pod.submit(1, "a-none", key="key")
    code, text = await pod.error(1)
    assert code == Code.NOT_FOUND and "is not served" in text
    pod.submit(2, "b-none", key="key")
    assert (await pod.error(2)) == (code, text.replace("a-none", "b-none")), "forbidden and missing are the same"
    pod.submit(3, "a-none", key="key")
    assert await pod.error(3) == (code, text)
    assert pod.calls == [("a-none", "")]
    assert pod.manager.num_open == pod.manager.num_queued == 0
    assert "a-none" not in pod.metrics.render(), "a name that does not exist makes no series"
    pod.now += 6
    del pod.errors["a-none"]
    pod.submit(4, "a-none", key="key")
    await pod.until(lambda: len(pod.sent) == 1)


@pytest.mark.parametrize("name", ["b1", "y1", "a/../b", "a1 ", "a" * 64, "a\0"])
async def test_nothing_is_looked_up_that_the_key_or_the_sources_do_not_allow(pod, name):
    pod.submit(1, name, key="key")
    assert (await pod.error(1))[0] == Code.NOT_FOUND
    assert pod.calls == []


@pytest.mark.parametrize(
    ("error", "lifetime_s"), [(InvalidArgument("rank must be positive"), 5.0), (Unavailable("source is down"), 1.0)]
)
async def test_other_failures_keep_their_reason_for_some_seconds(pod, error, lifetime_s):
    pod.errors["a1"] = error
    for i in range(3):
        pod.submit(i, "a1")
        assert await pod.error(i) == (error.code, str(error))
    assert len(pod.calls) == 1
    pod.now += lifetime_s
    del pod.errors["a1"]
    pod.submit(9, "a1")
    await pod.until(lambda: pod.sent)


async def test_a_request_that_waits_can_be_cancelled(pod):
    pod.gate.clear()
    pod.submit(1, "a1")
    pod.submit(2, "a1")
    await pod.until(lambda: pod.calls)
    pod.manager.cancel(pod.frontend, [1])
    assert pod.manager.num_open == 1
    pod.gate.set()
    await pod.until(lambda: pod.sent)
    assert len(pod.sent) == 1 and pod.manager.num_open == 1


async def test_a_dead_supervisor_fails_only_requests_that_need_it(tmp_path):
    pod = Pod(tmp_path)
    pod.submit(1, "a1")
    assert (await pod.error(1))[0] == Code.UNAVAILABLE
    pod.submit(2, "base")
    await pod.until(lambda: len(pod.sent) == 1)
    pod.now += 2
    async with Server([pod.find_adapter]).listening(tmp_path / "supervisor.sock"):
        pod.submit(3, "a1")
        await pod.until(lambda: len(pod.sent) == 2)
        await pod.finder.close()


async def test_an_adapter_that_leaves_at_once_is_looked_up_again(pod):
    lookup = pod.find_adapter
    losses = iter([True, False])

    async def find_adapter(name: str, client: str) -> None:
        await lookup(name, client)
        if next(losses):
            pod.adapters.clear()
            pod.set_adapters()

    pod.finder._call = find_adapter
    pod.submit(1, "a1")
    await pod.until(lambda: pod.sent)
    assert len(pod.calls) == 2


async def test_failures_are_bounded(pod, monkeypatch):
    monkeypatch.setattr(adapter_finder, "_MAX_FAILURES", 3)
    for i in range(10):
        pod.errors[f"a{i}"] = NotFound("none")
        pod.submit(i, f"a{i}")
        await pod.error(i)
    assert len(pod.finder._failures) == 3


async def test_idle_times_of_adapters(pod):
    pod.submit(1, "a1")
    await pod.until(lambda: pod.sent)
    assert pod.manager.adapter_idle_times() == {"a1": 0.0}
    pod.now += 3
    pod.manager.cancel(pod.frontend, [1])
    assert pod.manager.adapter_idle_times() == {"a1": 3.0}
    pod.adapters.clear()
    pod.set_adapters()
    assert pod.manager.adapter_idle_times() == {}
