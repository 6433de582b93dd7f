# SPDX-License-Identifier: Apache-2.0
"""Names of a checkpoint's parsers.

The names are configured, or they are detected in the chat template and in the added tokens of the tokenizer.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Self

from quire_engine.parsers.response_template.template import CALLS, REASONING, load_response_template
from quire_engine.tokenization.tokenizer import Tokenizer
from quire_spec.errors import ConfigError, InvalidArgument


@dataclass(frozen=True, slots=True)
class ReasoningMarks:
    """The marks between which a model writes its reasoning."""

    starts: tuple[str, ...] = ("<think>",)
    """Marks that begin the reasoning. Grammars contain the first one."""
    ends: tuple[str, ...] = ("</think>",)
    label: str = ""
    """Text that follows the start mark and is not part of the reasoning."""
    answer: tuple[str, str] | None = None
    """Marks before and after the answer, if the model writes them."""
    is_always_open: bool = False
    """True if outputs begin with reasoning, with or without the start mark."""
    ends_at_call: bool = True
    """True if the mark of a call ends the reasoning. False if the model writes such marks in its reasoning."""


_THINK = ReasoningMarks()
_OPEN_THINK = ReasoningMarks(is_always_open=True)
REASONING_MARKS = {
    **dict.fromkeys(("qwen3", "glm45", "glm47", "deepseek_v3", "kimi_k2", "olmo3"), _THINK),
    **dict.fromkeys(("deepseek_r1", "minimax_m2"), _OPEN_THINK),
    "ernie45": ReasoningMarks(answer=("<response>", "</response>")),
    "hunyuan_a13b": ReasoningMarks(answer=("<answer>", "</answer>")),
    "mistral": ReasoningMarks(("[THINK]",), ("[/THINK]",)),
    "seed_oss": ReasoningMarks(("<seed:think>",), ("</seed:think>",), ends_at_call=False),
    "gemma4": ReasoningMarks(("<|channel>",), ("<channel|>",), label="thought\n"),
    "granite": ReasoningMarks(
        ("Here is my thought process:", "Here's my thought process:"), ("Here is my response:", "Here's my response:")
    ),
}
"""The marks of each reasoning parser. The template of DeepSeek V3 decides for each request whether the model reasons:
the prompt then ends with one of the marks."""
HARMONY, _HARMONY_REASONING = "openai", "openai_gptoss"
RESPONSE_TEMPLATE = "response_template"
"""Name of both parsers if the response template of the checkpoint describes its outputs."""
_TOOL_CALL_MARKS = (
    ("seed_oss", "<seed:tool_call>"),
    ("minimax_m2", "<minimax:tool_call>"),
    ("gemma4", "<|tool_call>"),
    ("functiongemma", "<start_function_call>"),
    ("kimi_k2", "<|tool_calls_section_begin|>"),
    ("deepseek_v3", "'```json'"),
    ("deepseek_v31", "<｜tool▁calls▁begin｜>"),
    ("granite", "<|tool_call|>"),
    ("phi4_mini_json", "<|/tool|>"),
    ("lfm2", "<|tool_list_start|>"),
    ("hunyuan_a13b", "<tool_calls>"),
    ("olmo3", "<function_calls>"),
    ("glm47", "</arg_key><arg_value>"),
    ("glm45", "<arg_key>"),
    ("qwen3_coder", "<function="),
    ("ernie45", "<response>"),
    ("hermes", "<tool_call>"),
    ("mistral", "[TOOL_CALLS]"),
    ("llama4_pythonic", "<|python_start|>"),
    ("llama3_json", "<|python_tag|>"),
    ("llama3_json", '"parameters": '),
    ("pythonic", "[func_name"),
)
"""Each entry contains the name of a parser, and a text that occurs in the chat templates of the parser's format. The
first entry whose text occurs in a template selects the parser."""
_REASONING = (
    ("seed_oss", "</seed:think>"),
    ("gemma4", "<|channel>"),
    ("mistral", "[/THINK]"),
    ("granite", "Here is my thought process"),
    ("ernie45", "<response>"),
    ("hunyuan_a13b", "<answer>"),
    ("qwen3", "</think>"),
)
"""As `_TOOL_CALL_MARKS`, for reasoning parsers."""
_REASONING_OF_TOOL_CALLS = {
    **{name: name for name in ("minimax_m2", "glm45", "glm47", "kimi_k2", "olmo3")},
    **dict.fromkeys(("deepseek_v3", "deepseek_v31"), "deepseek_v3"),
}
"""Where reasoning stands between `<think>` and `</think>`, the format of the calls selects the reasoning parser."""


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
    def is_template(self) -> bool:
        """Whether the response template of the checkpoint describes outputs."""
        return RESPONSE_TEMPLATE in (self.tool_call_parser, self.reasoning_parser)

    def check_template(self, response_template: str) -> None:
        """Raise ConfigError if the parsers need a response template, and it is missing or invalid. Its argument is the
        JSON text of the template; it is empty if the checkpoint has none."""
        if not self.is_template:
            return
        others = {self.tool_call_parser, self.reasoning_parser} - {RESPONSE_TEMPLATE, None}
        if others:
            raise ConfigError(
                f"tool_call_parser, reasoning_parser: {RESPONSE_TEMPLATE} cannot be combined with {others.pop()}; set "
                "both to one of them, or the other to none"
            )
        if not response_template:
            raise ConfigError(
                f"tool_call_parser, reasoning_parser: {RESPONSE_TEMPLATE} needs response_template in "
                "tokenizer_config.json, which this checkpoint does not have; set another parser"
            )
        load_response_template(response_template)

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
        marks = REASONING_MARKS[self.reasoning_parser or ""]
        start, end = (tokenizer.encode(mark, add_special_tokens=False) for mark in (marks.starts[0], marks.ends[0]))
        return [[] if marks.is_always_open else start, end]

    @classmethod
    def detect(cls, template: str, added_tokens: Iterable[str] = (), response_template: str = "") -> Self:
        """Return the parsers that a checkpoint needs. They are detected in its chat template and in the added tokens of
        its tokenizer. If they show no format of tool calls, the JSON text of its response template decides."""
        known = set(added_tokens)
        if "<|channel|>" in template or {"<|channel|>", "<|constrain|>"} <= known:
            return cls(HARMONY, _HARMONY_REASONING)
        tool_calls, reasoning = (
            next((name for name, mark in table if mark in template), None) for table in (_TOOL_CALL_MARKS, _REASONING)
        )
        if tool_calls is None and response_template:
            names = load_response_template(response_template).field_names
            return cls(*(RESPONSE_TEMPLATE if name in names else None for name in (CALLS, REASONING)))
        if reasoning == "qwen3":
            reasoning = _REASONING_OF_TOOL_CALLS.get(tool_calls or "", reasoning)
        return cls(tool_calls, reasoning)

    def configured(self, tool_call_parser: str, reasoning_parser: str) -> "ParserNames":
        """Return the names that the configuration sets. If it sets a name to "auto", the name in this object is
        used."""
        return ParserNames(
            _choose(tool_call_parser, self.tool_call_parser), _choose(reasoning_parser, self.reasoning_parser)
        )


def _choose(configured: str, detected: str | None) -> str | None:
    return {"auto": detected, "none": None}.get(configured, configured)
