# SPDX-License-Identifier: Apache-2.0
"""API keys of spec.openai.keys: each sees and uses only its own adapters, on every route, within its rates."""

import re

import pytest
from support.quire_serve import example_document, running_service

pytestmark = pytest.mark.server

CHAT = [{"role": "user", "content": "hi"}]
ROUTES = {
    "/v1/completions": {"prompt": "a", "max_tokens": 1},
    "/v1/chat/completions": {"messages": CHAT, "max_tokens": 1},
    "/v1/responses": {"input": "a", "max_output_tokens": 1},
    "/v1/messages": {"messages": CHAT, "max_tokens": 1},
    "/v1/messages/count_tokens": {"messages": CHAT},
    "/v1/completions/render": {"prompt": "a"},
    "/v1/chat/completions/render": {"messages": CHAT},
    "/tokenize": {"prompt": "a"},
    "/detokenize": {"tokens": [5]},
}


@pytest.fixture(scope="module")
def own(tmp_path_factory):
    folder = tmp_path_factory.mktemp("keys")
    secret = folder / "secrets/keys"
    secret.mkdir(parents=True)
    for name in ("acme", "globex", "new"):
        (secret / name).write_text(f"{name}-key-0123456789")
    document = example_document()
    document["spec"]["runtime"] = {"expose": []}
    rules = [{"name": "acme", "adapters": ["s*"]}, {"name": "globex", "adapters": ["pirate"], "requestsPerMinute": 3}]
    document["spec"]["openai"] = {"apiKeysSecretRef": {"name": "keys"}, "keys": rules}
    with running_service(document, folder, f"--secrets-dir={secret.parent}") as service:
        yield service


def ask(service, key, path, body=None):
    return service.request("openai", path, body, key=f"{key}-key-0123456789")


def test_a_key_adds_only_its_own_adapters(own):
    def status(key, model):
        return ask(own, key, "/v1/completions", {"model": model, "prompt": "a", "max_tokens": 1}).status

    assert [status("acme", model) for model in ("sql:0.5", "sql:0.5,pirate:0.1", "none:1")] == [200, 404, 404]


def test_a_key_sees_its_own_adapters(own):
    def models(key):
        return {card["id"] for card in ask(own, key, "/v1/models").body["data"]}

    assert (models("acme"), models("globex"), models("new")) == ({"tales", "sql"}, {"tales", "pirate"}, {"tales"})
    assert ask(own, "acme", "/v1/models/sql").status == 200


@pytest.mark.parametrize("path", ROUTES)
def test_a_forbidden_adapter_and_a_missing_one_give_the_same_answer(own, path):
    def answer(model):
        response = ask(own, "acme", path, ROUTES[path] | {"model": model})
        # An error of the Messages API contains the id of its request.
        text = re.sub(r"'request_id': '\w+'", "", str(response.body))
        return response.status, text.replace(model, "NAME")

    assert answer("sql")[0] != 404
    status, text = answer("pirate")
    assert (status, text) == answer("absent") and status == 404 and "tools" not in text


def test_what_names_all_adapters_is_closed_to_keys(own):
    for path in ("/metrics", "/live", "/live/events"):
        assert ask(own, "acme", path).status == 403
    hidden, missing = (ask(own, "acme", f"/v1/models/{name}") for name in ("pirate", "absent"))
    assert hidden.status == missing.status == 404
    assert str(hidden.body).replace("pirate", "NAME") == str(missing.body).replace("absent", "NAME")


def test_a_key_beyond_its_rate_gets_429_and_no_other_key_does(own):
    body = {"model": "pirate", "prompt": "a", "max_tokens": 1}
    answers = [ask(own, "globex", "/v1/completions", body) for _ in range(4)]
    assert [answer.status for answer in answers] == [200, 200, 200, 429]
    message = answers[-1].body["error"]["message"]
    assert message.startswith("API key 'globex': rate limit reached, requestsPerMinute is 3; retry in ")
    assert ask(own, "acme", "/v1/completions", body | {"model": "sql"}).status == 200
    assert 'quire_api_key_requests_limited_total{api_key="globex",model_name="tales"} 1.0' in own.metrics()
