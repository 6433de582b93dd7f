# SPDX-License-Identifier: Apache-2.0
"""Every field that vLLM and clients of the OpenAI API send is honoured, ignored on purpose, or rejected by its name."""

import re
from pathlib import Path

import pytest

from quire_server.openai.chat import ChatFields
from quire_server.openai.completions import CompletionFields
from quire_server.openai.errors import ApiError
from quire_server.openai.http.ignored_fields import IgnoredFields
from quire_server.openai.messages.message_request import MessageFields
from quire_server.openai.request_fields import BOOKKEEPING_FIELDS, SAMPLING_FIELDS, UNSUPPORTED_FIELDS, parse_fields
from quire_server.openai.responses.response_request import ResponseFields

DOCUMENT, MESSAGES_DOCUMENT = (
    (Path(__file__).resolve().parents[3] / "docs" / name).read_text() for name in ("openai.md", "messages.md")
)
VLLM_FIELDS = """
    model prompt echo frequency_penalty presence_penalty logit_bias logprobs max_tokens n seed stop stream
    stream_options suffix temperature top_p user use_beam_search top_k min_p repetition_penalty length_penalty
    stop_token_ids include_stop_str_in_output ignore_eos min_tokens skip_special_tokens
    spaces_between_special_tokens truncate_prompt_tokens truncation_side allowed_token_ids prompt_logprobs
    logprob_token_ids bad_words prompt_embeds add_special_tokens response_format structured_outputs priority
    request_id session_id return_tokens_as_token_ids return_token_ids cache_salt kv_transfer_params vllm_xargs
    repetition_detection thinking_token_budget stream_interval
"""
CHAT_FIELDS = """
    messages top_logprobs max_completion_tokens tools tool_choice parallel_tool_calls reasoning_effort
    include_reasoning add_generation_prompt continue_final_message documents chat_template
    chat_template_kwargs return_prompt_text mm_processor_kwargs store metadata service_tier safety_identifier
    prompt_cache_key prediction modalities verbosity web_search_options function_call functions
"""
NAMES = {
    CompletionFields: VLLM_FIELDS.split(),
    ChatFields: VLLM_FIELDS.replace("suffix", "").split() + CHAT_FIELDS.split(),
}


@pytest.mark.parametrize(("fields_type", "name"), [(kind, name) for kind, names in NAMES.items() for name in names])
def test_a_field_of_vllm_is_known(fields_type, name):
    if fields_type is ChatFields and name == "prompt":
        return
    try:
        parse_fields({name: {"some": ["value"]}}, fields_type, ignored := IgnoredFields())
    except ApiError as error:
        assert name in error.message
    else:
        assert not ignored


def test_the_page_of_messages_names_every_field():
    assert set(MessageFields.__struct_fields__) - set(re.findall(r"`(\w+)`", MESSAGES_DOCUMENT)) == set()


def test_the_page_names_every_field():
    own = {name for kind in (CompletionFields, ChatFields, ResponseFields) for name in kind.__struct_fields__}
    documented = set(re.findall(r"`(\w+)`", DOCUMENT))
    assert (own | SAMPLING_FIELDS | BOOKKEEPING_FIELDS | UNSUPPORTED_FIELDS.keys()) - documented == set()
