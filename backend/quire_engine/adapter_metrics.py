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
_QUEUE_BUCKETS = (0.01, 0.1, 0.5, 1.0, 2.5, 10.0, 60.0)
_LOAD_BUCKETS = (0.005, 0.025, 0.1, 0.5, 2.5, 10.0)

OTHER = "_other"
"""No name that an adapter may have."""


class AdapterMetrics:
    """Series by adapter name; None, the base model, has none."""

    def __init__(self, registry: CollectorRegistry, served_name: str, first_token_buckets: Iterable[float]) -> None:
        self._model = served_name
        self._labels = AdapterLabels()
        self._resident: set[str] = set()
        names = ["model_name", "adapter"]
        self._requests = Counter(
            "quire_adapter_requests", "Requests admitted for the adapter.", names, registry=registry
        )
        self._tokens = Counter("quire_adapter_tokens", "Tokens generated with the adapter.", names, registry=registry)
        self._first_token = Histogram(
            "quire_adapter_time_to_first_token_seconds",
            "From a request's arrival to its first token.",
            names,
            buckets=tuple(first_token_buckets),
            registry=registry,
        )
        self._limited = Counter(
            "quire_adapter_requests_limited", "Requests refused for a limit of the adapter.", names, registry=registry
        )
        self._evictions = Counter(
            "quire_adapter_evictions", "Times that the adapter lost its slot to another one.", names, registry=registry
        )
        self._queue = Histogram(
            "quire_adapter_queue_seconds",
            "From a request's arrival to its first step, the wait for its adapter included.",
            names,
            buckets=_QUEUE_BUCKETS,
            registry=registry,
        )
        self._load = Histogram(
            "quire_adapter_load_seconds",
            "Time in which the adapter came from disk to host memory (to: host), and from there to a slot (to: slot).",
            [*names, "to"],
            buckets=_LOAD_BUCKETS,
            registry=registry,
        )
        self._residency = Gauge(
            "quire_adapter_slot_residency", "1 while the adapter is in a device slot.", names, registry=registry
        )

    def admitted(self, adapter: str | None) -> None:
        """A request was admitted."""
        if adapter is not None:
            self._requests.labels(self._model, self._labels.label(adapter)).inc()

    def limited(self, adapter: str | None) -> None:
        """A request was refused because of a limit of its adapter."""
        if adapter is not None:
            self._limited.labels(self._model, self._labels.label(adapter)).inc()

    def started(self, adapter: str | None, seconds: float) -> None:
        """A request ran for the first time, `seconds` after it came."""
        if adapter is not None:
            self._queue.labels(self._model, self._labels.label(adapter)).observe(seconds)

    def moved(self, adapter: str, move: AdapterEvent) -> None:
        """An adapter came to host memory or to a slot, or lost its slot."""
        label = self._labels.label(adapter)
        if move.kind == "evicted":
            self._evictions.labels(self._model, label).inc()
        else:
            self._load.labels(self._model, label, move.kind).observe(move.duration_s)

    def first_token(self, adapter: str | None, seconds: float) -> None:
        """A request got its first token, `seconds` after it came."""
        if adapter is not None:
            self._first_token.labels(self._model, self._labels.label(adapter)).observe(seconds)

    def tokens(self, adapter: str | None, count: int) -> None:
        """A request got `count` tokens."""
        if adapter is not None:
            self._tokens.labels(self._model, self._labels.label(adapter)).inc(count)

    def catalogue(self, names: Collection[str]) -> None:
        """The adapters that requests can name from now on; the series of others go."""
        for name in self._labels.keep(names):
            self._resident.discard(name)
            for metric in (
                *(self._requests, self._tokens, self._first_token, self._residency),
                *(self._limited, self._evictions, self._queue),
            ):
                metric.remove(self._model, name)
            for place in ("host", "slot"):
                self._load.remove(self._model, name, place)

    def slots(self, names: Collection[str]) -> None:
        """Names of the adapters that are in a device slot now."""
        now = {label for label in map(self._labels.label, names) if label != OTHER}
        for name in self._resident - now:
            self._residency.labels(self._model, name).set(0)
        for name in now - self._resident:
            self._residency.labels(self._model, name).set(1)
        self._resident = now


class AdapterLabels:
    """Which adapters have series of their own: the first MAX_ADAPTER_LABELS of those that requests can name."""

    def __init__(self) -> None:
        self._names: set[str] = set()
        self._shown: set[str] = set()

    def label(self, name: str) -> str:
        """The label value for an adapter; an adapter that was taken from the catalogue is `OTHER` from then on."""
        if name in self._shown:
            return name
        if name not in self._names or len(self._shown) >= MAX_ADAPTER_LABELS:
            return OTHER
        self._shown.add(name)
        return name

    def keep(self, names: Collection[str]) -> set[str]:
        """Take the catalogue's names; returns those whose series are to be removed."""
        self._names = set(names)
        gone = self._shown - self._names
        self._shown -= gone
        return gone
