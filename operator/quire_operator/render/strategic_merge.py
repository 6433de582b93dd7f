# SPDX-License-Identifier: Apache-2.0
"""Strategic merge of a patch into a pod template. For a PodSpec, the result is the same as that of `kubectl patch
--type=strategic`.

Two objects are merged field by field; if the patch contains null, the field is removed. Some lists have a merge key:
entries with the same value of this key are merged. The patch replaces all other lists. `$patch: delete` removes an
entry or an object, and `$patch: replace` replaces the whole value by the patch. (kubectl leaves an empty object.)

Source: https://kubernetes.io/docs/tasks/manage-kubernetes-objects/update-api-object-kubectl-patch/. The schema of a
PodSpec defines the merge keys in x-kubernetes-patch-merge-key.
"""

from collections.abc import Mapping
from typing import Any

from quire_spec.errors import ConfigError

_DIRECTIVE = "$patch"

_MERGE_KEYS: Mapping[str, str] = {
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
"""Maps each field whose value is a list that can be merged to the merge key of this list."""

_UNION_LISTS: Mapping[str, frozenset[str]] = {"volumes": frozenset({"name"})}
"""Fields with a list whose entries can have several types. Each field is mapped to those keys that the types have in
common. If an entry of the patch has a different type than the existing entry, it replaces the existing entry."""


def merge(base: Any, patch: Any, field: str = "") -> Any:
    """Merge `patch` into a copy of `base`, and return the copy. `field` is the name of the field that has the value
    `base`.

    Raises:
        ConfigError: an entry of a list with a merge key is not an object.
    """
    if isinstance(base, Mapping) and isinstance(patch, Mapping):
        if patch.get(_DIRECTIVE) == "replace":
            return _without_directives(patch)
        merged = {key: item for key, item in base.items() if key not in patch}
        for key, item in patch.items():
            if item is not None and key != _DIRECTIVE and not _is_deleted(item):
                merged[key] = merge(base[key], item, key) if key in base else _without_directives(item)
        return {key: merged[key] for key in (*base, *patch) if key in merged}
    if isinstance(base, list) and isinstance(patch, list) and field in _MERGE_KEYS:
        if invalid_entries := [item for item in patch if not isinstance(item, Mapping)]:
            raise ConfigError(
                f"{field}: {invalid_entries[0]!r} is not an object; each entry must have the key {_MERGE_KEYS[field]}"
            )
        return _merge_list(base, patch, field)
    return _without_directives(patch)


def _is_deleted(value: Any) -> bool:
    return isinstance(value, Mapping) and value.get(_DIRECTIVE) == "delete"


def _merge_list(base: list[Any], patch: list[Any], field: str) -> list[Any]:
    key = _MERGE_KEYS[field]
    if any(item.get(_DIRECTIVE) == "replace" for item in patch):
        return [_without_directives(item) for item in patch if item.get(_DIRECTIVE) != "replace"]
    merged = list(base)
    for item in patch:
        indexes = [i for i, other in enumerate(merged) if other.get(key) == item.get(key)]
        if item.get(_DIRECTIVE) == "delete":
            merged = [other for i, other in enumerate(merged) if i not in indexes]
        elif indexes:
            merged[indexes[0]] = _merge_entry(merged[indexes[0]], item, field)
        else:
            merged.append(_without_directives(item))
    return merged


def _merge_entry(base: Any, patch: Any, field: str) -> Any:
    if (common_keys := _UNION_LISTS.get(field)) is not None:
        base_type, patch_type = set(base) - common_keys, set(patch) - common_keys - {_DIRECTIVE}
        if base_type != patch_type and set(patch) - common_keys:
            return _without_directives(patch)
    return merge(base, patch)


def _without_directives(value: Any) -> Any:
    """Return a copy of `value` without `$patch` directives and nulls."""
    if isinstance(value, Mapping):
        return {
            key: _without_directives(item)
            for key, item in value.items()
            if item is not None and key != _DIRECTIVE and not _is_deleted(item)
        }
    if isinstance(value, list):
        return [_without_directives(i) for i in value if not (isinstance(i, Mapping) and i.get(_DIRECTIVE) == "delete")]
    return value
