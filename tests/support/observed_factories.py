# SPDX-License-Identifier: Apache-2.0
"""Factories of observed states for tests: Deployments, pods, Jobs and pods' status documents."""

from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

from support.openapi import OPENAPI
from support.planning import llm_service, plan_for

from quire_operator.api.llmservice import LLMService
from quire_operator.api.openapi_schema import iter_problems
from quire_operator.controller.status.observed_state import ObservedState, PlanningResult, PodState, TerminatedContainer
from quire_operator.controller.status.status import build_status
from quire_operator.plan.plan import Plan
from quire_spec.documents.pod_status import (
    AdapterState,
    AdapterStatus,
    MeasuredMemory,
    PodStatus,
    ProcessState,
    ProcessStatus,
)

NOW = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
CREATED_LATER = datetime(2026, 1, 2, 3, 5, 0, tzinfo=UTC)
ADAPTERS = """
replicas: 2
lora: {maxLoaded: 4, maxRank: 16}
adapters:
- {name: sql, source: {huggingFace: {repo: o/sql}}}
- {name: support, source: {huggingFace: {repo: o/support}}}
"""
GENERATION = 7
POD_SPEC = {"containers": [{"name": "server", "ports": [{"name": "openai", "containerPort": 8004}]}]}
PLAN: Plan = plan_for("qwen-0.5b", "NVIDIA-L4", "lora: {maxLoaded: 4, maxRank: 16}")


def desired_service(spec: str = ADAPTERS, generation: int = GENERATION) -> LLMService:
    """A service with two adapters on two pods by default."""
    return replace(llm_service(spec), generation=generation)


def pod_report(llm_service: LLMService, /, **changes: Any) -> PodStatus:
    """The status of a pod that has all adapters; `changes` are fields of the document."""
    catalog = llm_service.build_catalog()
    adapters = [
        AdapterStatus(a.name, AdapterState.READY, "2026-01-01T00:00:00Z", f"sha256:{a.name:0>64}", a.name)
        for a in catalog.adapters
    ]
    process = ProcessStatus(ProcessState.READY, 7, "2026-01-01T00:00:00Z")
    tokens = PLAN.kvTokens
    memory = MeasuredMemory(1, 1, 1, tokens // 16, 16, 4096, "bfloat16", "cuda:0")
    document = PodStatus(
        version="0.1.0",
        served_name=llm_service.served_name,
        ready=True,
        reason="",
        core_started_at="2026-01-01T00:00:00.123Z",
        generation=catalog.generation,
        processes={"core": process},
        memory=memory,
        models=[llm_service.served_name, *(a.name for a in catalog.adapters)],
        adapters=adapters,
        catalogue=catalog.version.digest,
        tool_call_parser="hermes",
    )
    return replace(document, **changes)


def with_adapter(document: PodStatus, name: str, state: AdapterState, error: str = "") -> PodStatus:
    """A report with one adapter in another state."""
    adapters = [replace(a, state=state, error=error) if a.name == name else a for a in document.adapters]
    models = [m for m in document.models if m != name]
    return replace(document, adapters=adapters, models=models)


def ready_pod(name: str, report: PodStatus | None = None, /, **changes: Any) -> PodState:
    """A ready pod of the newest template."""
    state = PodState(
        name=name,
        uid=f"uid-{name}",
        ip="10.0.0.1",
        phase="Running",
        ready=True,
        deleting=False,
        started_at="2026-01-01T00:00:00Z",
        restarts=0,
        template_hash="new",
        health_port=8003,
        created_at="2026-01-01T00:00:00Z",
        report=report,
    )
    return replace(state, **changes)


def starting_pod(name: str, /, **changes: Any) -> PodState:
    """A pod that is not ready."""
    return ready_pod(name, None, **{"ready": False, "started_at": ""} | changes)


def deployment(
    desired_replicas: int,
    updated: int | None = None,
    ready: int | None = None,
    replicas: int | None = None,
    **status: Any,
) -> dict[str, Any]:
    """A Deployment; numbers that are not given are those of a complete one."""
    updated = desired_replicas if updated is None else updated
    ready = desired_replicas if ready is None else ready
    return {
        "metadata": {"name": "s", "generation": 4},
        "spec": {"replicas": desired_replicas, "progressDeadlineSeconds": 600, "template": {"spec": POD_SPEC}},
        "status": {
            "observedGeneration": 4,
            "replicas": desired_replicas if replicas is None else replicas,
            "updatedReplicas": updated,
            "readyReplicas": ready,
            "availableReplicas": ready,
            **status,
        },
    }


def job(**status: Any) -> dict[str, Any]:
    """The download Job."""
    return {"metadata": {"name": "s-model-1234567", "uid": "job"}, "spec": {}, "status": status}


def finished_job(condition_type: str = "Complete", reason: str = "") -> dict[str, Any]:
    """A finished Job."""
    return job(conditions=[{"type": condition_type, "status": "True", "reason": reason}])


def terminated_container(
    container: str, exit_code: int, reason: str = "Error", message: str = ""
) -> TerminatedContainer:
    """A terminated container."""
    return TerminatedContainer(container, exit_code, reason, message)


def healthy_state(llm_service: LLMService | None = None, **changes: Any) -> ObservedState:
    """A service with everything ready."""
    llm_service = llm_service or desired_service()
    count = llm_service.spec.replicas
    pods = tuple(ready_pod(f"s-{i}", pod_report(llm_service)) for i in range(count))
    state = ObservedState(
        workload=deployment(count), pods=pods, job=finished_job(), applied_generation=llm_service.generation
    )
    return replace(state, **changes)


PLANNING_RESULT = PlanningResult(plan=PLAN)


def condition(status: dict[str, Any], kind: str) -> dict[str, Any]:
    """One condition of a status."""
    (matching,) = [c for c in status["conditions"] if c["type"] == kind]
    return matching


def conditions_by_type(status: dict[str, Any]) -> dict[str, tuple[str, str]]:
    """Status and reason of every condition."""
    return {c["type"]: (c["status"], c["reason"]) for c in status["conditions"]}


def schema_problems(status: dict[str, Any]) -> list[str]:
    """Return what an API server would reject in a status or drop from it."""
    return [str(problem) for problem in iter_problems(OPENAPI["properties"]["status"], status)]


SERVICE = desired_service()
CONDITION_TYPES = ["Ready", "ConfigValid", "Planned", "ModelCached", "Available", "Progressing", "AdaptersReady"]


def checked_status(
    observed: ObservedState,
    planning_result: PlanningResult = PLANNING_RESULT,
    service: LLMService | None = SERVICE,
    previous: Mapping[str, Any] | None = None,
    now: datetime = NOW,
) -> dict[str, Any]:
    """Build the status and check that an API server would accept it."""
    new_status = build_status(service, GENERATION, planning_result, observed, previous or {}, now)
    assert schema_problems(new_status) == []
    assert [c["type"] for c in new_status["conditions"]] == CONDITION_TYPES
    assert (
        {c["observedGeneration"] for c in new_status["conditions"]}
        == {GENERATION}
        == {new_status["observedGeneration"]}
    )
    return new_status


def ready_condition(status: dict[str, Any]) -> tuple[str, str]:
    """Status and reason of the condition Ready."""
    return conditions_by_type(status)["Ready"]


def state_with_pods(*pods: PodState, **changes: Any) -> ObservedState:
    """A service with everything ready except these pods."""
    return healthy_state(pods=pods, **changes)


def serving_pod(name: str = "s-0") -> PodState:
    """A pod that serves all of the service's adapters."""
    return ready_pod(name, pod_report(SERVICE))
