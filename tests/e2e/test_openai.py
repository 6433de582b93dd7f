# SPDX-License-Identifier: Apache-2.0
"""The OpenAI API of the example LLMService: adapters as models, and the same tokens as on the server's ports."""

import pytest

pytestmark = pytest.mark.server

STORY = "Once upon a time"


def test_models_list_the_adapters_with_their_base(service):
    cards = service.request("openai", "/v1/models").body["data"]
    assert [(card["id"], card["parent"]) for card in cards][:1] == [("tales", None)]
    assert {card["id"]: card["parent"] for card in cards[1:]} == {"pirate": "tales", "sql": "tales", "tools": "tales"}


@pytest.mark.parametrize("model", ["tales", "pirate", "sql", "tools"])
def test_greedy_text_equals_that_of_the_server(service, model):
    body = {"model": model, "prompt": STORY, "max_tokens": 30, "temperature": 0}
    answer = service.request("openai", "/v1/completions", body)
    assert answer.status == 200, answer.body
    assert answer.body["model"] == model
    assert answer.body["choices"][0]["text"] == service.text(model, STORY, temperature=0.0, max_tokens=30)


def test_an_unknown_model_is_404(service):
    answer = service.request("openai", "/v1/completions", {"model": "absent", "prompt": STORY})
    assert answer.status == 404 and "tales" in answer.body["error"]["message"]


def test_the_status_contains_the_front(service):
    assert service.status()["processes"]["openai"]["state"] == "Ready"
