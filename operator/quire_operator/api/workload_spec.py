# SPDX-License-Identifier: Apache-2.0
"""Fields of an LLMService that describe the number of its pods and how they are replaced and observed."""

from dataclasses import dataclass
from typing import ClassVar

from quire_spec.documents.field_schema import LABELS, Restarts, Rule, schema_field


@dataclass(frozen=True, slots=True, kw_only=True)
class AutoscalingSpec:
    """spec.autoscaling"""

    RULES: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "self.minReplicas <= self.maxReplicas",
            "minReplicas must not exceed maxReplicas; lower spec.autoscaling.minReplicas or raise "
            "spec.autoscaling.maxReplicas.",
        ),
        Rule(
            "(self.kind == 'ScaledObject') == has(self.prometheusAddress)",
            "prometheusAddress must be set if and only if kind is ScaledObject, because only a ScaledObject queries "
            "Prometheus directly; add or remove spec.autoscaling.prometheusAddress.",
        ),
    )

    kind: str = schema_field("HorizontalPodAutoscaler", enum=("HorizontalPodAutoscaler", "ScaledObject"))
    """Kind of the autoscaler. HorizontalPodAutoscaler requires a metrics adapter that provides Prometheus metrics as
    pod metrics. ScaledObject requires KEDA instead. Default HorizontalPodAutoscaler."""
    minReplicas: int = schema_field(1, minimum=1, maximum=1000)
    """Minimum number of pods. Default 1."""
    maxReplicas: int = schema_field(minimum=1, maximum=1000)
    """Maximum number of pods."""
    requestsPerReplica: int | None = schema_field(None, minimum=1, maximum=4096)
    """Target number of running and waiting requests for each pod. Default: maxNumSeqs."""
    scaleDownSeconds: int = schema_field(300, minimum=0, maximum=3600)
    """Seconds for which the load must be lower before a pod is removed. Default 300, because a new pod takes minutes to
    start."""
    prometheusAddress: str | None = schema_field(None, min_length=8, max_length=1024, pattern="^https?://[^ ]+$")
    """URL of Prometheus, for kind ScaledObject. Default: none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutSpec:
    """spec.rollout"""

    RULES: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "self.maxSurge > 0 || self.maxUnavailable > 0",
            "maxSurge and maxUnavailable must not both be 0, because then pods cannot be replaced; set "
            "spec.rollout.maxUnavailable to 1.",
        ),
    )

    maxSurge: int = schema_field(0, minimum=0, maximum=1000)
    """Number of pods above replicas during a rollout. Default 0, because an additional pod needs additional GPUs and
    stays Pending if there are none."""
    maxUnavailable: int = schema_field(1, minimum=0, maximum=1000)
    """Number of pods that can be unavailable during a rollout. Default 1."""
    minReadySeconds: int = schema_field(10, minimum=0, maximum=3600)
    """Seconds for which a new pod must be ready before the next one is replaced. Default 10, so that routers and
    gateways send requests to the new pod before the old one stops."""
    drainSeconds: int = schema_field(60, minimum=0, maximum=3600, restarts=Restarts.YES)
    """Seconds that running requests have to finish before a pod stops. Default 60."""
    progressDeadlineSeconds: int | None = schema_field(None, minimum=60, maximum=86400)
    """Seconds without progress after which a rollout counts as failed. Default: computed from the size of the model and
    drainSeconds, because a large model takes long to load."""
    updatePolicy: str = schema_field("OnSpecChange", enum=("OnSpecChange", "Auto"))
    """When a new plan can restart pods. With OnSpecChange, only after the spec, the model or the GPU changed. With
    Auto, also when a new release of the operator plans differently. Default OnSpecChange, so that an upgrade of the
    operator does not restart pods."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DisruptionSpec:
    """spec.disruption"""

    pdb: str = schema_field("Auto", enum=("Auto", "None"))
    """PodDisruptionBudget. With Auto and more than one replica, the operator creates one that allows one eviction at a
    time. For a single replica, it would only block the drain. Default Auto."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservabilitySpec:
    """spec.observability"""

    podMonitor: str = schema_field("Auto", enum=("Auto", "None"))
    """PodMonitor of the Prometheus operator. With Auto, the operator creates one if the cluster has that kind. Default
    Auto."""
    metricsLabels: dict[str, str] = schema_field(factory=dict, **LABELS)
    """Labels of the PodMonitor, for a Prometheus that selects PodMonitors by label. Default: none."""
