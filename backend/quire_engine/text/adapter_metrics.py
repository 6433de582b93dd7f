# SPDX-License-Identifier: Apache-2.0
"""AdapterMetrics: what is counted per adapter, with a bounded number of series. Part of metrics.py.

vLLM has nothing of the kind: one tenant's slow adapter is invisible there. Ours all begin with quire_adapter_.
"""

from collections.abc import Collection, Iterable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from quire_spec.protocol.messages import AdapterEvent

MAX_ADAPTER_LABELS = 100
"""Adapters with series of their own; the others share one. Each costs about 60 lines of a scrape, most of them
buckets, and a thousand adapters would make the scrape larger than the traffic it describes."""

# Coarse: these are seen beside the time to the first token, to tell what it went to.
_QUEUE_TIME_BUCKETS = (0.01, 0.1, 0.5, 1.0, 2.5, 10.0, 60.0)
_LOAD_TIME_BUCKETS = (0.005, 0.025, 0.1, 0.5, 2.5, 10.0)

OTHER_LABEL = "_other"
"""No name that an adapter may have."""


class AdapterMetrics:
    """Series by adapter name; None, the base model, has none."""

    def __init__(self, registry: CollectorRegistry, served_name: str, ttft_buckets: Iterable[float]) -> None:
        self._model_name = served_name
        self._labels = AdapterLabels()
        self._resident_names: set[str] = set()
        label_names = ["model_name", "adapter"]
        self._requests = Counter(
            "quire_adapter_requests", "Requests admitted for the adapter.", label_names, registry=registry
        )
        self._tokens = Counter(
            "quire_adapter_tokens", "Tokens generated with the adapter.", label_names, registry=registry
        )
        self._time_to_first_token = Histogram(
            "quire_adapter_time_to_first_token_seconds",
            "From a request's arrival to its first token.",
            label_names,
            buckets=tuple(ttft_buckets),
            registry=registry,
        )
        self._rate_limited_requests = Counter(
            "quire_adapter_requests_limited",
            "Requests refused for a limit of the adapter.",
            label_names,
            registry=registry,
        )
        self._evictions = Counter(
            "quire_adapter_evictions",
            "Times that the adapter lost its slot to another one.",
            label_names,
            registry=registry,
        )
        self._queue_time = Histogram(
            "quire_adapter_queue_seconds",
            "From a request's arrival to its first step, the wait for its adapter included.",
            label_names,
            buckets=_QUEUE_TIME_BUCKETS,
            registry=registry,
        )
        self._load_time = Histogram(
            "quire_adapter_load_seconds",
            "Time in which the adapter came from disk to host memory (to: host), and from there to a slot (to: slot).",
            [*label_names, "to"],
            buckets=_LOAD_TIME_BUCKETS,
            registry=registry,
        )
        self._slot_residency = Gauge(
            "quire_adapter_slot_residency", "1 while the adapter is in a device slot.", label_names, registry=registry
        )

    def record_admitted(self, adapter_name: str | None) -> None:
        """A request was admitted."""
        if adapter_name is not None:
            self._requests.labels(self._model_name, self._labels.label(adapter_name)).inc()

    def record_rate_limited(self, adapter_name: str | None) -> None:
        """A request was refused because of a limit of its adapter."""
        if adapter_name is not None:
            self._rate_limited_requests.labels(self._model_name, self._labels.label(adapter_name)).inc()

    def record_started(self, adapter_name: str | None, seconds: float) -> None:
        """A request ran for the first time, `seconds` after it came."""
        if adapter_name is not None:
            self._queue_time.labels(self._model_name, self._labels.label(adapter_name)).observe(seconds)

    def record_adapter_event(self, adapter_name: str, adapter_event: AdapterEvent) -> None:
        """An adapter came to host memory or to a slot, or lost its slot."""
        label = self._labels.label(adapter_name)
        if adapter_event.kind == "evicted":
            self._evictions.labels(self._model_name, label).inc()
        else:
            self._load_time.labels(self._model_name, label, adapter_event.kind).observe(adapter_event.duration_s)

    def record_first_token(self, adapter_name: str | None, seconds: float) -> None:
        """A request got its first token, `seconds` after it came."""
        if adapter_name is not None:
            self._time_to_first_token.labels(self._model_name, self._labels.label(adapter_name)).observe(seconds)

    def record_generated_tokens(self, adapter_name: str | None, num_tokens: int) -> None:
        """A request got `count` tokens."""
        if adapter_name is not None:
            self._tokens.labels(self._model_name, self._labels.label(adapter_name)).inc(num_tokens)

    def set_adapter_names(self, names: Collection[str]) -> None:
        """The adapters that requests can name from now on; the series of others go."""
        for name in self._labels.set_names(names):
            self._resident_names.discard(name)
            for metric in (
                *(self._requests, self._tokens, self._time_to_first_token, self._slot_residency),
                *(self._rate_limited_requests, self._evictions, self._queue_time),
            ):
                metric.remove(self._model_name, name)
            for destination in ("host", "slot"):
                self._load_time.remove(self._model_name, name, destination)

    def set_resident_adapters(self, names: Collection[str]) -> None:
        """Names of the adapters that are in a device slot now."""
        resident_names = {label for label in map(self._labels.label, names) if label != OTHER_LABEL}
        for name in self._resident_names - resident_names:
            self._slot_residency.labels(self._model_name, name).set(0)
        for name in resident_names - self._resident_names:
            self._slot_residency.labels(self._model_name, name).set(1)
        self._resident_names = resident_names


class AdapterLabels:
    """Which adapters have series of their own: the first MAX_ADAPTER_LABELS of those that requests can name."""

    def __init__(self) -> None:
        self._names: set[str] = set()
        self._labelled_names: set[str] = set()

    def label(self, name: str) -> str:
        """The label value for an adapter; an adapter that was taken from the catalogue is `OTHER` from then on."""
        if name in self._labelled_names:
            return name
        if name not in self._names or len(self._labelled_names) >= MAX_ADAPTER_LABELS:
            return OTHER_LABEL
        self._labelled_names.add(name)
        return name

    def set_names(self, names: Collection[str]) -> set[str]:
        """Take the catalogue's names; returns those whose series are to be removed."""
        self._names = set(names)
        removed_names = self._labelled_names - self._names
        self._labelled_names -= removed_names
        return removed_names
