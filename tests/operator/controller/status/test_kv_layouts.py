# SPDX-License-Identifier: Apache-2.0
"""Differences between the KV blocks of pods: each is kept in the status, and told of once."""

import dataclasses
import json

from hypothesis import given
from hypothesis import strategies as st
from support.observed_factories import (
    GENERATION,
    NOW,
    PLANNING_RESULT,
    desired_service,
    healthy_state,
    pod_report,
    ready_pod,
    schema_problems,
)

from quire_operator.controller.status.events import build_events
from quire_operator.controller.status.kv_layouts import FIXES, find_differences
from quire_operator.controller.status.status import build_status
from quire_server.supervisor.reporting import layout_differences
from quire_spec.dataclass_json import from_json
from quire_spec.documents.pod_status import PodStatus
from quire_spec.protocol.kv_wire import RowLayout
from quire_spec.protocol.results import KVPeerStatus

SERVICE = desired_service()
REPORT = pod_report(SERVICE)
names = st.sampled_from([*FIXES, "unknown", "x" * 5000, "\ud800"])
pods = st.builds(
    lambda said, is_deleted: ready_pod(
        "s-0", None if said is None else dataclasses.replace(REPORT, kv_differences=said), deleting=is_deleted
    ),
    st.none() | st.lists(names, max_size=4),
    st.booleans(),
)


def test_each_field_of_the_layout_has_a_fix():
    assert tuple(FIXES) == RowLayout.__struct_fields__


@given(st.lists(pods, max_size=4), st.lists(names, max_size=4))
def test_differences_come_from_reports_and_stay_while_one_is_missing(seen, previous):
    found = find_differences(seen, previous)
    alive = [pod.report for pod in seen if not pod.deleting]
    said = {name for report in alive if report for name in report.kv_differences if name in FIXES}
    kept = {name for name in previous if name in FIXES} if None in alive else set()
    assert found == sorted(said | kept)
    assert find_differences(seen, found) == found


def status_after(before, *refused):
    """The status after pods have refused connections for these reasons; None is a pod that does not answer."""
    reports = []
    for reasons in refused:
        differences = layout_differences(KVPeerStatus(refused=reasons or {}))
        document = dataclasses.asdict(dataclasses.replace(REPORT, kv_differences=differences))
        reports.append(None if reasons is None else from_json(PodStatus, json.loads(json.dumps(document))))
    pods = tuple(ready_pod(f"s-{i}", report) for i, report in enumerate(reports))
    status = build_status(SERVICE, GENERATION, PLANNING_RESULT, healthy_state(pods=pods), before, NOW)
    assert schema_problems(status) == [] and build_events(status, status) == []
    return status


def warnings(before, after):
    return [event.message for event in build_events(before, after) if event.reason == "KVLayoutsDiffer"]


def test_a_further_field_is_told_of_once():
    well = status_after({}, {}, {"limit": 3, "loading": 1})
    assert "kvTransfer" not in well and warnings({}, well) == []
    worse = status_after(well, {}, {"block_size": 1, "key": 2})
    assert worse["kvTransfer"] == {"differences": ["block_size"]}
    (message,) = warnings(well, worse)
    assert (
        "differ in block_size" in message and "compute blocks again" in message and "spec.engine.blockSize" in message
    )
    # Higher counts, and a pod that does not answer, change nothing.
    assert status_after(worse, {"block_size": 5}, {"block_size": 9}) == worse
    assert status_after(worse, {}, None)["kvTransfer"] == worse["kvTransfer"]
    worst = status_after(worse, {"model": 1}, {"block_size": 9})
    assert worst["kvTransfer"] == {"differences": ["block_size", "model"]}
    (message,) = warnings(worse, worst)
    assert "differ in model" in message and "spec.model.source" in message
    assert "kvTransfer" not in status_after(worst, {}, {})
