# SPDX-License-Identifier: Apache-2.0
"""Deployment, PodDisruptionBudget, HorizontalPodAutoscaler and ScaledObject of a service. Called by objects.py."""

from quire_operator.api.llmservice import LLMService
from quire_operator.api.workload_spec import AutoscalingSpec, ExternalMetricSpec
from quire_operator.plan.plan import Plan
from quire_operator.render import object_names, pod_template
from quire_operator.render.manifests import Manifest, new_manifest, service_reference
from quire_spec.dataclass_json import to_json

_QUEUE_SHARE = 8
"""The autoscaler has two targets for each pod: one for its running requests, and one for its waiting requests. The
second target is the first one divided by this number."""
_MAX_UNCUT_NAME = 46
"""The longest name of a Deployment for which the names of its pods are not cut: two hyphens and a digest of ten
characters follow."""


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
    """Return the PodDisruptionBudget of a service, or of one of its roles, which allows one replica to be unavailable.
    It is None if there is only one. A budget would then protect nothing, or prevent draining a node."""
    scaling = service.spec.autoscaling
    min_replicas = scaling.minReplicas if scaling else service.spec.replicas
    if service.spec.disruption.pdb == "None" or min_replicas < 2:
        return None
    selector: Manifest = {"matchLabels": object_names.selector_labels(service, object_names.SERVER)}
    if service.num_nodes > 1:
        # With a budget for the leaders alone, a drain would evict workers, which also ends their groups.
        components = [object_names.SERVER, object_names.WORKER]
        both = {"key": object_names.COMPONENT, "operator": "In", "values": components}
        del selector["matchLabels"][object_names.COMPONENT]
        selector["matchExpressions"] = [both]
    spec = {
        "maxUnavailable": service.num_nodes,
        "selector": selector,
        "unhealthyPodEvictionPolicy": "AlwaysAllow",
    }
    return new_manifest("policy/v1", "PodDisruptionBudget", service, object_names.of_role(service), spec=spec)


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
            *([_external_metric(scaling.external)] if scaling.external else []),
        ],
        "behavior": {"scaleDown": {"stabilizationWindowSeconds": scaling.scaleDownSeconds}},
    }
    return new_manifest("autoscaling/v2", "HorizontalPodAutoscaler", service, service.name, spec=spec)


def scaled_object(service: LLMService, plan: Plan, scaling: AutoscalingSpec) -> Manifest:
    """Return the ScaledObject for KEDA. KEDA sends its queries to Prometheus directly."""
    triggers = [*([_prometheus_trigger(service, plan, scaling)] if scaling.prometheusAddress else []),
                *(scaling.triggers or ())]  # fmt: skip
    behavior = {"scaleDown": {"stabilizationWindowSeconds": scaling.scaleDownSeconds}}
    fallback = scaling.fallback
    spec = {
        "scaleTargetRef": service_reference(service.name),
        "minReplicaCount": scaling.minReplicas,
        "maxReplicaCount": scaling.maxReplicas,
        # The last pod ends by this field of KEDA, not by the behavior.
        **({} if scaling.minReplicas else {"cooldownPeriod": scaling.scaleDownSeconds}),
        **({"pollingInterval": scaling.pollingInterval} if scaling.pollingInterval else {}),
        **({"fallback": to_json(fallback)} if fallback else {}),
        "advanced": {"horizontalPodAutoscalerConfig": {"behavior": behavior}},
        "triggers": triggers,
    }
    # KEDA copies the labels to its HorizontalPodAutoscaler, which the operator must not take for its own.
    own_labels = ",".join(object_names.labels(service, object_names.SERVER))
    annotations = {"scaledobject.keda.sh/hpa-excluded-labels": own_labels}
    return new_manifest("keda.sh/v1alpha1", "ScaledObject", service, service.name, annotations=annotations, spec=spec)


def _prometheus_trigger(service: LLMService, plan: Plan, scaling: AutoscalingSpec) -> Manifest:
    pod_matcher = f'namespace="{service.namespace or "default"}",pod=~"{pod_name_pattern(service)}"'
    query = f"sum(vllm:num_requests_running{{{pod_matcher}}}) + sum(vllm:num_requests_waiting{{{pod_matcher}}})"
    metadata = {
        **(scaling.prometheusMetadata or {}),
        "serverAddress": scaling.prometheusAddress,
        "query": query,
        "threshold": str(scaling.requestsPerReplica or plan.maxNumSeqs.value),
    }
    reference = scaling.authenticationRef
    authentication = {"authenticationRef": to_json(reference)} if reference else {}
    return {"type": "prometheus", "metricType": "AverageValue", "metadata": metadata, **authentication}


def pod_name_pattern(service: LLMService) -> str:
    """Return a regular expression that matches the names of the server pods: those of a Deployment, or the first pods
    of the groups of a LeaderWorkerSet.

    Kubernetes cuts the beginning of a pod's name to 58 characters. For a long name, the hyphen before the last part can
    be missing.
    """
    name = service.name
    if service.num_nodes > 1:
        return f"{name}-[0-9]+"
    hyphen = "-" if len(name) <= _MAX_UNCUT_NAME else "-?"
    return f"{name}-[a-z0-9]+{hyphen}[a-z0-9]+"


def _pods_metric(name: str, average_value: int) -> Manifest:
    return {"type": "Pods", "pods": {"metric": {"name": name}, "target": _average_value(average_value)}}


def _external_metric(external: ExternalMetricSpec) -> Manifest:
    selector = {"selector": {"matchLabels": dict(external.matchLabels)}} if external.matchLabels else {}
    metric = {"name": external.metric, **selector}
    return {"type": "External", "external": {"metric": metric, "target": _average_value(external.value)}}


def _average_value(value: int) -> Manifest:
    return {"type": "AverageValue", "averageValue": str(value)}
