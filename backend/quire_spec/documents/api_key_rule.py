# SPDX-License-Identifier: Apache-2.0
"""What an API key may use: an entry of spec.openai.keys of an LLMService, and of pod.json."""

import fnmatch
from dataclasses import dataclass

from quire_spec.documents.field_schema import schema_field
from quire_spec.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiKeyRule:
    """The adapters and the limits of one API key. The limits apply on each pod separately. A request beyond a limit
    gets status 429."""

    name: str = schema_field(min_length=1, max_length=253, pattern="^[-._a-zA-Z0-9]+$")
    """Name of the entry of apiKeysSecretRef that contains the key."""
    adapters: tuple[str, ...] = schema_field(
        ("*",),
        items={"min_length": 1, "max_length": 63, "pattern": r"^[-A-Za-z0-9._*?\[\]!]+$"},
        max_items=64,
        list_type="set",
    )
    """Names of the adapters that the key may use, or patterns with *, ? and [abc]. For this key, other adapters do not
    exist. Every key may use the base model. Default ['*']."""
    requestsPerMinute: int | None = schema_field(None, minimum=1, maximum=1000000000)
    """Average rate of requests; in a list of prompts, each prompt counts. A burst can use up to a minute of unused
    requests. Default: unlimited."""
    tokensPerMinute: int | None = schema_field(None, minimum=1, maximum=1000000000)
    """Average rate of prompt and output tokens together. A burst can use up to a minute of unused tokens. Default:
    unlimited."""

    def allows(self, adapter_name: str) -> bool:
        """Return whether the key may use an adapter."""
        return any(fnmatch.fnmatchcase(adapter_name, pattern) for pattern in self.adapters)

    def validate(self, field_path: str) -> None:
        """Raise ConfigError if the name is empty, or if a limit is so low that every request would be rejected."""
        if not self.name:
            raise ConfigError(f"{field_path}.name: must not be empty; give the name of a file of apiKeysDir")
        for field in ("requestsPerMinute", "tokensPerMinute"):
            if (value := getattr(self, field)) is not None and value < 1:
                raise ConfigError(f"{field_path}.{field}: must be at least 1, got {value}; omit it for no limit")
