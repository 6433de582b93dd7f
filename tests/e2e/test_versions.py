# SPDX-License-Identifier: Apache-2.0
"""Versions of an adapter on a real server: the split, the header, the names, the metrics and a promotion."""

import json
import urllib.request

import pytest
from support.engine_processes import wait_for
from support.quire_serve import EXAMPLES, example_document, running_service

pytestmark = pytest.mark.server

PROMPT = "Once upon a time"
FOLDERS = {"v1": str(EXAMPLES / "adapters/pirate"), "v2": str(EXAMPLES / "adapters/sql")}


def versions(**weights):
    return [{"name": name, "source": {"path": FOLDERS[name]}, "weight": weight} for name, weight in weights.items()]


@pytest.fixture(scope="module")
def own(tmp_path_factory):
    document = example_document()
    document["spec"]["adapters"] = [
        {"name": "pirate", "source": {"path": FOLDERS["v1"]}},
        {"name": "sql", "source": {"path": FOLDERS["v2"]}},
        {"name": "style", "versions": versions(v1=50, v2=50)},
    ]
    with running_service(document, tmp_path_factory.mktemp("versions")) as service:
        wait_for(lambda: {"style@v1", "style@v2"} <= served(service), 60, "both versions")
        yield service


def served(service):
    return {card["id"] for card in service.request("openai", "/v1/models").body["data"]}


def complete(service, model, session=None, **fields):
    """Return the text and the version of a completion."""
    body = {"model": model, "prompt": PROMPT, "max_tokens": 8, "temperature": 0, **fields}
    headers = {"Content-Type": "application/json"} | ({"X-Session-Id": session} if session else {})
    url = f"http://{service.host}:{service.ports['openai']}/v1/completions"
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=60) as response:
        text = response.read()
        version = response.headers.get("Quire-Adapter-Version")
    if fields.get("stream"):
        events = [line[6:] for line in text.decode().splitlines() if line.startswith("data: {")]
        return "".join(json.loads(event)["choices"][0]["text"] for event in events), version
    return json.loads(text)["choices"][0]["text"], version


def test_a_session_gets_one_version_and_the_header_names_it(own):
    texts = {"v1": complete(own, "pirate")[0], "v2": complete(own, "sql")[0]}
    assert texts["v1"] != texts["v2"] and complete(own, "pirate")[1] is None
    found = set()
    for i in range(12):
        text, version = complete(own, "style", f"session-{i}")
        assert text == texts[version]
        assert complete(own, "style", f"session-{i}", stream=True) == (text, version)
        found.add(version)
    assert found == {"v1", "v2"}
    by_user = {complete(own, "style", user="ann")[1] for _ in range(4)}
    assert len(by_user) == 1
    assert complete(own, "style", "ann", user="bob") == complete(own, "style", "ann", user="eve"), "the session wins"
    for version, text in texts.items():
        assert complete(own, f"style@{version}") == (text, version)


def test_triton_ports_split_and_select_too(own):
    texts = {
        own.text("pirate", PROMPT, max_tokens=8, temperature=0),
        own.text("sql", PROMPT, max_tokens=8, temperature=0),
    }
    assert {own.text("style", PROMPT, max_tokens=8, temperature=0) for _ in range(16)} == texts
    selected = own.text("tales", PROMPT, max_tokens=8, temperature=0, lora_name="style@v2")
    assert selected == own.text("sql", PROMPT, max_tokens=8, temperature=0)
    assert own.generate("tales", PROMPT, lora_name="style@v9").status == 400


def test_metrics_and_status_name_the_version(own):
    complete(own, "style@v2")
    page = own.metrics()
    assert 'adapter="style@v2"' in page
    status = own.adapter("style")
    assert {name: content["state"] for name, content in status["versions"].items()} == {"v1": "Ready", "v2": "Ready"}
    assert status["versions"]["v2"]["digest"] == own.adapter("sql")["digest"]


def test_a_promotion_moves_all_requests_without_a_load(own):
    adapters = [
        {"name": "pirate", "source": {"path": FOLDERS["v1"]}},
        {"name": "sql", "source": {"path": FOLDERS["v2"]}},
        {"name": "style", "versions": versions(v1=0, v2=1)},
    ]
    assert own.put_adapters({"generation": 5, "adapters": adapters}).status == 202
    wait_for(lambda: {complete(own, "style", str(i))[1] for i in range(8)} == {"v2"}, 10, "the promotion")
    assert complete(own, "style@v1")[1] == "v1", "it stays loaded"
