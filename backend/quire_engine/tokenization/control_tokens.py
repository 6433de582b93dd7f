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
_ESCAPED = re.compile(r"\\(?:U000f000|udb80\\udc0)([01])", re.IGNORECASE)
"""The two characters as Python and JSON escape them: a template can write a list as Python text, or JSON in ASCII."""
_PLAIN_NAME = re.compile(r"[A-Za-z_]+")
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
        """Return a copy of the messages in which control tokens are marked."""
        return [
            {
                _mark_name(name, pattern): _mark_name(value, pattern)
                if name == "role" and isinstance(value, str)
                else self._mark(value, pattern)
                for name, value in message.items()
            }
            for message in messages
            for pattern in [self._special if message.get("role") == "assistant" else self._all]
        ]

    def mark(self, value: Any) -> Any:
        """Return a copy of `value` in which the control tokens in all strings are marked, also in the keys of objects.

        `value` is plain data, such as the tools of a request.
        """
        return self._mark(value, self._all)

    def _mark(self, value: Any, pattern: re.Pattern[str]) -> Any:
        if isinstance(value, str):
            return _mark_text(value, pattern)
        if isinstance(value, dict):
            return {_mark_name(key, pattern): self._mark(item, pattern) for key, item in value.items()}
        if isinstance(value, list):
            return [self._mark(item, pattern) for item in value]
        return value


def _mark_text(text: str, pattern: re.Pattern[str]) -> str:
    # Marks are removed from the texts of a request, because they could hide a control token that the template writes.
    if START in text or END in text:
        text = text.replace(START, "").replace(END, "")
    return pattern.sub(rf"{START}\g<0>{END}", text)


def _mark_name(name: str, pattern: re.Pattern[str]) -> str:
    """Mark a role or the key of an object. Templates read plain names, so these stay as they are."""
    return name if _PLAIN_NAME.fullmatch(name) else _mark_text(name, pattern)


def split_marked(text: str) -> list[str]:
    """Return the pieces of a rendered text. No piece contains a control token that was marked.

    A marked token is cut after its first character. If a template has separated the two marks of a token, each mark is
    removed and the text is cut there.
    """
    text = _ESCAPED.sub(lambda match: (START, END)[int(match[1])], text)
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
