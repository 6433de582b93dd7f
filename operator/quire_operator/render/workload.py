# SPDX-License-Identifier: Apache-2.0
"""Deployment, PodDisruptionBudget, HorizontalPodAutoscaler and ScaledObject of a service. Called by objects.py."""

from typing import Any

from quire_operator.api.llmservice import AutoscalingSpec, LLMService
from quire_operator.plan.plan import Plan
from quire_operator.render import object_names, pod_template
from quire_spec import constants as spec_names

_QUEUE_SHARE = 8
"""A pod's target number of requests, divided by this, is the target number of waiting requests."""


def deployment(service: LLMService, plan: Plan, template: dict[str, Any]) -> dict[str, Any]:
    """Return the Deployment with the pod template."""
    rollout = service.spec.rollout
    # Not on the pods: different inputs can give the same plan, and then pods must not be replaced.
    annotations = {object_names.PLAN_ANNOTATION: plan.inputsHash}
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {**object_names.object_meta(service, service.name), "annotations": annotations},
        "spec": {
            "replicas": service.spec.replicas,
            "revisionHistoryLimit": 3,
            "progressDeadlineSeconds": pod_template.progress_seconds(service, plan),
            "selector": {"matchLabels": object_names.selector_labels(service, object_names.SERVER)},
            "strategy": {
                "type": "RollingUpdate",
                "rollingUpdate": {"maxSurge": rollout.maxSurge, "maxUnavailable": rollout.maxUnavailable},
            },
            "template": template,
        },
    }


def disruption_budget(service: LLMService) -> dict[str, Any] | None:
    """Return the PodDisruptionBudget, or None for a single pod, because its node could never be drained."""
    scaling = service.spec.autoscaling
    min_replicas = scaling.minReplicas if scaling else service.spec.replicas
    if service.spec.disruption.pdb == "None" or min_replicas < 2:
        return None
    return {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": object_names.object_meta(service, service.name),
        "spec": {
            "maxUnavailable": 1,
            "selector": {"matchLabels": object_names.selector_labels(service, object_names.SERVER)},
            "unhealthyPodEvictionPolicy": "AlwaysAllow",
        },
    }


def autoscaler(service: LLMService, plan: Plan, scaling: AutoscalingSpec) -> dict[str, Any]:
    """Return the HorizontalPodAutoscaler. It scales the LLMService; only the operator writes the Deployment."""
    requests = scaling.requestsPerReplica or plan.maxNumSeqs.value
    return {
        "apiVersion": "autoscaling/v2",
        "kind": "HorizontalPodAutoscaler",
        "metadata": object_names.object_meta(service, service.name),
        "spec": {
            "scaleTargetRef": _scale_target(service),
            "minReplicas": scaling.minReplicas,
            "maxReplicas": scaling.maxReplicas,
            "metrics": [
                _pods_metric("vllm:num_requests_running", requests),
                _pods_metric("vllm:num_requests_waiting", max(1, requests // _QUEUE_SHARE)),
            ],
            "behavior": {"scaleDown": {"stabilizationWindowSeconds": scaling.scaleDownSeconds}},
        },
    }


def scaled_object(service: LLMService, plan: Plan, scaling: AutoscalingSpec) -> dict[str, Any]:
    """Return the ScaledObject for KEDA, which queries Prometheus directly."""
    pod_matcher = f'namespace="{service.namespace or "default"}",pod=~"{service.name}-[a-z0-9]+-[a-z0-9]+"'
    query = f"sum(vllm:num_requests_running{{{pod_matcher}}}) + sum(vllm:num_requests_waiting{{{pod_matcher}}})"
    return {
        "apiVersion": "keda.sh/v1alpha1",
        "kind": "ScaledObject",
        "metadata": object_names.object_meta(service, service.name),
        "spec": {
            "scaleTargetRef": _scale_target(service),
            "minReplicaCount": scaling.minReplicas,
            "maxReplicaCount": scaling.maxReplicas,
            "advanced": {
                "horizontalPodAutoscalerConfig": {
                    "behavior": {"scaleDown": {"stabilizationWindowSeconds": scaling.scaleDownSeconds}}
                }
            },
            "triggers": [
                {
                    "type": "prometheus",
                    "metricType": "AverageValue",
                    "metadata": {
                        "serverAddress": scaling.prometheusAddress,
                        "query": query,
                        "threshold": str(scaling.requestsPerReplica or plan.maxNumSeqs.value),
                    },
                }
            ],
        },
    }


def _scale_target(service: LLMService) -> dict[str, str]:
    return {
        "apiVersion": f"{spec_names.API_GROUP}/{spec_names.API_VERSION}",
        "kind": spec_names.KIND,
        "name": service.name,
    }


def _pods_metric(name: str, average_value: int) -> dict[str, Any]:
    target = {"type": "AverageValue", "averageValue": str(average_value)}
    return {"type": "Pods", "pods": {"metric": {"name": name}, "target": target}}
