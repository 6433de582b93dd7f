# SPDX-License-Identifier: Apache-2.0
"""Where each adapter is: in a slot, in host memory or on disk, as metrics for routers and as rows.

The names are those of vLLM's pull request 54830, which llm-d's scorer of loaded adapters reads.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from quire_engine.text.adapter_labels import OTHER_LABEL, AdapterLabels
from quire_engine.text.metric_series import Registry
from quire_spec.constants import AdapterDigest, AdapterName
from quire_spec.protocol.messages import AdapterResidency

LOAD_TIME_BUCKETS = (0.005, 0.025, 0.1, 0.5, 2.5, 10.0)

_LEVELS = {"slot": "gpu", "host": "cpu", "disk": "disk"}
"""The values of the label `level` in vLLM, by the state of an adapter. On a CPU, the level of a slot is `gpu`, too."""


class AdapterResidencyMetrics:
    """The place of each adapter that a core has registered, and the series that show it."""

    def __init__(self, registry: Registry, served_name: str, labels: AdapterLabels) -> None:
        self._model_name = served_name
        self._labels = labels
        self._names_by_digest: Mapping[AdapterDigest, Sequence[AdapterName]] = {}
        self._residencies: dict[AdapterDigest, AdapterResidency] = {}
        self._num_by_state: Counter[str] = Counter()
        self._levels: dict[AdapterName, tuple[str, ...]] = {}
        """The label values of each adapter in `vllm:lora_adapter_loaded`."""
        self.in_slot = registry.gauge(
            "quire_adapter_slot_residency", "1 while the adapter is in a device slot.", ["model_name", "adapter"]
        )
        """Has the labels of the other metrics by adapter, so that their owner creates and removes its series."""
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
            LOAD_TIME_BUCKETS,
        )

    def set_names(self, names_by_digest: Mapping[AdapterDigest, Sequence[AdapterName]]) -> None:
        """Set the names of each adapter that requests can name; remove the series of all other names."""
        self._names_by_digest = names_by_digest
        names = {name: digest for digest, names in names_by_digest.items() for name in names}
        for name in self._levels.keys() - names.keys():
            self._loaded.remove(*self._levels.pop(name))
        for name, digest in names.items():
            self._show(name, digest)

    def record_load(self, state: str, seconds: float) -> None:
        """Record that an adapter was loaded to host memory or to a slot, as `state` says."""
        self._load_time_by_level.labels(self._model_name, _LEVELS[state]).observe(seconds)

    def record(self, changes: Iterable[AdapterResidency]) -> None:
        """Record the adapters that moved, or that were registered, pinned or removed."""
        for change in changes:
            if (old := self._residencies.pop(change.digest, None)) is not None:
                self._num_by_state[old.state] -= 1
            if change.state != "removed":
                self._residencies[change.digest] = change
                self._num_by_state[change.state] += 1
            for name in self._names_by_digest.get(change.digest, []):
                self._show(name, change.digest)
        self._num_gpu_loaded.set(self._num_by_state["slot"])
        self._num_cpu_loaded.set(self._num_by_state["slot"] + self._num_by_state["host"])

    @property
    def names_in_slots(self) -> set[AdapterName]:
        """Names of the adapters in slots, with a label of their own or not."""
        return {name for name, (_, _, level, *_) in self._levels.items() if level == "gpu"}

    def clear(self) -> None:
        """Forget where the adapters are, because no core is connected."""
        self.record([AdapterResidency(digest, "removed") for digest in self._residencies])

    def rows(self) -> list[dict[str, Any]]:
        """Return the name, digest, level, pin and rank of each adapter that requests can name and a core has."""
        return [
            {"name": name, "digest": d, "level": _LEVELS[known.state], "pinned": known.pinned, "rank": known.rank}
            for d, names in self._names_by_digest.items()
            for name in names
            if (known := self._residencies.get(d)) is not None
        ]

    def _show(self, name: AdapterName, digest: AdapterDigest) -> None:
        known = self._residencies.get(digest)
        is_in_slot = known is not None and known.state == "slot"
        if (is_in_slot and self._labels.label(name) != OTHER_LABEL) or self._labels.has_label(name):
            self.in_slot.labels(self._model_name, name).set(is_in_slot)
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
