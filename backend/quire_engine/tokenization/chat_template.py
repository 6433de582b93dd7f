# SPDX-License-Identifier: Apache-2.0
"""Chat templates: render a conversation to the prompt format that a chat model was trained on.

A template comes with a checkpoint, so it is not trusted and runs in jinja2's sandbox. It can use the same functions and
filters as in transformers. The sandbox prevents access to files and Python, but does not limit time and memory
(`{{ 'a' * 10**12 }}`). The server therefore renders in a process that may die (text/render_worker.py). The offline LLM,
which users run for themselves, renders in its own process.

Source: `_compile_jinja_template` and `render_jinja_template` in transformers 5, utils/chat_template_utils.py
"""

import datetime
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, Self

from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.nodes import CallBlock, Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from quire_engine.tokenization.chat_template_files import ChatTemplateFiles
from quire_spec.errors import InvalidArgument

_REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")
_CONTINUE_FINAL_MESSAGE_TAG = "CONTINUE_FINAL_MESSAGE "
"""This tag is appended to the content that the model must continue. It shows where this content ends in the rendered
text. Without the tag, the end could not be found reliably, because a template can write the same characters again after
the content. If a template trims contents, it removes the trailing space of the tag.
"""

ChatMessage = Mapping[str, Any]
"""A message such as {"role": "user", "content": "..."}, in the format of the OpenAI API."""


class ChatTemplate:
    """A compiled template.

    Raises:
        InvalidArgument: the source is not a valid template.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str] | None = None) -> None:
        """`special_tokens` maps names such as bos_token to the texts of special tokens. The template can use these
        names."""
        self._special_tokens = dict(special_tokens or {})
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, "jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
        try:
            self._template = environment.from_string(source)
            self._reads_parts = _reads_parts(environment.parse(source))
        # This also catches errors of Python's compiler. It limits how deeply the code that jinja2 generates can be
        # nested.
        except Exception as error:
            raise InvalidArgument(f"chat_template: {error}") from error

    @classmethod
    def from_folder(cls, folder: Path, template_override: str | None = None, has_tools: bool = False) -> Self | None:
        """Return the chat template of a checkpoint; None if it has no template.

        The template is in chat_template.jinja or, if this file does not exist, in tokenizer_config.json. If
        `template_override` is given, it is used instead of this template, together with the special tokens of the
        checkpoint. If `has_tools` is True, a separate template for conversations with tools is preferred.

        Raises:
            ConfigError: tokenizer_config.json is invalid.
            InvalidArgument: the template is invalid.
        """
        files = ChatTemplateFiles.from_folder(folder)
        source = files.source(has_tools) if template_override is None else template_override
        return None if source is None else cls(source, files.special_tokens)

    def render(
        self,
        messages: Sequence[ChatMessage],
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        **template_kwargs: Any,
    ) -> str:
        """Return the prompt of a conversation.

        If `add_generation_prompt` is True, the prompt ends with the beginning of an answer. If `continue_final_message`
        is True, it ends inside the last message. `tools`, `documents` and `template_kwargs` are passed to the template.

        Raises:
            InvalidArgument: the template or this method rejects the messages; the error contains the reason.
        """
        if continue_final_message and add_generation_prompt:
            raise InvalidArgument(
                "continue_final_message: not possible with add_generation_prompt; set only one of them"
            )
        flat_messages = [flatten_content(message) for message in messages]
        if not flat_messages:
            raise InvalidArgument("messages: must not be empty; give at least one")
        final_content: Any = flat_messages[-1].get("content")
        if continue_final_message:
            if not isinstance(final_content, str):
                reason = "has no content" if final_content is None else "has images; put a text after it"
                raise InvalidArgument(f"continue_final_message: the last message {reason}")
            flat_messages[-1]["content"] = final_content + _CONTINUE_FINAL_MESSAGE_TAG
        if self._reads_parts:
            flat_messages = [_with_parts(message) for message in flat_messages]
        variables = self._special_tokens | template_kwargs
        try:
            text = self._template.render(
                messages=flat_messages,
                tools=tools,
                documents=documents,
                add_generation_prompt=add_generation_prompt,
                **variables,
            )
        except InvalidArgument:
            raise
        except Exception as error:  # a template can raise any exception
            raise InvalidArgument(
                f"messages: the chat template failed: {str(error) or type(error).__name__}"
            ) from error
        return _truncate_at_tag(text, final_content) if continue_final_message else text


def as_conversation_list(
    messages: Sequence[ChatMessage] | Sequence[Sequence[ChatMessage]],
) -> list[Sequence[ChatMessage]]:
    """Return a list of conversations; a single conversation becomes a list of one.

    Raises:
        InvalidArgument: the argument is neither a conversation nor a list of conversations.
    """
    is_single = _is_list(messages) and len(messages) > 0 and isinstance(messages[0], Mapping)
    conversations: Any = [messages] if is_single else messages
    if not _is_list(conversations) or not all(map(_is_list, conversations)):
        raise InvalidArgument(
            f"messages: must be a list of messages or a list of such lists, got {str(messages)[:80]!r}"
        )
    return list(conversations)


def _is_list(value: object) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)


def load_chat_template(chat_template: str | Path) -> str:
    """Return the text of a template, given as text or as a path. A string that contains neither a brace nor a line
    break is a path.

    Raises:
        InvalidArgument: the file cannot be read.
    """
    if isinstance(chat_template, str) and ("{" in chat_template or "\n" in chat_template):
        return chat_template
    try:
        return Path(chat_template).expanduser().read_text(encoding="utf-8")
    except (OSError, TypeError, ValueError, RuntimeError) as error:
        raise InvalidArgument(f"chat_template: {error}") from error


def flatten_content(message: object) -> dict[str, Any]:
    """Return a message with its content as one text. Text parts are joined by newlines, as vLLM does. A content with
    images stays a list of parts."""
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise InvalidArgument(f"messages: must be objects with 'role' and 'content', got {str(message)[:80]}")
    content = message.get("content")
    if content is None and "tool_calls" not in message:
        raise InvalidArgument(f"messages: the message of role {message['role']!r} has no 'content'")
    if isinstance(content, Sequence) and not isinstance(content, str):
        if not all(isinstance(part, Mapping) and part.get("type") in ("text", "image") for part in content):
            raise InvalidArgument("messages: only texts and images are supported; give parts of these types only")
        if all(part["type"] == "text" for part in content):
            content = "\n".join(str(part.get("text", "")) for part in content)
    if not isinstance(content, str | list | None):
        raise InvalidArgument(f"messages: content must be a text, got {content!r}")
    # As in transformers, null fields are removed, and reasoning is available under several field names.
    fields = {name: value for name, value in {**message, "content": content}.items() if value is not None}
    if isinstance(fields.get("tool_calls"), Sequence):
        fields["tool_calls"] = [_parse_arguments(call) for call in fields["tool_calls"]]
    reasoning = next((fields[name] for name in _REASONING_FIELDS if name in fields), None)
    return fields if reasoning is None else {"thinking": reasoning, **fields, "reasoning_content": reasoning}


def _parse_arguments(call: Any) -> Any:
    """Return a tool call with its arguments as an object. Clients send the arguments as JSON text, which templates
    would encode again.
    """
    function: Any = call.get("function") if isinstance(call, Mapping) else None
    arguments = function.get("arguments") if isinstance(function, Mapping) else None
    if not isinstance(arguments, str):
        return call
    try:
        return {**call, "function": {**function, "arguments": json.loads(arguments) if arguments.strip() else {}}}
    except (ValueError, RecursionError):
        raise InvalidArgument(f"messages: the arguments of a tool call are not JSON, got {arguments[:80]!r}") from None


def _reads_parts(template: nodes.Template) -> bool:
    """Return whether a template contains a loop over the content of a message, and no test for texts. It then expects
    a list of parts, and a text would be lost.

    Source: `_iter_nodes_assign_content_item` in vllm/renderers/hf.py of vLLM 0.33
    """
    if any(test.name == "string" for test in template.find_all(nodes.Test)):
        return False
    loops = list(template.find_all(nodes.For))
    messages = {"messages"} | {
        assign.target.name
        for assign in template.find_all(nodes.Assign)
        if isinstance(assign.target, nodes.Name) and _is_variable_or_slice(assign.node, {"messages"})
    }
    items = {
        loop.target.name
        for loop in loops
        if isinstance(loop.target, nodes.Name) and _is_variable_or_slice(loop.iter, messages)
    }
    contents = {
        assign.target.name
        for assign in template.find_all(nodes.Assign)
        if isinstance(assign.target, nodes.Name) and _is_content(assign.node, items)
    }
    return any(_is_content(loop.iter, items) or _is_variable_or_slice(loop.iter, contents) for loop in loops)


def _is_variable_or_slice(node: nodes.Node, names: set[str]) -> bool:
    """Return whether an expression is a variable, a part of it, or a filter of either."""
    while isinstance(node, nodes.Getitem | nodes.Filter) and node.node is not None:
        if isinstance(node, nodes.Getitem) and not isinstance(node.arg, nodes.Slice):
            return False
        node = node.node
    return isinstance(node, nodes.Name) and node.name in names


def _is_content(node: nodes.Node, items: set[str]) -> bool:
    """Return whether an expression is the content of a message."""
    while isinstance(node, nodes.Filter) and node.node is not None:
        node = node.node
    if isinstance(node, nodes.Getattr):
        return node.attr == "content" and isinstance(node.node, nodes.Name) and node.node.name in items
    return (
        isinstance(node, nodes.Getitem)
        and isinstance(node.arg, nodes.Const)
        and node.arg.value == "content"
        and isinstance(node.node, nodes.Name)
        and node.node.name in items
    )


def _with_parts(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message with its content as a list of one text part."""
    content = message.get("content")
    return {**message, "content": [{"type": "text", "text": content}]} if isinstance(content, str) else message


def _truncate_at_tag(text: str, content: str) -> str:
    """Return `text` up to the end of the last message's content, where the tag begins."""
    before, tag, after = text.rpartition(_CONTINUE_FINAL_MESSAGE_TAG.strip())
    if not tag or content.strip() not in before:
        raise InvalidArgument(
            "continue_final_message: the chat template changes the last message, so it cannot be continued; "
            "use another template"
        )
    return before if after.startswith(" ") else before.rstrip()


def _to_json(value: object, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    """Replaces jinja2's tojson filter, which escapes characters for HTML. transformers replaces it, too."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


def _raise_exception(message: str) -> NoReturn:
    raise InvalidArgument(f"messages: {message}")


class _GenerationTag(Extension):
    """{% generation %} marks the model's own text for training. This extension renders its content unchanged."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return CallBlock(self.call_method("_generation_support"), [], [], body).set_lineno(line)

    def _generation_support(self, caller: Any) -> str:
        text: str = caller()
        return text
