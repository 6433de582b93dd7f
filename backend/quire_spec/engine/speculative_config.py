# SPDX-License-Identifier: Apache-2.0
"""Configuration of speculative decoding. It is the field `speculative_config` of EngineConfig, and its fields have
vLLM's names."""

import math
from dataclasses import dataclass

from quire_spec.errors import ConfigError
from quire_spec.model import capabilities
from quire_spec.model.model_config import ModelConfig
from quire_spec.model.mtp_config import MTPConfig

MAX_SPECULATIVE_TOKENS = 16
MAX_TREE_DEPTH = 128
_DEFAULT_PROMPT_LOOKUP = 5


@dataclass(frozen=True, slots=True)
class SpeculativeConfig:
    """Selects the method that proposes draft tokens, and limits how many draft tokens a step verifies."""

    method: str
    """How draft tokens are found.

    With ngram, the sequence is searched for an earlier copy of its last tokens, and the tokens after that copy are
    proposed. With suffix, the most frequent continuation is proposed. The engine searches for it in the sequence
    itself, and in past outputs that had the same adapter and cache salt. With draft_model, a smaller model is run. With
    eagle3, an EAGLE-3 head is run, which reads the hidden states of the main model. With medusa, Medusa heads are run,
    one for each draft token. With mtp, the layer of the main model's checkpoint that predicts a further token is run.
    """

    num_speculative_tokens: int
    """Maximum number of draft tokens for each sequence in a step. A step verifies fewer draft tokens, or none, in two
    cases: if it has many sequences, or if few of the last draft tokens were accepted."""

    model: str | None = None
    """Folder or hub id of the draft model or of the heads. Only the methods draft_model, eagle3 and medusa use it. Its
    weights are converted to the dtype of the main model."""

    revision: str | None = None
    """Branch, tag or commit if `model` is a hub id. None selects the default branch of the hub."""

    prompt_lookup_min: int | None = None
    """A match is an earlier part of the sequence that equals the last tokens of the sequence. It has at least this
    number of tokens. None: the value of prompt_lookup_max, or 5 if prompt_lookup_max is also None."""

    prompt_lookup_max: int | None = None
    """A match has at most this number of tokens. The longest match is used. None: the value of prompt_lookup_min, or 5
    if prompt_lookup_min is also None."""

    suffix_decoding_max_tree_depth: int = 24
    """A match and the draft tokens after it have at most this number of tokens together."""

    suffix_decoding_max_cached_requests: int = 10_000
    """Maximum number of past outputs that are kept in memory. Their size in bytes is also limited. 0: only the sequence
    itself is searched."""

    suffix_decoding_max_spec_factor: float = 1.0
    """Maximum number of draft tokens for each token of the match."""

    suffix_decoding_min_token_prob: float = 0.1
    """The probability of each draft token is estimated from counts. A draft ends before the first token whose
    probability is less than this value."""

    @property
    def has_drafter(self) -> bool:
        """True if draft tokens are computed with weights."""
        return self.method in capabilities.SPECULATIVE_DRAFTER_METHODS

    @property
    def lookup_lengths(self) -> range:
        """Lengths of the token sequences to search for, in ascending order."""
        smallest = self.prompt_lookup_min or self.prompt_lookup_max or _DEFAULT_PROMPT_LOOKUP
        return range(smallest, (self.prompt_lookup_max or smallest) + 1)

    def validate(self) -> None:
        """Raise ConfigError for the first field that is out of range."""
        if self.method not in capabilities.SPECULATIVE_METHODS:
            supported = ", ".join(capabilities.SPECULATIVE_METHODS)
            raise ConfigError(f"speculative_config.method: must be one of {supported}, got {self.method!r}")
        if (self.model is not None) != (self.method in capabilities.SPECULATIVE_MODEL_METHODS):
            problem = "missing; give the folder of the draft model" if self.model is None else "must not be given"
            raise ConfigError(f"speculative_config.model: {problem} with method {self.method!r}")
        self._check_range("num_speculative_tokens", 1, MAX_SPECULATIVE_TOKENS)
        for name in ("prompt_lookup_min", "prompt_lookup_max"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"speculative_config.{name}: must be at least 1, got {value}")
        if not self.lookup_lengths:
            raise ConfigError(
                f"speculative_config.prompt_lookup_max: must be at least prompt_lookup_min {self.prompt_lookup_min}, "
                f"got {self.prompt_lookup_max}"
            )
        self._check_range("suffix_decoding_max_tree_depth", 2, MAX_TREE_DEPTH)
        if self.suffix_decoding_max_cached_requests < 0:
            raise ConfigError(
                "speculative_config.suffix_decoding_max_cached_requests: must be at least 0, got "
                f"{self.suffix_decoding_max_cached_requests}"
            )
        if not 0.0 < self.suffix_decoding_max_spec_factor < math.inf:
            raise ConfigError(
                "speculative_config.suffix_decoding_max_spec_factor: must be a positive number, got "
                f"{self.suffix_decoding_max_spec_factor}"
            )
        self._check_range("suffix_decoding_min_token_prob", 0, 1)

    def check_target(self, target: ModelConfig) -> None:
        """Raise ConfigError if this method uses weights, but these do not exist or cannot be used with `target`."""
        architecture = target.architecture
        if self.method == "mtp" and MTPConfig.from_model(target) is None:
            raise ConfigError(
                f"speculative_config.method: mtp: the model has the architecture {architecture!r} and "
                f"{target.num_nextn_predict_layers} layers that predict further tokens, and the engine supports none "
                "of them; use suffix or ngram"
            )
        if self.has_drafter and target.variants is not None:
            raise ConfigError(
                f"speculative_config.method: {self.method} does not support architecture {architecture!r}, whose "
                "layers have keys of different sizes; use suffix or ngram"
            )
        if self.method in ("eagle3", "medusa") and not target.is_native:
            raise ConfigError(
                f"speculative_config.method: {self.method} does not support model_impl transformers, whose hidden "
                "states the heads cannot read; use suffix or ngram"
            )
        if self.method in ("eagle3", "medusa") and architecture in capabilities.ARCHITECTURES_WITHOUT_HEADS:
            raise ConfigError(
                f"speculative_config.method: {self.method} does not support architecture {architecture!r}; use suffix "
                "or ngram"
            )

    def _check_range(self, name: str, smallest: int, largest: int) -> None:
        if not smallest <= (value := getattr(self, name)) <= largest:
            raise ConfigError(f"speculative_config.{name}: must be from {smallest} to {largest}, got {value}")


def draft_model_problem(draft: ModelConfig, target: ModelConfig) -> str:
    """Return why `draft` cannot be the draft model of `target`. The result is empty if it can."""
    if draft.variants is not None:
        return (
            f"the draft model has the architecture {draft.architecture}, whose layers have keys of different sizes; "
            "use another draft model"
        )
    if draft.states is not None:
        return (
            f"the draft model has the architecture {draft.architecture}, whose layers have one state per sequence; use "
            "another draft model"
        )
    if draft.vocab_size != target.vocab_size:
        return (
            f"the draft model has vocab_size {draft.vocab_size}, but the model has {target.vocab_size}; use a draft "
            "model with the same vocabulary"
        )
    return ""
