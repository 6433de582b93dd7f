# SPDX-License-Identifier: Apache-2.0
"""Names of a checkpoint's parsers.

The names are configured, or they are detected in the chat template and in the added tokens of the tokenizer.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Self

from quire_engine.tokenization.tokenizer import Tokenizer
from quire_spec.errors import InvalidArgument

REASONING_MARKS = {
    "qwen3": ("<think>", "</think>"),
    "deepseek_r1": ("<think>", "</think>"),
    "mistral": ("[THINK]", "[/THINK]"),
}
"""Maps the name of each reasoning parser to the two marks between which the model writes its reasoning."""
HARMONY, _HARMONY_REASONING = "openai", "openai_gptoss"
_TOOL_CALL_MARKS = (
    ("qwen3_coder", "<function="),
    ("hermes", "<tool_call>"),
    ("mistral", "[TOOL_CALLS]"),
    ("llama4_pythonic", "<|python_start|>"),
    ("llama3_json", "<|python_tag|>"),
    ("llama3_json", '"parameters": '),
    ("pythonic", "[func_name"),
)
"""Each entry contains the name of a parser, and a text that occurs in the chat templates of the parser's format. The
first entry whose text occurs in a template selects the parser."""


@dataclass(frozen=True, slots=True)
class ParserNames:
    """Names of the two parsers, as in vLLM's options --tool-call-parser and --reasoning-parser."""

    tool_call_parser: str | None = None
    """Name of the tool call parser; None if tool calls stay in the text."""
    reasoning_parser: str | None = None
    """Name of the reasoning parser; None if reasoning stays in the text."""

    @property
    def is_harmony(self) -> bool:
        """Whether outputs consist of messages in channels, so that the answer, reasoning and calls are separate
        messages."""
        return self.tool_call_parser == HARMONY or self.reasoning_parser == _HARMONY_REASONING

    @property
    def has_thinking_budget(self) -> bool:
        """Whether a thinking budget is possible. It requires known marks before and after the reasoning. A format that
        writes messages in channels has no such marks."""
        return self.reasoning_parser in REASONING_MARKS and not self.is_harmony

    def check_thinking_budget(self, num_tokens: int | None) -> None:
        """Raise InvalidArgument if a thinking budget is set, but the format of the reasoning does not support one."""
        if num_tokens is not None and not self.has_thinking_budget:
            raise InvalidArgument(
                "sampling parameter 'thinking_token_budget': not possible, because the format of this model's "
                f"reasoning is {self.reasoning_parser or 'unknown'}; leave it out, or start the server with one of the "
                f"reasoning parsers {', '.join(REASONING_MARKS)}"
            )

    def reasoning_mark_ids(self, tokenizer: Tokenizer) -> list[list[int]]:
        """Return the marks of the reasoning as token ids, for SequenceRequest.reasoning_marks.

        `check_thinking_budget` must be called first.
        """
        start, end = (
            tokenizer.encode(mark, add_special_tokens=False) for mark in REASONING_MARKS[self.reasoning_parser or ""]
        )
        # The outputs of DeepSeek-R1 begin with reasoning, with or without the start mark.
        return [[] if self.reasoning_parser == "deepseek_r1" else start, end]

    @classmethod
    def detect(cls, template: str, added_tokens: Iterable[str] = ()) -> Self:
        """Return the parsers that a checkpoint needs. They are detected in its chat template and in the added tokens of
        its tokenizer."""
        known = set(added_tokens)
        if "<|channel|>" in template or {"<|channel|>", "<|constrain|>"} <= known:
            return cls(HARMONY, _HARMONY_REASONING)
        reasoning = "qwen3" if "</think>" in template else "mistral" if "[/THINK]" in template else None
        return cls(next((name for name, mark in _TOOL_CALL_MARKS if mark in template), None), reasoning)

    def configured(self, tool_call_parser: str, reasoning_parser: str) -> "ParserNames":
        """Return the names that the configuration sets. If it sets a name to "auto", the name in this object is
        used."""
        return ParserNames(
            _choose(tool_call_parser, self.tool_call_parser), _choose(reasoning_parser, self.reasoning_parser)
        )


def _choose(configured: str, detected: str | None) -> str | None:
    return {"auto": detected, "none": None}.get(configured, configured)
