# SPDX-License-Identifier: Apache-2.0
"""Embeddings of `quire serve`: of the base model and of adapters, by OpenAI's client and as in vllm_backend."""

import json

import openai
import pytest
import torch
from support.pooling_checkpoints import embed
from support.quire_serve import EXAMPLES, example_document, running_service
from transformers import AutoTokenizer

pytestmark = pytest.mark.server

TINY = EXAMPLES / "models/tiny"
STORY = "Once upon a time, there was a little dog."


def test_embeddings_of_a_model_and_its_adapters(tmp_path):
    document = example_document()
    document["spec"]["engine"]["convert"] = "embed"
    adapters = {a["name"]: EXAMPLES / a["source"]["path"] for a in document["spec"]["adapters"] if "source" in a}
    tokens = AutoTokenizer.from_pretrained(TINY)(STORY).input_ids
    with running_service(document, tmp_path) as service:
        url = f"http://127.0.0.1:{service.ports['openai']}/v1"
        for name, adapter in [("tales", None), *adapters.items()]:
            expected = embed(TINY, tokens, adapter)
            with openai.OpenAI(base_url=url, api_key="none", max_retries=0) as client:
                [entry] = client.embeddings.create(model=name, input=STORY).data
            body = {"embedding_request": json.dumps({"input": STORY}), "return_num_input_tokens": True}
            response = service.request("http", f"/v2/models/{name}/generate", body)
            assert response.status == 200, response
            assert response.body["num_input_tokens"] == len(tokens)
            for vector in (entry.embedding, json.loads(response.body["text_output"])):
                assert (torch.tensor(vector) - expected).abs().max() < 2e-5
        assert service.text("tales", STORY, max_tokens=4)
        wrong = service.request("http", "/v2/models/tales/generate", {"embedding_request": '{"input": [""]}'})
        assert wrong.status == 400 and "embedding_request: input: must be a text" in wrong.body["error"]
