# SPDX-License-Identifier: Apache-2.0
"""Checks the tools of a chat request. It checks both the definitions of the tools and the field tool_choice. Chat
completions and /tokenize use this module."""

import re
from collections.abc import Sequence
from typing import Any

import msgspec

from quire_server.openai.chat_messages import check_depth
from quire_server.openai.errors import ApiError
from quire_server.openai.http.ignored_fields import IgnoredFields
from quire_spec.errors import truncated_repr
from quire_spec.protocol.parsed_output import OutputParsing

MAX_TOOLS = 256
MAX_NAME_CHARS = 128
MAX_TOOLS_BYTES = 512 * 1024
_NAME = re.compile(r"[\w.:/-]+")
_FUNCTION_FIELDS = {"description": str, "parameters": dict, "strict": bool}
_TOOL_CHOICE_FIELDS = frozenset({"type", "function", "name", "allowed_tools", "mode", "tools"})


def check_tools(tools: object, ignored: IgnoredFields) -> None:
    """Record the fields of tools that are not known."""
    for tool in tools if isinstance(tools, list) else []:
        if isinstance(tool, dict):
            ignored.check(tool, {"type", "function"}, "tools.")
            ignored.check(tool.get("function"), {"name", *_FUNCTION_FIELDS}, "tools.function.")


def check_tool_choice(tool_choice: object, ignored: IgnoredFields) -> None:
    """Record the fields of tool_choice that are not known."""
    if isinstance(tool_choice, dict):
        ignored.check(tool_choice, _TOOL_CHOICE_FIELDS, "tool_choice.")
        ignored.check(tool_choice.get("function"), {"name"}, "tool_choice.function.")
        ignored.check(tool_choice.get("allowed_tools"), {"mode", "tools"}, "tool_choice.allowed_tools.")


def normalize_tools(tools: object) -> list[dict[str, Any]] | None:
    """Return the tools in the form that templates read, each as {type, function}; None if there are no tools. Raises
    ApiError."""
    if tools is None:
        return None
    if not isinstance(tools, list) or not tools:
        raise ApiError(400, "tools: must be a list with at least one tool; leave it out if there are no tools")
    if len(tools) > MAX_TOOLS:
        raise ApiError(400, f"tools: at most {MAX_TOOLS} are allowed, got {len(tools)}")
    functions = [_function(tool, f"tools[{i}]") for i, tool in enumerate(tools)]
    if len(msgspec.json.encode(functions)) > MAX_TOOLS_BYTES:
        raise ApiError(400, f"tools: the JSON is longer than {MAX_TOOLS_BYTES} bytes; shorten descriptions or schemas")
    names = [function["name"] for function in functions]
    if repeated := next((name for name in names if names.count(name) > 1), None):
        raise ApiError(400, f"tools: the name {repeated!r} occurs more than once; rename one of the tools")
    return [{"type": "function", "function": function} for function in functions]


def apply_allowed_tools(tools: object, tool_choice: object) -> tuple[object, object]:
    """Return the tools and the tool_choice that a tool_choice of the type allowed_tools stands for; return both
    unchanged if it has another type. The model then sees the allowed tools only.

    The names are inside `allowed_tools` in chat completions, and beside the type in responses. Raises ApiError.
    """
    if not isinstance(tool_choice, dict) or tool_choice.get("type") != "allowed_tools":
        return tools, tool_choice
    choice = tool_choice.get("allowed_tools", tool_choice)
    entries, mode = (choice.get("tools"), choice.get("mode", "auto")) if isinstance(choice, dict) else (None, None)
    names = {_tool_name(entry) for entry in entries} if isinstance(entries, list) else set()
    if not names or not all(isinstance(name, str) for name in names) or mode not in ("auto", "required"):
        raise ApiError(
            400,
            'tool_choice: must have the form {"type": "allowed_tools", "allowed_tools": {"mode": "auto" or "required", '
            '"tools": [{"type": "function", "function": {"name": "..."}}]}}',
        )
    all_tools = tools if isinstance(tools, list) else []
    if unknown := names - {_tool_name(tool) for tool in all_tools}:
        raise ApiError(400, f"tool_choice: {truncated_repr(min(unknown))} is not among the tools")
    return [tool for tool in all_tools if _tool_name(tool) in names], mode


def _tool_name(tool: object) -> Any:
    """Return the name of a tool, or None. It is inside `function` in chat completions, and beside the type in
    responses."""
    function = tool.get("function", tool) if isinstance(tool, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    return name if isinstance(name, str) else None


def output_parsing(
    tools: Sequence[dict[str, Any]] | None, tool_choice: object, parallel_tool_calls: bool, separate_reasoning: bool
) -> OutputParsing:
    """Return the settings with which the outputs of a request are parsed; raises ApiError if tool_choice is invalid."""
    choice, function = tool_choice, None
    if isinstance(choice, dict):
        named = choice.get("function", choice)
        function = named.get("name") if isinstance(named, dict) and choice.get("type") == "function" else None
        choice = "function"
        if not isinstance(function, str):
            raise ApiError(400, 'tool_choice: must have the form {"type": "function", "function": {"name": "..."}}')
    if choice is None:
        choice = "auto"
    if choice not in ("none", "auto", "required", "function"):
        raise ApiError(400, f"tool_choice: must be none, auto, required or a function, got {truncated_repr(choice)}")
    if not tools:
        if choice in ("required", "function"):
            raise ApiError(400, "tool_choice: requires tools; add them, or leave tool_choice out")
        choice = "none"
    elif function is not None and function not in (names := [tool["function"]["name"] for tool in tools]):
        raise ApiError(400, f"tool_choice: {function[:80]!r} is not among the tools; use {', '.join(names[:10])}")
    return OutputParsing(choice, function, parallel_tool_calls, separate_reasoning)


def _function(tool: object, path: str) -> dict[str, Any]:
    function = tool.get("function") if isinstance(tool, dict) and tool.get("type", "function") == "function" else None
    if not isinstance(function, dict):
        raise ApiError(400, f'{path}: must have the form {{"type": "function", "function": {{"name": "..."}}}}')
    name = function.get("name")
    if not isinstance(name, str) or len(name) > MAX_NAME_CHARS or not _NAME.fullmatch(name):
        raise ApiError(
            400,
            f"{path}.function.name: must have 1 to {MAX_NAME_CHARS} characters: letters, digits or _-.:/; got "
            f"{truncated_repr(name)}",
        )
    check_depth(function, path)
    normalized: dict[str, Any] = {"name": name}
    for field, field_type in _FUNCTION_FIELDS.items():
        if (value := function.get(field)) is None:
            continue
        if not isinstance(value, field_type):
            kind = {str: "a text", dict: "a JSON schema", bool: "true or false"}[field_type]
            raise ApiError(400, f"{path}.function.{field}: must be {kind}, got {truncated_repr(value)}")
        normalized[field] = value
    # Templates read all three fields. The templates of Qwen models fail if `parameters` is missing.
    return {"name": name, "description": "", "parameters": {"type": "object", "properties": {}}, **normalized}
