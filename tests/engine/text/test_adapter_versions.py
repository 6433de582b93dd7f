# SPDX-License-Identifier: Apache-2.0
"""The split of requests between the versions of an adapter."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from quire_engine.text.admission.adapter_versions import AdapterVersions, base_name, version_of

SERVED = {"sql", "sql@v1", "sql@v2", "sql@v3", "tone"}
WEIGHTS = st.dictionaries(st.sampled_from(["v1", "v2", "v3"]), st.integers(0, 10000), min_size=1)


def versions(**weights):
    split = AdapterVersions()
    split.weights_by_name = {"sql": weights}
    return split


def test_the_split_follows_the_weights():
    counts = Counter(versions(v1=90, v2=10, v3=0).choose("sql", f"user-{i}", SERVED) for i in range(20_000))
    assert counts.keys() == {"sql@v1", "sql@v2"}
    assert abs(counts["sql@v2"] / 20_000 - 0.1) < 0.01


@given(WEIGHTS, st.text(max_size=20), st.sets(st.sampled_from(sorted(SERVED))))
def test_a_session_always_gets_the_same_served_version(weights, session, served):
    split = versions(**weights)
    chosen = split.choose("sql", session, served)
    assert chosen == split.choose("sql", session, served)
    candidates = {f"sql@{name}" for name, weight in weights.items() if weight > 0} & served
    assert chosen in candidates if candidates else chosen == "sql"


@given(st.integers(0, 100), st.integers(0, 100), st.text(max_size=20))
def test_if_a_version_gains_no_session_leaves_it(low, high, session):
    low, high = sorted((low, high))
    before = versions(v1=100 - low, v2=low).choose("sql", session, SERVED)
    after = versions(v1=100 - high, v2=high).choose("sql", session, SERVED)
    assert (before, after) != ("sql@v2", "sql@v1")


def test_other_names_are_left_alone():
    split = versions(v1=1)
    assert split.choose("tone", "x", SERVED) == "tone"
    assert split.choose("sql@v2", "x", SERVED) == "sql@v2"
    assert (base_name("sql@v2"), version_of("sql@v2"), base_name("sql"), version_of("sql")) == ("sql", "v2", "sql", "")
