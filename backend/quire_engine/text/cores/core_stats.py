# SPDX-License-Identifier: Apache-2.0
"""The state of all schedulers of a pod as one: what a picker or an autoscaler needs to know. Pure."""

from collections import Counter
from collections.abc import Iterable
from itertools import zip_longest
from typing import Any

import msgspec

from quire_spec.protocol.messages import SchedulerStats

_COUNTERS = (
    *("prefix_cache_queries", "prefix_cache_hits", "num_preemptions", "num_block_copies", "num_swapped_out_blocks"),
    *("num_swapped_in_blocks", "num_steps", "num_step_tokens", "num_adapter_evictions"),
    *("num_drafts", "num_draft_tokens", "num_accepted_draft_tokens", "accepted_draft_tokens_per_position"),
    *("kv_offload_store_bytes", "kv_offload_load_bytes", "host_cache_queries", "host_cache_hits"),
    *("num_folder_read_blocks", "num_folder_written_blocks", "folder_errors", "num_dropped_kv_events"),
    *("num_peer_requested_blocks", "num_peer_read_blocks", "peer_errors", "num_refused_leases"),
)
"""Fields that only grow while a core runs, and start at zero with the next core."""


class CoreStats:
    """The statistics of the connected cores, and the counts of the cores that have ended."""

    def __init__(self) -> None:
        self._by_core: dict[int, SchedulerStats] = {}
        self._ended = _NONE

    def __getitem__(self, core: int) -> SchedulerStats:
        """The latest statistics of a core; all zero if there are none."""
        return self._by_core.get(core, _NONE)

    def set(self, core: int, stats: SchedulerStats) -> SchedulerStats:
        """Replace the statistics of a core, and return the sum of all cores."""
        self._by_core[core] = stats
        return merge_stats([self._ended, *self._by_core.values()])

    def remove(self, core: int) -> SchedulerStats:
        """Remove a core that has ended, and return the sum of the others. Its counts stay in the sum, because a counter
        must never decrease."""
        ended = self._by_core.pop(core, _NONE)
        counts: dict[str, Any] = {name: getattr(ended, name) for name in _COUNTERS}
        self._ended = merge_stats([self._ended, SchedulerStats(**counts)])
        return merge_stats([self._ended, *self._by_core.values()])

    def clear(self) -> None:
        """Forget everything, because no core is connected."""
        self._by_core.clear()
        self._ended = _NONE


def merge_stats(stats: Iterable[SchedulerStats]) -> SchedulerStats:
    """Add up the numbers."""
    parts = list(stats)
    return SchedulerStats(**{name: _merge([getattr(part, name) for part in parts]) for name in _FIELDS})


def _merge(values: list[Any]) -> Any:
    if isinstance(values[0], dict):
        return dict(sum(map(Counter, values), Counter[str]()))
    lists = [value for value in values if isinstance(value, list)]
    if not lists:
        return sum(values)
    return [sum(items) for items in zip_longest(*lists, fillvalue=0)]


_NONE = SchedulerStats()
_FIELDS = tuple(field.name for field in msgspec.structs.fields(SchedulerStats))
