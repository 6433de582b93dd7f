# SPDX-License-Identifier: Apache-2.0
"""Deployment, PodDisruptionBudget, HorizontalPodAutoscaler and ScaledObject of a service. Called by objects.py."""

from quire_operator.api.llmservice import LLMService
from quire_operator.api.workload_spec import AutoscalingSpec
from quire_operator.plan.plan import Plan
from quire_operator.render import object_names, pod_template
from quire_operator.render.manifests import Manifest, new_manifest, service_reference

_QUEUE_SHARE = 8
"""The autoscaler has two targets for each pod: one for its running requests, and one for its waiting requests. The
second target is the first one divided by this number."""


def deployment(service: LLMService, plan: Plan, template: Manifest) -> Manifest:
    """Return the Deployment with the pod template."""
    rollout = service.spec.rollout
    # The annotation is not on the pods, because it would replace them when it changes. But different inputs can lead to
    # the same plan, and then the pods must stay.
    annotations = {object_names.PLAN_ANNOTATION: plan.inputsHash}
    spec = {
        "replicas": service.spec.replicas,
        "revisionHistoryLimit": 3,
        "minReadySeconds": rollout.minReadySeconds,
        "progressDeadlineSeconds": pod_template.progress_seconds(service, plan),
        "selector": {"matchLabels": object_names.selector_labels(service, object_names.SERVER)},
        "strategy": {
            "type": "RollingUpdate",
            "rollingUpdate": {"maxSurge": rollout.maxSurge, "maxUnavailable": rollout.maxUnavailable},
        },
        "template": template,
    }
    return new_manifest("apps/v1", "Deployment", service, service.name, annotations=annotations, spec=spec)


def disruption_budget(service: LLMService) -> Manifest | None:
    """Return the PodDisruptionBudget. It is None if there is only one pod. A budget that allows one unavailable pod
    would not protect this pod, and a budget that allows none would prevent draining its node."""
    scaling = service.spec.autoscaling
    min_replicas = scaling.minReplicas if scaling else service.spec.replicas
    if service.spec.disruption.pdb == "None" or min_replicas < 2:
        return None
    spec = {
        "maxUnavailable": 1,
        "selector": {"matchLabels": object_names.selector_labels(service, object_names.SERVER)},
        "unhealthyPodEvictionPolicy": "AlwaysAllow",
    }
    return new_manifest("policy/v1", "PodDisruptionBudget", service, service.name, spec=spec)


def autoscaler(service: LLMService, plan: Plan, scaling: AutoscalingSpec) -> Manifest:
    """Return the HorizontalPodAutoscaler. Its target is the LLMService, not the Deployment, because only the operator
    writes the Deployment."""
    requests = scaling.requestsPerReplica or plan.maxNumSeqs.value
    spec = {
        "scaleTargetRef": service_reference(service.name),
        "minReplicas": scaling.minReplicas,
        "maxReplicas": scaling.maxReplicas,
        "metrics": [
            _pods_metric("vllm:num_requests_running", requests),
            _pods_metric("vllm:num_requests_waiting", max(1, requests // _QUEUE_SHARE)),
        ],
        "behavior": {"scaleDown": {"stabilizationWindowSeconds": scaling.scaleDownSeconds}},
    }
    return new_manifest("autoscaling/v2", "HorizontalPodAutoscaler", service, service.name, spec=spec)


def scaled_object(service: LLMService, plan: Plan, scaling: AutoscalingSpec) -> Manifest:
    """Return the ScaledObject for KEDA. KEDA sends its queries to Prometheus directly."""
    pod_matcher = f'namespace="{service.namespace or "default"}",pod=~"{service.name}-[a-z0-9]+-[a-z0-9]+"'
    query = f"sum(vllm:num_requests_running{{{pod_matcher}}}) + sum(vllm:num_requests_waiting{{{pod_matcher}}})"
    trigger = {
        "serverAddress": scaling.prometheusAddress,
        "query": query,
        "threshold": str(scaling.requestsPerReplica or plan.maxNumSeqs.value),
    }
    behavior = {"scaleDown": {"stabilizationWindowSeconds": scaling.scaleDownSeconds}}
    spec = {
        "scaleTargetRef": service_reference(service.name),
        "minReplicaCount": scaling.minReplicas,
        "maxReplicaCount": scaling.maxReplicas,
        "advanced": {"horizontalPodAutoscalerConfig": {"behavior": behavior}},
        "triggers": [{"type": "prometheus", "metricType": "AverageValue", "metadata": trigger}],
    }
    return new_manifest("keda.sh/v1alpha1", "ScaledObject", service, service.name, spec=spec)


def _pods_metric(name: str, average_value: int) -> Manifest:
    target = {"type": "AverageValue", "averageValue": str(average_value)}
    return {"type": "Pods", "pods": {"metric": {"name": name}, "target": target}}
