# SPDX-License-Identifier: Apache-2.0
"""Writes pod.json for a pod under test."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def write_pod_config(file: Path, *overrides: Mapping[str, Any]) -> Path:
    """Write a pod.json that has an empty catalog beside it, and return its path. Each mapping of `overrides` is merged
    into the document, at every depth; paths become texts."""
    document: dict[str, Any] = {"servedName": "base", "engine": {"model": "none"}, "adapters": adapters_file(file)}
    for override in overrides:
        document = merged(document, override)
    if not adapters_file(file).exists():
        adapters_file(file).write_text("{}")
    file.write_text(json.dumps(document, default=str))
    return file


def adapters_file(config_file: Path) -> Path:
    """Return the file of the catalog that `write_pod_config` names."""
    return config_file.with_name("adapters.json").absolute()


def merged(document: Mapping[str, Any], override: Mapping[str, Any]) -> dict[str, Any]:
    """Return `document` with the values of `override`."""
    result = dict(document)
    for name, value in override.items():
        mappings = isinstance(value, Mapping) and isinstance(result.get(name), Mapping)
        result[name] = merged(result[name], value) if mappings else value
    return result
