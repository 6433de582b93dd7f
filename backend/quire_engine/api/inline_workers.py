# SPDX-License-Identifier: Apache-2.0
"""Renders conversations, reads images and converts constraints in this process, for the offline `LLM`. The text process
does the same in processes that may die, because its clients are not trusted."""

import json
from collections.abc import Sequence
from dataclasses import replace
from functools import cache, lru_cache
from pathlib import Path

from quire_engine.images.processor import ImageProcessor, ProcessedImage
from quire_engine.requests.processor import decode_conversation
from quire_engine.structured_outputs.composed_constraint import ComposedConstraint
from quire_engine.structured_outputs.grammar_text import document_to_grammar_text
from quire_engine.tokenization.chat_template_files import ChatTemplateFiles
from quire_engine.tokenization.conversation_renderer import ConversationRenderer, split_added_tokens
from quire_engine.tokenization.tokenizer import Tokenizer
from quire_spec.engine.structured_outputs import StructuredOutputsParams
from quire_spec.errors import InvalidArgument
from quire_spec.model.images.image_config import ImageConfig
from quire_spec.protocol.messages import Conversation

_MAX_TEMPLATES = 8
"""Maximum number of compiled templates that are kept."""
_MAX_GRAMMARS = 64


class InlineRenderer:
    """The renderer of one checkpoint."""

    def __init__(self, files: ChatTemplateFiles, tokenizer: Tokenizer) -> None:
        added_tokens = split_added_tokens(tokenizer)

        @lru_cache(_MAX_TEMPLATES)
        def renderer(template: str | None) -> ConversationRenderer:
            used = files if template is None else replace(files, default=template, tool_use=None)
            return ConversationRenderer(used, *added_tokens)

        self._renderer = renderer

    async def render(self, chat: Conversation, template: str | None) -> str:
        """Return the text of a conversation. `template` is the text of a template that replaces the checkpoint's.

        Raises:
            InvalidArgument: the template rejects the conversation, or the conversation has too many levels.
        """
        try:
            return self._renderer(template).render(decode_conversation(chat))
        except RecursionError:
            raise InvalidArgument("messages: the conversation is nested too deeply; use fewer levels") from None


class InlineImageReader:
    """The image processor of one checkpoint."""

    def __init__(self, folder: Path, images: ImageConfig) -> None:
        # The import of transformers takes seconds, which only users of images must wait for.
        self._processor = cache(lambda: ImageProcessor(folder, images))

    async def read(self, files: Sequence[bytes]) -> list[ProcessedImage]:
        """Return the images in these files. Raises InvalidArgument."""
        return [self._process(data, f"images[{i}]") for i, data in enumerate(files)]

    def _process(self, data: bytes, name: str) -> ProcessedImage:
        try:
            return self._processor().process(data)
        except InvalidArgument as error:
            raise InvalidArgument(f"{name}: {error}") from error


class InlineGrammarChecker:
    """Converts constraints. The engine compiles the grammars later."""

    async def check(self, constraint: StructuredOutputsParams | ComposedConstraint) -> str:
        """Return the grammar of a constraint. Raises InvalidArgument if it cannot be enforced."""
        return _grammar_text(json.dumps(constraint.to_mapping()))


# Prompts usually share a constraint, and converting a schema takes about a millisecond.
@lru_cache(_MAX_GRAMMARS)
def _grammar_text(document: str) -> str:
    return document_to_grammar_text(json.loads(document))
