# SPDX-License-Identifier: Apache-2.0
"""Prometheus metrics per adapter, with a bounded number of series.

The engine core reports the digests of adapters, and this module finds the names that belong to them. `RequestMetrics`
owns the metrics, and the request manager calls them. vLLM has no metrics per adapter, so all names begin with
quire_adapter_.
"""

from collections import Counter, deque
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from quire_engine.text.metric_series import Registry
from quire_spec.constants import AdapterDigest, AdapterName
from quire_spec.protocol.messages import AdapterEvent, AdapterResidency, SequenceDelta

MAX_ADAPTER_LABELS = 100
"""Maximum number of adapters that have their own series. All other adapters share one series. Each adapter adds about
60 lines to a scrape, and most of these lines are buckets. With 1,000 adapters, a scrape would be larger than the
traffic that it describes.
"""

_MAX_UNNAMED_ADAPTER_EVENTS = 256
"""Maximum number of events that are kept for adapters whose names are not known yet."""

# The buckets are coarse: they only show which part of the time to first token was spent on waiting or loading.
_QUEUE_TIME_BUCKETS = (0.01, 0.1, 0.5, 1.0, 2.5, 10.0, 60.0)
_LOAD_TIME_BUCKETS = (0.005, 0.025, 0.1, 0.5, 2.5, 10.0)

_LEVELS = {"slot": "gpu", "host": "cpu", "disk": "disk"}
"""The values of the label `level` in vLLM, by the state of an adapter. On a CPU, the level of a slot is `gpu`, too."""

OTHER_LABEL = "_other"
"""Label of the shared series. It is not a valid name for an adapter."""


class AdapterMetrics:
    """Series by adapter name. The base model, whose adapter name is None, has no series."""

    def __init__(self, registry: Registry, served_name: str, ttft_buckets: Iterable[float]) -> None:
        self._model_name = served_name
        self._labels = AdapterLabels()
        self._names_by_digest: dict[AdapterDigest, list[AdapterName]] = {}
        self._residencies: dict[AdapterDigest, AdapterResidency] = {}
        self._num_by_state: Counter[str] = Counter()
        self._levels: dict[AdapterName, tuple[str, ...]] = {}
        """The label values of each adapter in `vllm:lora_adapter_loaded`."""
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
            _LOAD_TIME_BUCKETS,
        )
        self._slot_residency = registry.gauge(
            "quire_adapter_slot_residency", "1 while the adapter is in a device slot.", labels
        )
        self._loaded = registry.gauge(
            "vllm:lora_adapter_loaded",
            "1 while the adapter is in a slot (level gpu), in host memory (cpu) or only on disk (disk).",
            ["model_name", "adapter_name", "level", "pinned", "rank"],
        )
        self._num_gpu_loaded = registry.gauge(
            "vllm:num_gpu_loaded_lora_adapters", "Adapters in slots.", ["model_name"]
        ).labels(served_name)
        self._num_cpu_loaded = registry.gauge(
            "vllm:num_cpu_loaded_lora_adapters", "Adapters in host memory, including those in slots.", ["model_name"]
        ).labels(served_name)
        self._load_time_by_level = registry.histogram(
            "vllm:lora_adapter_load_seconds",
            "Time to load an adapter from disk to host memory (level cpu), and from there to a slot (level gpu).",
            ["model_name", "level"],
            _LOAD_TIME_BUCKETS,
        )
        self._by_adapter = (
            *(self._requests, self._tokens, self._time_to_first_token, self._slot_residency),
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
            level = _LEVELS[adapter_event.kind]
            self._load_time_by_level.labels(self._model_name, level).observe(adapter_event.duration_s)
        names = self._names_by_digest.get(adapter_event.digest, [])
        if not names:
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
        for name in self._levels.keys() - digest_by_name.keys():
            self._loaded.remove(*self._levels.pop(name))
        for name, digest in digest_by_name.items():
            self._show_residency(name, digest)
        adapter_events = list(self._unnamed_adapter_events)
        self._unnamed_adapter_events.clear()
        for adapter_event in adapter_events:
            self.record_adapter_event(adapter_event, is_late=True)

    def record_residency(self, changes: Iterable[AdapterResidency]) -> None:
        """Record the adapters that moved, or that were registered, pinned or removed."""
        for change in changes:
            if (old := self._residencies.pop(change.digest, None)) is not None:
                self._num_by_state[old.state] -= 1
            if change.state != "removed":
                self._residencies[change.digest] = change
                self._num_by_state[change.state] += 1
            for name in self._names_by_digest.get(change.digest, []):
                self._show_residency(name, change.digest)
        self._num_gpu_loaded.set(self._num_by_state["slot"])
        self._num_cpu_loaded.set(self._num_by_state["slot"] + self._num_by_state["host"])

    @property
    def names_in_slots(self) -> set[AdapterName]:
        """Names of the adapters in slots, with a label of their own or not."""
        return {name for name, (_, _, level, *_) in self._levels.items() if level == "gpu"}

    def clear_residency(self) -> None:
        """Forget where the adapters are, because no core is connected."""
        self.record_residency([AdapterResidency(digest, "removed") for digest in self._residencies])

    def residency(self) -> list[dict[str, Any]]:
        """Return the name, digest, level, pin and rank of each adapter that requests can name and a core has."""
        return [
            {"name": name, "digest": d, "level": _LEVELS[known.state], "pinned": known.pinned, "rank": known.rank}
            for d, names in self._names_by_digest.items()
            for name in names
            if (known := self._residencies.get(d)) is not None
        ]

    def mean_load_times(self) -> dict[tuple[str, str], float]:
        """Return the mean load time in seconds for each pair of adapter label and destination (host or slot)."""
        return {
            (adapter, destination): series.sum / series.count
            for (_, adapter, destination), series in self._load_time.items()
            if series.count
        }

    def _show_residency(self, name: AdapterName, digest: AdapterDigest) -> None:
        known = self._residencies.get(digest)
        is_in_slot = known is not None and known.state == "slot"
        if (is_in_slot and self._labels.label(name) != OTHER_LABEL) or self._labels.has_label(name):
            self._slot_residency.labels(self._model_name, name).set(is_in_slot)
        labels: tuple[str, ...] | None = None
        # The number of adapters in slots and in host memory is limited, and that of the others is not.
        if known is not None and (known.state != "disk" or self._labels.has_label(name)):
            pinned = str(known.pinned).lower()
            labels = (self._model_name, name, _LEVELS[known.state], pinned, str(known.rank))
        if (old := self._levels.pop(name, None)) is not None and old != labels:
            self._loaded.remove(*old)
        if labels is not None:
            self._levels[name] = labels
            self._loaded.labels(*labels).set(1)


class AdapterLabels:
    """Chooses the label values of adapters. The first MAX_ADAPTER_LABELS adapters that are used get their own label
    values."""

    def __init__(self) -> None:
        self._names: set[str] = set()
        self._labelled_names: set[str] = set()

    def label(self, name: str) -> str:
        """Return the label value of an adapter; OTHER_LABEL for an adapter that was removed from the catalog."""
        if name in self._labelled_names:
            return name
        if name not in self._names or len(self._labelled_names) >= MAX_ADAPTER_LABELS:
            return OTHER_LABEL
        self._labelled_names.add(name)
        return name

    def has_label(self, name: str) -> bool:
        """Return whether an adapter has its own label value already."""
        return name in self._labelled_names

    def set_names(self, names: Collection[str]) -> set[str]:
        """Set the adapter names that the catalog contains, and return the names whose series must be removed."""
        self._names = set(names)
        removed_names = self._labelled_names - self._names
        self._labelled_names -= removed_names
        return removed_names
