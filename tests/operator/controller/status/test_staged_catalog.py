# SPDX-License-Identifier: Apache-2.0
"""A new content becomes live when all ready pods have verified it, and the content before it stays for a rollback."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.observed_factories import ready_pod

from quire_operator.controller.status.staged_catalog import stage_catalog
from quire_spec.documents.adapter_catalog import AdapterCatalog, AdapterSpec, Canary
from quire_spec.documents.pod_status import AdapterState, AdapterStatus, ContentStatus, PodStatus
from quire_spec.documents.sources import PvcSource, Source

A, B, C = (Source(pvc=PvcSource("models", path)) for path in "abc")
CLAIMS = {"models"}


def catalog(source, generation=1, **fields):
    return AdapterCatalog(generation, (AdapterSpec("sql", source, **fields),))


def pod(name, of, state=None):
    """A ready pod that works on a catalog."""
    held = None if state is None else ContentStatus(AdapterState(state))
    adapter = AdapterStatus("sql", AdapterState.READY, "", candidate=held)
    report = PodStatus("1", "s", True, "", None, 1, {}, None, adapters=[adapter], catalogue=of.version.digest)
    return ready_pod(name, report)


def content(source, canary=None):
    return AdapterSpec("sql", source, canary=canary).content


STAGED = catalog(A, candidate=content(B))


def test_another_source_is_first_a_candidate():
    assert stage_catalog(catalog(B), catalog(A), [ready_pod("p")], CLAIMS) == STAGED
    assert stage_catalog(catalog(B), STAGED, [ready_pod("p")], CLAIMS) == STAGED, "without reports, nothing switches"


@pytest.mark.parametrize("states", [[], ["Verified", "Loading"], ["Verified", "Failed"], ["Verified", None]])
def test_nothing_switches_before_all_ready_pods_have_verified(states):
    pods = [pod(str(i), STAGED, state) for i, state in enumerate(states)] or [replace(ready_pod("p"), ready=False)]
    assert stage_catalog(catalog(B), STAGED, pods, CLAIMS) == STAGED


def test_it_switches_when_all_ready_pods_have_verified_and_keeps_the_previous_content():
    pods = [pod("0", STAGED, "Verified"), pod("1", STAGED, "Verified"), replace(ready_pod("2"), ready=False)]
    switched = stage_catalog(catalog(B), STAGED, pods, CLAIMS)
    assert switched == catalog(B, previous=content(A))
    assert stage_catalog(catalog(B), switched, pods, CLAIMS) == switched
    rollback = stage_catalog(catalog(A), switched, pods, CLAIMS)
    assert rollback == catalog(B, candidate=content(A), previous=content(A))
    pods = [pod("0", rollback, "Verified")]
    assert stage_catalog(catalog(A), rollback, pods, CLAIMS) == catalog(A, previous=content(B))


def test_a_report_about_another_candidate_does_not_count():
    pods = [pod("0", STAGED, "Verified")]
    assert stage_catalog(catalog(C), STAGED, pods, CLAIMS) == catalog(A, candidate=content(C))
    assert stage_catalog(catalog(A), STAGED, pods, CLAIMS) == catalog(A)


def test_a_new_canary_is_a_candidate_and_other_fields_change_at_once():
    canary = Canary("a", expect="b")
    staged = stage_catalog(catalog(A, canary=canary), catalog(A), [ready_pod("p")], CLAIMS)
    assert staged == catalog(A, candidate=content(A, canary))
    assert stage_catalog(catalog(A, pinned=True), catalog(A), [ready_pod("p")], CLAIMS) == catalog(A, pinned=True)
    assert stage_catalog(catalog(B, pinned=True), catalog(A), [ready_pod("p")], CLAIMS).adapters[0].pinned


def test_without_pods_or_a_common_claim_the_content_is_live_at_once():
    other = Source(pvc=PvcSource("other", "a"))
    assert stage_catalog(catalog(A), None, [ready_pod("p")], CLAIMS) == catalog(A)
    assert stage_catalog(catalog(B), catalog(A), [], CLAIMS) == catalog(B, previous=content(A))
    assert stage_catalog(catalog(other), catalog(A), [ready_pod("p")], CLAIMS) == catalog(other, previous=content(A))
    assert stage_catalog(catalog(A), catalog(other), [ready_pod("p")], CLAIMS) == catalog(A)


SOURCES = st.sampled_from([A, B, C])
STATES = st.lists(st.sampled_from(["Verified", "Loading", "Failed", None]), min_size=1, max_size=3)


@given(st.lists(st.tuples(SOURCES, STATES), min_size=1, max_size=8))
def test_a_content_is_live_only_after_all_pods_have_verified_it(passes):
    """After any sequence of edits and reports, and a repeated pass changes nothing."""
    live = catalog(A)
    verified = {A}
    for wanted, states in passes:
        staged = stage_catalog(catalog(wanted), live, [ready_pod("p")], CLAIMS)
        pods = [pod(str(i), staged, state) for i, state in enumerate(states)]
        candidate = staged.adapters[0].candidate
        if candidate is not None and set(states) == {"Verified"}:
            verified.add(candidate.source)
        before, live = live, stage_catalog(catalog(wanted), staged, pods, CLAIMS)
        entry = live.adapters[0]
        assert entry.source in verified
        assert entry.source == wanted or entry.candidate == content(wanted)
        if entry.source != before.adapters[0].source:
            assert entry.previous == before.adapters[0].content
        assert stage_catalog(catalog(wanted), live, [ready_pod("p")], CLAIMS) == live
