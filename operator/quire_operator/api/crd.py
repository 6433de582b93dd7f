# SPDX-License-Identifier: Apache-2.0
"""Validation of documents against the CRD in crds/llmservices.yaml, in the same way as an API server.

A validation reports all problems at once. openapi_schema.py and cel_rules.py contain the checks. The commands and the
controller call `validate` or `require_valid`.
"""

import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from quire_operator.api import cel_rules, openapi_schema
from quire_operator.api.disaggregation_spec import Role
from quire_operator.api.validation_errors import ABSENT, FieldPath, InvalidService, Problem, sorted_unique
from quire_operator.api.yaml_manifest import Manifest, read_manifests
from quire_spec import constants
from quire_spec.errors import ConfigError, Internal

GROUP_VERSION = f"{constants.API_GROUP}/{constants.API_VERSION}"

_STRING_MAP = {"type": "object", "additionalProperties": {"type": "string"}}
_METADATA: Mapping[str, Any] = {
    # The fields that a user can write are checked. The fields that an API server adds can have any value, so that an
    # object from an API server is also valid.
    "type": "object",
    "required": ["name"],
    "properties": {
        "name": {"type": "string", "maxLength": 253, "description": "Name of the service."},
        "namespace": {"type": "string", "maxLength": 63, "pattern": "^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$"},
        "labels": _STRING_MAP,
        "annotations": _STRING_MAP,
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
class ValidationResult:
    """Result of a validation."""

    body: Any
    """The document after nulls were removed and defaults were added."""
    problems: tuple[Problem, ...]
    """The problems, sorted by path. Empty if the document is valid."""


def find_crd_file() -> Path:
    """Return the path of the file that contains the CRD.

    An installed wheel contains the file in its package. A source tree contains it in crds/.

    Raises:
        Internal: the CRD is neither in the package nor in crds/.
    """
    module_path = Path(__file__).resolve()
    candidates = [module_path.parents[1] / "llmservices.yaml", module_path.parents[3] / "crds" / "llmservices.yaml"]
    for path in candidates:
        if path.is_file():
            return path
    raise Internal(f"llmservices.yaml does not exist in {' or '.join(map(str, candidates))}; reinstall quire-llm")


@functools.cache
def load_schema() -> Mapping[str, Any]:
    """Return the schema of an LLMService from the CRD. The fields of metadata are added to it."""
    crd = yaml.load(find_crd_file().read_text(), yaml.CSafeLoader)
    version = next(v for v in crd["spec"]["versions"] if v["name"] == constants.API_VERSION)
    root: dict[str, Any] = version["schema"]["openAPIV3Schema"]
    properties = {name: field for name, field in root["properties"].items() if name != "status"}
    properties |= {
        "apiVersion": {"type": "string", "enum": [GROUP_VERSION]},
        "kind": {"type": "string", "enum": [constants.KIND]},
        "metadata": _METADATA,
    }
    return {**root, "required": ["apiVersion", "kind", "metadata", *root["required"]], "properties": properties}


@functools.cache
def _validator() -> Any:
    return openapi_schema.build_validator(load_schema())


def validate(body: object, old: object = ABSENT) -> ValidationResult:
    """Check a document. Return its problems. Also return the document in the form in which an API server would store
    it.

    `old` is the stored object that the document replaces. If `old` is not given, rules about changes are skipped. The
    function ignores the status, as an API server does.
    """
    if isinstance(body, Mapping):
        body = {key: item for key, item in body.items() if key != "status"}
    completed = openapi_schema.with_defaults(load_schema(), body)
    old_completed = old if old is ABSENT else openapi_schema.with_defaults(load_schema(), old)
    schema_problems = list(openapi_schema.iter_problems(load_schema(), completed, validator=_validator()))
    # Unknown fields are removed before the rules are evaluated, because each rule copies the value that it checks.
    rule_problems = list(
        cel_rules.iter_problems(
            load_schema(),
            openapi_schema.without_unknown_fields(load_schema(), completed),
            old_completed,
            schema_problems,
        )
    )
    problems = [*schema_problems, *rule_problems]
    return ValidationResult(completed, tuple(sorted_unique(problems or _role_problems(completed))))


def _role_problems(body: Any) -> Iterator[Problem]:
    """Yield the problems of the settings that the pods of a role have: those of the role, merged over the common ones.

    An API server does not find these problems, because no rule can merge two objects.
    """
    disaggregation = body["spec"].get("disaggregation") or {}
    for role, own in ((role.value, disaggregation[role]) for role in Role if disaggregation):
        resources = dict(own["resources"])
        gpu = {"gpu": resources.pop("gpu")} if "gpu" in resources else {}
        merged = {name: value for name, value in body["spec"].items() if name != "disaggregation"}
        merged |= {"engine": merged["engine"] | own["engine"], "runtime": merged["runtime"] | resources, **gpu}
        for problem in validate({**body, "spec": merged}).problems:
            path = _role_path(problem.path, role, own)
            rule = problem.rule if role in path else f"{problem.rule} (in role {role})"
            yield replace(problem, path=path, rule=rule)


def _role_path(path: FieldPath, role: str, own: Mapping[str, Any]) -> FieldPath:
    """Return the path at which a user has set a field of the merged spec of a role."""
    section, names = path[1:2], path[2:]
    if section == ("engine",) and names[:1] and names[0] in own["engine"]:
        return ("spec", "disaggregation", role, *path[1:])
    is_resource = section == ("runtime",) and names[:1] and names[0] in own["resources"]
    if is_resource or (section == ("gpu",) and "gpu" in own["resources"]):
        return ("spec", "disaggregation", role, "resources", *(names if is_resource else path[1:]))
    return path


def is_service(body: object) -> bool:
    """Return whether a document is meant to be an LLMService. This is the case if it has the API group or the kind of
    an LLMService."""
    if not isinstance(body, Mapping):
        return False
    group = str(body.get("apiVersion", "")).partition("/")[0]
    return group == constants.API_GROUP or str(body.get("kind", "")).lower() == constants.KIND.lower()


def single_service(file: str) -> Manifest:
    """Return the only LLMService in a file. The document is not validated.

    Raises:
        ManifestError: the file cannot be read, or is not YAML.
        ConfigError: the file contains no LLMService or more than one.
    """
    manifests = read_manifests(file)
    documents = [document for document in manifests if is_service(document.body)]
    if len(documents) > 1:
        raise ConfigError(f"{file}: must contain exactly one LLMService, got {len(documents)}; split the file")
    if not documents:
        has_spec = any(isinstance(document.body, Mapping) and "spec" in document.body for document in manifests)
        form = f"`apiVersion: {constants.API_GROUP}/{constants.API_VERSION}` and `kind: {constants.KIND}`"
        raise ConfigError(
            f"{file}: contains no LLMService; "
            + (f"add {form}" if has_spec else f"write a document with {form}, or use `quire serve MODEL`")
        )
    return documents[0]


def require_valid(manifest: Manifest) -> Any:
    """Validate a manifest, and return its body with the defaults added.

    Raises:
        InvalidService: the manifest is invalid; the message contains every problem with its line.
    """
    result = validate(manifest.body)
    if problems := [*result.problems, *null_problems(manifest.body)]:
        raise InvalidService(problems, manifest.location)
    return result.body


def null_problems(body: object) -> Iterator[Problem]:
    """Yield a problem for each null in spec.podTemplate of a file.

    In a strategic merge, null removes a value. But kubectl drops nulls before the operator sees them, so that a value
    would be removed by `quire render` only.
    """
    spec = body.get("spec") if isinstance(body, Mapping) else None
    template = spec.get("podTemplate") if isinstance(spec, Mapping) else None
    values: list[tuple[FieldPath, Any]] = [(("spec", "podTemplate"), template)] if template is not None else []
    while values:
        path, value = values.pop()
        entries = value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, list) else ()
        values += [((*path, key), entry) for key, entry in entries]
        if value is None:
            rule = "must not be null, because kubectl drops it before the operator sees it"
            fix = "to remove an object or a list entry, write $patch: delete in it; for a simple value, write "
            yield Problem(path, ABSENT, rule, f"{fix}$patch: replace and the other fields in the object around it")
