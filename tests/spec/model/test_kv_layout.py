# SPDX-License-Identifier: Apache-2.0
"""Groups of layers that share KV blocks, for any pattern of windows."""

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire_spec.model.kv_layout import KVLayout


def make_layout(windows, max_model_len=100, full_elements=1, windowed_elements=1, sources=None, has_drafter=False):
    """A layout for layers whose keys have these numbers of elements, depending on whether they have a window."""
    is_uniform = None not in windows
    shape = SimpleNamespace(
        encoder=None,
        sliding_windows=tuple(windows),
        num_layers=len(windows),
        max_sliding_window=max(windows) if is_uniform else None,
        kv_source=lambda layer: layer if sources is None else sources[layer],
        kv_elements=lambda layer: full_elements if windows[layer] is None else windowed_elements,
    )
    return KVLayout.from_model(shape, max_model_len, has_drafter)


@given(st.lists(st.sampled_from([None, 16, 40, 100]), min_size=1, max_size=40))
def test_each_layer_has_a_place_of_its_own_beside_layers_of_its_kind(windows):
    layout = make_layout(windows)
    places = list(zip(layout.groups, layout.rows, strict=True))
    assert len(set(places)) == len(windows)
    assert set(layout.groups) == set(range(layout.num_groups))
    assert set(layout.rows) == set(range(layout.num_layers))
    needs_all_keys = [window is None or window >= 100 for window in windows]
    if layout.num_groups == 1:
        assert len(set(needs_all_keys)) == 1
    else:
        is_full = [group < layout.num_full_groups for group in layout.groups]
        assert is_full == needs_all_keys
        assert layout.window == max(w for w in windows if w is not None and w < 100)
        assert layout.num_groups <= 17
        # Fewer places are unused than a group of each kind has.
        assert 0 <= layout.num_layers * layout.num_groups - len(windows) < 2 * layout.num_layers


@given(
    st.lists(st.sampled_from([None, 16]), min_size=1, max_size=40).filter(lambda windows: len(set(windows)) == 2),
    st.sampled_from([(1, 1), (2, 1), (1, 2), (4, 1)]),
    st.integers(0, 10),
    st.sampled_from([8, 100]),
)
def test_layers_with_larger_keys_have_several_blocks(windows, elements, num_shared, max_model_len):
    """Each block has room for `num_layers` keys of the smallest size, and each place belongs to one layer and to the
    layers that read its keys. A short context makes all layers full ones."""
    num_own = max(len(windows) - num_shared, windows.index(None) + 1, windows.index(16) + 1)
    sources = [
        i if i < num_own else next(j for j in reversed(range(num_own)) if windows[j] == windows[i])
        for i in range(len(windows))
    ]
    layout = make_layout(windows, max_model_len, *elements, sources)
    splits = layout.splits or (1,) * len(windows)
    used = set()
    for layer, source in enumerate(sources):
        size = elements[0] if windows[layer] is None else elements[1]
        assert splits[layer] == size // min(elements)
        place = {(layout.groups[layer] + i, layout.rows[layer]) for i in range(splits[layer])}
        assert used.isdisjoint(place) if source == layer else place <= used
        used |= place
        is_full = windows[layer] is None or max_model_len == 8
        if layout.num_groups > 1:
            assert all((group < layout.num_full_groups) == is_full for group, _ in place)
    assert {group for group, _ in used} == set(range(layout.num_groups))
    assert {row for _, row in used} == set(range(layout.num_layers))


@pytest.mark.parametrize(("num_layers", "period", "expected"), [(26, 2, (13, 2)), (48, 6, (8, 6)), (26, 6, (4, 7))])
def test_groups_of_published_models(num_layers, period, expected):
    """Gemma 2 2B, Gemma 3 12B and 1B: every second or sixth layer has no window."""
    layout = make_layout([None if i % period == period - 1 else 16 for i in range(num_layers)])
    assert (layout.num_layers, layout.num_groups) == expected and layout.num_full_groups == 1


@given(st.integers(0, 300), st.integers(1, 50), st.sampled_from([8, 16]))
def test_blocks_outside_the_window(num_tokens, window, block_size):
    """The next token has position num_tokens and attends to `window` keys, its own included."""
    layout = make_layout([None, window])
    outside = layout.num_outside_window(num_tokens, block_size)
    first_key = max(num_tokens - window + 1, 0)
    assert outside * block_size <= first_key < (outside + 1) * block_size


def test_splits_the_entries_of_a_block_table():
    layout = make_layout([None, 16, None, 16, 16, None, 16])
    assert (layout.num_groups, layout.num_full_groups) == (3, 1)
    assert layout.split_entries([1, 2, 3, 4, 5, 6]) == ([1, 4], [2, 3, 5, 6])
    assert layout.without_freed([1, 2, 3, 4, 5, 6]) == [1, 1, 1, 4, 4, 4]


@given(
    st.lists(st.sampled_from([None, 16, 40]), min_size=1, max_size=12),
    st.integers(100, 10_000),
    st.integers(1, 40),
)
def test_capacity_of_sequences_that_have_left_their_windows(windows, pool_tokens, num_seqs):
    layout = make_layout(windows, max_model_len=10_000)
    length = layout.max_length(pool_tokens, num_seqs, 8)
    num_windowed = 0 if layout.num_groups == 1 else layout.num_groups - layout.num_full_groups
    kept = layout.num_groups * length - num_windowed * max(length - (layout.window or 0) - 16, 0)
    used = layout.num_groups * length + (num_seqs - 1) * kept
    one_more = (layout.num_groups - num_windowed) * (num_seqs - 1) + layout.num_groups * num_seqs
    assert used <= pool_tokens * layout.num_groups < used + one_more
    if length:
        assert layout.num_tokens(pool_tokens, length, 8) >= num_seqs * length


@given(st.lists(st.booleans(), min_size=2, max_size=40).filter(lambda layers: not all(layers)), st.booleans())
def test_only_layers_without_a_state_have_a_place_in_blocks(has_state, has_drafter):
    """With a drafter, all layers keep all tokens."""
    windows, num_kv_layers = [7 if has_drafter else None] * len(has_state), has_state.count(False)
    sources = [has_state.index(False) if state else layer for layer, state in enumerate(has_state)]
    layout = make_layout(windows, sources=sources, has_drafter=has_drafter)
    assert (layout.num_layers, layout.num_groups, layout.window) == (num_kv_layers, 1, None)
    rows = [row for row, state in zip(layout.rows, has_state, strict=True) if not state]
    assert rows == list(range(num_kv_layers)) and max(layout.rows) < num_kv_layers
