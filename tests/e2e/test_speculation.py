# SPDX-License-Identifier: Apache-2.0
"""An LLMService with the EAGLE-3 head of the tiny model: the tokens of the service without it, in fewer steps."""

import pytest
from prometheus_client.parser import text_string_to_metric_families
from support.quire_serve import EXAMPLES, example_document, running_service

pytestmark = pytest.mark.server

PROMPT = "Question: Can I change my order?\nAnswer:"


def test_an_llmservice_with_an_eagle3_head(service, tmp_path):
    document = example_document()
    document["spec"].setdefault("engine", {})["speculativeConfig"] = {
        "method": "eagle3",
        "numSpeculativeTokens": 3,
        "model": {"source": {"path": str(EXAMPLES / "models/tiny-eagle3")}},
    }
    parameters = {"max_tokens": 40, "temperature": 0.0, "ignore_eos": True}
    expected = service.generate("tales", PROMPT, **parameters).body["text_output"]
    with running_service(document, tmp_path) as speculating:
        assert speculating.generate("tales", PROMPT, **parameters).body["text_output"] == expected
        by_name = {
            sample.name: sample.value
            for family in text_string_to_metric_families(speculating.metrics())
            for sample in family.samples
        }
    assert by_name["vllm:spec_decode_num_drafts_total"] > 5
    assert by_name["vllm:spec_decode_num_accepted_tokens_total"] > 10
