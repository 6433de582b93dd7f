# SPDX-License-Identifier: Apache-2.0
"""The state pool never gives a row to two owners, and keeps the snapshots that were used last."""

from collections import OrderedDict

from hypothesis import given
from hypothesis import strategies as st

from quire_engine.kv_cache.state_pool import StatePool

KEYS = [bytes([letter]) for letter in b"abcdefgh"]


@given(
    st.integers(1, 6),
    st.lists(st.tuples(st.sampled_from(["allocate", "from", "free", "add", "drop"]), st.integers(0, 7)), max_size=60),
)
def test_pool_equals_a_model_of_it(num_rows, events):
    pool, owned, model = StatePool(num_rows), [], OrderedDict()

    def evict_for(row):
        for key in [key for key, model_row in model.items() if model_row == row]:
            assert key == next(iter(model)), "another snapshot was used less recently"
            del model[key]

    for event, number in events:
        key = KEYS[number]
        is_full = pool.num_available == 0
        if event == "allocate" and not is_full:
            owned.append(pool.allocate())
            evict_for(owned[-1])
        elif event == "from" and key in model:
            row, source = pool.allocate_from(key)
            assert source == model[key]
            model.move_to_end(key)
            assert (row == source) == (len(model) + len(owned) == num_rows and len(model) == 1)
            evict_for(row)
            owned.append(row)
        elif event == "free" and owned:
            pool.free(owned.pop(number % len(owned)))
        elif event == "add":
            is_known, row = key in model, pool.add_snapshot(key)
            assert (row is None) == (is_known or is_full)
            if row is not None:
                evict_for(row)
                model[key] = row
                assert pool.key_of(row) == key
            elif is_known:
                model.move_to_end(key)
        elif event == "drop":
            pool.drop_snapshot(key)
            model.pop(key, None)
        assert all((each in pool) == (each in model) for each in KEYS)
        assert pool.num_snapshots == len(model) and pool.num_available == num_rows - len(owned)
        pool.check_integrity(owned)
