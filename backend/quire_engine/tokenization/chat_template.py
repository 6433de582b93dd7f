# SPDX-License-Identifier: Apache-2.0
"""ChatTemplate: a conversation to the text that a chat model was trained to go on with. llm.py calls it.

Templates come with checkpoints, so they run in jinja2's sandbox, in the environment that transformers gives them. It
keeps them from files and from Python, not from time and memory (`{{ 'a' * 10**12 }}`): nothing short of a process of
their own would, and whoever runs this runs it for themselves. The server applies no template.

Source: `_compile_jinja_template` and `render_jinja_template` in transformers 5, utils/chat_template_utils.py
"""

import datetime
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, Self

from jinja2.ext import Extension
from jinja2.nodes import CallBlock, Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from quire_engine.tokenization.tokenizer import SPECIAL_TOKENS_ATTRIBUTES
from quire_spec.dataclass_json import read_json_object
from quire_spec.errors import ConfigError, InvalidArgument

TEMPLATE_FILE = "chat_template.jinja"
_TOOL_USE_TEMPLATE_FILE = "additional_chat_templates/tool_use.jinja"

_REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")
_CONTINUE_FINAL_MESSAGE_TAG = "CONTINUE_FINAL_MESSAGE "
"""Put behind the content that is to be continued, so that it is found: what a template writes after it may hold the
same letters. A template that trims contents takes the space away."""

ChatMessage = Mapping[str, Any]
"""{"role": "user", "content": "..."}, as OpenAI's."""


class ChatTemplate:
    """A compiled template.

    Raises:
        InvalidArgument: it is no template.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str] | None = None) -> None:
        """`special_tokens`: texts by name, such as bos_token, that the template may write."""
        self._special_tokens = dict(special_tokens or {})
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, "jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
        try:
            self._template = environment.from_string(source)
        # Also what Python makes of the code that jinja2 makes of it: it nests blocks so deep, and not deeper.
        except Exception as error:
            raise InvalidArgument(f"chat_template: {error}") from error

    @classmethod
    def from_folder(cls, folder: Path, template_override: str | None = None, has_tools: bool = False) -> Self | None:
        """The template of a checkpoint: chat_template.jinja, else what tokenizer_config.json has; None without one.

        `given` is a template to take instead, with the special tokens of the checkpoint. `tools`: take the one for
        conversations with tools, where there is one of its own.

        Raises:
            ConfigError: tokenizer_config.json is broken. InvalidArgument: the template is.
        """
        config_path = folder / "tokenizer_config.json"
        config = read_json_object(config_path) if config_path.exists() else {}
        template_path = (
            folder / _TOOL_USE_TEMPLATE_FILE
            if has_tools and (folder / _TOOL_USE_TEMPLATE_FILE).exists()
            else folder / TEMPLATE_FILE
        )
        checkpoint_template = (
            template_path.read_text(encoding="utf-8") if template_path.exists() else config.get("chat_template")
        )
        source = checkpoint_template if template_override is None else template_override
        if isinstance(source, list):
            try:
                templates_by_name = {entry["name"]: entry["template"] for entry in source}
            except (KeyError, TypeError) as error:
                raise ConfigError(
                    f"{config_path}: chat_template: neither a template nor a list of named ones"
                ) from error
            source = templates_by_name.get("tool_use" if has_tools and "tool_use" in templates_by_name else "default")
        token_entries = {name: config[name] for name in SPECIAL_TOKENS_ATTRIBUTES if config.get(name)}
        special_tokens = {
            name: token if isinstance(token, str) else token["content"] for name, token in token_entries.items()
        }
        return cls(source, special_tokens) if isinstance(source, str) else None

    def render(
        self,
        messages: Sequence[ChatMessage],
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **template_kwargs: Any,
    ) -> str:
        """The prompt of a conversation.

        `add_generation_prompt` ends it with the beginning of an answer, `continue_final_message` inside the last
        message; `tools` and `arguments` are whatever the template takes.

        Raises:
            InvalidArgument: the messages are not what the template, or this function, takes; the message says why.
        """
        if continue_final_message and add_generation_prompt:
            raise InvalidArgument("continue_final_message: not possible with add_generation_prompt; set one of them")
        flat_messages = [flatten_content(message) for message in messages]
        if not flat_messages:
            raise InvalidArgument("messages: empty; give at least one")
        final_content: Any = flat_messages[-1].get("content")
        if continue_final_message:
            if final_content is None:
                raise InvalidArgument("continue_final_message: the last message has no content")
            flat_messages[-1]["content"] = final_content + _CONTINUE_FINAL_MESSAGE_TAG
        variables = self._special_tokens | template_kwargs
        try:
            text = self._template.render(
                messages=flat_messages,
                tools=tools,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **variables,
            )
        except InvalidArgument:
            raise
        except Exception as error:  # a template can raise whatever its expressions do
            raise InvalidArgument(f"messages: the chat template fails on them: {error}") from error
        return _truncate_at_tag(text, final_content) if continue_final_message else text


def as_conversation_list(
    messages: Sequence[ChatMessage] | Sequence[Sequence[ChatMessage]],
) -> list[Sequence[ChatMessage]]:
    """Conversations one by one; one alone is a list of one.

    Raises:
        InvalidArgument: neither.
    """
    is_single = _is_list(messages) and len(messages) > 0 and isinstance(messages[0], Mapping)
    conversations: Any = [messages] if is_single else messages
    if not _is_list(conversations) or not all(map(_is_list, conversations)):
        raise InvalidArgument(f"messages: {str(messages)[:80]!r} is neither a list of messages nor one of such lists")
    return list(conversations)


def _is_list(value: object) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)


def load_chat_template(chat_template: str | Path) -> str:
    """The text of a template, or of the file that holds one: a path has neither a brace nor a second line.

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
    """A message whose content is a text: parts of one are joined by newlines, as vLLM does."""
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise InvalidArgument(f"messages: {str(message)[:80]} is no object with a 'role' and a 'content'")
    content = message.get("content")
    if content is None and "tool_calls" not in message:
        raise InvalidArgument(f"messages: the one of role {message['role']!r} has no 'content'")
    if isinstance(content, Sequence) and not isinstance(content, str):
        if not all(isinstance(part, Mapping) and part.get("type") == "text" for part in content):
            raise InvalidArgument("messages: content other than text is not supported; give text parts only")
        content = "\n".join(str(part.get("text", "")) for part in content)
    if not isinstance(content, str | None):
        raise InvalidArgument(f"messages: content {content!r} is no text")
    # What is null is not there, and thoughts have several names, as in transformers.
    fields = {name: value for name, value in {**message, "content": content}.items() if value is not None}
    reasoning = next((fields[name] for name in _REASONING_FIELDS if name in fields), None)
    return fields if reasoning is None else {"thinking": reasoning, **fields, "reasoning_content": reasoning}


def _truncate_at_tag(text: str, content: str) -> str:
    """`text` up to the end of the last message's content, which `_MARK` follows."""
    before, tag, after = text.rpartition(_CONTINUE_FINAL_MESSAGE_TAG.strip())
    if not tag or content.strip() not in before:
        raise InvalidArgument("continue_final_message: the chat template does not show the last message as it is")
    return before if after.startswith(" ") else before.rstrip()


def _to_json(value: object, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    """As transformers: jinja2's own filter escapes what HTML would misread."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


def _raise_exception(message: str) -> NoReturn:
    raise InvalidArgument(f"messages: {message}")


class _GenerationTag(Extension):
    """{% generation %}, which marks what a model wrote when it is trained; here it is what it encloses."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return CallBlock(self.call_method("_generation_support"), [], [], body).set_lineno(line)

    def _generation_support(self, caller: Any) -> str:
        text: str = caller()
        return text
