# SPDX-License-Identifier: Apache-2.0
"""Calls as a model of each format writes them: what the chat templates of the models render for a message with calls.

Sources of the formats, beside the templates: tests/tool_parsers of vLLM, and the model cards.
"""

import json
from collections.abc import Callable, Sequence
from typing import Any

Calls = Sequence[tuple[str, dict[str, Any]]]
DEEPSEEK = "<｜tool▁calls▁begin｜>{}<｜tool▁calls▁end｜>"
KIMI = "<|tool_calls_section_begin|>{}<|tool_calls_section_end|>"


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _objects(calls: Calls, key: str = "arguments") -> list[str]:
    return [f'{{"name": "{name}", "{key}": {_json(arguments)}}}' for name, arguments in calls]


def _list(calls: Calls) -> str:
    return f"[{', '.join(_objects(calls))}]"


def _hermes(calls: Calls) -> str:
    return "\n".join(f"<tool_call>\n{text}\n</tool_call>" for text in _objects(calls))


def _text(value: Any) -> str:
    return value if isinstance(value, str) else _json(value)


def _qwen(calls: Calls) -> str:
    return "\n".join(
        f"<tool_call>\n<function={name}>\n"
        + "".join(f"<parameter={key}>\n{_text(value)}\n</parameter>\n" for key, value in arguments.items())
        + "</function>\n</tool_call>"
        for name, arguments in calls
    )


def _seed(calls: Calls) -> str:
    return "\n".join(
        f"<seed:tool_call>\n<function={name}>\n"
        + "".join(f"<parameter={key}>{_text(value)}</parameter>\n" for key, value in arguments.items())
        + "</function>\n</seed:tool_call>"
        for name, arguments in calls
    )


def _minimax(calls: Calls) -> str:
    return "\n".join(
        f'<minimax:tool_call>\n<invoke name="{name}">\n'
        + "".join(f'<parameter name="{key}">{_text(value)}</parameter>\n' for key, value in arguments.items())
        + "</invoke>\n</minimax:tool_call>"
        for name, arguments in calls
    )


def _glm(break_: str) -> Callable[[Calls], str]:
    def write(calls: Calls) -> str:
        return "\n".join(
            f"<tool_call>{name}{break_}"
            + "".join(
                f"<arg_key>{key}</arg_key>{break_}<arg_value>{_text(value)}</arg_value>{break_}"
                for key, value in arguments.items()
            )
            + "</tool_call>"
            for name, arguments in calls
        )

    return write


def _python(calls: Calls, separator: str = ", ") -> str:
    return separator.join(
        f"{name}({', '.join(f'{key}={_json(value)}' for key, value in arguments.items())})" for name, arguments in calls
    )


def _gemma(start: str, end: str, quote: str) -> Callable[[Calls], str]:
    def value_of(value: Any) -> str:
        if isinstance(value, dict):
            return "{" + ",".join(f"{key}:{value_of(item)}" for key, item in value.items()) + "}"
        if isinstance(value, list):
            return f"[{','.join(map(value_of, value))}]"
        return f"{quote}{value}{quote}" if isinstance(value, str) else _json(value)

    return lambda calls: "".join(f"{start}call:{name}{value_of(arguments)}{end}" for name, arguments in calls)


def _deepseek_v3(calls: Calls) -> str:
    return DEEPSEEK.format(
        "\n".join(
            f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{_json(arguments)}\n```<｜tool▁call▁end｜>"
            for name, arguments in calls
        )
    )


def _deepseek_v31(calls: Calls) -> str:
    return DEEPSEEK.format(
        "".join(
            f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{_json(arguments)}<｜tool▁call▁end｜>"
            for name, arguments in calls
        )
    )


def _kimi(calls: Calls) -> str:
    return KIMI.format(
        "".join(
            f"<|tool_call_begin|>functions.{name}:{i}<|tool_call_argument_begin|>{_json(arguments)}<|tool_call_end|>"
            for i, (name, arguments) in enumerate(calls)
        )
    )


def _harmony(calls: Calls) -> str:
    [(name, arguments)] = calls
    return f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{_json(arguments)}"


def _llama(calls: Calls) -> str:
    return "; ".join(_objects(calls, "parameters"))


_WRITERS: dict[str, Callable[[Calls], str]] = {
    **dict.fromkeys(("hermes", "granite4", "ernie45"), _hermes),
    **dict.fromkeys(("qwen3_coder", "qwen3_xml"), _qwen),
    **dict.fromkeys(("llama3_json", "llama4_json"), _llama),
    **dict.fromkeys(("pythonic", "llama4_pythonic"), lambda calls: f"[{_python(calls)}]"),
    "mistral": lambda calls: f"[TOOL_CALLS] {_list(calls)}",
    "openai": _harmony,
    "granite": lambda calls: f"<|tool_call|>{_list(calls)}",
    "phi4_mini_json": lambda calls: f"functools{_list(calls)}",
    "hunyuan_a13b": lambda calls: f"<tool_calls>{_list(calls)}</tool_calls>",
    "xlam": _list,
    "seed_oss": _seed,
    "minimax_m2": _minimax,
    "glm45": _glm("\n"),
    "glm47": _glm(""),
    "lfm2": lambda calls: f"<|tool_call_start|>[{_python(calls)}]<|tool_call_end|>",
    "olmo3": lambda calls: "<function_calls>\n" + _python(calls, "\n") + "\n</function_calls>",
    "deepseek_v3": _deepseek_v3,
    "deepseek_v31": _deepseek_v31,
    "kimi_k2": _kimi,
    "gemma4": _gemma("<|tool_call>", "<tool_call|>", '<|"|>'),
    "functiongemma": _gemma("<start_function_call>", "<end_function_call>", "<escape>"),
}


def written_calls(parser: str, calls: Calls, has_tokens: bool = False) -> str:
    """Return calls as a model of this format writes them. If `has_tokens` is True, its tokenizer has a token for each
    mark. A format without a writer raises KeyError, so that each new parser gets one."""
    if parser == "mistral" and has_tokens:
        return "".join(f"[TOOL_CALLS]{name}[ARGS]{_json(arguments)}" for name, arguments in calls)
    return _WRITERS[parser](calls)
