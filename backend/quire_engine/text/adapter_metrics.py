# SPDX-License-Identifier: Apache-2.0
"""Prometheus metrics per adapter, with a bounded number of series.

The engine core reports the digests of adapters, and this module finds the names that belong to them. `RequestMetrics`
owns the metrics, and the request manager calls them. vLLM has no metrics per adapter except those about residency
(adapter_residency.py), so all other names begin with quire_adapter_.
"""

from collections import deque
from collections.abc import Iterable, Mapping

from quire_engine.text.adapter_labels import MAX_ADAPTER_LABELS, AdapterLabels
from quire_engine.text.adapter_residency import LOAD_TIME_BUCKETS, AdapterResidencyMetrics
from quire_engine.text.metric_series import Registry
from quire_spec.constants import AdapterDigest, AdapterName
from quire_spec.documents.adapter_sum import is_sum
from quire_spec.protocol.messages import AdapterEvent, SequenceDelta

_MAX_UNNAMED_ADAPTER_EVENTS = 256
"""Maximum number of events that are kept for adapters whose names are not known yet."""

# The buckets are coarse: they only show which part of the time to first token was spent on waiting or loading.
_QUEUE_TIME_BUCKETS = (0.01, 0.1, 0.5, 1.0, 2.5, 10.0, 60.0)


class AdapterMetrics:
    """Series by adapter name. The base model, whose adapter name is None, has no series."""

    def __init__(self, registry: Registry, served_name: str, ttft_buckets: Iterable[float]) -> None:
        self._model_name = served_name
        self._labels = AdapterLabels()
        self.residency = AdapterResidencyMetrics(registry, served_name, self._labels)
        self._names_by_digest: dict[AdapterDigest, list[AdapterName]] = {}
        self._unnamed_adapter_events: deque[AdapterEvent] = deque(maxlen=_MAX_UNNAMED_ADAPTER_EVENTS)
        labels = ["model_name", "adapter"]
        self._requests = registry.counter("quire_adapter_requests", "Requests admitted for the adapter.", labels)
        self._tokens = registry.counter("quire_adapter_tokens", "Tokens generated with the adapter.", labels)
        self._drafts = (
            registry.counter("quire_adapter_spec_decode_num_drafts", "Drafts that steps verified.", labels),
            registry.counter("quire_adapter_spec_decode_num_draft_tokens", "Draft tokens that steps verified.", labels),
            registry.counter("quire_adapter_spec_decode_num_accepted_tokens", "Accepted draft tokens.", labels),
        )
        self._time_to_first_token = registry.histogram(
            "quire_adapter_time_to_first_token_seconds",
            "From a request's arrival to its first token.",
            labels,
            ttft_buckets,
        )
        self._rate_limited_requests = registry.counter(
            "quire_adapter_requests_limited", "Requests rejected because of a limit of the adapter.", labels
        )
        self._evictions = registry.counter(
            "quire_adapter_evictions", "Times that the adapter was evicted from its slot.", labels
        )
        self._queue_time = registry.histogram(
            "quire_adapter_queue_seconds",
            "From a request's arrival to the start of its first step, including the wait for its adapter.",
            labels,
            _QUEUE_TIME_BUCKETS,
        )
        self._load_time = registry.histogram(
            "quire_adapter_load_seconds",
            "Time to load the adapter from disk to host memory (to: host), and from there to a slot (to: slot).",
            [*labels, "to"],
            LOAD_TIME_BUCKETS,
        )
        self._by_adapter = (
            *(self._requests, self._tokens, self._time_to_first_token, self.residency.in_slot),
            *(self._rate_limited_requests, self._evictions, self._queue_time, *self._drafts),
        )
        """The families whose only labels are the model and the adapter."""

    def record_admitted(self, adapter_name: AdapterName | None) -> None:
        """Count an admitted request."""
        if adapter_name is not None:
            self._requests.labels(self._model_name, self._labels.label(adapter_name)).inc()

    def record_rate_limited(self, adapter_name: AdapterName | None) -> None:
        """Count a request that was rejected because its adapter is at a limit."""
        if adapter_name is not None:
            self._rate_limited_requests.labels(self._model_name, self._labels.label(adapter_name)).inc()

    def record_started(self, adapter_name: AdapterName | None, seconds: float) -> None:
        """Record that a request ran in a step for the first time, `seconds` after its arrival."""
        if adapter_name is not None:
            self._queue_time.labels(self._model_name, self._labels.label(adapter_name)).observe(seconds)

    def record_adapter_event(self, adapter_event: AdapterEvent, is_late: bool = False) -> None:
        """Record that an adapter was loaded to host memory or to a slot, or was evicted from its slot. An event that
        came before the adapter's name is recorded again, late."""
        if adapter_event.kind != "evicted" and not is_late:
            self.residency.record_load(adapter_event.kind, adapter_event.duration_s)
        names = self._names_by_digest.get(adapter_event.digest, [])
        if not names and not is_sum(adapter_event.digest):
            # The core loads an adapter before the supervisor announces its name here.
            self._unnamed_adapter_events.append(adapter_event)
        for label in map(self._labels.label, names):
            if adapter_event.kind == "evicted":
                self._evictions.labels(self._model_name, label).inc()
            else:
                self._load_time.labels(self._model_name, label, adapter_event.kind).observe(adapter_event.duration_s)

    def record_first_token(self, adapter_name: AdapterName | None, seconds: float) -> None:
        """Record the first token of a request, `seconds` after its arrival."""
        if adapter_name is not None:
            self._time_to_first_token.labels(self._model_name, self._labels.label(adapter_name)).observe(seconds)

    def record_generated_tokens(self, adapter_name: AdapterName | None, num_tokens: int) -> None:
        """Count generated tokens."""
        if adapter_name is not None:
            self._tokens.labels(self._model_name, self._labels.label(adapter_name)).inc(num_tokens)

    def record_drafts(self, adapter_name: AdapterName | None, result: SequenceDelta) -> None:
        """Count the verified drafts of a result, their draft tokens, and the accepted draft tokens."""
        if adapter_name is not None:
            label = self._labels.label(adapter_name)
            counts = result.num_drafts, result.num_draft_tokens, result.num_accepted_draft_tokens
            for counter, count in zip(self._drafts, counts, strict=True):
                counter.labels(self._model_name, label).inc(count)

    def set_adapters(self, digest_by_name: Mapping[AdapterName, AdapterDigest]) -> None:
        """Set the adapters that requests can name; remove the series of all others."""
        self._names_by_digest = {}
        for adapter_name, digest in digest_by_name.items():
            self._names_by_digest.setdefault(digest, []).append(adapter_name)
        for name in self._labels.set_names(digest_by_name):
            for metric in self._by_adapter:
                metric.remove(self._model_name, name)
            for destination in ("host", "slot"):
                self._load_time.remove(self._model_name, name, destination)
        if len(digest_by_name) <= MAX_ADAPTER_LABELS:
            # Series that begin with their first request would hide this request from `rate()`.
            for label in map(self._labels.label, digest_by_name):
                for metric in self._by_adapter:
                    metric.labels(self._model_name, label)
        self.residency.set_names(self._names_by_digest)
        adapter_events = list(self._unnamed_adapter_events)
        self._unnamed_adapter_events.clear()
        for adapter_event in adapter_events:
            self.record_adapter_event(adapter_event, is_late=True)

    def mean_load_times(self) -> dict[tuple[str, str], float]:
        """Return the mean load time in seconds for each pair of adapter label and destination (host or slot)."""
        return {
            (adapter, destination): series.sum / series.count
            for (_, adapter, destination), series in self._load_time.items()
            if series.count
        }
