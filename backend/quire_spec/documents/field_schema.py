# SPDX-License-Identifier: Apache-2.0
"""Declarations of the fields of LLMService: bounds, defaults, rules, and what a change of a field does.

The dataclasses of LLMService are the source of the CRD and of its reference page, as Go types are for controller-gen.
`schema_field` adds to a field what its annotation cannot express. `make generated` reads these declarations, and the
docstrings below the fields, which become the descriptions (hack/crd_schema.py). The operator reads from them which
fields replace pods and which fields the planner depends on. Standard library only.
"""

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import MISSING
from enum import StrEnum
from typing import Any, NamedTuple

OBJECT_NAME: Mapping[str, Any] = {
    "min_length": 1,
    "max_length": 253,
    "pattern": "^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$",
}
"""Keywords of the name of a Kubernetes object."""
_KEY = "schema"


class Rule(NamedTuple):
    """A rule between fields. A class lists its rules in the class variable RULES."""

    rule: str
    """A CEL expression that is true for valid values of the class (`self`)."""
    message: str
    """Error if it is false: "<field> ... must ...; <what to do>."."""


_QUALIFIED_NAME = (
    "^([a-z0-9]([-a-z0-9]*[a-z0-9])?([.][a-z0-9]([-a-z0-9]*[a-z0-9])?)*/)?"
    "[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?$"
)
_KEYS = Rule(
    f"self.all(key, key.matches('{_QUALIFIED_NAME}'))",
    "the keys must be names of labels or annotations, such as team or example.com/team, with at most 63 characters "
    "after the slash; correct the key.",
)
LABELS: Mapping[str, Any] = {
    "items": {"max_length": 63, "pattern": "^([A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?)?$"},
    "max_properties": 32,
    "rules": (_KEYS,),
}
"""Keywords of a map of labels. A cluster rejects objects whose labels have other keys or values."""
ANNOTATIONS: Mapping[str, Any] = {"items": {"max_length": 4096}, "max_properties": 64, "rules": (_KEYS,)}
"""Keywords of a map of annotations."""


class Restarts(StrEnum):
    """Whether a change of a field replaces the pods, as spec.rollout configures it."""

    YES = "yes"
    NO = "no"
    BY_PLAN = "by plan"
    """Only if the plan changes. Only the planner reads the field."""
    LATER = "later"
    """Running pods stay, and pods that are replaced for another reason get the new value."""
    OF_EMPTY_DIR = "an EmptyDir"
    """Only if the field belongs to an EmptyDir. A claim is changed in place."""


@dataclasses.dataclass(frozen=True, slots=True)
class FieldSchema:
    """What `schema_field` declares."""

    keywords: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Keywords of OpenAPI, such as minimum and pattern, with their values in the CRD."""
    items: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """The same for the entries of a list or map."""
    type: Any = None
    """Type in the CRD if the value has another one in Python, such as a dict that is only copied."""
    without: tuple[str, ...] = ()
    """Fields of the type that do not exist in the CRD here."""
    restarts: Restarts | None = None
    """None: as for the field that contains this one."""
    planned: bool = False
    """Whether the plan depends on the field, so that the digest of the planner's inputs contains it."""


def schema_field(
    default: Any = MISSING,
    *,
    factory: Callable[[], Any] | Any = MISSING,
    crd_default: Any = MISSING,
    items: Mapping[str, Any] | None = None,
    type: Any = None,
    without: tuple[str, ...] = (),
    restarts: Restarts | None = None,
    planned: bool = False,
    **keywords: Any,
) -> Any:
    """Return a field of a dataclass. It is required in the CRD if it has no default.

    Args:
        default: Also the default in the CRD, unless it is None or empty.
        factory: Creates the default. The default of an object is {} in the CRD, so that the defaults of its fields
            apply.
        crd_default: The default in the CRD if it differs from the one in Python.
        keywords: Keywords of OpenAPI. `rules` is a tuple of Rules about the value.

    FieldSchema explains the other arguments.
    """
    if crd_default is not MISSING:
        keywords["default"] = crd_default
    schema = FieldSchema(keywords, items or {}, type, without, restarts, planned)
    if factory is not MISSING:
        return dataclasses.field(default_factory=factory, metadata={_KEY: schema})
    return dataclasses.field(default=default, metadata={_KEY: schema})


def schema_of(field: "dataclasses.Field[Any]") -> FieldSchema:
    """Return the declaration of a field; an empty one if it was not made with `schema_field`."""
    schema: FieldSchema = field.metadata.get(_KEY, FieldSchema())
    return schema


def field_names(cls: type, condition: Callable[[FieldSchema], bool]) -> tuple[str, ...]:
    """Return the names of a dataclass's fields whose declaration meets a condition."""
    return tuple(field.name for field in dataclasses.fields(cls) if condition(schema_of(field)))
