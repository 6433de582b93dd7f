# SPDX-License-Identifier: Apache-2.0
"""LLM.chat generates from the rendered prompt; defaults of the model; priorities."""

import json
from pathlib import Path
from typing import Any

import pytest
from support.tiny_checkpoints import VOCAB, make_checkpoint
from support.tokenizer import byte_level, save_tokenizer
from transformers import AutoTokenizer

from quire_engine import LLM, SamplingParams
from quire_spec.errors import ConfigError, InvalidArgument

TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}[{{ message['role'] }}] {{ message['content'] | trim }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
CONVERSATION = [
    {"role": "system", "content": 'Be <kind> & "brief".'},
    {"role": "user", "content": "  Grüße 🙂\n"},
    {"role": "assistant", "content": "Hello, the fox"},
]


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    folder = make_checkpoint(tmp_path_factory.mktemp("model"), "llama")
    save_tokenizer(byte_level(VOCAB - 1), folder, chat_template=TEMPLATE)
    generation_config = {
        "temperature": 0.6,
        "top_p": 0.95,
        "max_new_tokens": 9.0,
        "repetition_penalty": None,
        "do_sample": True,
    }
    (folder / "generation_config.json").write_text(json.dumps(generation_config))
    return LLM(folder, dtype="float32", max_model_len=256, kv_cache_memory_bytes=2**22)


def test_chat_equals_generate_with_the_rendered_prompt(llm: LLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=8)
    conversations = [[{"role": "user", "content": "the fox"}], CONVERSATION]
    outputs = llm.chat(conversations, params, use_tqdm=False)
    reference = AutoTokenizer.from_pretrained(llm.engine.model_folder)
    for conversation, output in zip(conversations, outputs, strict=True):
        ids = reference.apply_chat_template(conversation, add_generation_prompt=True)["input_ids"]
        assert output.prompt_token_ids == ids and ids.count(0) == 1
        assert output.prompt == reference.apply_chat_template(conversation, add_generation_prompt=True, tokenize=False)
        [plain] = llm.generate({"prompt_token_ids": ids}, params, use_tqdm=False)
        assert plain.outputs == output.outputs
    [one] = llm.chat(conversations[0], params, use_tqdm=False)
    assert one.outputs == outputs[0].outputs
    [other] = llm.chat(conversations[0], params, use_tqdm=False, chat_template="{{ messages[0].content }}")
    assert other.prompt == "the fox"


_MESSAGES = "messages: must be a list of messages or a list of such lists, got"
_KWARGS = "chat_template_kwargs: must be an object of arguments by name, got"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        *(({"messages": m}, _MESSAGES) for m in (None, 5, "hello", CONVERSATION[1], [1], [CONVERSATION, "hello"], {3})),
        *(({"chat_template_kwargs": kwargs}, _KWARGS) for kwargs in (3, "ab", [1], {1: 2})),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs: 'messages'"),
        ({"chat_template_content_format": "openai"}, "chat_template_content_format: 'openai' is not supported"),
        ({"chat_template": "/nowhere"}, "chat_template: .*No such file"),
        ({"messages": [[("role", "user")]]}, "messages: each must be an object such as"),
        ({"tools": 5, "chat_template": "{% for t in tools %}{% endfor %}"}, "'int' object is not iterable"),
        ({"messages": [{**CONVERSATION[1], "x": json.loads("[" * 500 + "]" * 500)}]}, "messages: .* nested too deeply"),
    ],
    ids=str,
)
def test_invalid_arguments_are_rejected(llm: LLM, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        llm.chat(**({"messages": CONVERSATION, "use_tqdm": False} | arguments))


def test_template_kwargs_override_the_other_arguments(llm: LLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=4)
    [expected] = llm.chat(CONVERSATION, params, use_tqdm=False, add_generation_prompt=False)
    [output] = llm.chat(
        CONVERSATION, params, use_tqdm=False, chat_template_kwargs={"add_generation_prompt": False, "tools": None}
    )
    assert output.prompt == expected.prompt


def test_model_without_a_template_requires_one_as_argument(tmp_path: Path, llm: LLM) -> None:
    folder = save_tokenizer(byte_level(), tmp_path, bos_token="<s>")
    other = LLM(
        llm.engine.model_folder, tokenizer=folder, dtype="float32", max_model_len=64, kv_cache_memory_bytes=2**21
    )
    with pytest.raises(InvalidArgument, match=r"has no chat template \(chat_template.jinja, or"):
        other.chat([{"role": "user", "content": "a"}])
    file = tmp_path / "mine.txt"
    file.write_text("{{ bos_token }}{{ messages[0].content }}")
    [output] = other.chat([{"role": "user", "content": "a"}], chat_template=str(file), use_tqdm=False)
    assert output.prompt == "<s>a"


def test_default_parameters_are_those_of_generation_config(llm: LLM) -> None:
    assert llm.get_default_sampling_params() == SamplingParams(temperature=0.6, top_p=0.95, max_tokens=9)
    [output] = llm.generate("the fox", use_tqdm=False)
    assert len(output.outputs[0].token_ids) == 9
    assert llm.get_tokenizer().encode("fox") == output.prompt_token_ids[:1] + llm.get_tokenizer().encode("fox")[1:]


@pytest.mark.parametrize("content", ["{", "[]", '{"temperature": "hot"}'])
def test_invalid_generation_config_is_reported(llm: LLM, content: str) -> None:
    path = llm.engine.model_folder / "generation_config.json"
    original_text = path.read_text()
    path.write_text(content)
    try:
        with pytest.raises(ConfigError, match=r"generation_config\.json: "):
            llm.generate("the fox", use_tqdm=False)
    finally:
        path.write_text(original_text)


def test_urgent_requests_finish_first(llm: LLM) -> None:
    settings = {"dtype": "float32", "max_model_len": 64, "kv_cache_memory_bytes": 2**21, "max_num_seqs": 1}
    llm_with_priorities = LLM(llm.engine.model_folder, scheduling_policy="priority", **settings)
    order: list[int] = []
    step = llm_with_priorities.engine.step

    def recording_step() -> Any:
        results = step()
        order.extend(result.id for result in results.results if result.finish_reason)
        return results

    llm_with_priorities.engine.step = recording_step  # type: ignore[method-assign]
    llm_with_priorities.generate(["a", "b", "c"], SamplingParams(max_tokens=2), use_tqdm=False, priority=[2, 0, 1])
    assert order == [1, 2, 0]
