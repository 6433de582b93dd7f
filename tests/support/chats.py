# SPDX-License-Identifier: Apache-2.0
"""Conversations for tests."""

from collections.abc import Sequence
from typing import Any

from quire_spec.protocol.messages import Conversation, to_raw


def conversation(*messages: Any, tools: Sequence[dict[str, Any]] | None = None, **fields: Any) -> Conversation:
    """Return a conversation with these messages and tools."""
    encoded = {name: to_raw(fields.pop(name), name) for name in ("documents", "template_kwargs") if name in fields}
    return Conversation(to_raw(messages, "messages"), to_raw(tools, "tools"), **encoded, **fields)
