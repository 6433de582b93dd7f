# SPDX-License-Identifier: Apache-2.0
"""The conversations that the tiny model is trained on: rendering, labels, and calls that repeat the request."""

import json
import random
import re
import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import pytest
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

_ROOT = Path(__file__).resolve().parents[2]
# The scripts in hack/ are run by path and import their neighbours by bare name.
sys.path.insert(0, str(_ROOT / "hack" / "tiny"))

import corpus  # noqa: E402
import objects  # noqa: E402
import tokens  # noqa: E402
import tools  # noqa: E402
import turns  # noqa: E402


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    """The shipped vocabulary with the tokens of turns behind it."""
    tokenizer = Tokenizer.from_file(str(_ROOT / "examples/models/tiny/tokenizer.json"))
    if tokenizer.token_to_id(turns.END_OF_TURN) is None:
        tokens.add_turns(tokenizer)
    return tokenizer


def tool_chats(count: int) -> Iterator[turns.Chat]:
    rng = random.Random(77_777)
    return (tools.chat(rng) for _ in range(count))


def test_new_tokens_follow_the_vocabulary(tokenizer: Tokenizer) -> None:
    ids = sorted(tokenizer.token_to_id(token) for token in (*turns.CONTROL, *turns.MARKS))
    assert ids == list(range(2048, 2064))
    encoded = tokenizer.encode(f"<|im_start|>user<think>{turns.END_OF_TURN}", add_special_tokens=False)
    assert tokenizer.decode(encoded.ids, skip_special_tokens=True) == "user<think>"
    assert turns.without_tokens(f"<|im_start|>user\n<think>a</think>{turns.END_OF_TURN}") == "user\na"


def test_prompt_and_reply_are_what_transformers_renders(tokenizer: Tokenizer) -> None:
    theirs = PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=turns.TEMPLATE_FILE.read_text())
    for chat in tool_chats(100):
        prompt, text = chat.rendered()
        reply = turns.said("assistant", chat.reply)
        assert prompt + text + "\n" == turns.render([*chat.messages, reply], chat.tools)
        template = {"add_generation_prompt": True, "tokenize": False}
        assert theirs.apply_chat_template(list(chat.messages), list(chat.tools), **template) == prompt


def test_template_keeps_the_reasoning_of_the_last_exchange_only() -> None:
    reasoned = [turns.said("user", "Hi"), {"role": "assistant", "content": "b", "reasoning_content": "a"}]
    assert turns.render(reasoned).endswith("assistant\n<think>\na\n</think>\n\nb<|im_end|>\n")
    assert "<think>" not in turns.render([*reasoned, turns.said("user", "Hi")], add_generation_prompt=True)
    assert turns.render(reasoned[:1], add_generation_prompt=True, enable_thinking=False).endswith("\n\n</think>\n\n")
    unusual = [
        {"name": "f"},
        {"type": "function", "function": {"name": "g", "parameters": {"properties": {"a": True}}}},
    ]
    offered = turns.render([turns.said("developer", "Be brief.")], unusual)
    assert offered.startswith("<|im_start|>system\nBe brief.\n\n# Functions\nf()\ng(a)<|im_end|>\n")


def test_calls_name_an_offered_function_and_copy_the_values_of_the_request() -> None:
    for chat in tool_chats(300):
        parameters = {
            tool["function"]["name"]: list(tool["function"]["parameters"]["properties"]) for tool in chat.tools
        }
        for call in re.findall(r"<tool_call>\n(.*)\n</tool_call>", chat.reply):
            written = json.loads(call)
            assert list(written["arguments"]) == parameters[written["name"]]
            assert all(str(value) in chat.messages[-1]["content"] for value in written["arguments"].values())
    rng = random.Random(1)
    for _ in range(300):
        asked = objects.request(rng)
        stated = (value for value in asked.answer.values() if not isinstance(value, bool))
        assert all(str(value) in asked.question for value in stated)


def test_only_turns_of_the_assistant_are_learned(tokenizer: Tokenizer) -> None:
    documents = list(islice(corpus.tool_calls(5), 300))
    batches = tokens.whole_documents(tokenizer, iter(documents * 9), 2048, seed=0)
    learned = set()
    for ids, labels in islice(batches, 20):
        assert ids.shape == labels.shape and ids.numel() <= 2048 + ids.shape[1]
        for row, row_labels in zip(ids.tolist(), labels.tolist(), strict=True):
            assert all(label in (tokens.IGNORED, token) for token, label in zip(row, row_labels, strict=True))
            learned.add(tokenizer.decode([label for label in row_labels if label >= 0], skip_special_tokens=False))
    replies = {text for document in documents for text in re.findall(r"assistant\n(.*?<\|im_end\|>)",
               document.prompt.replace("<think>\n\n</think>\n\n", "") + document.text, re.DOTALL)}  # fmt: skip
    parts = {part + turns.END_OF_TURN for text in learned for part in text.split(turns.END_OF_TURN)[:-1]}
    assert parts and parts <= replies
