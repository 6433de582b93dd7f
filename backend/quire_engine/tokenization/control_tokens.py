# SPDX-License-Identifier: Apache-2.0
"""Ensures that control tokens in the messages of users are encoded as plain text.

To recognize these tokens, `ControlTokens` marks them in the messages before the chat template is rendered. A chat
template writes control tokens such as <|im_end|> between the contents of messages. If a user writes the same text in a
message, it must not end a turn. The process that renders templates imports this module. Therefore, the module imports
no other module of Quire.

Source: `mark_control_tokens` and `encode_marked_chat` in transformers 5.23, utils/chat_template_utils.py
"""

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

START, END = "\U000f0000", "\U000f0001"
"""Private-use characters that are written before and after a control token in the text of a user."""
_MARKED = re.compile(f"{START}([^{START}{END}]+){END}|[{START}{END}]")


class ControlTokens:
    """Marks control tokens in the messages of a conversation."""

    def __init__(self, special: Collection[str], others: Collection[str]) -> None:
        """`special` tokens are marked in every message.

        `others` are tokens such as <think>, which were added to the vocabulary and which the template writes. `others`
        are not marked in the messages of the assistant. In these messages, clients send the model's own earlier output,
        which can contain such tokens.
        """
        self._special = _pattern(special)
        self._all = _pattern([*special, *others])

    def mark_messages(self, messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Return a copy of the messages in which control tokens are marked; keys and roles are not changed."""
        return [
            {
                name: value
                if name == "role"
                else self._mark(value, self._special if message.get("role") == "assistant" else self._all)
                for name, value in message.items()
            }
            for message in messages
        ]

    def mark(self, value: Any) -> Any:
        """Return a copy of `value` in which the control tokens in all strings are marked.

        `value` is plain data, such as the tools of a request.
        """
        return self._mark(value, self._all)

    def _mark(self, value: Any, pattern: re.Pattern[str]) -> Any:
        if isinstance(value, str):
            # Marks are removed from the texts of a request, because they could hide a control token that the template
            # writes.
            if START in value or END in value:
                value = value.replace(START, "").replace(END, "")
            return pattern.sub(rf"{START}\g<0>{END}", value)
        if isinstance(value, dict):
            return {key: self._mark(item, pattern) for key, item in value.items()}
        if isinstance(value, list):
            return [self._mark(item, pattern) for item in value]
        return value


def split_marked(text: str) -> list[str]:
    """Return the pieces of a rendered text. No piece contains a control token that was marked.

    A marked token is cut after its first character. If a template has separated the two marks of a token, each mark is
    removed and the text is cut there.
    """
    if START not in text and END not in text:
        return [text]
    pieces = [""]
    end = 0
    for match in _MARKED.finditer(text):
        token = match[1] or ""
        pieces[-1] += text[end : match.start()] + token[:1]
        pieces.append(token[1:])
        end = match.end()
    pieces[-1] += text[end:]
    return [piece for piece in pieces if piece]


def _pattern(tokens: Collection[str]) -> re.Pattern[str]:
    # The longest tokens come first, so that a token has priority over tokens that it contains.
    return re.compile("|".join(map(re.escape, sorted(filter(None, tokens), key=len, reverse=True))) or "(?!)")
