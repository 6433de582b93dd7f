# SPDX-License-Identifier: Apache-2.0
"""The CRD: finds crds/llmservices.yaml and checks documents against it, as an API server would, and all at once.

One source of truth for kubectl, operator and command line. schema.py and rules.py do the work; the commands call
`check` or `valid`.
"""

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from quire_operator import rules, schema
from quire_operator.errors import ABSENT, InvalidService, Problem, in_order
from quire_operator.manifest import Manifest, read
from quire_spec import constants
from quire_spec.errors import ConfigError, Internal

API = f"{constants.API_GROUP}/{constants.API_VERSION}"

_TEXTS = {"type": "object", "additionalProperties": {"type": "string"}}
_METADATA: Mapping[str, Any] = {
    # What a user may write is checked; what an API server adds is only known, so that its output can be read back.
    "type": "object",
    "required": ["name"],
    "properties": {
        "name": {"type": "string", "maxLength": 253, "description": "Name of the service."},
        "namespace": {"type": "string", "maxLength": 63, "pattern": "^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$"},
        "labels": _TEXTS,
        "annotations": _TEXTS,
        **{
            field: {}
            for field in (
                "creationTimestamp", "deletionGracePeriodSeconds", "deletionTimestamp", "finalizers", "generateName",
                "generation", "managedFields", "ownerReferences", "resourceVersion", "selfLink", "uid",
            )
        },
    },
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Checked:
    """What a check found."""

    body: Any
    """The document with nulls dropped and defaults filled in."""
    problems: tuple[Problem, ...]
    """Sorted by path; empty when the document is valid."""


def find() -> Path:
    """The CRD's file: beside this module in an installed wheel, in crds/ in a source tree.

    Raises:
        Internal: it is in neither place.
    """
    here = Path(__file__).resolve()
    places = [here.with_name("llmservices.yaml"), here.parents[2] / "crds" / "llmservices.yaml"]
    for place in places:
        if place.is_file():
            return place
    raise Internal(f"llmservices.yaml is in none of {', '.join(map(str, places))}; install quire-llm again")


@functools.cache
def load() -> Mapping[str, Any]:
    """The schema of an LLMService, from the CRD, with metadata's fields listed."""
    crd = yaml.load(find().read_text(), yaml.CSafeLoader)
    version = next(v for v in crd["spec"]["versions"] if v["name"] == constants.API_VERSION)
    root: dict[str, Any] = version["schema"]["openAPIV3Schema"]
    properties = {name: field for name, field in root["properties"].items() if name != "status"}
    properties |= {
        "apiVersion": {"type": "string", "enum": [API]},
        "kind": {"type": "string", "enum": [constants.KIND]},
        "metadata": _METADATA,
    }
    return {**root, "required": ["apiVersion", "kind", "metadata", *root["required"]], "properties": properties}


def check(body: object, old: object = ABSENT) -> Checked:
    """Everything that is wrong with a document, and the document as an API server would store it.

    `old` is the stored object that the document would replace; without it, rules about changes are not judged. A
    status is ignored, as an API server ignores it.
    """
    if isinstance(body, Mapping):
        body = {key: item for key, item in body.items() if key != "status"}
    full = schema.complete(load(), body)
    before = old if old is ABSENT else schema.complete(load(), old)
    structural = list(schema.problems(load(), full))
    # Each rule gets a copy of its value, however many fields are in it that no rule knows.
    broken = list(rules.problems(load(), schema.known(load(), full), before, structural))
    return Checked(full, tuple(in_order([*structural, *broken])))


def is_service(body: object) -> bool:
    """Whether a document is meant as an LLMService: of our group, or of our kind."""
    if not isinstance(body, Mapping):
        return False
    group = str(body.get("apiVersion", "")).partition("/")[0]
    return group == constants.API_GROUP or str(body.get("kind", "")).lower() == constants.KIND.lower()


def only_service(file: str) -> Manifest:
    """The one LLMService of a file, unchecked.

    Raises:
        ManifestError: the file cannot be read, or is not YAML.
        ConfigError: it has none, or several.
    """
    documents = [document for document in read(file) if is_service(document.body)]
    if len(documents) != 1:
        raise ConfigError(f"{file}: has {len(documents)} LLMServices, and this command takes one; split the file")
    return documents[0]


def valid(manifest: Manifest) -> Any:
    """The checked body of a manifest.

    Raises:
        InvalidService: with every problem and the line of each.
    """
    checked = check(manifest.body)
    if checked.problems:
        raise InvalidService(checked.problems, manifest.place)
    return checked.body
