# SPDX-License-Identifier: Apache-2.0
"""Adapters are added, replaced and removed while clients ask for all of them: no request fails, no answer is of two."""

import asyncio

import pytest
from support.quire_serve import EXAMPLES, StreamedResponse, example_document, run_concurrently, running_service

pytestmark = pytest.mark.server

STORY = "Once upon a time"
GREEDY = {"temperature": 0.0, "max_tokens": 24, "ignore_eos": True}
PIRATE, SQL = (str(EXAMPLES / "adapters" / name) for name in ("pirate", "sql"))


@pytest.fixture(scope="module")
def own(tmp_path_factory):
    document = example_document()
    # One slot: every change of adapter among the clients is a change of slot too.
    document["spec"]["lora"] |= {"maxLoaded": 1, "maxCached": 2}
    with running_service(document, tmp_path_factory.mktemp("load")) as service:
        yield service


class Clients:
    """Requests that never stop: each client asks the next model when it has its answer, over HTTP and gRPC in turn."""

    def __init__(self, service, models):
        self.service = service
        self.models = models
        self.answers = []
        """Model asked, its answer."""
        self._stop = False

    async def run(self, work, num=12):
        """Keep asking while `work` runs in a thread."""
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
            self.answers.append((parameters.get("lora_name", model), stream))


def catalogue(generation, **folders):
    hidden = {"expose": "Parameter"}
    adapters = [
        {"name": name, "source": {"path": folder}} | (hidden if name == "guest" else {})
        for name, folder in folders.items()
    ]
    return {"generation": generation, "adapters": adapters}


def test_changes_under_load_fail_no_request_and_mix_no_contents(own):
    digests = {PIRATE: own.adapter("pirate")["digest"], SQL: own.adapter("sql")["digest"]}
    expected = {PIRATE: own.text("pirate", STORY, **GREEDY), SQL: own.text("sql", STORY, **GREEDY)}
    base = own.text("tales", STORY, **GREEDY)
    assert len({base, *expected.values()}) == 3
    generation = own.status()["generation"]
    always = {"pirate": PIRATE, "sql": SQL}

    def put(**folders):
        nonlocal generation
        generation += 1
        assert own.put_adapters(catalogue(generation, **always, **folders)).status == 202
        wanted = {name: digests[folder] for name, folder in folders.items()}
        own.wait(lambda: {a["name"]: _ready(a) for a in own.status()["adapters"]} == digests_of(wanted), 30, "in place")

    def digests_of(more):
        return {name: digests[folder] for name, folder in always.items()} | more

    put(swapped=PIRATE)
    clients = Clients(own, [("swapped", {}), ("tales", {}), ("pirate", {}), ("tales", {"lora_name": "swapped"})])

    def change():
        for folder in (SQL, PIRATE, SQL, PIRATE, SQL):
            put(swapped=folder, guest=PIRATE)
            assert own.text("tales", STORY, lora_name="guest", **GREEDY) == expected[PIRATE]
            assert own.text("swapped", STORY, **GREEDY) == expected[folder]
            put(swapped=folder)

    run_concurrently(clients.run(change), timeout=120)
    assert [stream.error for _, stream in clients.answers if stream.error] == []
    assert len(clients.answers) > 20
    for model, stream in clients.answers:
        allowed = {"tales": {base}, "pirate": {expected[PIRATE]}}.get(model, set(expected.values()))
        assert stream.text in allowed, model
    seen = [stream.text for model, stream in clients.answers if model == "swapped"]
    assert set(seen) == set(expected.values()), "both contents were served under the one name"


def test_a_request_that_runs_keeps_the_content_that_it_began_with(own):
    generation = own.status()["generation"] + 1
    own.put_adapters(catalogue(generation, pirate=PIRATE, sql=SQL, swapped=PIRATE, guest=SQL))
    own.wait(lambda: {_ready(a) and a["name"] for a in own.status()["adapters"]} >= {"swapped", "guest"}, 30, "there")
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
        # Replaced the one, removed the other.
        put = own.put_adapters, catalogue(generation + 1, pirate=PIRATE, sql=SQL, swapped=SQL)
        assert (await asyncio.to_thread(*put)).status == 202
        await asyncio.gather(*tasks)

    run_concurrently(both(), timeout=60)
    assert [stream.error for stream in streams] == [None, None]
    assert "".join(streams[0].pieces) == alone["pirate"]
    assert "".join(streams[1].pieces) == alone["sql"]
    own.wait(lambda: own.generate("tales", STORY, lora_name="guest", max_tokens=1).status == 400, 10, "guest gone")
    assert own.text("swapped", STORY, **long) == alone["sql"]


def test_limits_are_kept_and_told(own):
    generation = own.status()["generation"]
    wanted = catalogue(generation + 1, pirate=PIRATE, sql=SQL)
    wanted["adapters"][1]["limits"] = {"maxTokensPerSecond": 2}
    own.put_adapters(wanted)
    refused = []

    def asked():
        answer = own.generate("sql", STORY, max_tokens=30)
        if answer.status == 400 and "maxTokensPerSecond" in answer.body["error"]:
            refused.append(answer.body["error"])
        return bool(refused)

    own.wait(asked, 20, "limited")
    assert "UNAVAILABLE" in refused[0] and "retry in" in refused[0]
    assert own.generate("pirate", STORY, max_tokens=2).status == 200
    assert 'quire_adapter_requests_limited_total{adapter="sql",model_name="tales"} 1.0' in own.metrics()


def _ready(adapter):
    return adapter["digest"] if adapter["state"] == "Ready" else None
