# SPDX-License-Identifier: Apache-2.0
"""Adapters are added, replaced and removed under load: no request fails, and no response mixes two versions."""

import asyncio
import os
import signal

import pytest
from prometheus_client.parser import text_string_to_metric_families
from support.quire_serve import EXAMPLES, StreamedResponse, example_document, run_concurrently, running_service

pytestmark = pytest.mark.server

STORY = "Once upon a time"
GREEDY = {"temperature": 0.0, "max_tokens": 24, "ignore_eos": True}
PIRATE, SQL = (str(EXAMPLES / "adapters" / name) for name in ("pirate", "sql"))


@pytest.fixture(scope="module")
def own(tmp_path_factory):
    document = example_document()
    # One adapter slot, so that every change of adapter among the clients also swaps the slot.
    document["spec"]["lora"] |= {"maxLoaded": 1, "maxCached": 2}
    with running_service(document, tmp_path_factory.mktemp("load")) as service:
        yield service


class Clients:
    """Continuous load: each client requests one model after the other, alternating between HTTP and gRPC."""

    def __init__(self, service, models):
        self.service = service
        self.models = models
        self.responses = []
        """Model name and streamed response of each request."""
        self._stop = False

    async def run(self, work, num=12):
        """Send requests while `work` runs in a thread."""
        clients = [asyncio.create_task(self._client(i)) for i in range(num)]
        try:
            await asyncio.to_thread(work)
        finally:
            self._stop = True
            await asyncio.gather(*clients)

    async def _client(self, i):
        while not self._stop:
            model, parameters = self.models[i % len(self.models)]
            i += 1
            call = self.service.http_stream if i // len(self.models) % 2 else self.service.grpc_stream
            stream = await call(model, STORY, **GREEDY, **parameters)
            self.responses.append((parameters.get("lora_name", model), stream))


def catalog(generation, **folders):
    hidden = {"expose": "Parameter"}
    adapters = [
        {"name": name, "source": {"path": folder}} | (hidden if name == "guest" else {})
        for name, folder in folders.items()
    ]
    return {"generation": generation, "adapters": adapters}


def test_changes_under_load_fail_no_request_and_mix_no_versions(own):
    digests = {PIRATE: own.adapter("pirate")["digest"], SQL: own.adapter("sql")["digest"]}
    expected = {PIRATE: own.text("pirate", STORY, **GREEDY), SQL: own.text("sql", STORY, **GREEDY)}
    base = own.text("tales", STORY, **GREEDY)
    assert len({base, *expected.values()}) == 3
    generation = own.status()["generation"]
    always = {"pirate": PIRATE, "sql": SQL}

    def put(**folders):
        nonlocal generation
        generation += 1
        assert own.put_adapters(catalog(generation, **always, **folders)).status == 202
        desired = {name: digests[folder] for name, folder in (always | folders).items()}
        own.wait(lambda: {a["name"]: _ready(a) for a in own.status()["adapters"]} == desired, 30, "up to date")

    put(swapped=PIRATE)
    clients = Clients(own, [("swapped", {}), ("tales", {}), ("pirate", {}), ("tales", {"lora_name": "swapped"})])

    def change():
        for folder in (SQL, PIRATE, SQL, PIRATE, SQL):
            put(swapped=folder, guest=PIRATE)
            assert own.text("tales", STORY, lora_name="guest", **GREEDY) == expected[PIRATE]
            assert own.text("swapped", STORY, **GREEDY) == expected[folder]
            put(swapped=folder)

    run_concurrently(clients.run(change), timeout=120)
    assert [stream.error for _, stream in clients.responses if stream.error] == []
    assert len(clients.responses) > 20
    for model, stream in clients.responses:
        allowed = {"tales": {base}, "pirate": {expected[PIRATE]}}.get(model, set(expected.values()))
        assert stream.text in allowed, model
    texts = [stream.text for model, stream in clients.responses if model == "swapped"]
    assert set(texts) == set(expected.values()), "both versions must be served under the same name"


def test_running_request_keeps_its_adapter_version(own):
    generation = own.status()["generation"] + 1
    own.put_adapters(catalog(generation, pirate=PIRATE, sql=SQL, swapped=PIRATE, guest=SQL))
    own.wait(lambda: {_ready(a) and a["name"] for a in own.status()["adapters"]} >= {"swapped", "guest"}, 30, "loaded")
    long = {"temperature": 0.0, "max_tokens": 180, "ignore_eos": True}
    alone = {name: own.text(name, STORY, **long) for name in ("pirate", "sql")}
    streams = StreamedResponse(), StreamedResponse()

    async def both():
        tasks = [
            asyncio.create_task(own.http_stream("swapped", STORY, streams[0], **long)),
            asyncio.create_task(own.http_stream("tales", STORY, streams[1], lora_name="guest", **long)),
        ]
        while not all(stream.pieces for stream in streams):
            await asyncio.sleep(0.005)
        # Replace one adapter and remove the other.
        put = own.put_adapters, catalog(generation + 1, pirate=PIRATE, sql=SQL, swapped=SQL)
        assert (await asyncio.to_thread(*put)).status == 202
        await asyncio.gather(*tasks)

    run_concurrently(both(), timeout=60)
    assert [stream.error for stream in streams] == [None, None]
    assert "".join(streams[0].pieces) == alone["pirate"]
    assert "".join(streams[1].pieces) == alone["sql"]
    own.wait(lambda: own.generate("tales", STORY, lora_name="guest", max_tokens=1).status == 400, 10, "without guest")
    assert own.text("swapped", STORY, **long) == alone["sql"]


def test_enforces_adapter_limits(own):
    generation = own.status()["generation"]
    document = catalog(generation + 1, pirate=PIRATE, sql=SQL)
    document["adapters"][1]["limits"] = {"maxTokensPerSecond": 2}
    own.put_adapters(document)
    errors = []

    def is_limited():
        response = own.generate("sql", STORY, max_tokens=30)
        if response.status == 400 and "maxTokensPerSecond" in response.body["error"]:
            errors.append(response.body["error"])
        return bool(errors)

    own.wait(is_limited, 20, "limited")
    assert "UNAVAILABLE" in errors[0] and "retry in" in errors[0]
    assert own.generate("pirate", STORY, max_tokens=2).status == 200
    assert 'quire_adapter_requests_limited_total{adapter="sql",model_name="tales"} 1.0' in own.metrics()


def test_shows_where_each_adapter_is(own):
    """After a load, an eviction, a pin, a removal and the death of the core; `GET /adapters` and the metrics agree."""
    generation = own.status()["generation"]
    document = catalog(generation + 1, pirate=PIRATE, sql=SQL)
    assert own.put_adapters(document).status == 202
    own.wait(lambda: own.status()["generation"] == generation + 1, 10, "the catalog")

    def levels():
        adapters = own.request("health", "/adapters").body["adapters"]
        return {adapter["name"]: (adapter["level"], adapter["pinned"]) for adapter in adapters}

    def exported():
        families = {family.name: family.samples for family in text_string_to_metric_families(own.metrics())}
        labels = [sample.labels for sample in families.get("vllm:lora_adapter_loaded", [])]
        by_name = {x["adapter_name"]: (x["level"], x["pinned"] == "true") for x in labels}
        (num_gpu,) = families["vllm:num_gpu_loaded_lora_adapters"]
        assert num_gpu.value == sum(level == "gpu" for level, _ in by_name.values())
        return by_name

    for name, other in (("pirate", "sql"), ("sql", "pirate")):
        own.text(name, STORY, max_tokens=2)
        assert levels() == exported() == {name: ("gpu", False), other: ("cpu", False)}
    document = catalog(generation + 2, pirate=PIRATE, sql=SQL)
    document["adapters"][0]["pinned"] = True
    own.put_adapters(document)
    own.wait(lambda: levels().get("pirate", ("", False))[1], 10, "the pin")
    assert exported()["pirate"][1]
    own.put_adapters(catalog(generation + 3, sql=SQL))
    own.wait(lambda: levels() == exported() == {"sql": ("gpu", False)}, 10, "the removal")
    os.kill(own.pid("core"), signal.SIGKILL)
    own.wait(lambda: levels() == exported() == {}, 10, "a dead core has no adapters")
    own.wait(lambda: levels() == exported() == {"sql": ("cpu", False)}, 60, "the next core")


def _ready(adapter):
    return adapter["digest"] if adapter["state"] == "Ready" else None
