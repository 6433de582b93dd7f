# SPDX-License-Identifier: Apache-2.0
"""Configuration of speculative decoding: `speculative_config` of engine.json, with vLLM's names."""

from dataclasses import dataclass

from quire_spec.errors import ConfigError
from quire_spec.model import capabilities

MAX_SPECULATIVE_TOKENS = 16
_DEFAULT_PROMPT_LOOKUP = 5


@dataclass(frozen=True, slots=True)
class SpeculativeConfig:
    """How draft tokens are found, and how many a step verifies."""

    method: str
    """ngram: the tokens that followed the last tokens when these occurred before in the same sequence."""

    num_speculative_tokens: int
    """Maximum number of draft tokens per sequence and step. A step uses fewer, or none, if it has many sequences or if
    few of the last draft tokens were accepted."""

    prompt_lookup_min: int | None = None
    """Minimum number of last tokens that must occur before. None: prompt_lookup_max, or 5 if that is None too."""

    prompt_lookup_max: int | None = None
    """Maximum number of last tokens to search for; the longest match counts. None: prompt_lookup_min, or 5."""

    @property
    def lookup_lengths(self) -> range:
        """Numbers of last tokens to search for, ascending."""
        smallest = self.prompt_lookup_min or self.prompt_lookup_max or _DEFAULT_PROMPT_LOOKUP
        return range(smallest, (self.prompt_lookup_max or smallest) + 1)

    def validate(self) -> None:
        """Raise ConfigError for the first field that is out of range."""
        if self.method not in capabilities.SPECULATIVE_METHODS:
            supported = ", ".join(capabilities.SPECULATIVE_METHODS)
            raise ConfigError(f"speculative_config.method: must be one of {supported}, got {self.method!r}")
        if not 1 <= self.num_speculative_tokens <= MAX_SPECULATIVE_TOKENS:
            raise ConfigError(
                f"speculative_config.num_speculative_tokens: must be from 1 to {MAX_SPECULATIVE_TOKENS}, got "
                f"{self.num_speculative_tokens}"
            )
        for name in ("prompt_lookup_min", "prompt_lookup_max"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"speculative_config.{name}: must be at least 1, got {value}")
        if not self.lookup_lengths:
            raise ConfigError(
                f"speculative_config.prompt_lookup_max: must be at least prompt_lookup_min {self.prompt_lookup_min}, "
                f"got {self.prompt_lookup_max}"
            )
