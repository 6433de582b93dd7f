# SPDX-License-Identifier: Apache-2.0
"""The state that the live page shows: KV blocks by owner, and adapters by name.

A pure function computes the state, which never contains text of requests. The core reports the digests of adapters, and
the text process adds their names. If a digest has several names, it is shown as one owner with the first of these
names.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from quire_engine.text.cores.core_stats import merge_stats
from quire_spec.constants import AdapterDigest, AdapterName
from quire_spec.documents.adapter_sum import is_sum
from quire_spec.protocol.messages import SchedulerStats

MAX_ADAPTERS = 64
MAX_OWNERS = 12
"""The page shows at most this number of owners of KV blocks in colours of their own. It shows all other owners as a
single owner."""
_STATE_ORDER = {"slot": 0, "host": 1}
REMOVED = "removed"
"""The page shows this name as the owner of KV blocks if their adapter was removed, but open requests still use it."""
SUMS = "weighted sums"
"""The page shows this name as the owner of the KV blocks of all weighted sums of adapters."""
OTHERS = "others"


def merge_live(cores: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """Return the results of the method `live` of several cores as one. An adapter is in the best state that it has on
    any core."""
    if len(cores) == 1:
        return cores[0]
    rows: dict[str | None, list[Any]] = {}
    for digest, state, *counts in (row for core in cores for row in core["adapters"]):
        _, other, *sums = rows.get(digest, [digest, state, *[0] * len(counts)])
        best = min(state, other, key=lambda name: _STATE_ORDER.get(name, 2))
        rows[digest] = [digest, best, *map(sum, zip(sums, counts, strict=True))]
    stats = merge_stats(SchedulerStats(**core["stats"]) for core in cores)
    num_adapters = max(core["num_adapters"] for core in cores)
    return {
        "stats": msgspec.structs.asdict(stats),
        "slots": list(dict.fromkeys(digest for core in cores for digest in core["slots"])),
        "adapters": list(rows.values()),
        "num_adapters": num_adapters,
    }


def build_live_snapshot(
    core: Mapping[str, Any],
    served_name: str,
    digest_by_name: Mapping[AdapterName, AdapterDigest],
    load_times: Mapping[tuple[str, str], float],
) -> dict[str, Any]:
    """Return the parts `model`, `kv_cache`, `owners`, `adapters`, `num_adapters` and `swap` of a snapshot.

    Args:
        core: result of the core's method `live`.
        served_name: name of the base model.
        digest_by_name: the adapters that requests can name.
        load_times: mean time of a load in seconds, by the name of the adapter and the destination (host or slot).
    """
    stats = core["stats"]
    first_names: dict[str, str] = {}
    for alias in sorted(digest_by_name):
        first_names.setdefault(digest_by_name[alias], alias)
    adapters: list[dict[str, Any]] = []
    num_blocks: dict[str, int] = {}
    slots = {digest: slot for slot, digest in enumerate(core["slots"])}
    for digest, state, num_running, num_waiting, num_owned_blocks in core["adapters"]:
        unnamed = SUMS if digest is not None and is_sum(digest) else REMOVED
        name: str = served_name if digest is None else first_names.get(digest, unnamed)
        if num_owned_blocks:
            num_blocks[name] = num_blocks.get(name, 0) + num_owned_blocks
        if name not in (REMOVED, SUMS) and len(adapters) < MAX_ADAPTERS:
            adapters.append(
                {
                    "name": name,
                    "is_base": digest is None,
                    "state": state,
                    "slot": slots.get(digest),
                    "running": num_running,
                    "waiting": num_waiting,
                    "host_load_s": load_times.get((name, "host")),
                    "slot_load_s": load_times.get((name, "slot")),
                }
            )
    adapters.sort(key=lambda row: (not row["is_base"], _STATE_ORDER.get(row["state"], 2), row["name"]))
    owners = sorted(num_blocks.items(), key=lambda item: (-item[1], item[0]))
    rest = sum(count for _, count in owners[MAX_OWNERS:])
    return {
        "model": served_name,
        "kv_cache": {"blocks": stats["num_blocks"], "used": stats["num_used_blocks"]},
        "states": {
            "rows": stats["num_states"],
            "used": stats["num_used_states"],
            "snapshots": stats["num_state_snapshots"],
        },
        "swap": {"blocks": stats["num_host_blocks"], "used": stats["num_used_host_blocks"]},
        "owners": [*owners[:MAX_OWNERS], *([(OTHERS, rest)] if rest else [])],
        "adapters": adapters,
        "num_adapters": len(digest_by_name),
        "host_adapter_bytes": stats["host_adapter_bytes"],
    }
