# SPDX-License-Identifier: Apache-2.0
"""The live snapshot: bounded, by name, and complete in its counts."""

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from quire_engine.text.live_snapshot import MAX_ADAPTERS, MAX_OWNERS, REMOVED, build_live_snapshot
from quire_spec.protocol.messages import SchedulerStats

DIGESTS = st.none() | st.integers(0, 200).map("sha256:{}".format)
ROWS = st.lists(
    st.tuples(DIGESTS, st.sampled_from(["slot", "host", "disk"]), *(st.integers(0, 9),) * 3),
    max_size=120,
    unique_by=lambda row: row[0],
)
NAMES = st.dictionaries(st.integers(0, 99).map("adapter-{}".format), DIGESTS.filter(bool), max_size=120)


@given(ROWS, NAMES)
def test_a_snapshot_is_bounded_and_loses_no_block(rows, names):
    core = {
        "stats": msgspec.structs.asdict(SchedulerStats(num_blocks=9, num_used_blocks=5)),
        "slots": [digest for digest, state, *_ in rows if state == "slot"],
        "adapters": rows,
        "num_adapters": 3,
    }
    snapshot = build_live_snapshot(core, "base", names, {})
    assert len(snapshot["adapters"]) <= MAX_ADAPTERS and len(snapshot["owners"]) <= MAX_OWNERS + 1
    assert sum(count for _, count in snapshot["owners"]) == sum(row[4] for row in rows)
    shown = [row["name"] for row in snapshot["adapters"]]
    assert len(shown) == len(set(shown)) and set(shown) <= {"base", *names}
    assert REMOVED not in shown and snapshot["num_adapters"] == len(names)
    if any(row[0] is None for row in rows):
        assert shown[0] == "base"
