# SPDX-License-Identifier: Apache-2.0
"""Strategic merge of a pod template: what `kubectl patch --type=strategic` does with the lists of a PodSpec.

Objects merge field by field, null takes a field away. Lists whose entries have a key of their own merge by it, all
others are replaced. `$patch: delete` takes an entry away, `$patch: replace` takes the patch as it is.

Source: https://kubernetes.io/docs/tasks/manage-kubernetes-objects/update-api-object-kubectl-patch/, and the keys from
the x-kubernetes-patch-merge-key of the PodSpec's fields.
"""

from collections.abc import Mapping
from typing import Any

from quire_spec.errors import ConfigError

_DIRECTIVE = "$patch"

_KEYS: Mapping[str, str] = {
    "containers": "name",
    "ephemeralContainers": "name",
    "env": "name",
    "hostAliases": "ip",
    "imagePullSecrets": "name",
    "initContainers": "name",
    "ports": "containerPort",
    "resourceClaims": "name",
    "schedulingGates": "name",
    "topologySpreadConstraints": "topologyKey",
    "volumeDevices": "devicePath",
    "volumeMounts": "mountPath",
    "volumes": "name",
}
"""Lists that merge, by their field's name, with the key of an entry."""

_EXCLUSIVE: Mapping[str, frozenset[str]] = {"volumes": frozenset({"name"})}
"""Lists whose entries are one of several kinds: a patch that brings another kind replaces the entry."""


def merge(base: Any, patch: Any, field: str = "") -> Any:
    """`base` with `patch` over it; neither is changed. `field` is the name of the field that they are the value of.

    Raises:
        ConfigError: an entry of a list that merges is not an object.
    """
    if isinstance(base, Mapping) and isinstance(patch, Mapping):
        if patch.get(_DIRECTIVE) == "replace":
            return _plain(patch)
        merged = {key: item for key, item in base.items() if key not in patch}
        for key, item in patch.items():
            if item is not None and key != _DIRECTIVE:
                merged[key] = merge(base[key], item, key) if key in base else _plain(item)
        return {key: merged[key] for key in (*base, *patch) if key in merged}
    if isinstance(base, list) and isinstance(patch, list) and field in _KEYS:
        if strays := [item for item in patch if not isinstance(item, Mapping)]:
            raise ConfigError(f"{field}: {strays[0]!r} is not an object; give each entry its {_KEYS[field]}")
        return _merge_list(base, patch, field)
    return _plain(patch)


def _merge_list(base: list[Any], patch: list[Any], field: str) -> list[Any]:
    key = _KEYS[field]
    if any(item.get(_DIRECTIVE) == "replace" for item in patch):
        return [_plain(item) for item in patch if item.get(_DIRECTIVE) != "replace"]
    merged = list(base)
    for item in patch:
        places = [i for i, other in enumerate(merged) if other.get(key) == item.get(key)]
        if item.get(_DIRECTIVE) == "delete":
            merged = [other for i, other in enumerate(merged) if i not in places]
        elif places:
            merged[places[0]] = _merge_entry(merged[places[0]], item, field)
        else:
            merged.append(_plain(item))
    return merged


def _merge_entry(base: Any, patch: Any, field: str) -> Any:
    common = _EXCLUSIVE.get(field)
    if common is not None and set(base) - common != set(patch) - common - {_DIRECTIVE} and set(patch) - common:
        return _plain(patch)
    return merge(base, patch)


def _plain(value: Any) -> Any:
    """A copy without directives and nulls."""
    if isinstance(value, Mapping):
        return {k: _plain(item) for k, item in value.items() if item is not None and k != _DIRECTIVE}
    if isinstance(value, list):
        return [_plain(i) for i in value if not (isinstance(i, Mapping) and i.get(_DIRECTIVE) == "delete")]
    return value
