# SPDX-License-Identifier: Apache-2.0
"""Conversations become the prompts that transformers makes of them, and templates can do no harm."""

import json
from pathlib import Path
from typing import Any

import pytest
from support.tiny_checkpoints import VOCAB, make_checkpoint
from support.tokenizer import byte_level, save_tokenizer
from transformers import AutoTokenizer

from quire_engine import LLM, SamplingParams
from quire_engine.tokenization.chat_template import ChatTemplate
from quire_spec.errors import ConfigError, InvalidArgument

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] | trim }}"
    "{{ '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
RICH = """{{- bos_token }}
{%- if tools %}
    {{- "Tools: " + (tools | tojson(indent=2)) }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == "ignored" %}{% continue %}{% endif %}
    {%- if message.role not in ["user", "assistant", "system"] %}
        {{- raise_exception("roles must be user or assistant, not " + message.role) }}
    {%- endif %}
    {% generation %}[{{ message.role }}{{ loop.index }}] {{ message.content }}{% endgeneration %}
    {% if not loop.last %}{{ eos_token }}{% endif %}

{%- endfor %}
{{- strftime_now("%Y")[:2] }}{{ extra | default("none") }}
{%- set ns = namespace(last="") %}{% for message in messages %}{% set ns.last = message.role %}{% endfor %}{{ ns.last }}
{%- if add_generation_prompt %}[assistant]{% endif %}"""
TALK = [
    {"role": "system", "content": 'Be <kind> & "brief".'},
    {"role": "user", "content": "  Grüße 🙂\n"},
    {"role": "ignored", "content": "x"},
    {"role": "assistant", "content": "Hello, the fox"},
]
TOOLS = [{"type": "function", "function": {"name": "größe", "parameters": {"a": [1, "<b>"]}}}]


def _folder(tmp_path: Path, template: Any = None, **files: str) -> Path:
    config = {} if template is None else {"chat_template": template}
    save_tokenizer(
        byte_level(), tmp_path, bos_token="<s>", eos_token={"content": "</s>", "__type": "AddedToken"}, **config
    )
    for name, text in files.items():
        (tmp_path / f"{name}.jinja").write_text(text, encoding="utf-8")
    return tmp_path


@pytest.mark.parametrize("template", [CHATML, RICH], ids=["chatml", "rich"])
@pytest.mark.parametrize("options", [{}, {"tools": TOOLS, "extra": "é"}, {"add_generation_prompt": True}], ids=str)
def test_prompts_are_those_of_transformers(tmp_path: Path, template: str, options: dict[str, Any]) -> None:
    folder = _folder(tmp_path, template)
    oracle = AutoTokenizer.from_pretrained(folder)
    wanted = oracle.apply_chat_template(TALK, tokenize=False, **({"add_generation_prompt": False} | options))
    found = ChatTemplate.from_folder(folder)
    assert found is not None
    assert found.render(TALK, **({"add_generation_prompt": False} | options)) == wanted
    unfinished = oracle.apply_chat_template(TALK, tokenize=False, continue_final_message=True)
    assert found.render(TALK, add_generation_prompt=False, continue_final_message=True) == unfinished
    assert unfinished.endswith("Hello, the fox")


def test_where_a_template_is_found(tmp_path: Path) -> None:
    said = [{"role": "user", "content": "a"}]
    assert ChatTemplate.from_folder(_folder(tmp_path / "none")) is None
    several = [{"name": "rag", "template": "rag"}, {"name": "default", "template": "several"}]
    texts = {
        "several": _folder(tmp_path / "several", several),
        "file": _folder(tmp_path / "file", "config", chat_template="file"),
        "config": _folder(tmp_path / "config", "config"),
    }
    for text, folder in texts.items():
        found = ChatTemplate.from_folder(folder)
        assert found is not None and found.render(said) == text


def test_conversations_with_tools_may_have_a_template_of_their_own(tmp_path: Path) -> None:
    said = [{"role": "user", "content": "a"}]
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]
    file = _folder(tmp_path / "file", chat_template="plain")
    (file / "additional_chat_templates").mkdir()
    (file / "additional_chat_templates/tool_use.jinja").write_text("tools")
    for folder in (_folder(tmp_path / "named", named), file):
        for tools, text in ((False, "plain"), (True, "tools")):
            found = ChatTemplate.from_folder(folder, has_tools=tools)
            assert found is not None and found.render(said) == text
    only = ChatTemplate.from_folder(_folder(tmp_path / "only", named[:1]), has_tools=True)
    assert only is not None and only.render(said) == "plain"
    with pytest.raises(ConfigError, match="chat_template: neither a template nor a list of named ones"):
        ChatTemplate.from_folder(_folder(tmp_path / "wrong", ["plain"]))


@pytest.mark.parametrize("said", ["e", "", " ", "end", "<|im_end|>", "m\n", "CONTINUE_FINAL_MESSAGE "])
@pytest.mark.parametrize("template", [CHATML, CHATML.replace(" | trim", "")], ids=["trims", "keeps"])
def test_the_last_message_ends_where_it_ends(tmp_path: Path, template: str, said: str) -> None:
    # Its letters are found in what the template writes behind it, too.
    talk = [{"role": "user", "content": "x"}, {"role": "assistant", "content": said}]
    oracle = AutoTokenizer.from_pretrained(_folder(tmp_path, template))
    wanted = oracle.apply_chat_template(talk, tokenize=False, continue_final_message=True)
    options = {"add_generation_prompt": False, "continue_final_message": True}
    assert ChatTemplate(template).render(talk, **options) == wanted


def test_null_is_left_out_and_thoughts_have_several_names(tmp_path: Path) -> None:
    template = (
        "{% for m in messages %}{{ m.role }} {{ m.content }} {{ m.reasoning_content }} {{ m.thinking }}"
        "{{ m.name is defined }};{% endfor %}"
    )
    talk = [
        {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f"}}], "name": None},
        *({"role": "assistant", "content": "a", name: "hm"} for name in ("reasoning", "thinking", "reasoning_content")),
    ]
    oracle = AutoTokenizer.from_pretrained(_folder(tmp_path, template))
    assert ChatTemplate(template).render(talk) == oracle.apply_chat_template(talk, tokenize=False)


@pytest.mark.parametrize(
    ("template", "messages", "words"),
    [
        ("{% if %}", TALK, "chat_template: Expected an expression"),
        (RICH, [{"role": "robot", "content": "x"}], "roles must be user or assistant, not robot"),
        (CHATML, [], "messages: empty"),
        (CHATML, ["hello"], "no object with a 'role'"),
        (CHATML, [{"role": "user"}], "the one of role 'user' has no 'content'"),
        (CHATML, [{"role": "user", "content": 5}], "content 5 is no text"),
        ("{{ messages[7].content }}", TALK, "the chat template fails on them"),
        (CHATML, [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}], "other than text"),
        ("{{ messages.__class__.__mro__ }}", TALK, "unsafe"),
        ("{{ messages.append(1) }}", TALK, "not safely callable|unsafe"),
        ("{{ ''.__class__.__base__.__subclasses__() }}", TALK, "unsafe"),
        ("{% for i in range(10 ** 9) %}{% endfor %}", TALK, "Range too big"),
        # What jinja2 takes, and Python then does not.
        ("{% for i in [] %}" * 30 + "{% endfor %}" * 30, TALK, "chat_template: too many statically nested blocks"),
        ("{{ " + "(" * 2000 + "1" + ")" * 2000 + " }}", TALK, "chat_template: maximum recursion depth exceeded"),
        ("{{ f(a=1, a=2) }}", TALK, "chat_template: keyword argument repeated"),
        ("{{ 9 ** 99999 }}", TALK, "chat_template: Exceeds the limit"),
    ],
)
def test_what_cannot_be_is_refused_with_the_reason(template: str, messages: Any, words: str) -> None:
    with pytest.raises(InvalidArgument, match=words):
        ChatTemplate(template).render(messages)


def test_parts_of_text_are_joined_and_both_endings_exclude_each_other() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert "a\nb" in ChatTemplate(CHATML).render([{"role": "user", "content": parts}])
    with pytest.raises(InvalidArgument, match="continue_final_message"):
        ChatTemplate(CHATML).render(TALK, add_generation_prompt=True, continue_final_message=True)
    with pytest.raises(InvalidArgument, match="continue_final_message"):
        ChatTemplate("x").render(TALK, add_generation_prompt=False, continue_final_message=True)


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    folder = make_checkpoint(tmp_path_factory.mktemp("model"), "llama")
    save_tokenizer(byte_level(VOCAB - 1), folder, chat_template="{{ bos_token }}" + CHATML)
    recommended = {
        "temperature": 0.6,
        "top_p": 0.95,
        "max_new_tokens": 9,
        "repetition_penalty": None,
        "do_sample": True,
    }
    (folder / "generation_config.json").write_text(json.dumps(recommended))
    return LLM(folder, dtype="float32", max_model_len=256, kv_cache_memory_bytes=2**22)


def test_chat_is_generate_with_the_rendered_prompt(llm: LLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=8)
    talks = [[{"role": "user", "content": "the fox"}], TALK]
    outputs = llm.chat(talks, params, use_tqdm=False)
    oracle = AutoTokenizer.from_pretrained(llm.engine.model_folder)
    for talk, output in zip(talks, outputs, strict=True):
        ids = oracle.apply_chat_template(talk, add_generation_prompt=True)["input_ids"]
        assert output.prompt_token_ids == ids and ids.count(0) == 1
        assert output.prompt == oracle.apply_chat_template(talk, add_generation_prompt=True, tokenize=False)
        [plain] = llm.generate({"prompt_token_ids": ids}, params, use_tqdm=False)
        assert plain.outputs == output.outputs
    [one] = llm.chat(talks[0], params, use_tqdm=False)
    assert one.outputs == outputs[0].outputs
    [other] = llm.chat(talks[0], params, use_tqdm=False, chat_template="{{ messages[0].content }}")
    assert other.prompt == "the fox"


def test_contents_are_given_to_templates_as_texts(llm: LLM) -> None:
    params = SamplingParams(max_tokens=1)
    [wanted] = llm.chat(TALK, params, use_tqdm=False)
    [got] = llm.chat(TALK, params, use_tqdm=False, chat_template_content_format="string")
    assert got.prompt == wanted.prompt
    with pytest.raises(InvalidArgument, match="chat_template_content_format: 'openai' is not supported"):
        llm.chat(TALK, params, use_tqdm=False, chat_template_content_format="openai")


@pytest.mark.parametrize("messages", [None, 5, "hello", {"role": "user", "content": "a"}, [1], [TALK, "hello"], {3}])
def test_what_is_no_conversation_is_refused(llm: LLM, messages: Any) -> None:
    with pytest.raises(InvalidArgument, match=r"messages: .* is neither a list of messages nor one of such lists"):
        llm.chat(messages, use_tqdm=False)


@pytest.mark.parametrize("given", [3, "ab", [1], {1: 2}])
def test_arguments_that_are_no_object_are_refused(llm: LLM, given: Any) -> None:
    with pytest.raises(InvalidArgument, match=r"chat_template_kwargs: .* is no object of arguments by name"):
        llm.chat(TALK, use_tqdm=False, chat_template_kwargs=given)


def test_template_arguments_go_over_the_others(llm: LLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=4)
    [wanted] = llm.chat(TALK, params, use_tqdm=False, add_generation_prompt=False)
    [got] = llm.chat(TALK, params, use_tqdm=False, chat_template_kwargs={"add_generation_prompt": False, "tools": None})
    assert got.prompt == wanted.prompt
    with pytest.raises(InvalidArgument, match="chat_template_kwargs: 'messages'"):
        llm.chat(TALK, params, use_tqdm=False, chat_template_kwargs={"messages": []})


def test_a_model_without_a_template_says_so(tmp_path: Path, llm: LLM) -> None:
    folder = _folder(tmp_path)
    other = LLM(
        llm.engine.model_folder, tokenizer=folder, dtype="float32", max_model_len=64, kv_cache_memory_bytes=2**21
    )
    with pytest.raises(InvalidArgument, match=r"has no chat template \(chat_template.jinja, or"):
        other.chat([{"role": "user", "content": "a"}])
    file = tmp_path / "mine.txt"
    file.write_text("{{ bos_token }}{{ messages[0].content }}")
    [output] = other.chat([{"role": "user", "content": "a"}], chat_template=str(file), use_tqdm=False)
    assert output.prompt == "<s>a"
    with pytest.raises(InvalidArgument, match=r"chat_template: .*No such file"):
        other.chat([{"role": "user", "content": "a"}], chat_template="/nowhere")


def test_defaults_are_what_the_model_recommends(llm: LLM) -> None:
    assert llm.get_default_sampling_params() == SamplingParams(temperature=0.6, top_p=0.95, max_tokens=9)
    [output] = llm.generate("the fox", use_tqdm=False)
    assert len(output.outputs[0].token_ids) == 9
    assert llm.get_tokenizer().encode("fox") == output.prompt_token_ids[:1] + llm.get_tokenizer().encode("fox")[1:]


@pytest.mark.parametrize("content", ["{", "[]", '{"temperature": "hot"}'])
def test_a_broken_recommendation_is_named(llm: LLM, content: str) -> None:
    path = llm.engine.model_folder / "generation_config.json"
    before = path.read_text()
    path.write_text(content)
    try:
        with pytest.raises(ConfigError, match=r"generation_config\.json: "):
            llm.generate("the fox", use_tqdm=False)
    finally:
        path.write_text(before)


def test_priorities_need_an_engine_that_has_them(llm: LLM) -> None:
    with pytest.raises(InvalidArgument, match="priority: 3, but scheduling_policy is fcfs"):
        llm.generate(["a", "b"], priority=[0, 3])
    with pytest.raises(InvalidArgument, match="priority: 1 entries for 2 prompts"):
        llm.generate(["a", "b"], priority=[0])
    settings = {"dtype": "float32", "max_model_len": 64, "kv_cache_memory_bytes": 2**21, "max_num_seqs": 1}
    ranked = LLM(llm.engine.model_folder, scheduling_policy="priority", **settings)
    order: list[int] = []
    step = ranked.engine.step

    def watched() -> Any:
        results = step()
        order.extend(result.id for result in results.results if result.finish_reason)
        return results

    ranked.engine.step = watched  # type: ignore[method-assign]
    ranked.generate(["a", "b", "c"], SamplingParams(max_tokens=2), use_tqdm=False, priority=[2, 0, 1])
    assert order == [1, 2, 0]
