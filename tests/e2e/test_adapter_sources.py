# SPDX-License-Identifier: Apache-2.0
"""Adapters that a running `quire serve` finds by name, and a file that changes while it is served."""

import concurrent.futures
import shutil

import pytest
import yaml
from support.quire_serve import EXAMPLES, example_document, running_service

pytestmark = pytest.mark.server

PROMPT = {"prompt": "Once upon a time", "max_tokens": 8, "temperature": 0.0}


@pytest.fixture(scope="module")
def own(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sources")
    for name in ("acme-sql", "acme-2", "globex-pirate"):
        shutil.copytree(EXAMPLES / "adapters" / ("pirate" if "pirate" in name else "sql"), folder / "prefix" / name)
    (folder / "prefix" / "acme-broken").mkdir()
    (folder / "prefix" / "acme-broken/adapter_config.json").write_text("{}")
    (folder / "prefix" / "acme-broken/adapter_model.safetensors").write_bytes(b"x" * 100)
    (folder / "prefix" / "acme-link").symlink_to(EXAMPLES / "adapters/sql")
    secret = folder / "secrets/keys"
    secret.mkdir(parents=True)
    for name in ("acme", "globex"):
        (secret / name).write_text(f"{name}-key-0123456789")
    document = example_document()
    document["spec"]["adapters"] = document["spec"]["adapters"][:1]
    document["spec"]["adapterSources"] = [{"path": str(folder / "prefix"), "allow": "*-*"}]
    rules = [{"name": "acme", "adapters": ["acme-*"]}, {"name": "globex"}]
    document["spec"]["openai"] = {"apiKeysSecretRef": {"name": "keys"}, "keys": rules}
    document["spec"]["runtime"] = {"expose": []}
    with running_service(document, folder, f"--secrets-dir={secret.parent}") as service:
        yield service


@pytest.fixture
def document(own):
    """The served document; the test may write another one, and the next test gets the first one again."""
    text = own.file.read_text()
    yield yaml.safe_load(text)
    own.file.write_text(text)
    own.wait(lambda: [a["name"] for a in own.status()["adapters"]] == ["pirate"], 30, "as before")


def ask(service, model, key="globex", path="/v1/completions", **body):
    return service.request("openai", path, PROMPT | {"model": model} | body, key=f"{key}-key-0123456789")


def text_of(answer):
    assert answer.status == 200, answer
    return answer.body["choices"][0]["text"]


def models(service, key="globex"):
    cards = service.request("openai", "/v1/models", key=f"{key}-key-0123456789").body["data"]
    return {card["id"] for card in cards}


def test_an_adapter_is_found_by_name(own):
    assert "globex-pirate" not in models(own)
    assert text_of(ask(own, "globex-pirate")) == text_of(ask(own, "pirate"))
    assert {"globex-pirate", "pirate"} <= models(own)
    status = own.status()
    assert [adapter["name"] for adapter in status["adapters"]] == ["pirate"] and status["ready"]
    assert status["on_demand"]["adapters"] >= 1 and status["on_demand"]["bytes"] > 0


def test_many_first_requests_are_all_answered(own):
    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(lambda i: ask(own, "acme-2", stream=False), range(16)))
    assert {text_of(answer) for answer in answers} == {text_of(ask(own, "acme-sql"))}
    assert own.log.read_text().count("adapter found name=acme-2 ") == 1


@pytest.mark.parametrize("path", ["/v1/completions", "/tokenize"])
def test_a_key_finds_only_its_adapters_and_missing_ones_look_the_same(own, path):
    def answer(model):
        response = ask(own, model, "acme", path)
        return response.status, str(response.body).replace(model, "NAME")

    assert answer("acme-sql")[0] == 200
    assert answer("globex-absent") == answer("acme-absent") == answer("nodash") and answer("acme-absent")[0] == 404


@pytest.mark.parametrize("name", ["acme-..", "../acme-sql", "acme-sql/../acme-2", "acme-%2e%2e", "acme-\0"])
def test_a_name_is_never_a_path(own, name):
    assert ask(own, name).status == 404


def test_a_broken_adapter_and_a_link_are_one_clear_error(own):
    assert (ask(own, "acme-broken").status, ask(own, "acme-link").status) == (400, 400)
    assert "leads out of" in ask(own, "acme-link").body["error"]["message"]
    assert text_of(ask(own, "pirate"))


def test_the_ports_of_the_server_find_adapters_by_lora_name(own):
    parameters = {"lora_name": "acme-sql", "max_tokens": 8, "temperature": 0.0}
    answer = own.generate("tales", "Once upon a time", exclude_input_in_output=True, **parameters)
    assert (answer.status, answer.body.get("text_output")) == (200, text_of(ask(own, "acme-sql")))
    assert own.generate("tales", "x", lora_name="absent-x").status == 400
    assert own.generate("acme-sql", "x").status in (400, 404), "the server knows no model of this name"


def test_the_file_is_applied_when_it_changes(own, document):
    sql = {"name": "sql", "source": {"path": str(EXAMPLES / "adapters/sql")}}
    document["spec"]["adapters"].append(sql)
    document["spec"]["engine"]["maxNumSeqs"] = 5
    own.file.write_text(yaml.safe_dump(document))
    own.wait(
        lambda: own.adapter("sql")["state"] == "Ready" if len(own.status()["adapters"]) == 2 else False, 30, "ready"
    )
    assert text_of(ask(own, "sql")) == text_of(ask(own, "acme-sql"))
    log = own.log.read_text()
    assert log.count("restart quire serve to apply the change of spec.engine.maxNumSeqs\n") == 1
    assert "adapters: added sql" in log
    own.file.write_text("apiVersion: [")
    own.wait(lambda: "has an error, and nothing changes" in own.log.read_text(), 30, "reported")
    assert text_of(ask(own, "sql"))


def test_adapters_leave_with_their_source(own, document):
    assert text_of(ask(own, "acme-sql"))
    document["spec"]["adapterSources"] = []
    own.file.write_text(yaml.safe_dump(document))
    own.wait(lambda: ask(own, "acme-sql").status == 404, 30, "gone")
    own.wait(lambda: own.status()["on_demand"] is None, 30, "without sources")
