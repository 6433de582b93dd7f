# SPDX-License-Identifier: Apache-2.0
"""The transitions of one adapter, as a table, and what holds after any sequence of events."""

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire_server.adapters.adapter_progress import (
    Activated,
    AdapterProgress,
    AttemptFailed,
    AttemptStarted,
    CatalogChanged,
    Converged,
    Failure,
    FetchStarted,
    LoadStarted,
    Removed,
    SourceRead,
    SourceUnreachable,
    transition,
)
from quire_server.adapters.fetcher import CachedAdapter
from quire_spec.constants import AdapterDigest
from quire_spec.documents.adapter_catalog import AdapterSpec
from quire_spec.documents.pod_status import AdapterState
from quire_spec.documents.sources import Source
from quire_spec.errors import AccessDenied, InvalidArgument, Unavailable

A, B = Source(path="/a"), Source(path="/b")
OF_A, OF_B = (CachedAdapter(AdapterDigest(f"sha256:{name}"), Path(f"/cache/{name}")) for name in "ab")
SPEC_A, SPEC_B = AdapterSpec("sql", A), AdapterSpec("sql", B)
FETCHING, LOADING, VERIFIED, READY, FAILED = AdapterState
NEW = AdapterProgress(SPEC_A, exposed=True)
SERVING = AdapterProgress(SPEC_A, True, 1, 1, OF_A, A, OF_A, state=READY)
REPLACING = replace(SERVING, desired=SPEC_B, revision=2, state=FETCHING)
DENIED, INVALID, BUSY = AccessDenied("403"), InvalidArgument("rank"), Unavailable("503")
REFUSED = replace(REPLACING, checked_revision=2, latest=OF_B, latest_source=B, state=FAILED)
REJECTED = replace(REFUSED, failure=Failure(INVALID, 0, True, None))
RETRYING = replace(NEW, secret_version=7, state=FAILED, failure=Failure(DENIED, 2, False, 7))

TABLE = [
    (SERVING, CatalogChanged(SPEC_A, True), {"revision": 2}),
    (SERVING, CatalogChanged(SPEC_A, False), {"revision": 2, "exposed": False}),
    (SERVING, CatalogChanged(SPEC_B, True), {"revision": 2, "desired": SPEC_B, "state": FETCHING}),
    (SERVING, CatalogChanged(SPEC_A, True, must_read=True), {"revision": 2, "latest_source": None, "state": FETCHING}),
    (SERVING, CatalogChanged(None, True), {"revision": 2, "desired": None}),
    (REJECTED, CatalogChanged(SPEC_B, True), {"revision": 3, "failure": Failure(INVALID, 0, False, None)}),
    (
        replace(SERVING, desired=None),
        CatalogChanged(SPEC_A, True),
        {"revision": 2, "desired": SPEC_A, "state": FETCHING},
    ),
    (NEW, AttemptStarted(), {}),
    (SERVING, AttemptStarted(), {}),
    (REJECTED, AttemptStarted(), {}),
    (RETRYING, AttemptStarted(), {"state": FETCHING, "failure": Failure(DENIED, 2, False, None)}),
    (replace(REFUSED, failure=Failure(BUSY, 1, False, None)), AttemptStarted(), {}),
    (NEW, FetchStarted(7), {"secret_version": 7}),
    (REPLACING, SourceRead(2, B, OF_B), {"checked_revision": 2, "latest": OF_B, "latest_source": B}),
    (replace(SERVING, revision=2), SourceUnreachable(2), {"checked_revision": 2}),
    (REPLACING, LoadStarted(), {"state": LOADING}),
    (SERVING, LoadStarted(), {"state": LOADING}),
    (replace(SERVING, latest=OF_B), Activated(OF_B), {"active": OF_B}),
    (REJECTED, Activated(OF_A), {}),
    (RETRYING, Converged(), {"state": READY, "failure": None}),
    (RETRYING, AttemptFailed(DENIED), {"failure": Failure(DENIED, 3, False, 7)}),
    (RETRYING, AttemptFailed(BUSY), {"failure": Failure(BUSY, 3, False, None)}),
    (SERVING, AttemptFailed(INVALID), {"state": FAILED, "failure": Failure(INVALID, 0, True, None)}),
    (REFUSED, Removed(), {"checked_revision": -1, "latest": None, "latest_source": None, "active": None}),
]


@pytest.mark.parametrize(("before", "event", "changes"), TABLE)
def test_transition(before, event, changes):
    assert transition(before, event) == replace(before, **changes)


EVENTS = st.one_of(
    st.builds(CatalogChanged, st.sampled_from([SPEC_A, SPEC_B, None]), st.booleans(), st.booleans()),
    st.sampled_from([AttemptStarted(), FetchStarted(1), LoadStarted(), Converged(), Removed()]),
    st.sampled_from([AttemptFailed(error) for error in (DENIED, INVALID, BUSY)]),
    st.sampled_from([Activated(OF_A), Activated(OF_B)]),
    st.builds(SourceRead, st.just(1), st.sampled_from([A, B]), st.sampled_from([OF_A, OF_B])),
)


@given(st.lists(EVENTS, max_size=20))
def test_any_sequence_of_events(events):
    progress = NEW
    for event in events:
        before, progress = progress, transition(progress, event)
        assert progress.revision == before.revision + isinstance(event, CatalogChanged)
        if progress.state is FAILED:
            assert progress.failure is not None
        if isinstance(event, CatalogChanged):
            # A new catalog always leads to another attempt, and a new source is never reported as ready.
            assert not progress.is_rejected
            assert not (progress.is_settled and event.desired and before.desired != event.desired)
        if progress.is_rejected:
            assert isinstance(progress.failure.error, InvalidArgument)
        if progress.failure and progress.failure.denied_secret_version is not None:
            assert isinstance(progress.failure.error, AccessDenied)
