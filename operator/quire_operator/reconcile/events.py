# SPDX-License-Identifier: Apache-2.0
"""events(): what to tell `kubectl describe` and whoever watches events: transitions only, each once. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Event:
    """A Kubernetes event about the service."""

    type: str
    """Normal or Warning."""
    reason: str
    """In one word, at most 128 characters."""
    message: str
    """In sentences, at most 1024 characters."""


def events(previous: Mapping[str, Any], status: Mapping[str, Any]) -> list[Event]:
    """What has changed between two statuses that people should hear of; nothing when nothing has."""
    raise NotImplementedError
