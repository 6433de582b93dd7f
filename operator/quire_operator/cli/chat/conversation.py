# SPDX-License-Identifier: Apache-2.0
"""The state of a chat: the messages, the model and the sampling parameters. No I/O."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class Conversation:
    """Messages and parameters, from which the body of each request is built."""

    model: str
    system: str | None = None
    parameters: Mapping[str, Any] = field(default_factory=dict)
    """Fields of each request that were given, such as temperature."""
    messages: list[dict[str, str]] = field(default_factory=list)
    """Turns of the user and the assistant. The system prompt is not one of them, so that it can change."""

    def request(self, prompt: str) -> dict[str, Any]:
        """Return the body of a request for the answer to a prompt. The prompt is not part of the messages yet."""
        system = [] if self.system is None else [{"role": "system", "content": self.system}]
        messages = [*system, *self.messages, {"role": "user", "content": prompt}]
        return {"model": self.model, "messages": messages, **self.parameters}

    def add_turn(self, prompt: str, answer: str) -> None:
        """Add a prompt and its answer, which may have been stopped. Without any text of an answer, neither is added,
        because many chat templates require turns that alternate."""
        if answer:
            self.messages += [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]

    def clear(self) -> None:
        """Start a new conversation with the same model and system prompt."""
        self.messages.clear()
