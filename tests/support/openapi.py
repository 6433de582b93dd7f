# SPDX-License-Identifier: Apache-2.0
"""The CRD as data, and iteration over its schemas."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[2]
CRD = yaml.safe_load((ROOT / "crds/llmservices.yaml").read_text())
VERSION = CRD["spec"]["versions"][0]
OPENAPI = VERSION["schema"]["openAPIV3Schema"]


def walk(node: dict[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], dict[str, Any]]]:
    """Yield every schema with its path; () is the document, '[]' a list item, '*' a map value."""
    yield path, node
    for name, child in node.get("properties", {}).items():
        yield from walk(child, (*path, name))
    if "items" in node:
        yield from walk(node["items"], (*path, "[]"))
    if isinstance(node.get("additionalProperties"), dict):
        yield from walk(node["additionalProperties"], (*path, "*"))
