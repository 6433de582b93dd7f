# SPDX-License-Identifier: Apache-2.0
"""The chat templates of a checkpoint. Their texts are read from the files in which transformers stores them.

The file chat_template.jinja takes precedence over the entry `chat_template` in tokenizer_config.json or
chat_template.json. This entry is either a text or a list of texts that have names. The file
additional_chat_templates/tool_use.jinja contains a separate template for conversations with tools.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

from quire_engine.tokenization.tokenizer_config import (
    read_tokenizer_config,
    special_token_texts,
)
from quire_spec.documents.adapter_digest import CHAT_TEMPLATE_FILE
from quire_spec.documents.tokenizer_files import TOKENIZER_CONFIG_FILE
from quire_spec.errors import ConfigError

TOOL_USE_TEMPLATE_FILE = "additional_chat_templates/tool_use.jinja"


@dataclass(frozen=True, slots=True)
class ChatTemplateFiles:
    """Texts of the templates, and the special tokens that the templates can name."""

    default: str | None
    tool_use: str | None
    """Template for conversations with tools; if None, the default template is used."""
    special_tokens: Mapping[str, str]
    """Maps names such as bos_token to the texts of special tokens."""

    @classmethod
    def from_folder(cls, folder: Path) -> Self:
        """Read the files of a checkpoint; both templates are None if the checkpoint has no template.

        Raises:
            ConfigError: tokenizer_config.json or a template cannot be read.
        """
        config = read_tokenizer_config(folder)
        default = config.get("chat_template")
        tool_use = None
        if isinstance(default, list):
            default, tool_use = _named_templates(default, folder / TOKENIZER_CONFIG_FILE)
        try:
            if (folder / CHAT_TEMPLATE_FILE).exists():
                default, tool_use = (folder / CHAT_TEMPLATE_FILE).read_text(encoding="utf-8"), None
            if (folder / TOOL_USE_TEMPLATE_FILE).exists():
                tool_use = (folder / TOOL_USE_TEMPLATE_FILE).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{folder}: the chat template cannot be read: {error}") from error
        return cls(default if isinstance(default, str) else None, tool_use, special_token_texts(config))

    def replaced_by(self, path: Path) -> Self:
        """Return a copy of these files in which the template in `path` replaces all templates.

        Raises:
            ConfigError: `path` cannot be read.
        """
        try:
            return replace(self, default=path.read_text(encoding="utf-8"), tool_use=None)
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"chat_template: {path} cannot be read ({error}); give a file with a template") from error

    @property
    def sources(self) -> str:
        """Texts of all templates; empty if the checkpoint has no template."""
        return (self.default or "") + (self.tool_use or "")

    def source(self, has_tools: bool) -> str | None:
        """Return the text of the template for a conversation with or without tools."""
        return self.tool_use if has_tools and self.tool_use is not None else self.default


def _named_templates(entries: list[Any], path: Path) -> tuple[Any, Any]:
    try:
        by_name = {entry["name"]: entry["template"] for entry in entries}
    except (KeyError, TypeError) as error:
        raise ConfigError(f"{path}: chat_template must be a template or a list of named templates") from error
    return by_name.get("default"), by_name.get("tool_use")
