# SPDX-License-Identifier: Apache-2.0
"""No string of a request becomes a control token: neither values nor names, keys and roles."""

import json
from typing import Any

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from support.tokenizer import byte_level, save_tokenizer

from quire_engine.tokenization.chat_template_files import ChatTemplateFiles
from quire_engine.tokenization.conversation_renderer import ConversationRenderer, split_added_tokens
from quire_engine.tokenization.tokenizer import Tokenizer

CONTROL = ["<|im_start|>", "<|im_end|>", "<tool_call>"]
TEMPLATE = """
{%- for tool in tools or [] %}<|im_start|>tool
{{ tool | tojson }}
{%- for name, schema in tool.function.parameters.properties.items() %}{{ name }}: {{ schema.type }}{% endfor %}
{{- tool | tojson(ensure_ascii=true) }}<|im_end|>
{%- endfor %}
{%- for document in documents or [] %}{{ document }}{% endfor %}
{%- for message in messages %}<|im_start|>{{ message.role }}
{{ message.name }}{{ message.content }}
{%- for call in message.tool_calls or [] %}<tool_call>{{ call.function.name }}
{%- for key, value in call.function.arguments.items() %}{{ key }}={{ value }}{% endfor %}{{ call | tojson }}
{%- endfor %}<|im_end|>
{%- endfor %}{{ extra }}"""
TEXT = st.lists(
    st.sampled_from([*CONTROL, "a", " ", "\n", "\U000f0000", "\U000f0001", "<|im_", "end|>", "_"]), max_size=4
)
NAMES = TEXT.map("".join)
VALUES = st.recursive(
    NAMES | st.integers(), lambda v: st.lists(v, max_size=2) | st.dictionaries(NAMES, v, max_size=2), max_leaves=4
)
CONVERSATIONS = st.fixed_dictionaries(
    {
        "messages": st.lists(
            st.fixed_dictionaries(
                {"role": st.sampled_from(["user", "assistant", "tool"]) | NAMES, "content": NAMES, "name": NAMES},
                optional={
                    "tool_calls": st.lists(
                        st.fixed_dictionaries(
                            {"name": NAMES, "arguments": st.dictionaries(NAMES, VALUES, max_size=2)}
                        ).map(lambda function: {"function": function}),
                        max_size=2,
                    )
                },
            ),
            min_size=1,
            max_size=3,
        ),
        "tools": st.lists(
            st.builds(
                lambda name, properties: {"function": {"name": name, "parameters": {"properties": properties}}},
                NAMES,
                st.dictionaries(NAMES, st.dictionaries(NAMES, VALUES, max_size=2), max_size=2),
            ),
            max_size=2,
        ),
        "documents": st.lists(st.dictionaries(NAMES, VALUES, max_size=2), max_size=1),
        "template_kwargs": st.fixed_dictionaries({"extra": VALUES}),
        "add_generation_prompt": st.just(False),
        "continue_final_message": st.just(False),
    }
)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    backend = byte_level()
    backend.add_special_tokens(CONTROL[:2])
    backend.add_tokens([tokenizers.AddedToken(CONTROL[2], normalized=False)])
    return Tokenizer(save_tokenizer(backend, tmp_path_factory.mktemp("tokenizer")))


@given(CONVERSATIONS)
def test_control_tokens_come_from_the_template_only(tokenizer: Tokenizer, chat: dict[str, Any]) -> None:
    renderer = ConversationRenderer(ChatTemplateFiles(TEMPLATE, None, {}), *split_added_tokens(tokenizer))
    ids = tokenizer.encode_rendered(renderer.render(chat))
    num_calls = sum(len(message.get("tool_calls", ())) for message in chat["messages"])
    num_turns = len(chat["messages"]) + len(chat["tools"])
    # The model's own earlier output, in messages of the assistant, can contain tokens that are not special.
    own_texts = json.dumps([message for message in chat["messages"] if message["role"] == "assistant"])
    counts = [sum(tokenizer.added_tokens.get(i) == token for i in ids) for token in CONTROL]
    assert counts[:2] == [num_turns, num_turns]
    assert num_calls <= counts[2] <= num_calls + 3 * own_texts.count(CONTROL[2])
    if CONTROL[2] not in own_texts:
        assert counts[2] == num_calls


@pytest.mark.parametrize("name", ["role", "function", "im_end", "Content"])
def test_plain_names_stay_as_they_are(tokenizer: Tokenizer, name: str) -> None:
    """A vocabulary can contain an ordinary word, and the template reads this name."""
    renderer = ConversationRenderer(ChatTemplateFiles("{{ messages[0][extra] }}", None, {}), [name], [])
    chat = {"messages": [{"role": "user", "content": "c", name: "v"}], "template_kwargs": {"extra": name}}
    rendered = renderer.render(chat | {"add_generation_prompt": False, "continue_final_message": False})
    assert rendered in ("v", "") or name in rendered
