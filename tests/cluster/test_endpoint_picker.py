# SPDX-License-Identifier: Apache-2.0
"""The endpoint picker behind Envoy, with the InferencePool that the operator applied and two real servers at the
addresses of two pods. Each pod has two cores, of which a picker must not notice anything."""

import inspect
import json
import os
import re
import signal
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import pytest
from support.cluster import ROOT
from support.controller_harness import llm_service
from support.engine_processes import wait_for
from support.envoy import POD_HEADER
from support.picked_service import PickedService, picked_service
from support.quire_serve import QuireServeProcess

from quire_server.openai.app import Application

pytestmark = pytest.mark.timeout(300)

SERVICE = llm_service(
    replicas=2,
    model={"source": {"pvc": {"claimName": "models", "path": "models/tiny"}}, "servedName": "tales"},
    adapters=[
        {"name": name, "source": {"pvc": {"claimName": "models", "path": f"adapters/{name}"}}}
        for name in ("pirate", "sql")
    ],
    lora={"maxLoaded": 1, "maxRank": 16},
    engine={"dtype": "float32", "dataParallelSize": 2, "maxNumSeqs": 2},
    networking={"inferencePool": {"targetPort": "openai", "endpointPicker": {"name": "picker"}}},
)
STORY = "Once upon a time there was a small mouse who lived in a big house with a garden and a dog and three cows. "
MESSAGES = [{"role": "user", "content": "Tell me a story."}]
ROUTES: dict[str, Any] = {
    "GET /": None,
    "GET /openapi.json": None,
    "GET /health": None,
    "GET /ping": None,
    "POST /ping": {},
    "GET /load": None,
    "GET /server_info": None,
    "GET /tokenizer_info": None,
    "GET /version": None,
    "GET /metrics": None,
    "GET /live": None,
    "GET /live/events": None,
    "GET /v1/models": None,
    "GET /v1/models/NAME": None,
    "POST /v1/completions": {"prompt": "Once", "max_tokens": 1},
    "POST /v1/completions with token ids": {"prompt": [5, 6], "max_tokens": 1},
    "POST /v1/completions/render": {"prompt": "Once"},
    "POST /v1/chat/completions": {"messages": MESSAGES, "max_tokens": 1},
    "POST /v1/chat/completions/render": {"messages": MESSAGES},
    "POST /v1/responses": {"input": "Once", "max_output_tokens": 1},
    "GET /v1/responses/ID": None,
    "DELETE /v1/responses/ID": None,
    "POST /v1/responses/ID": {},
    "POST /v1/messages": {"messages": MESSAGES, "max_tokens": 1},
    "POST /v1/messages/count_tokens": {"messages": MESSAGES},
    "POST /v1/embeddings": {"input": "Once"},
    "POST /score": {"queries": "Once", "documents": ["a"]},
    "POST /v1/score": {"queries": "Once", "documents": ["a"]},
    "POST /rerank": {"query": "Once", "documents": ["a"]},
    "POST /v1/rerank": {"query": "Once", "documents": ["a"]},
    "POST /v2/rerank": {"query": "Once", "documents": ["a"]},
    "POST /classify": {"input": "Once"},
    "POST /v1/classify": {"input": "Once"},
    "POST /pooling": {"input": "Once"},
    "POST /generative_scoring": {"query": "Once", "items": ["a"], "label_token_ids": [5]},
    "POST /v1/load_lora_adapter": {"lora_name": "new", "lora_path": "/tmp/new"},
    "POST /v1/unload_lora_adapter": {"lora_name": "new"},
    "POST /tokenize with a prompt": {"prompt": "Once"},
    "POST /tokenize with messages": {"messages": MESSAGES},
    "POST /detokenize": {"tokens": [5]},
}
"""A body for each route."""
OWN_REFUSAL = {
    "/v1/responses/ID": 404,
    "lora_adapter": 403,
    "embeddings": 400,
    "score": 400,
    "rerank": 400,
    "classify": 400,
    "pooling": 400,
}
"""The pod's own status for routes that are off, whose object does not exist, or for which the model has no head."""


@dataclass
class Response:
    status: int
    pod: str | None
    """Address of the pod that has answered; None if none has."""
    text: str


class World(PickedService):
    """The service, its pods, the picker and Envoy."""

    def send(self, method: str, path: str, body: Any = None) -> Response:
        """Send a request to Envoy. Of a stream without end, only the first event is read."""
        url = f"http://127.0.0.1:{self.port}{path}"
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(url, data, {"Content-Type": "application/json"}, method=method)
        try:
            with urllib.request.urlopen(request, timeout=60) as response:
                text = response.readline() if path == "/live/events" else response.read()
                return Response(response.status, _host(response.headers), text.decode())
        except urllib.error.HTTPError as error:
            with error:
                return Response(error.code, _host(error.headers), error.read().decode())

    def complete(self, prompt: str, model: str = "tales") -> Response:
        """Send a request for one token."""
        body = {"model": model, "prompt": prompt, "max_tokens": 1, "temperature": 0}
        response = self.send("POST", "/v1/completions", body)
        assert response.status == 200, response
        return response


def _host(headers: Any) -> str | None:
    address = headers.get(POD_HEADER)
    return address and address.rpartition(":")[0]


@pytest.fixture(scope="module")
def world(cluster, kubelet, tmp_path_factory) -> Iterator[World]:
    with picked_service(cluster, kubelet, SERVICE, tmp_path_factory.mktemp("picker")) as service:
        yield World(**vars(service))


def gauge(pod: QuireServeProcess, name: str) -> float:
    """Return the value of the only series of a metric of a pod, whose cores have a series each under another name."""
    page = pod.metrics()
    (value,) = re.findall(rf"^vllm:{name}{{.*}} (\S+)$", page, re.MULTILINE)
    assert len(re.findall(rf"^quire_core_{name}{{", page, re.MULTILINE)) == 2
    return float(value)


def test_the_gauges_of_the_picker_are_those_of_the_pods(world):
    """The picker takes the first series of a name, so a pod with two cores has one series."""
    gauges = {"average_queue_size": "num_requests_waiting", "average_kv_cache_utilization": "kv_cache_usage_perc"}
    pods = [*world.pods.running.values()]
    assert len(pods) == 2 == world.picker.value("inference_pool_ready_pods")
    body = {"model": "tales", "prompt": "Once", "max_tokens": 400, "ignore_eos": True}
    loads = [
        threading.Thread(target=pod.request, args=("openai", "/v1/completions", body))
        for pod, num_requests in zip(pods, (12, 7), strict=True)
        for _ in range(num_requests)
    ]
    for load in loads:
        load.start()
    wait_for(lambda: min(gauge(pod, "num_requests_waiting") for pod in pods) > 0, 20, "queues")
    cores = [world.pods.pid(pod, core) for pod in pods for core in ("core-0", "core-1")]
    try:
        for pid in cores:
            os.kill(pid, signal.SIGSTOP)  # Nothing changes, so the picker and the pods can be compared.
        time.sleep(0.2)
        means = {name: sum(gauge(pod, series) for pod in pods) / 2 for name, series in gauges.items()}

        def values():
            return {name: world.picker.value(f"inference_pool_{name}") for name in gauges}

        wait_for(lambda: values() == pytest.approx(means), 5, lambda: (values(), means))
        assert min(means.values()) > 0 and world.picker.value("inference_pool_ready_pods") == 2
    finally:
        for pid in cores:
            os.kill(pid, signal.SIGCONT)
    for load in loads:
        load.join()


def test_an_adapter_reaches_the_pod_that_has_it_in_a_slot(world):
    first, second = world.pods.running.items()
    for (_, pod), name in ((first, "sql"), (second, "pirate")):
        # The checks at start had loaded both adapters. Requests at once use both cores, which have one slot each.
        body = {"model": name, "prompt": "Once", "max_tokens": 40}

        def has_only(pod=pod, name=name, body=body):
            with ThreadPoolExecutor(8) as executor:
                responses = executor.map(lambda _: pod.request("openai", "/v1/completions", body).status, range(8))
            assert set(responses) == {200}
            return f'running_lora_adapters="{name}"' in pod.metrics()

        pod.wait(has_only, 30, name)
    time.sleep(0.5)  # The picker reads the pods every 50 ms. No request runs now.
    for (address, _), name in ((first, "sql"), (second, "pirate")):
        pods = [world.complete(f"{i} {name}", name).pod for i in range(10)]
        assert pods == [address] * 10, (name, pods)


def test_equal_beginnings_reach_one_pod(world):
    for chapter in range(4):
        responses = [world.complete(f"Chapter {chapter}. {STORY * 4} Part {i}") for i in range(6)]
        cached = [json.loads(r.text)["usage"]["prompt_tokens_details"]["cached_tokens"] for r in responses]
        assert len({response.pod for response in responses}) == 1, responses
        assert min(cached[1:]) >= 64, cached


def test_an_unready_pod_gets_nothing(world):
    """The supervisor hangs, so the probes fail, but the pod would answer requests."""
    stopped, other = world.pods.running
    process = world.pods.running[stopped].process
    process.send_signal(signal.SIGSTOP)
    try:
        wait_for(lambda: world.picker.value("inference_pool_ready_pods") == 1, 20, "one ready pod")
        assert {world.complete(f"{i} without").pod for i in range(20)} == {other}
        assert {world.send("GET", "/v1/models").pod for _ in range(10)} == {other}
    finally:
        process.send_signal(signal.SIGCONT)
    wait_for(lambda: world.picker.value("inference_pool_ready_pods") == 2, 120, "two ready pods")
    wait_for(lambda: world.send("GET", "/v1/models").pod == stopped, 20, "requests to the pod that came back")


def test_each_route_goes_through_or_fails_with_the_words_of_the_picker(world):
    """docs/gpu-cluster.md contains the table, and the table contains all routes."""
    routes = set(re.findall(r'"(/[^"]*)"', inspect.getsource(Application.__init__)))
    tested = {route.split(" ")[1].replace("ID", "").replace("NAME", "") for route in ROUTES}
    assert routes == tested, routes ^ tested
    rows = [_row(world, route, body) for route, body in ROUTES.items()]
    table = "\n".join(["| route | through the picker |", "|---|---|", *_merged(rows)])
    assert table in (ROOT / "docs/gpu-cluster.md").read_text(), table


def test_what_the_picker_refuses_and_changes(world):
    for body, words in (
        ({"prompt": "Once"}, "model not found in request body"),
        ({"model": "tales", "prompt": ""}, "must have prompt field"),
    ):
        response = world.send("POST", "/v1/completions", body)
        assert (response.pod, response.status) == (None, 400) and words in response.text, response
    largest_seed = {"model": "tales", "prompt": "Once", "max_tokens": 1, "seed": 2**63 - 1}
    pod = next(iter(world.pods.running.values()))
    assert pod.request("openai", "/v1/completions", largest_seed).status == 200
    response = world.send("POST", "/v1/completions", largest_seed)
    assert response.pod is not None and response.status == 400 and "seed" in response.text, response


def _row(world: World, route: str, body: Any) -> tuple[str, str]:
    """Return a route and what happens to it."""
    method, path, *_ = route.split(" ")
    path = path.replace("NAME", "tales")
    expected = next((status for part, status in OWN_REFUSAL.items() if part in path), 200)
    response = world.send(method, path, body if body is None else {"model": "tales", **body})
    if response.pod is not None:
        assert response.status == expected, (route, response)
        return route, "passes"
    assert response.status == 400, (route, response)
    return route, f"400 `{response.text.strip()}`"


def _merged(rows: list[tuple[str, str]]) -> Iterator[str]:
    """Yield the lines of a table in which routes with the same result share a line."""
    for result in dict.fromkeys(result for _, result in rows):
        routes = ", ".join(f"`{route}`" for route, found in rows if found == result)
        yield f"| {routes} | {result} |"
