# SPDX-License-Identifier: Apache-2.0
"""Conversations in the form in which the chat template renders them. A conversation consists of a prompt, and of the
assistant's turn, which the model must learn.

The module defines the tokens for turns, tool calls and thinking. `chat`, `facts`, `objects` and `tools` write the
conversations.
"""

import json
import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from transformers.utils.chat_template_utils import render_jinja_template

TEMPLATE_FILE = Path(__file__).resolve().parent / "chat_template.jinja"
"""Chat template of the shipped model. Training copies it to the folder with the weights."""
END_OF_TURN = "<|im_end|>"
PADDING = "<|endoftext|>"
NUM_RESERVED = 7
CONTROL = ("<|im_start|>", END_OF_TURN, PADDING, *(f"<|reserved_{index}|>" for index in range(NUM_RESERVED)))
"""Special tokens. Decoding skips them. The reserved tokens make the size of the vocabulary a multiple of 16."""
MARKS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")
"""Tokens that decoding keeps, because the parsers for tool calls and for reasoning read them. Qwen3 does the same."""

Message = Mapping[str, Any]
"""A message of a conversation, in the form of the OpenAI API."""

_SYSTEM = ("You are a helpful assistant.", "You are a friendly assistant.", "Be brief.", "Answer in one sentence.")


@dataclass(frozen=True, slots=True)
class Chat:
    """A conversation, and the assistant's turn that follows it. The conversation ends with a turn of the user or of a
    tool."""

    messages: Sequence[Message]
    """The messages in order. The last one is not from the assistant."""
    reply: str
    """The text of the assistant's turn. It can contain tool calls in their text form."""
    reasoning: str = ""
    """The thoughts before the reply. If they are "", the reply has no think block."""
    tools: Sequence[Message] = ()
    """Functions that the assistant may call."""

    def rendered(self, thinking: bool = True) -> tuple[str, str]:
        """Return the prompt, and the assistant's turn, which the model must learn. If `thinking` is False, the prompt
        contains an empty think block."""
        kwargs = {} if thinking else {"enable_thinking": False}
        prompt = render(self.messages, self.tools, add_generation_prompt=True, **kwargs)
        thoughts = f"<think>\n{self.reasoning}\n</think>\n\n" if self.reasoning and thinking else ""
        return prompt, f"{thoughts}{self.reply}{END_OF_TURN}"


def said(role: str, content: str) -> Message:
    """Return a message."""
    return {"role": role, "content": content}


def written_call(name: str, arguments: Mapping[str, object]) -> str:
    """Return a tool call as the text that the assistant writes."""
    call = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
    return f"<tool_call>\n{call}\n</tool_call>"


def system_turn(rng: random.Random) -> list[Message]:
    """In most cases, return an empty list; in the other cases, return a list with a system message."""
    return [said("system", rng.choice(_SYSTEM))] if rng.random() < 0.25 else []


def render(messages: Sequence[Message], tools: Sequence[Message] = (), **kwargs: object) -> str:
    """Render a conversation in the same way as transformers."""
    rendered, _ = render_jinja_template(
        [list(messages)], tools=list(tools) or None, chat_template=_template(), **kwargs
    )
    return str(rendered[0])


def without_tokens(text: str) -> str:
    """Remove the tokens for turns, tool calls and thinking from the text of a conversation. The vocabulary is trained
    on texts without them."""
    return re.sub("|".join(map(re.escape, (*CONTROL, *MARKS))), "", text)


@cache
def _template() -> str:
    return TEMPLATE_FILE.read_text(encoding="utf-8")
