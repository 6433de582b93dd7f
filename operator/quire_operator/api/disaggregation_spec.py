# SPDX-License-Identifier: Apache-2.0
"""spec.disaggregation of an LLMService: pods of two roles, which compute prompts and generate tokens."""

from dataclasses import dataclass
from enum import StrEnum
from typing import ClassVar

from quire_operator.api.engine_spec import RoleEngineSpec
from quire_operator.api.pod_spec import ContainerResources, GpuSpec
from quire_spec.documents.field_schema import Restarts, Rule, schema_field
from quire_spec.model import capabilities

MAX_NAME_LENGTH = 31
"""Longest name of a service with roles. The controller of a DisaggregatedSet adds a slice, a revision and the role to
the names of its objects, and the controller of a LeaderWorkerSet adds further parts. They are limited to 63 characters.
"""
MAX_GROUP_NAME_LENGTH = 28
"""Longest name if replicas are groups of pods. The name of a StatefulSet has at most 52 characters, because the label
with its revision is 11 characters longer. Its workers' StatefulSet has the index of the group at the end, which has up
to four digits, after what MAX_NAME_LENGTH leaves room for."""


class Role(StrEnum):
    """The roles, in the order in which a DisaggregatedSet contains them. The values are those of llm-d's label."""

    PREFILL = "prefill"
    DECODE = "decode"


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleResources(ContainerResources):
    """spec.disaggregation.prefill.resources and spec.disaggregation.decode.resources. A field that is set replaces
    spec.gpu or the field of spec.runtime with the same name."""

    gpu: GpuSpec | None = schema_field(None)
    """GPUs of a replica of this role. Default: spec.gpu."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleSpec:
    """spec.disaggregation.prefill and spec.disaggregation.decode"""

    replicas: int = schema_field(1, minimum=0, maximum=1000, restarts=Restarts.NO)
    """Number of pods of this role, or of groups of pods with engine.pipelineParallelSize above 1. It is 0 in both
    roles or in none. Default 1."""
    resources: RoleResources = schema_field(factory=RoleResources)
    """GPUs, CPU cores and memory of a pod, as in spec.gpu and spec.runtime. Default: those of spec.gpu and
    spec.runtime."""
    engine: RoleEngineSpec = schema_field(factory=RoleEngineSpec)
    """Settings of the engine that replace those of spec.engine. All other settings are equal in both roles. Default:
    those of spec.engine; the planner chooses omitted fields for each role."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DisaggregationSpec:
    """spec.disaggregation"""

    RULES: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "(self.prefill.replicas == 0) == (self.decode.replicas == 0)",
            "prefill.replicas must be 0 exactly if decode.replicas is 0, because one role alone cannot serve; raise "
            "the one that is 0, or set both to 0.",
        ),
    )

    prefill: RoleSpec = schema_field()
    """Pods that compute prompts. Decode pods and routers send requests to them, clients do not."""
    decode: RoleSpec = schema_field()
    """Pods that clients send requests to. They read the KV blocks of long prompts from prefill pods and generate the
    tokens."""

    localTokens: int | None = schema_field(None, minimum=0, maximum=16777216)
    """If a request names a prefill pod in the header x-prefiller-host-port, a decode pod computes the prompt itself if
    at most this many of its tokens are not cached. Default 512: such prompts would wait behind long ones."""

    recomputeThreshold: int | None = schema_field(None, minimum=0, maximum=16777216)
    """A decode pod reads no KV blocks for a prompt of which fewer tokens than this are not cached: computing them takes
    less time. It also computes a prompt if reads took longer than computing in the last seconds. With 0, it always
    reads. Default 64."""
    loadFailurePolicy: str | None = schema_field(None, enum=capabilities.KV_LOAD_FAILURE_POLICIES)
    """Policy of decode pods if the blocks of a prompt that a prefill pod has computed cannot be read. recompute: the
    decode pod computes the prompt. fail: the request fails with UNAVAILABLE before it has output. Default recompute."""

    def role(self, role: Role) -> RoleSpec:
        """Return what is specific to a role."""
        return self.prefill if role is Role.PREFILL else self.decode
