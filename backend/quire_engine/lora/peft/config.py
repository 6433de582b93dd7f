# SPDX-License-Identifier: Apache-2.0
"""Reader of adapter_config.json: LoRA ranks, scales and target modules. Rejects features that cannot be served.

If a field changes the adapter's computation in an unsupported way, the config is rejected, and the error names the
field. PEFT adds a new field for each new LoRA variant. Therefore, an unknown field that is set is rejected if the
adapter was saved by a newer PEFT than the table below. Otherwise, PEFT does not know the field either: a trainer wrote
it for itself, and it is ignored with a warning. The adapter's tensors are all used, or the adapter is rejected.
"""

import json
import logging
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from quire_engine.lora.peft.module_pattern import ModulePattern
from quire_engine.lora.peft.regex_matcher import RegexMatcher, is_safe_regex
from quire_engine.lora.peft.target_modules import TargetModules
from quire_spec.errors import InvalidArgument, truncated_repr

logger = logging.getLogger(__name__)

CONFIG_FILE = "adapter_config.json"
PEFT_VERSION = (0, 21)
"""The version of PEFT whose fields the tables below contain."""
# Some of these fields describe the training, and the saved tensors already contain its result. The others describe how
# files are handled.
IGNORED_FIELDS = frozenset(
    {
        "auto_mapping", "base_model_name_or_path", "corda_config", "eva_config",
        "exclude_modules", "fan_in_fan_out", "inference_mode", "layers_pattern", "layers_to_transform",
        "loftq_config", "lora_dropout", "lora_ga_config", "megatron_config", "megatron_core", "peft_version",
        "qalora_group_size", "revision", "runtime_config", "target_modules", "task_type",
    }
)  # fmt: skip
SUPPORTED_FIELDS = frozenset(
    {
        "peft_type", "r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "ensure_weight_tying",
        "use_dora", "lora_bias", "trainable_token_indices", "alora_invocation_tokens", "target_parameters",
        "modules_to_save",
    }
)  # fmt: skip
# An adapter is rejected if one of these fields has a value other than null, false or empty.
UNSUPPORTED_FIELDS = {
    "arrow_config": "the adapter is a mixture",
    "kasa_config": "there is a diagonal between A and B",
    "layer_replication": "the adapted model has other layers than the base model",
    "monteclora_config": "the adapter is sampled",
    "use_bdlora": "A or B is block-diagonal",
    "use_qalora": "inputs are pooled before A",
    "velora_config": "it is a variant",
}
# The other methods (pissa, olora, corda, loftq) change the weights of the base model when PEFT loads the adapter: they
# subtract the initial product of B and A. lora_ga does so only in training.
SUPPORTED_INITIALIZATIONS = (None, True, False, "gaussian", "eva", "orthogonal", "mica", "lora_ga")

_MAX_CONFIG_BYTES = 1 << 20
_MAX_PATTERNS = 4096
_MAX_INVOCATION_TOKENS = 1024


@dataclass(frozen=True, slots=True)
class PeftConfig:
    """LoRA ranks and scales of an adapter's modules."""

    r: int
    lora_alpha: float
    use_rslora: bool
    rank_pattern: ModulePattern
    alpha_pattern: ModulePattern
    ensure_weight_tying: bool
    """Whether the embedding and the output projection, if they are tied, share one adapter."""
    use_dora: bool
    """Whether the adapter has the magnitude of each output feature in addition to A and B."""
    lora_bias: bool
    """Whether B has a bias."""
    bias: str
    """Biases of the base model that were trained: none, all, or lora_only for those of the adapted modules."""
    token_indices: Mapping[str, tuple[int, ...]]
    """Tokens whose rows were trained, for embed_tokens and lm_head."""
    target_modules: TargetModules
    """The modules that were adapted."""
    invocation_tokens: tuple[int, ...]
    """The adapter applies from the last occurrence of these tokens in the prompt on, or to all tokens if there are
    none."""
    target_parameters: frozenset[str]
    """Ends of the paths of parameters that were adapted beside these modules."""
    modules_to_save: frozenset[str]
    """Ends of the paths of modules that were trained as a whole."""

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read adapter_config.json.

        Raises:
            InvalidArgument: the file cannot be read, is not a LoRA config, or uses an unsupported feature.
        """
        values = _read_json_object(path)
        _check_fields(values)
        matcher = RegexMatcher()
        return cls(
            r=_positive_int("r", values.get("r", 8)),
            lora_alpha=_number("lora_alpha", values.get("lora_alpha", 8)),
            use_rslora=_flag("use_rslora", values.get("use_rslora")),
            rank_pattern=ModulePattern(_parse_pattern("rank_pattern", values, _positive_int), matcher),
            alpha_pattern=ModulePattern(_parse_pattern("alpha_pattern", values, _number), matcher),
            ensure_weight_tying=_flag("ensure_weight_tying", values.get("ensure_weight_tying")),
            use_dora=_flag("use_dora", values.get("use_dora")),
            lora_bias=_flag("lora_bias", values.get("lora_bias")),
            bias=values.get("bias", "none"),
            token_indices=_token_indices(values.get("trainable_token_indices")),
            target_modules=TargetModules.from_config(values, matcher),
            invocation_tokens=_invocation_tokens(values),
            target_parameters=_names("target_parameters", values.get("target_parameters")),
            modules_to_save=_names("modules_to_save", values.get("modules_to_save")),
        )

    @property
    def not_combinable(self) -> str:
        """The first field that is set for which the adapter cannot be part of a weighted sum; empty if there is none.
        The field changes more than the product of B and A."""
        fields = {"use_dora": self.use_dora, "lora_bias": self.lora_bias, "bias": self.bias != "none"}
        fields |= {"trainable_token_indices": bool(self.token_indices), "modules_to_save": bool(self.modules_to_save)}
        return next((name for name, is_set in fields.items() if is_set), "")

    def rank(self, module: str) -> int:
        """Return the LoRA rank of a module, given its path in the model."""
        return int(self.rank_pattern.get(module, self.r))

    def scale(self, module: str) -> float:
        """Return the factor by which the LoRA output B A x of a module is multiplied."""
        return self._scale(self.rank(module), self.alpha_pattern.get(module, self.lora_alpha))

    @property
    def default_scale(self) -> float:
        """The factor of modules to which no pattern applies."""
        return self._scale(self.r, self.lora_alpha)

    def targets_parameter(self, parameter: str) -> bool:
        """Return whether target_parameters contains a parameter, given its path in the model."""
        parts = parameter.split(".")
        return any(".".join(parts[i:]) in self.target_parameters for i in range(len(parts)))

    def saves_module(self, module: str) -> bool:
        """Return whether modules_to_save contains a module or a module around it, given its path in the model."""
        parts = module.split(".")
        ends = tuple(self.modules_to_save)
        return any(".".join(parts[: i + 1]).endswith(ends) for i in range(len(parts)))

    def _scale(self, rank: int, alpha: float) -> float:
        return alpha / math.sqrt(rank) if self.use_rslora else alpha / rank


def _read_json_object(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise InvalidArgument(f"{path.name} is missing; check that this is the folder of a PEFT adapter")
    if path.stat().st_size > _MAX_CONFIG_BYTES:
        raise InvalidArgument(f"{path.name} has {path.stat().st_size} bytes; at most {_MAX_CONFIG_BYTES} are supported")
    try:
        values = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise InvalidArgument(f"{path.name} is not JSON: {error}") from error
    if not isinstance(values, dict):
        raise InvalidArgument(f"{path.name} is not a JSON object")
    return values


def _check_fields(values: Mapping[str, Any]) -> None:
    if values.get("peft_type") != "LORA":
        raise InvalidArgument(f"peft_type {truncated_repr(values.get('peft_type'))} is not supported; use 'LORA'")
    if values.get("bias", "none") not in ("none", "all", "lora_only"):
        raise InvalidArgument(f"bias {truncated_repr(values['bias'])} is not supported; use 'none'")
    init_method = values.get("init_lora_weights", True)
    if not any(
        init_method is known or (isinstance(known, str) and init_method == known) for known in SUPPORTED_INITIALIZATIONS
    ):
        raise InvalidArgument(
            f"init_lora_weights {truncated_repr(init_method)} changes the base model's weights; convert the adapter "
            "to a plain one (PEFT: save_pretrained with path_initial_model_for_weight_conversion)"
        )
    ignored: list[str] = []
    known = IGNORED_FIELDS | SUPPORTED_FIELDS | {"bias", "init_lora_weights"}
    for name in sorted(set(values) - known):
        if values[name] in (None, False, [], {}, ""):
            continue
        if name in UNSUPPORTED_FIELDS or _is_newer(values.get("peft_version")):
            reason = UNSUPPORTED_FIELDS.get(name) or (
                f"PEFT {truncated_repr(values['peft_version'])} is newer than the fields that this version knows; "
                "remove the field if it only describes the training"
            )
            raise InvalidArgument(f"{truncated_repr(name)} {truncated_repr(values[name])} is not supported: {reason}")
        ignored.append(name)
    if ignored:
        logger.warning("fields of adapter_config.json ignored, because PEFT does not know them: %s", ", ".join(ignored))


def _is_newer(version: Any) -> bool:
    """Return whether PEFT of this version can have fields that the tables do not contain. Versions before 0.17 did not
    write their number."""
    if version is None:
        return False
    numbers = re.match(r"(\d{1,5})\.(\d{1,5})", version) if isinstance(version, str) else None
    return numbers is None or (int(numbers[1]), int(numbers[2])) > PEFT_VERSION


def _parse_pattern(name: str, values: Mapping[str, Any], parse: Any) -> dict[str, Any]:
    value = values.get(name)
    if value is None:
        return {}
    if not isinstance(value, dict) or len(value) > _MAX_PATTERNS:
        raise InvalidArgument(f"{name} {truncated_repr(value)} is not an object of at most {_MAX_PATTERNS} entries")
    for key in value:
        _check_regex(name, key)
    return {key: parse(f"{name}[{truncated_repr(key)}]", entry) for key, entry in value.items()}


def _check_regex(name: str, key: str) -> None:
    """Reject a regular expression that is invalid or could take forever to match."""
    try:
        if not is_safe_regex(key):
            raise ValueError("it is too long, has too many repetitions or alternatives, or repeats a group")
        re.compile(key)
    except (ValueError, re.error, RecursionError, OverflowError) as error:
        raise InvalidArgument(
            f"{name}: key {truncated_repr(key)} is not a usable regular expression: {error}"
        ) from error


def _token_indices(value: Any) -> dict[str, tuple[int, ...]]:
    """Parse trainable_token_indices: tokens of the embedding, or an object of modules and their tokens."""
    by_module = {} if not value else value if isinstance(value, dict) else {"embed_tokens": value}
    indices: dict[str, tuple[int, ...]] = {}
    for name, tokens in by_module.items():
        path = str(name).rpartition(".")[2]
        if (
            path not in ("embed_tokens", "lm_head")
            or not isinstance(tokens, list)
            or not tokens
            or not all(type(token) is int and token >= 0 for token in tokens)
            or len(set(tokens)) < len(tokens)
        ):
            raise InvalidArgument(
                f"trainable_token_indices {truncated_repr(value)} must be different tokens of embed_tokens or lm_head"
            )
        indices[path] = tuple(tokens)
    return indices


def _invocation_tokens(values: Mapping[str, Any]) -> tuple[int, ...]:
    """Parse alora_invocation_tokens. Reject fields that PEFT refuses beside it, or that change earlier tokens, too."""
    tokens = values.get("alora_invocation_tokens") or []
    if (
        not isinstance(tokens, list)
        or len(tokens) > _MAX_INVOCATION_TOKENS
        or not all(type(token) is int and token >= 0 for token in tokens)
    ):
        raise InvalidArgument(
            f"alora_invocation_tokens {truncated_repr(tokens)} must be at most {_MAX_INVOCATION_TOKENS} tokens"
        )
    changes = ("use_dora", "bias", "trainable_token_indices", "target_parameters", "modules_to_save")
    for name in changes if tokens else ():
        if values.get(name) not in (None, False, "none", [], {}):
            raise InvalidArgument(f"alora_invocation_tokens is not supported together with {name}")
    return tuple(tokens)


def _names(name: str, value: Any) -> frozenset[str]:
    if value is not None and not (isinstance(value, list) and all(isinstance(each, str) for each in value)):
        raise InvalidArgument(f"{name} {truncated_repr(value)} is not a list of names")
    return frozenset(value or ())


def _positive_int(name: str, value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value < 2**31:
        raise InvalidArgument(f"{name} {truncated_repr(value)} is not a positive integer")
    return value


def _number(name: str, value: Any) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not abs(value) <= 1e9:
        raise InvalidArgument(f"{name} {truncated_repr(value)} is not a number from -1e9 to 1e9")
    return float(value)


def _flag(name: str, value: Any) -> bool:
    if value is not None and not isinstance(value, bool):
        raise InvalidArgument(f"{name} {truncated_repr(value)} is neither true nor false")
    return bool(value)
