# SPDX-License-Identifier: Apache-2.0
"""What a reconciler would have seen of a service: Deployments, pods, Jobs and pods' reports, made for tests."""

from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

from support.openapi import OPENAPI
from support.planning import plan, service

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
LATER = datetime(2026, 1, 2, 3, 5, 0, tzinfo=UTC)
ADAPTERS = """
replicas: 2
lora: {maxLoaded: 4, maxRank: 16}
adapters:
- {name: sql, source: {huggingFace: {repo: o/sql}}}
- {name: support, source: {huggingFace: {repo: o/support}}}
"""
GENERATION = 7
PLAN: Plan = plan("qwen-0.5b", "NVIDIA-L4", "lora: {maxLoaded: 4, maxRank: 16}")


def wanted(spec: str = ADAPTERS, generation: int = GENERATION) -> LLMService:
    """A service with two adapters on two pods, unless the spec says otherwise."""
    return replace(service(spec), generation=generation)


def report(of: LLMService, /, **changes: Any) -> PodStatus:
    """What a pod says that has all of a service's adapters; changes are fields of the document."""
    catalogue = of.build_catalog()
    adapters = [
        AdapterStatus(a.name, AdapterState.READY, "2026-01-01T00:00:00Z", f"sha256:{a.name:0>64}", a.name)
        for a in catalogue.adapters
    ]
    process = ProcessStatus(ProcessState.READY, 7, "2026-01-01T00:00:00Z")
    tokens = PLAN.kvTokens
    memory = MeasuredMemory(1, 1, 1, tokens // 16, 16, 4096, "bfloat16", "cuda:0")
    document = PodStatus(
        version="0.1.0",
        served_name=of.served_name,
        ready=True,
        reason="",
        core_started_at="2026-01-01T00:00:00.123Z",
        generation=catalogue.generation,
        processes={"core": process},
        memory=memory,
        models=[of.served_name, *(a.name for a in catalogue.adapters)],
        adapters=adapters,
        catalogue=catalogue.version.digest,
    )
    return replace(document, **changes)


def with_adapter(document: PodStatus, name: str, state: AdapterState, error: str = "") -> PodStatus:
    """A report with one adapter in another state."""
    adapters = [replace(a, state=state, error=error) if a.name == name else a for a in document.adapters]
    models = [m for m in document.models if m != name]
    return replace(document, adapters=adapters, models=models)


def pod(name: str, said: PodStatus | None = None, /, **changes: Any) -> PodState:
    """A ready pod of the newest template."""
    made = PodState(
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
        report=said,
    )
    return replace(made, **changes)


def starting(name: str, /, **changes: Any) -> PodState:
    """A pod that is not ready."""
    return pod(name, None, **{"ready": False, "started_at": ""} | changes)


def deployment(
    wanted: int, updated: int | None = None, ready: int | None = None, replicas: int | None = None, **status: Any
) -> dict[str, Any]:
    """A Deployment; numbers that are not given are those of a complete one."""
    updated = wanted if updated is None else updated
    ready = wanted if ready is None else ready
    return {
        "metadata": {"name": "s", "generation": 4},
        "spec": {"replicas": wanted, "progressDeadlineSeconds": 600},
        "status": {
            "observedGeneration": 4,
            "replicas": wanted if replicas is None else replicas,
            "updatedReplicas": updated,
            "readyReplicas": ready,
            "availableReplicas": ready,
            **status,
        },
    }


def job(**status: Any) -> dict[str, Any]:
    """The download Job."""
    return {"metadata": {"name": "s-model-1234567", "uid": "job"}, "spec": {}, "status": status}


def job_done(kind: str = "Complete", reason: str = "") -> dict[str, Any]:
    """A Job that has ended."""
    return job(conditions=[{"type": kind, "status": "True", "reason": reason}])


def ended(container: str, exit_code: int, reason: str = "Error", message: str = "") -> TerminatedContainer:
    """The end of a container."""
    return TerminatedContainer(container, exit_code, reason, message)


def healthy(of: LLMService | None = None, **changes: Any) -> ObservedState:
    """Everything as it should be."""
    of = of or wanted()
    count = of.spec.replicas
    pods = tuple(pod(f"s-{i}", report(of)) for i in range(count))
    made = ObservedState(deployment=deployment(count), pods=pods, job=job_done(), applied_generation=of.generation)
    return replace(made, **changes)


VERDICT = PlanningResult(plan=PLAN)


def condition(status: dict[str, Any], kind: str) -> dict[str, Any]:
    """One condition of a status."""
    (found,) = [c for c in status["conditions"] if c["type"] == kind]
    return found


def judged(status: dict[str, Any]) -> dict[str, tuple[str, str]]:
    """Status and reason of every condition."""
    return {c["type"]: (c["status"], c["reason"]) for c in status["conditions"]}


def faults(status: dict[str, Any]) -> list[str]:
    """What an API server would find wrong with a status, or drop from it."""
    return [str(problem) for problem in iter_problems(OPENAPI["properties"]["status"], status)]


SERVICE = wanted()
TYPES = ["Ready", "ConfigValid", "Planned", "ModelCached", "Available", "Progressing", "AdaptersReady"]


def of(
    observed: ObservedState,
    verdict: PlanningResult = VERDICT,
    service: LLMService | None = SERVICE,
    previous: Mapping[str, Any] | None = None,
    now: datetime = NOW,
) -> dict[str, Any]:
    """The status, which must always be one that an API server takes."""
    found = build_status(service, GENERATION, verdict, observed, previous or {}, now)
    assert faults(found) == []
    assert [c["type"] for c in found["conditions"]] == TYPES
    assert {c["observedGeneration"] for c in found["conditions"]} == {GENERATION} == {found["observedGeneration"]}
    return found


def ready(found: dict[str, Any]) -> tuple[str, str]:
    """Status and reason of the condition Ready."""
    return judged(found)["Ready"]


def with_pods(*pods: PodState, **changes: Any) -> ObservedState:
    """Everything as it should be, but for these pods."""
    return healthy(pods=pods, **changes)


def good(name: str = "s-0") -> PodState:
    """A pod that serves all of the service's adapters."""
    return pod(name, report(SERVICE))
