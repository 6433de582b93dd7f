# SPDX-License-Identifier: Apache-2.0
"""Fields of an LLMService that describe the number of its pods and how they are replaced and observed."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from quire_spec.documents.field_schema import LABELS, OBJECT_NAME, Restarts, Rule, schema_field

_OWN_METADATA = Rule(
    "self.all(key, !(key in ['serverAddress', 'query', 'threshold']))",
    "the keys serverAddress, query and threshold must not be set, because the operator sets them; use "
    "spec.autoscaling.prometheusAddress and spec.autoscaling.requestsPerReplica.",
)


METRIC_NAME = "^[a-zA-Z_:][a-zA-Z0-9_:.-]*$"


@dataclass(frozen=True, slots=True, kw_only=True)
class AuthenticationRef:
    """spec.autoscaling.authenticationRef"""

    name: str = schema_field(**OBJECT_NAME)
    """Name of the object."""
    kind: str = schema_field("TriggerAuthentication", enum=("TriggerAuthentication", "ClusterTriggerAuthentication"))
    """Kind of the object. Default TriggerAuthentication, in the namespace of the service."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TriggerSpec:
    """An entry of spec.autoscaling.triggers. It is copied into the ScaledObject."""

    type: str = schema_field(min_length=1, max_length=63, pattern="^[a-z0-9-]+$")
    """Name of a scaler of KEDA, such as cron."""
    name: str | None = schema_field(None, **OBJECT_NAME)
    """Name of the trigger. Default: none."""
    metricType: str | None = schema_field(None, enum=("AverageValue", "Value", "Utilization"))
    """Kind of the target. Default: that of KEDA."""
    metadata: dict[str, str] = schema_field(items={"max_length": 4096}, max_properties=32)
    """Settings of the scaler. All values are strings."""
    authenticationRef: AuthenticationRef | None = schema_field(None)
    """KEDA's object with the credentials of the scaler. Default: none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FallbackSpec:
    """spec.autoscaling.fallback"""

    failureThreshold: int = schema_field(3, minimum=1, maximum=1000)
    """Number of failed queries after which the fallback applies. Default 3."""
    replicas: int = schema_field(minimum=1, maximum=1000)
    """Number of pods while Prometheus does not answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExternalMetricSpec:
    """spec.autoscaling.external"""

    metric: str = schema_field(min_length=1, max_length=253, pattern=METRIC_NAME)
    """Name of the metric in the external metrics API, such as llm_d_epp_flow_control_queue_size."""
    matchLabels: dict[str, str] | None = schema_field(None, **LABELS)
    """Labels that select the series of the metric. Default: none."""
    value: int = schema_field(minimum=1, maximum=1_000_000_000)
    """Target of the metric for each pod."""


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
            "self.kind == 'ScaledObject' ? (has(self.prometheusAddress) || has(self.triggers)) : "
            "!has(self.prometheusAddress)",
            "prometheusAddress must be set if kind is ScaledObject and there are no triggers, and must not be set for "
            "other kinds, because only a ScaledObject queries Prometheus directly; add or remove "
            "spec.autoscaling.prometheusAddress.",
        ),
        Rule(
            "self.kind == 'ScaledObject' || (!has(self.authenticationRef) && !has(self.prometheusMetadata) && "
            "!has(self.triggers) && !has(self.pollingInterval) && !has(self.fallback))",
            "kind must be ScaledObject if authenticationRef, prometheusMetadata, triggers, pollingInterval or fallback "
            "is set, because they are settings of KEDA; set spec.autoscaling.kind to ScaledObject.",
        ),
        Rule(
            "has(self.prometheusAddress) || (!has(self.authenticationRef) && !has(self.prometheusMetadata))",
            "prometheusAddress must be set with authenticationRef and prometheusMetadata, because they belong to its "
            "trigger; add spec.autoscaling.prometheusAddress.",
        ),
        Rule(
            "self.kind != 'ScaledObject' || !has(self.external)",
            "external must not be set if kind is ScaledObject, because KEDA has scalers for external metrics; use "
            "spec.autoscaling.triggers.",
        ),
        Rule(
            "self.minReplicas > 0 || has(self.external) || (has(self.triggers) && has(self.prometheusAddress))",
            "minReplicas must be at least 1 unless external is set, or triggers and prometheusAddress: triggers start "
            "the first pod, and prometheusAddress keeps the pods that have requests; set them, or raise "
            "spec.autoscaling.minReplicas to 1.",
        ),
    )

    kind: str = schema_field("HorizontalPodAutoscaler", enum=("HorizontalPodAutoscaler", "ScaledObject"))
    """Kind of the autoscaler. HorizontalPodAutoscaler requires a metrics adapter that provides Prometheus metrics as
    pod metrics. ScaledObject requires KEDA instead. Default HorizontalPodAutoscaler."""
    minReplicas: int = schema_field(1, minimum=0, maximum=1000)
    """Minimum number of pods. Default 1. 0 requires `triggers` and `prometheusAddress`, or `external` and the
    feature gate HPAScaleToZero, which is on by default from Kubernetes 1.37. While there are no pods, requests fail
    unless something before the service holds them."""
    maxReplicas: int = schema_field(minimum=1, maximum=1000)
    """Maximum number of pods."""
    requestsPerReplica: int | None = schema_field(None, minimum=1, maximum=4096)
    """Target number of running and waiting requests for each pod. Default: maxNumSeqs."""
    external: ExternalMetricSpec | None = schema_field(None)
    """Further metric of the HorizontalPodAutoscaler, which does not come from the pods. The number of pods follows the
    metric that needs the most. Default: none."""
    scaleDownSeconds: int = schema_field(300, minimum=0, maximum=3600)
    """Seconds for which the load must be lower before a pod is removed. Default 300, because a new pod takes minutes to
    start."""
    prometheusAddress: str | None = schema_field(None, min_length=8, max_length=1024, pattern="^https?://[^ ]+$")
    """URL of Prometheus, for kind ScaledObject. Default: none."""
    authenticationRef: AuthenticationRef | None = schema_field(None)
    """KEDA's object with the credentials for Prometheus. Also set authModes in prometheusMetadata. Default: none."""
    prometheusMetadata: dict[str, str] | None = schema_field(
        None, items={"max_length": 1024}, max_properties=16, rules=(_OWN_METADATA,)
    )
    """Further metadata of KEDA's trigger for Prometheus, such as authModes, namespace or unsafeSsl. Default: none."""
    triggers: tuple[dict[str, Any], ...] | None = schema_field(
        None, type=tuple[TriggerSpec, ...], minItems=1, max_items=8, list_type="atomic"
    )
    """Further triggers of KEDA. The number of pods follows the trigger that needs the most. Default: none."""
    pollingInterval: int | None = schema_field(None, minimum=1, maximum=3600)
    """Seconds between two queries of KEDA. Default: that of KEDA, 30."""
    fallback: FallbackSpec | None = schema_field(None)
    """Number of pods while the metrics cannot be read. Default: the number stays as it is."""


PERCENTAGE = "^([0-9]|[1-9][0-9]|100)%$"
_NUMBER_OR_PERCENTAGE: Mapping[str, Any] = {"minimum": 0, "maximum": 1000, "max_length": 4, "pattern": PERCENTAGE}


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutSpec:
    """spec.rollout"""

    RULES: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "(self.maxSurge != 0 && self.maxSurge != '0%') || "
            "(self.maxUnavailable != 0 && self.maxUnavailable != '0%')",
            "maxSurge and maxUnavailable must not both be 0, because then pods cannot be replaced; set "
            "spec.rollout.maxUnavailable to 1.",
        ),
    )

    maxSurge: int | str = schema_field(0, **_NUMBER_OR_PERCENTAGE)
    """Number of pods above replicas during a rollout, or percentage of replicas, rounded up. Default 0, because an
    additional pod needs additional GPUs and stays Pending if there are none."""
    maxUnavailable: int | str = schema_field(1, **_NUMBER_OR_PERCENTAGE)
    """Number of pods that can be unavailable during a rollout, or percentage of replicas, rounded down. Default 1.
    """
    minReadySeconds: int = schema_field(10, minimum=0, maximum=3600)
    """Seconds for which a new pod must be ready before the next one is replaced. Default 10, so that routers and
    gateways send requests to the new pod before the old one stops."""
    drainSeconds: int = schema_field(60, minimum=0, maximum=3600, restarts=Restarts.YES)
    """Seconds that running requests have to finish before a pod stops. Default 60."""
    progressDeadlineSeconds: int | None = schema_field(None, minimum=60, maximum=86400)
    """Seconds without progress after which a rollout counts as failed. Default: computed from the size of the model and
    drainSeconds, because a large model takes long to load."""
    updatePolicy: str = schema_field("OnSpecChange", enum=("OnSpecChange", "Auto"))
    """When a new plan can restart pods. With OnSpecChange, only after the spec or the model changed. With
    Auto, also when a new release of the operator plans differently. Default OnSpecChange, so that an upgrade of the
    operator does not restart pods."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DisruptionSpec:
    """spec.disruption"""

    pdb: str = schema_field("Auto", enum=("Auto", "None"))
    """PodDisruptionBudget. With Auto and more than one replica, the operator creates one that allows one eviction at a
    time. For a single replica, it would only block the drain. Default Auto."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TracingSpec:
    """spec.observability.tracing"""

    endpoint: str = schema_field(pattern=r"^(https?|grpc)://[^/\s]+(/\S*)?$", maxLength=1024)
    """URL to which pods send spans of requests by OTLP, such as http://collector.monitoring:4317 for gRPC, or
    http://collector.monitoring:4318/v1/traces for HTTP. Variables such as OTEL_TRACES_SAMPLER and
    OTEL_EXPORTER_OTLP_HEADERS can be set in spec.runtime.env."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservabilitySpec:
    """spec.observability"""

    podMonitor: str = schema_field("Auto", enum=("Auto", "None"))
    """PodMonitor of the Prometheus operator. With Auto, the operator creates one if the cluster has that kind. Default
    Auto."""
    metricsLabels: dict[str, str] = schema_field(factory=dict, **LABELS)
    """Labels of the PodMonitor, for a Prometheus that selects PodMonitors by label. Default: none."""
    tracing: TracingSpec | None = schema_field(None, restarts=Restarts.YES)
    """OpenTelemetry traces of requests. Default: none."""
