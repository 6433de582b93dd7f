# SPDX-License-Identifier: Apache-2.0
"""Determines which modules of a model were adapted. It uses the adapter's config and the same rule as PEFT. A part of
PeftConfig.

PEFT silently ignores tensors of modules that the config does not target. The reader rejects a file with such tensors.

Source: `check_target_module_exists` in PEFT 0.21, tuners/tuners_utils.py
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from quire_engine.lora.peft.regex_matcher import RegexMatcher, is_safe_regex
from quire_spec.errors import InvalidArgument, truncated_repr

ALL_LINEAR = "all-linear"
_NON_LAYER_MODULES = ("embed_tokens", "lm_head")
_MAX_LAYERS_PATTERNS = 64
_ANY_LAYER = r".*?\.[^.]*\.(\d+)\."


@dataclass(frozen=True, slots=True)
class TargetModules:
    """The combined effect of target_modules, exclude_modules, layers_to_transform and layers_pattern."""

    names: frozenset[str] | str | None
    """A set of names, or a regular expression. A module matches if its path ends with one of the names, or if its path
    matches the expression. None if the field is not set, or if its regular expression could take forever to match.
    """
    excluded_names: frozenset[str] | str | None
    layers: frozenset[int] | None
    """Layers to which names apply; None if they apply to all layers."""
    layer_regexes: tuple[str, ...]
    """Regular expressions that find the layer number in a module's path; the first one that matches is used."""
    matcher: RegexMatcher

    @classmethod
    def from_config(cls, values: Mapping[str, Any], matcher: RegexMatcher) -> Self:
        """Parse the fields of a config. `matcher` matches its regular expressions.

        Raises:
            InvalidArgument: layers_to_transform or layers_pattern has an invalid form.
        """
        layers, patterns = values.get("layers_to_transform"), values.get("layers_pattern") or []
        layers = [layers] if type(layers) is int else layers or None
        if layers is not None and not (isinstance(layers, list) and all(type(layer) is int for layer in layers)):
            raise InvalidArgument(
                f"layers_to_transform {truncated_repr(layers)} is neither a layer number nor a list of layer numbers"
            )
        patterns = [patterns] if isinstance(patterns, str) else patterns
        if not (
            isinstance(patterns, list)
            and len(patterns) <= _MAX_LAYERS_PATTERNS
            and all(isinstance(p, str) and re.fullmatch(r"[\w.]+", p) for p in patterns)
        ):
            raise InvalidArgument(
                f"layers_pattern {truncated_repr(patterns)} is neither a module name nor a list of at most "
                f"{_MAX_LAYERS_PATTERNS} module names"
            )
        return cls(
            names=_parse_names(values.get("target_modules")),
            excluded_names=_parse_names(values.get("exclude_modules") or None),
            layers=None if layers is None else frozenset(layers),
            layer_regexes=tuple(rf"(?:^|.*?\.){pattern}\.(\d+)\." for pattern in patterns) or (_ANY_LAYER,),
            matcher=matcher,
        )

    @property
    def names_in_every_layer(self) -> frozenset[str]:
        """Names of modules that were adapted in every layer."""
        in_every_layer = isinstance(self.names, frozenset) and self.layers is None and not self.excluded_names
        return self.names if in_every_layer and isinstance(self.names, frozenset) else frozenset()

    def excluding_field(self, module: str) -> str | None:
        """Return the config field that excludes a module, given its path; None if the module was adapted or may have
        been adapted."""
        if self.excluded_names is not None and self._matches(self.excluded_names, module):
            return "exclude_modules"
        if self.names is None:
            return None
        if not self._matches(self.names, module):
            return "target_modules"
        # As in PEFT, layers_to_transform does not apply to a module whose whole path is in target_modules.
        if isinstance(self.names, str) or module in self.names or self.layers is None:
            return None
        layer_match = next(filter(None, (re.match(expression, module) for expression in self.layer_regexes)), None)
        return None if layer_match and int(layer_match[1]) in self.layers else "layers_to_transform"

    def _matches(self, names: frozenset[str] | str, module: str) -> bool:
        if names == ALL_LINEAR:
            return not module.endswith(_NON_LAYER_MODULES)
        if isinstance(names, str):
            return self.matcher.matches(names, module)
        parts = module.split(".")
        return any(".".join(parts[i:]) in names for i in range(len(parts)))


def _parse_names(value: Any) -> frozenset[str] | str | None:
    if isinstance(value, list):
        return frozenset(name for name in value if isinstance(name, str))
    if not isinstance(value, str):
        return None
    if value.lower() == ALL_LINEAR:
        return ALL_LINEAR
    try:
        re.compile(value)
    except (ValueError, re.error, RecursionError, OverflowError):
        return None
    return value if is_safe_regex(value) else None
