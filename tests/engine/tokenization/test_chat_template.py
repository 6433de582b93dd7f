# SPDX-License-Identifier: Apache-2.0
"""Chat templates render the same prompts as transformers, and cannot access files or Python."""

from pathlib import Path
from typing import Any

import pytest
from support.tokenizer import byte_level, save_tokenizer
from transformers import AutoTokenizer

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
CONVERSATION = [
    {"role": "system", "content": 'Be <kind> & "brief".'},
    {"role": "user", "content": "  Grüße 🙂\n"},
    {"role": "ignored", "content": "x"},
    {"role": "assistant", "content": "Hello, the fox"},
]
TOOLS = [{"type": "function", "function": {"name": "größe", "parameters": {"a": [1, "<b>"]}}}]


def _save_template(tmp_path: Path, template: Any = None, **files: str) -> Path:
    config = {} if template is None else {"chat_template": template}
    save_tokenizer(
        byte_level(), tmp_path, bos_token="<s>", eos_token={"content": "</s>", "__type": "AddedToken"}, **config
    )
    for name, text in files.items():
        (tmp_path / f"{name}.jinja").write_text(text, encoding="utf-8")
    return tmp_path


@pytest.mark.parametrize("template", [CHATML, RICH], ids=["chatml", "rich"])
@pytest.mark.parametrize("options", [{}, {"tools": TOOLS, "extra": "é"}, {"add_generation_prompt": True}], ids=str)
def test_prompts_match_transformers(tmp_path: Path, template: str, options: dict[str, Any]) -> None:
    folder = _save_template(tmp_path, template)
    reference = AutoTokenizer.from_pretrained(folder)
    expected = reference.apply_chat_template(
        CONVERSATION, tokenize=False, **({"add_generation_prompt": False} | options)
    )
    chat_template = ChatTemplate.from_folder(folder)
    assert chat_template is not None
    assert chat_template.render(CONVERSATION, **({"add_generation_prompt": False} | options)) == expected
    unfinished = reference.apply_chat_template(CONVERSATION, tokenize=False, continue_final_message=True)
    assert chat_template.render(CONVERSATION, add_generation_prompt=False, continue_final_message=True) == unfinished
    assert unfinished.endswith("Hello, the fox")


def test_template_is_read_from_its_file_or_from_tokenizer_config(tmp_path: Path) -> None:
    conversation = [{"role": "user", "content": "a"}]
    assert ChatTemplate.from_folder(_save_template(tmp_path / "none")) is None
    several = [{"name": "rag", "template": "rag"}, {"name": "default", "template": "several"}]
    texts = {
        "several": _save_template(tmp_path / "several", several),
        "file": _save_template(tmp_path / "file", "config", chat_template="file"),
        "config": _save_template(tmp_path / "config", "config"),
    }
    for text, folder in texts.items():
        chat_template = ChatTemplate.from_folder(folder)
        assert chat_template is not None and chat_template.render(conversation) == text


def test_template_for_tools_is_preferred_if_there_are_tools(tmp_path: Path) -> None:
    conversation = [{"role": "user", "content": "a"}]
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]
    file = _save_template(tmp_path / "file", chat_template="plain")
    (file / "additional_chat_templates").mkdir()
    (file / "additional_chat_templates/tool_use.jinja").write_text("tools")
    for folder in (_save_template(tmp_path / "named", named), file):
        for tools, text in ((False, "plain"), (True, "tools")):
            chat_template = ChatTemplate.from_folder(folder, has_tools=tools)
            assert chat_template is not None and chat_template.render(conversation) == text
    only = ChatTemplate.from_folder(_save_template(tmp_path / "only", named[:1]), has_tools=True)
    assert only is not None and only.render(conversation) == "plain"
    with pytest.raises(ConfigError, match="chat_template must be a template or a list of named templates"):
        ChatTemplate.from_folder(_save_template(tmp_path / "wrong", ["plain"]))


@pytest.mark.parametrize("content", ["e", "", " ", "end", "<|im_end|>", "m\n", "CONTINUE_FINAL_MESSAGE "])
@pytest.mark.parametrize("template", [CHATML, CHATML.replace(" | trim", "")], ids=["trims", "keeps"])
def test_continued_message_ends_at_its_own_end(tmp_path: Path, template: str, content: str) -> None:
    # The text that the template writes after the message contains the same characters.
    conversation = [{"role": "user", "content": "x"}, {"role": "assistant", "content": content}]
    reference = AutoTokenizer.from_pretrained(_save_template(tmp_path, template))
    expected = reference.apply_chat_template(conversation, tokenize=False, continue_final_message=True)
    options = {"add_generation_prompt": False, "continue_final_message": True}
    assert ChatTemplate(template).render(conversation, **options) == expected


def test_null_fields_are_removed_and_reasoning_has_several_names(tmp_path: Path) -> None:
    template = (
        "{% for m in messages %}{{ m.role }} {{ m.content }} {{ m.reasoning_content }} {{ m.thinking }}"
        "{{ m.name is defined }};{% endfor %}"
    )
    conversation = [
        {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f"}}], "name": None},
        *({"role": "assistant", "content": "a", name: "hm"} for name in ("reasoning", "thinking", "reasoning_content")),
    ]
    reference = AutoTokenizer.from_pretrained(_save_template(tmp_path, template))
    assert ChatTemplate(template).render(conversation) == reference.apply_chat_template(conversation, tokenize=False)


@pytest.mark.parametrize(
    ("template", "messages", "message"),
    [
        ("{% if %}", CONVERSATION, "chat_template: Expected an expression"),
        (RICH, [{"role": "robot", "content": "x"}], "roles must be user or assistant, not robot"),
        (CHATML, [], "messages: must not be empty"),
        (CHATML, ["hello"], "must be objects with 'role'"),
        (CHATML, [{"role": "user"}], "the message of role 'user' has no 'content'"),
        (CHATML, [{"role": "user", "content": 5}], "content must be a text, got 5"),
        ("{{ messages[7].content }}", CONVERSATION, "the chat template failed"),
        (CHATML, [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}], "only texts and images"),
        ("{{ messages.__class__.__mro__ }}", CONVERSATION, "unsafe"),
        ("{{ messages.append(1) }}", CONVERSATION, "not safely callable|unsafe"),
        ("{{ ''.__class__.__base__.__subclasses__() }}", CONVERSATION, "unsafe"),
        ("{% for i in range(10 ** 9) %}{% endfor %}", CONVERSATION, "Range too big"),
        # Accepted by jinja2, but rejected by Python's compiler.
        (
            "{% for i in [] %}" * 30 + "{% endfor %}" * 30,
            CONVERSATION,
            "chat_template: too many statically nested blocks",
        ),
        (
            "{{ " + "(" * 2000 + "1" + ")" * 2000 + " }}",
            CONVERSATION,
            "chat_template: maximum recursion depth exceeded",
        ),
        ("{{ f(a=1, a=2) }}", CONVERSATION, "chat_template: keyword argument repeated"),
        ("{{ 9 ** 99999 }}", CONVERSATION, "chat_template: Exceeds the limit"),
    ],
)
def test_invalid_templates_and_messages_are_rejected_with_the_reason(
    template: str, messages: Any, message: str
) -> None:
    with pytest.raises(InvalidArgument, match=message):
        ChatTemplate(template).render(messages)


def test_arguments_of_tool_calls_are_objects_for_the_template() -> None:
    template = ChatTemplate("{{ messages[0].tool_calls[0].function.arguments | tojson }}")
    for arguments, rendered in (('{"a": "b"}', '{"a": "b"}'), ({"a": 1}, '{"a": 1}'), (" ", "{}")):
        call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
        assert template.render([{"role": "assistant", "content": None, "tool_calls": [call]}]) == rendered
    call["function"] = {"name": "f", "arguments": "{"}
    with pytest.raises(InvalidArgument, match="arguments of a tool call are not JSON"):
        template.render([{"role": "assistant", "tool_calls": [call]}])


def test_text_parts_are_joined_and_both_endings_exclude_each_other() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert "a\nb" in ChatTemplate(CHATML).render([{"role": "user", "content": parts}])
    with pytest.raises(InvalidArgument, match="continue_final_message"):
        ChatTemplate(CHATML).render(CONVERSATION, add_generation_prompt=True, continue_final_message=True)
    with pytest.raises(InvalidArgument, match="continue_final_message"):
        ChatTemplate("x").render(CONVERSATION, add_generation_prompt=False, continue_final_message=True)
