# SPDX-License-Identifier: Apache-2.0
"""Metrics of the operator itself, in a registry of their own; GET /metrics has them."""

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from quire_operator.kube.kinds import Kind
from quire_operator.reconcile.pods import Exchange

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)


class Metrics:
    """What is counted and measured."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        here = self.registry
        self.passes = Counter("quire_operator_reconcile", "Passes over services.", ["result"], registry=here)
        self.seconds = Histogram("quire_operator_reconcile_seconds", "Time of a pass.", buckets=_SECONDS, registry=here)
        self.errors = Counter(
            "quire_operator_reconcile_errors", "Passes that failed, by error.", ["reason"], registry=here
        )
        self.writes = Counter("quire_operator_writes", "Writes to the API server.", ["kind", "verb"], registry=here)
        self.pods = Counter("quire_operator_pod_visits", "Visits to pods' admin ports.", ["outcome"], registry=here)
        self.pod_seconds = Histogram(
            "quire_operator_pod_visit_seconds", "Time of a visit.", buckets=_SECONDS, registry=here
        )
        self.services = Gauge("quire_operator_services", "LLMServices that are known.", registry=here)
        self.depth = Gauge("quire_operator_queue_depth", "Services whose turn has come and that wait.", registry=here)
        self.queue_age = Gauge(
            "quire_operator_queue_age_seconds", "For how long the oldest waits or is worked on.", registry=here
        )
        self.watch_age = Gauge(
            "quire_operator_watch_age_seconds", "Since the API server last said something.", ["kind"], registry=here
        )
        told = "Comparisons of the cache with what the API server lists, a kind each: same, diverged, unknown."
        self.verified = Counter("quire_operator_verifications", told, ["result"], registry=here)

    def wrote(self, kind: Kind, verb: str) -> None:
        """A write was made."""
        self.writes.labels(kind.name, verb).inc()

    def visited(self, exchange: Exchange, seconds: float) -> None:
        """A pod was visited."""
        self.pods.labels(exchange.value).inc()
        self.pod_seconds.observe(seconds)

    def text(self, refresh: Callable[[], None]) -> bytes:
        """All of them in Prometheus' text format; `refresh` sets the gauges first."""
        refresh()
        return generate_latest(self.registry)
