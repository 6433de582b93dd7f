# SPDX-License-Identifier: Apache-2.0
"""A router's view of a real server: the KV events, and the routes and headers that routers use."""

import json
import os
import signal
import urllib.request

import pytest
from nodocker_cluster.ports import free_ports
from support.kv_subscriber import AllBlocksCleared, BlockIndex, KVSubscriber
from support.quire_serve import QuireServeProcess, example_adapters, example_document, running_service
from support.supervisor_harness import catalog

pytestmark = pytest.mark.server

STORY = "Once upon a time there was a small mouse who lived in a big house with a garden and a dog and three cows. "
MODELS = ("tales", "pirate")


def complete(service: QuireServeProcess, model: str, prompt: str) -> dict:
    body = {"model": model, "prompt": prompt, "max_tokens": 24, "temperature": 0, "return_token_ids": True}
    response = service.request("openai", "/v1/completions", body)
    assert response.status == 200, response
    return response.body


@pytest.fixture(scope="module")
def publishing(tmp_path_factory):
    """A server that publishes KV events."""
    while (ports := free_ports(2))[1] != ports[0] + 1:
        pass
    port = ports[0]
    folder = tmp_path_factory.mktemp("events")
    with running_service(example_document(), folder, f"--kv-events-port={port}") as service:
        service.kv_port = port
        yield service


@pytest.fixture
def subscriber(publishing):
    port = publishing.kv_port
    subscriber = KVSubscriber(f"tcp://127.0.0.1:{port}", f"tcp://127.0.0.1:{port + 1}")
    yield subscriber
    subscriber.close()


def current_index(subscriber: KVSubscriber) -> BlockIndex:
    """Return the blocks that are cached according to all events so far."""
    index = BlockIndex()
    for _, _, batch in subscriber.replay(0):
        index.apply(batch.events)
    return index


def test_events_describe_the_cache_and_change_no_output(publishing, service, subscriber):
    for model in MODELS:
        for prompt in (STORY, STORY + "One day", STORY * 3):
            answers = [complete(server, model, prompt) for server in (publishing, service)]
            choice, other = (answer["choices"][0] for answer in answers)
            assert (choice["text"], choice["token_ids"]) == (other["text"], other["token_ids"])
            tokens = choice["prompt_token_ids"] + choice["token_ids"]
            name = None if model == "tales" else model
            # The last token of an output is not computed.
            assert current_index(subscriber).cached_tokens(tokens, name) == (len(tokens) - 1) // 16 * 16
            again = complete(publishing, model, prompt)["usage"]["prompt_tokens_details"]["cached_tokens"]
            assert again == min((len(tokens) - 1) // 16 * 16, (len(choice["prompt_token_ids"]) - 1) // 16 * 16)
    topics = {topic for topic, _, _ in subscriber.replay(0)}
    assert topics == {f"kv@{os.uname().nodename}@tales".encode()}


def test_blocks_of_an_alias_are_removed_when_it_gets_other_content(publishing, subscriber):
    prompt = complete(publishing, "sql", STORY)["choices"][0]["prompt_token_ids"]
    former = current_index(subscriber)
    former_hashes = {block_hash for (_, block_hash), (name, _) in former.prefixes.items() if name == "sql"}
    assert former.cached_tokens(prompt, "sql") > 0 and former_hashes
    adapters = example_adapters()
    moved = adapters | {"sql": adapters["pirate"]}
    assert publishing.put_adapters(catalog(publishing.status()["generation"] + 1, **moved)).status < 300
    # The two names have the same content now.
    publishing.wait(
        lambda: complete(publishing, "sql", STORY)["choices"] == complete(publishing, "pirate", STORY)["choices"],
        30,
        "moved",
    )
    index = current_index(subscriber)
    assert index.cached_tokens(prompt, "pirate") > 0
    # The blocks of the former content are not among those of the name, although the engine still has them.
    hashes = {block_hash for (_, block_hash), (name, _) in index.prefixes.items() if name == "sql"}
    assert hashes.isdisjoint(former_hashes)


def test_restarted_core_announces_an_empty_cache(publishing, subscriber):
    prompt = complete(publishing, "tales", STORY)["choices"][0]["prompt_token_ids"]
    assert current_index(subscriber).cached_tokens(prompt) > 0
    core = publishing.pid("core")
    os.kill(core, signal.SIGKILL)
    publishing.wait(lambda: publishing.health()[0] == 200 and publishing.is_restarted("core", core), 60, "ready again")
    _, number, batch = next(subscriber.replay(0))
    assert number == 0 and isinstance(batch.events[0], AllBlocksCleared)
    assert current_index(subscriber).cached_tokens(prompt) == 0
    complete(publishing, "tales", STORY)
    assert current_index(subscriber).cached_tokens(prompt) == len(prompt) // 16 * 16


def test_port_in_use_is_one_clear_error(publishing, tmp_path):
    second = QuireServeProcess(example_document(), tmp_path, f"--kv-events-port={publishing.kv_port}")
    assert second.process.wait(60) != 0
    port = publishing.kv_port
    message = f"engine.kv_events_config.endpoint {port} (Address already in use)"
    assert message in second.tail() and "Traceback" not in second.tail(400)


@pytest.mark.parametrize(
    ("route", "body"),
    [
        ("/v1/completions", {"model": "tales", "prompt": STORY}),
        ("/v1/completions", {"model": "pirate", "prompt": [STORY, "Two"], "add_special_tokens": False}),
        ("/v1/completions", {"prompt": list(range(5, 50)), "truncate_prompt_tokens": 20}),
        ("/v1/chat/completions", {"model": "tales", "messages": [{"role": "user", "content": "Tell me a story."}]}),
    ],
)
def test_render_routes_return_the_tokens_of_the_engine(service, route, body):
    # A router sends the fields of SGLang, too.
    extra = {"no_stop_trim": False, "return_hidden_states": False, "stream_reasoning": True}
    rendered = service.request("openai", f"{route}/render", body | extra)
    answer = service.request("openai", route, body | {"max_tokens": 1, "return_token_ids": True})
    assert (rendered.status, answer.status) == (200, 200), (rendered, answer)
    documents = rendered.body if route == "/v1/completions" else [rendered.body]
    holders = answer.body["choices"] if route == "/v1/completions" else [answer.body]
    assert [d["token_ids"] for d in documents] == [holder["prompt_token_ids"] for holder in holders]
    assert {d["model"] for d in documents} == {body.get("model", "tales")}
    unknown = service.request("openai", f"{route}/render", body | {"model": "none"})
    invalid = service.request("openai", f"{route}/render", body | {"temperature": -1})
    assert (unknown.status, invalid.status) == (404, 400)


@pytest.mark.parametrize(("rank", "status"), [("0", 200), ("1", 400), ("-1", 400), ("x", 400)])
def test_headers_of_routers(service, rank, status):
    headers = {"Content-Type": "application/json", "X-data-parallel-rank": rank, "x-request-id": "router-7"}
    body = json.dumps({"model": "tales", "prompt": "Once", "max_tokens": 1}).encode()
    url = f"http://127.0.0.1:{service.ports['openai']}/v1/completions"
    try:
        with urllib.request.urlopen(urllib.request.Request(url, body, headers)) as response:
            code, answered, text = response.status, response.headers, response.read().decode()
    except urllib.error.HTTPError as error:
        code, answered, text = error.code, error.headers, error.read().decode()
    assert code == status and answered["x-request-id"] == "router-7"
    assert ("cmpl-router-7" in text) if status == 200 else ("rank" in text)


def test_transfer_parameters_are_rejected_by_name_without_a_connector(service):
    body = {"model": "tales", "prompt": "Once", "kv_transfer_params": {"do_remote_decode": True}}
    response = service.request("openai", "/v1/completions", body)
    assert response.status == 400 and response.body["error"]["param"] == "kv_transfer_params"
