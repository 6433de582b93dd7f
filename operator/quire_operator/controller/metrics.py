# SPDX-License-Identifier: Apache-2.0
"""Prometheus metrics of the operator. They have their own registry, and health.py serves them at /metrics."""

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from quire_operator.controller.observe.pod_admin_client import VisitResult
from quire_operator.kube.resources import Resource

_BUCKETS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)


class ControllerMetrics:
    """The counters, gauges and histograms of the operator."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        registry = self.registry
        self.reconciles = Counter(
            "quire_operator_reconcile", "Reconciliations of LLMServices.", ["result"], registry=registry
        )
        self.reconcile_seconds = Histogram(
            "quire_operator_reconcile_seconds", "Time of a reconciliation.", buckets=_BUCKETS_S, registry=registry
        )
        self.reconcile_errors = Counter(
            "quire_operator_reconcile_errors", "Failed reconciliations, by error.", ["reason"], registry=registry
        )
        self.writes = Counter("quire_operator_writes", "Writes to the API server.", ["kind", "verb"], registry=registry)
        self.pod_visits = Counter(
            "quire_operator_pod_visits",
            "Reads of a pod's status, with a push of the catalog if needed.",
            ["outcome"],
            registry=registry,
        )
        self.pod_visit_seconds = Histogram(
            "quire_operator_pod_visit_seconds",
            "Time to read a pod's status and to push the catalog if needed.",
            buckets=_BUCKETS_S,
            registry=registry,
        )
        self.services = Gauge("quire_operator_services", "Known LLMServices.", registry=registry)
        self.namespace_served = Gauge(
            "quire_operator_namespace_served",
            "Whether a watched namespace is served: 1, or 0 while the operator lacks permissions in it.",
            ["namespace"],
            registry=registry,
        )
        description = "LLMServices that this operator sees, but that another operator owns."
        self.foreign_services = Gauge("quire_operator_foreign_services", description, registry=registry)
        self.queue_depth = Gauge(
            "quire_operator_queue_depth", "LLMServices that wait in the work queue.", registry=registry
        )
        self.queue_age = Gauge(
            "quire_operator_queue_age_seconds",
            "Time for which the oldest LLMService in the work queue has been due or in progress.",
            registry=registry,
        )
        self.watch_age = Gauge(
            "quire_operator_watch_age_seconds",
            "Time since the last event or bookmark of the watch.",
            ["kind"],
            registry=registry,
        )
        description = "Comparisons of the object cache with the API server, by result: same, diverged, unknown."
        self.verifications = Counter("quire_operator_verifications", description, ["result"], registry=registry)

    def record_write(self, resource: Resource, verb: str) -> None:
        """Count a write to the API server."""
        self.writes.labels(resource.kind, verb).inc()

    def record_visit(self, result: VisitResult, seconds: float) -> None:
        """Count a visit to a pod, and record the duration of the visit."""
        self.pod_visits.labels(result.value).inc()
        self.pod_visit_seconds.observe(seconds)

    def generate_text(self, update_gauges: Callable[[], None]) -> bytes:
        """Call `update_gauges`, and return all metrics in Prometheus' text format."""
        update_gauges()
        return generate_latest(self.registry)
