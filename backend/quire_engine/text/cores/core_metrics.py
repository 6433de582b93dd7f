# SPDX-License-Identifier: Apache-2.0
"""Metrics of each core of a pod with several cores. Their label `engine` is the number of the core, as in vLLM.

The metrics without this label (metrics.py) describe the pod as a whole, because an endpoint picker reads only the first
series of a name.
"""

from quire_engine.text.metric_series import Registry
from quire_spec.protocol.messages import SchedulerStats


class CoreMetrics:
    """Series by core."""

    def __init__(self, registry: Registry, served_name: str, num_cores: int) -> None:
        labels = ["model_name", "engine"]
        self._labels = [(served_name, str(core)) for core in range(num_cores)]
        self._connected = registry.gauge("quire_core_up", "1 while the core is connected.", labels)
        self._num_running = registry.gauge("quire_core_num_requests_running", "Running requests of the core.", labels)
        self._num_waiting = registry.gauge(
            "quire_core_num_requests_waiting", "Requests that wait to run on the core.", labels
        )
        self._kv_cache_usage = registry.gauge(
            "quire_core_kv_cache_usage_perc", "Fraction of the core's KV blocks in use; 1 means all.", labels
        )
        self._dispatched = registry.counter("quire_core_requests_dispatched", "Requests sent to the core.", labels)
        self._redispatched = registry.counter(
            "quire_core_requests_redispatched", "Requests that were moved to another core when this core ended.", labels
        )
        for core in range(num_cores):
            self.set_lost(core)
            self._dispatched.labels(*self._labels[core])
            self._redispatched.labels(*self._labels[core])

    def set_stats(self, core: int, stats: SchedulerStats) -> None:
        """Set the gauges of a connected core."""
        labels = self._labels[core]
        self._connected.labels(*labels).set(1)
        self._num_running.labels(*labels).set(stats.num_running)
        self._num_waiting.labels(*labels).set(stats.num_waiting)
        self._kv_cache_usage.labels(*labels).set(stats.num_used_blocks / max(1, stats.num_blocks))

    def set_lost(self, core: int) -> None:
        """Set the gauges of a core that is not connected."""
        for gauge in (self._connected, self._num_running, self._num_waiting, self._kv_cache_usage):
            gauge.labels(*self._labels[core]).set(0)

    def record_dispatched(self, core: int) -> None:
        """Count a request that is sent to a core."""
        self._dispatched.labels(*self._labels[core]).inc()

    def record_redispatched(self, core: int) -> None:
        """Count a request that is moved away from a core."""
        self._redispatched.labels(*self._labels[core]).inc()
