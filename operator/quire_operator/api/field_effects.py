# SPDX-License-Identifier: Apache-2.0
"""What a change of a field of an LLMService does, from the declarations of the fields (`schema_field`). Pure."""

import dataclasses
import types
import typing
from typing import Any

from quire_operator.api.disaggregation_spec import RoleSpec
from quire_operator.api.engine_spec import EngineSpec
from quire_operator.api.llmservice import LLMServiceSpec
from quire_operator.api.networking_spec import KvEventsSpec
from quire_operator.api.pod_spec import CacheSpec
from quire_operator.api.workload_spec import RolloutSpec
from quire_spec.documents.field_schema import Restarts, field_names, schema_of

_KEEPING_PODS = (Restarts.NO, Restarts.LATER)
POD_FIELDS = field_names(LLMServiceSpec, lambda field: field.restarts not in _KEEPING_PODS)
"""Fields of the spec whose change renders the pods again."""
POD_CACHE_FIELDS = field_names(CacheSpec, lambda field: field.restarts not in _KEEPING_PODS)
POD_ROLLOUT_FIELDS = field_names(RolloutSpec, lambda field: field.restarts is Restarts.YES)
POD_ROLE_FIELDS = field_names(RoleSpec, lambda field: field.restarts not in _KEEPING_PODS)
POD_KV_EVENTS_FIELDS = field_names(KvEventsSpec, lambda field: field.restarts is Restarts.YES)
PLANNED_ENGINE_FIELDS = field_names(EngineSpec, lambda field: field.planned)
"""Fields of spec.engine that a plan depends on. The other fields of spec.engine do not change memory."""


def restarts(path: str) -> Restarts:
    """Return whether a change of a field replaces pods.

    Args:
        path: such as spec.adapters[].source.pvc.path.

    Raises:
        KeyError: the field does not exist.
    """
    cls: Any = LLMServiceSpec
    result = Restarts.YES
    for name in path.replace("[]", "").split(".")[1:]:
        fields = {field.name.rstrip("_"): field for field in dataclasses.fields(cls)}
        declared = schema_of(fields[name])
        result = declared.restarts or result
        cls = _inner_type(declared.type or typing.get_type_hints(cls)[fields[name].name])
    return result


def _inner_type(hint: Any) -> Any:
    """Return the dataclass inside optional types and tuples; the type itself if it contains none."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType, tuple):
        inner = [arg for arg in typing.get_args(hint) if arg not in (types.NoneType, Ellipsis)]
        return _inner_type(inner[0]) if len(inner) == 1 else hint
    return hint
