# SPDX-License-Identifier: Apache-2.0
"""AdapterMetrics: what is counted per adapter, with a bounded number of series. Part of metrics.py.

vLLM has nothing of the kind: one tenant's slow adapter is invisible there. Ours all begin with quire_adapter_.
"""

from collections.abc import Collection, Iterable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

MAX_ADAPTER_LABELS = 100
"""Adapters with series of their own; the others share "other". Each costs about 30 lines of a scrape, most of them
buckets, and a thousand adapters would make the scrape larger than the traffic it describes."""

OTHER = "other"


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
        self._residency = Gauge(
            "quire_adapter_slot_residency", "1 while the adapter is in a device slot.", names, registry=registry
        )

    def admitted(self, adapter: str | None) -> None:
        """A request was admitted."""
        if adapter is not None:
            self._requests.labels(self._model, self._labels.label(adapter)).inc()

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
            for metric in (self._requests, self._tokens, self._first_token, self._residency):
                metric.remove(self._model, name)

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
        """The label value for an adapter; an adapter that was taken from the catalogue is "other" from then on."""
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
