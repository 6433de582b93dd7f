# SPDX-License-Identifier: Apache-2.0
"""Renders conversations to the texts of prompts, in which control tokens of users are marked.

A template can take any amount of time and memory. The text process therefore renders in processes that may die
(text/render_worker.py). The offline LLM, which users run for themselves, renders in its own process.
"""

from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from quire_engine.tokenization.chat_template import ChatTemplate
from quire_engine.tokenization.chat_template_files import ChatTemplateFiles
from quire_engine.tokenization.control_tokens import ControlTokens
from quire_engine.tokenization.tokenizer import Tokenizer
from quire_spec.errors import ConfigError, InvalidArgument, Unavailable

MAX_ADAPTER_TEMPLATES = 64
"""Maximum number of adapters whose compiled templates are kept."""


class ConversationRenderer:
    """The templates of one checkpoint."""

    def __init__(self, files: ChatTemplateFiles, special_tokens: list[str], other_tokens: list[str]) -> None:
        """`special_tokens` and `other_tokens` are the added tokens of the tokenizer. See ControlTokens."""
        self._files = files
        self._special_tokens, self._other_tokens = special_tokens, other_tokens
        self._adapter_files: OrderedDict[str, _Templates] = OrderedDict()
        self._base_templates = self._compile(self._files)

    def render(self, chat: Mapping[str, Any], template_file: str | None = None) -> str:
        """Return the text of a conversation, given as the fields of a Conversation.

        If `template_file` is given, the template in this file is used instead of the checkpoint's template.

        Raises:
            InvalidArgument: the template rejects the conversation, or there is no template.
            Unavailable: the file cannot be read.
        """
        tools = chat.get("tools")
        templates = self._base_templates if template_file is None else self._adapter_templates(template_file)
        control_tokens = templates.control_tokens
        return templates.get(bool(tools)).render(
            control_tokens.mark_messages(chat["messages"]),
            chat["add_generation_prompt"],
            chat["continue_final_message"],
            control_tokens.mark(tools),
            control_tokens.mark(chat.get("documents")),
            **control_tokens.mark(chat["template_kwargs"]),
        )

    def _adapter_templates(self, file: str) -> "_Templates":
        """Return the templates of an adapter. The file of an adapter never changes, because the name of its folder is
        the adapter's digest."""
        if file not in self._adapter_files:
            try:
                files = self._files.replaced_by(Path(file))
            except ConfigError as error:
                raise Unavailable("messages: the chat template of the adapter cannot be read; try again") from error
            self._adapter_files[file] = self._compile(files)
            while len(self._adapter_files) > MAX_ADAPTER_TEMPLATES:
                self._adapter_files.popitem(last=False)
        self._adapter_files.move_to_end(file)
        return self._adapter_files[file]

    def _compile(self, files: ChatTemplateFiles) -> "_Templates":
        # If no template writes an added token, the token has no meaning in a conversation.
        other_tokens = [token for token in self._other_tokens if token in files.sources]
        return _Templates(files, ControlTokens(self._special_tokens, other_tokens))


class _Templates:
    """The templates of the checkpoint or of an adapter, compiled when they are first used."""

    def __init__(self, files: ChatTemplateFiles, control_tokens: ControlTokens) -> None:
        self.control_tokens = control_tokens
        self._files = files
        self._templates: dict[bool, ChatTemplate] = {}

    def get(self, has_tools: bool) -> ChatTemplate:
        """Return the template for a conversation with or without tools."""
        if has_tools not in self._templates:
            source = self._files.source(has_tools)
            if source is None:
                raise InvalidArgument("messages: the checkpoint has no chat template; use completions")
            self._templates[has_tools] = ChatTemplate(source, self._files.special_tokens)
        return self._templates[has_tools]


def split_added_tokens(tokenizer: Tokenizer) -> tuple[list[str], list[str]]:
    """Return the added tokens of a tokenizer: the special ones, and the others."""
    special = [tokenizer.added_tokens[i] for i in tokenizer.special_token_ids]
    return special, [text for i, text in tokenizer.added_tokens.items() if i not in tokenizer.special_token_ids]
