# SPDX-License-Identifier: Apache-2.0
"""Defaults for the specs of all LLMServices of an operator: the chart's value `defaults`. Pure.

A default applies to a field that an LLMService does not set. An API server adds the defaults of the CRD when it stores
an object. Therefore, a field that is equal to the default of the CRD counts as not set.

Defaults do not belong to the digest of the fields that replace pods. A change of them reaches pods that are replaced
for another reason, and all other objects at once. For this reason, only fields are allowed that do not change the plan
or the ports of pods.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

from quire_operator.api import crd, openapi_schema
from quire_operator.api.llmservice import Device, LLMService
from quire_operator.api.yaml_manifest import read_manifests
from quire_spec.errors import ConfigError

ALLOWED_FIELDS = (
    "annotations", "disruption", "gpu.nodeSelector", "gpu.runtimeClassName", "gpu.tolerations", "jobs", "labels",
    "networking.networkPolicy", "observability", "podTemplate", "rollout", "runtime.env", "runtime.image",
    "runtime.imagePullSecrets", "security",
)  # fmt: skip
"""Paths below spec of the fields that can have a default."""
VALUE = "defaults"
"""The chart's value."""


@dataclass(frozen=True, slots=True)
class SpecDefaults:
    """A partial spec."""

    spec: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def read(cls, file: Path | None) -> Self:
        """Read a YAML or JSON file with a partial spec; it can be empty. Without a file, there are no defaults.

        Raises:
            ConfigError: the file cannot be read or has several documents, or a field is not allowed or invalid.
        """
        documents = [] if file is None else read_manifests(str(file))
        if len(documents) > 1:
            location = documents[1].location(())
            raise ConfigError(f"{location}: {VALUE}: a second YAML document; merge the documents, or remove one")
        return cls.parse(documents[0].body if documents else {})

    @classmethod
    def parse(cls, spec: object) -> Self:
        """Check a partial spec.

        Raises:
            ConfigError: a field is not allowed or invalid; the message contains every problem.
        """
        if not isinstance(spec, Mapping):
            raise ConfigError(f"{VALUE}: must be an object with fields of an LLMService's spec")
        if refused := [path for path in _paths(spec) if path not in ALLOWED_FIELDS]:
            raise ConfigError(f"{VALUE}.{refused[0]}: must not be set; use only {', '.join(ALLOWED_FIELDS)}")
        model = {"source": {"huggingFace": {"repo": "organization/model"}}}
        head = {"apiVersion": crd.GROUP_VERSION, "kind": "LLMService", "metadata": {"name": VALUE}}
        if problems := crd.validate({**head, "spec": {**spec, "model": model}}).problems:
            raise ConfigError("\n".join(str(problem).replace("spec", VALUE, 1) for problem in problems))
        return cls(spec)

    def service(self, body: Mapping[str, Any]) -> LLMService:
        """Convert the body of a valid LLMService, to which `crd.validate` has added the CRD's defaults.

        Raises:
            ConfigError: the spec with the defaults is invalid.
        """
        if not self.spec:
            return LLMService.from_body(body)
        schema = crd.load_schema()["properties"]["spec"]
        defaults = {name: value for name, value in self.spec.items() if name != "podTemplate"}
        if body["spec"]["device"] == Device.CPU:
            defaults.pop("gpu", None)
        own = openapi_schema.without_defaults(schema, body["spec"])
        completed = crd.validate({**body, "spec": _merge(schema, defaults, own)})
        if completed.problems:
            problems = "; ".join(map(str, completed.problems))
            raise ConfigError(f"the spec is invalid with the chart's value {VALUE}: {problems}")
        spec, template = completed.body["spec"], self.spec.get("podTemplate", {})
        fields = [path for path in _paths(defaults) if _value_at(spec, path) != _value_at(body["spec"], path)]
        fields += ["podTemplate"] if template else []
        service = LLMService.from_body(completed.body)
        return replace(service, default_pod_template=template, defaulted_fields=tuple(sorted(fields)))


def _merge(schema: Mapping[str, Any], default: Any, own: Any) -> Any:
    """Return `own` with the parts of `default` that it does not have. Lists whose entries have keys are merged by these
    keys, as in server-side apply."""
    if isinstance(default, Mapping) and isinstance(own, Mapping):
        fields, other = schema.get("properties", {}), schema.get("additionalProperties", {})
        merged = {k: _merge(fields.get(k, other), default[k], own[k]) for k in default.keys() & own.keys()}
        return {**default, **own, **merged}
    keys = schema.get("x-kubernetes-list-map-keys")
    if keys and isinstance(default, list) and isinstance(own, list):
        own_keys = [[entry[key] for key in keys] for entry in own]
        return [*(entry for entry in default if [entry[key] for key in keys] not in own_keys), *own]
    return own


def _paths(spec: Mapping[str, Any]) -> Iterator[str]:
    """Yield the paths of the fields of a partial spec, in the form of ALLOWED_FIELDS."""
    parents = {path.partition(".")[0] for path in ALLOWED_FIELDS if "." in path}
    for name, value in spec.items():
        if name in parents and isinstance(value, Mapping):
            yield from (f"{name}.{inner}" for inner in value)
        else:
            yield name


def _value_at(spec: Mapping[str, Any], path: str) -> Any:
    value: Any = spec
    for name in path.split("."):
        value = value.get(name) if isinstance(value, Mapping) else None
    return value
