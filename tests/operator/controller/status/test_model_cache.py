# SPDX-License-Identifier: Apache-2.0
"""ModelCached and status.cache, case by case: whether a model is there, and what keeps it from it."""

from datetime import timedelta

import pytest
from support.observed_factories import (
    CREATED_LATER,
    GENERATION,
    NOW,
    PLAN,
    checked_status,
    condition,
    conditions_by_type,
    deployment,
    desired_service,
    finished_job,
    healthy_state,
    job,
    ready_condition,
    starting_pod,
    terminated_container,
)  # fmt: skip
from support.rendering import only_of_kind, rendered_objects

from quire_operator.controller.status.observed_state import ObservedState, PlanningResult, parse_pod
from quire_operator.plan.errors import Unplannable, UnplannableReason
from quire_operator.render import model_storage
from quire_spec.documents.download_progress import DownloadProgress
from quire_spec.documents.download_result import DownloadReason, DownloadResult


def ended_download(result, revision=None, message="", number=0, **changes):
    said = DownloadResult(result, 3 * 2**30, revision, message).dump()
    code = 0 if result is DownloadReason.DOWNLOADED else 1
    fields = {
        "phase": "Failed" if code else "Succeeded",
        "terminated": terminated_container("download", code, "Error", said),
    }
    return starting_pod(f"job-{number}", created_at=f"2026-01-01T00:0{number}:00Z", **fields | changes)


def downloading(number=1, progress=None):
    started = {"started_at": "2026-01-01T00:00:00Z", "downloading": True, "progress": progress}
    return starting_pod(f"job-{number}", created_at=f"2026-01-01T00:0{number}:00Z", **started)


def test_a_model_that_is_there():
    found = checked_status(healthy_state(job_pods=(ended_download(DownloadReason.DOWNLOADED, "0e9e39f"),)))
    assert found["cache"] == {"state": "Ready", "bytes": str(3 * 2**30), "revision": "0e9e39f"}
    assert condition(found, "ModelCached")["message"] == "all files exist, 3.00 GiB, revision 0e9e39f"
    later = checked_status(healthy_state(), previous=found, now=CREATED_LATER)
    assert later["cache"] == found["cache"], "the Job's pod is gone, what it said is not"


DOWNLOADS = {
    "the Job is being created": ({"job": None}, "DownloadPending", "Pending", "being created"),
    "its claim is not bound": (
        {"claim": {"metadata": {"name": "s-models"}, "status": {"phase": "Pending"}}},
        "DownloadPending", "Pending", "claim s-models is Pending",
    ),
    "its claim is being deleted": (
        {"claim": {"metadata": {"name": "s-models", "deletionTimestamp": "2026-01-01T00:00:00Z"}}},
        "DownloadPending", "Pending", "claim s-models is being deleted",
    ),
    "it runs again after the line was cut": (
        {"job_pods": (ended_download(DownloadReason.UNREACHABLE, message="HTTP 503"), downloading())},
        "Downloading", "Downloading", "HTTP 503",
    ),
    "the token is wrong": (
        {"job_pods": (ended_download(DownloadReason.AUTH_FAILED, message="hub repository 'o/m': HTTP 401"),)},
        "AuthFailed", "Failed", "no Secret is named; set spec.model.source.huggingFace.tokenSecretRef",
    ),
    **{
        result.value: (
            {"job": finished_job("Failed", "BackoffLimitExceeded"), "job_pods": (ended_download(result,
            message="why"),)},
            result.value, "Failed", "the Job gave up (BackoffLimitExceeded)",
        )
        for result in DownloadReason if result not in (DownloadReason.DOWNLOADED, DownloadReason.AUTH_FAILED)
    },
    "it ended with no word": (
        {"job": finished_job("Failed"), "job_pods": (starting_pod("j", terminated=terminated_container("download",
        137, "OOMKilled")),)},
        "DownloadFailed", "Failed", "OOMKilled (exit code 137)",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", DOWNLOADS)
def test_a_model_that_is_not_there(case):
    changes, reason, state, words = DOWNLOADS[case]
    nothing = ObservedState(workload=deployment(0), applied_generation=GENERATION, **{"job": job()} | changes)
    found = checked_status(nothing)
    assert conditions_by_type(found)["ModelCached"] == ("False", reason)
    assert ready_condition(found) == ("False", reason), "no pod is blamed: there are none before the model is there"
    assert found["cache"]["state"] == state
    assert words in condition(found, "ModelCached")["message"]


def on_its_way(progress, previous=None, seconds=0, *before):
    """The status of a download `seconds` after NOW, and its words."""
    pods = (*before, downloading(progress=progress))
    seen = ObservedState(workload=deployment(0), applied_generation=GENERATION, job=job(), job_pods=pods)
    found = checked_status(seen, previous=previous, now=NOW + timedelta(seconds=seconds))
    return found, condition(found, "ModelCached")["message"]


MIB = 2**20


def test_how_far_a_download_is():
    found, words = on_its_way(DownloadProgress(3 * 2**30, 15 * 2**30, 100 * MIB))
    assert found["cache"] == {
        "state": "Downloading", "progress": "20%", "bytes": str(3 * 2**30), "totalBytes": str(15 * 2**30),
        "bytesPerSecond": str(100 * MIB), "at": "2026-01-02T03:04:05Z",
    }  # fmt: skip
    assert words == (
        "pod job-1 downloads Hugging Face repository o/m: 3.0 GiB of 15.0 GiB (20%), 100.0 MiB/s, about 2 min left"
    )
    assert condition(found, "Ready")["message"] == words
    cut = ended_download(DownloadReason.UNREACHABLE, message="HTTP 503")
    _, words = on_its_way(DownloadProgress(3 * 2**30, 15 * 2**30), None, 0, cut)
    assert words.endswith(": 3.0 GiB of 15.0 GiB (20%); the previous try failed: HTTP 503")
    for progress, end in (
        (DownloadProgress(7 * 2**30, 15 * 2**30, 0), "(46%), nothing comes now"),
        (DownloadProgress(15 * 2**30, 15 * 2**30, 0), "(100%), which are being checked"),
        (DownloadProgress(5 * 2**10, 2**41, 2**25), "5.0 KiB of 2048.0 GiB (0%), 32.0 MiB/s, about 18 h 12 min left"),
    ):
        assert on_its_way(progress)[1].endswith(end)
    found, _ = on_its_way(DownloadProgress(PLAN.modelBytes * 3 // 4 + 1))
    assert found["cache"]["progress"] == "75%", "a place that does not say its sizes: those of the plan"
    assert on_its_way(None)[0]["cache"] == {"state": "Downloading"}


def test_progress_is_told_each_5_percent_or_30_s_and_never_twice_in_10_s():
    first, _ = on_its_way(DownloadProgress(20 * MIB, 100 * MIB, MIB))
    for seconds, percent, told in (
        (1, 90, 20), (9, 90, 20), (10, 24, 20), (10, 25, 25), (10, 15, 15), (29, 24, 20), (30, 20, 20), (30, 21, 21),
    ):  # fmt: skip
        found, _ = on_its_way(DownloadProgress(percent * MIB, 100 * MIB, 2 * MIB), first, seconds)
        assert found["cache"]["progress"] == f"{told}%", (seconds, percent)
        again = seconds >= 30 or told != 20
        assert (found == first) == (not again), "unchanged fields cause no write"
    assert on_its_way(None, first, 119)[0] == first, "it did not answer"
    assert on_its_way(None, first, 120)[0]["cache"] == {"state": "Downloading"}, "the numbers are outdated"
    done = checked_status(healthy_state(job_pods=(ended_download(DownloadReason.DOWNLOADED),)), previous=first)
    assert done["cache"] == {"state": "Ready", "bytes": str(3 * 2**30)}


def test_a_status_that_somebody_else_wrote_is_no_trouble():
    for at in ("", "soon", "2026-01-02T03:04:05", "2099-01-01T00:00:00Z", 7):
        previous = {"cache": {"state": "Downloading", "progress": "x%", "bytes": "y", "at": at}}
        assert on_its_way(DownloadProgress(1, 2), previous)[0]["cache"]["progress"] == "50%"


@pytest.mark.parametrize("result", [DownloadReason.AUTH_FAILED, DownloadReason.NOT_FOUND, DownloadReason.UNREACHABLE])
def test_a_model_that_cannot_be_read_for_the_plan(result):
    spec = "model: {source: {huggingFace: {repo: o/m, tokenSecretRef: {name: hf, key: token}}}}"
    verdict = PlanningResult(waiting_for="hub repository 'o/m': why", read_error=result)
    found = checked_status(ObservedState(), verdict, service=desired_service(spec))
    assert conditions_by_type(found)["Ready"] == conditions_by_type(found)["ModelCached"] == ("False", result.value)
    assert conditions_by_type(found)["Planned"] == ("Unknown", "Planning")
    message = condition(found, "Ready")["message"]
    assert message.startswith("hub repository 'o/m': why") and message.endswith("it is tried again")
    assert ("check Secret 'hf', key 'token'" in message) == (result is DownloadReason.AUTH_FAILED)
    assert found["cache"] == {"state": "Failed"}


IN_PODS = "replicas: 2\nlora: {maxLoaded: 0}\ngpu: {product: NVIDIA-L4}\ncache: {mode: EmptyDir}"


def test_a_model_that_each_pod_downloads():
    service = desired_service(IN_PODS)
    of_it = {"phase": "Pending", "download_folders": (model_storage.folder(service.spec.model.source),)}
    found = checked_status(healthy_state(service, job=None), service=service)
    assert conditions_by_type(found)["ModelCached"] == ("True", "InPods")
    said = DownloadResult(DownloadReason.NO_SPACE, 5, message="the disk is full").dump()
    under_way = starting_pod("s-1", downloading=True, progress=DownloadProgress(MIB, 4 * MIB), **of_it)
    found = checked_status(healthy_state(service, job=None, pods=(under_way,)), service=service)
    assert conditions_by_type(found)["ModelCached"] == ("True", "InPods")
    assert condition(found, "ModelCached")["message"].endswith("; a pod does: 1.0 MiB of 4.0 MiB (25%)")
    assert (found["cache"]["state"], found["cache"]["progress"]) == ("Downloading", "25%")
    stuck = starting_pod("s-1", terminated=terminated_container("download", 1, message=said), **of_it)
    found = checked_status(healthy_state(service, job=None, pods=(stuck,)), service=service)
    assert conditions_by_type(found)["ModelCached"] == conditions_by_type(found)["Ready"] == ("False", "NoSpace")
    assert condition(found, "Ready")["message"] == "pod s-1: the disk is full"


def test_what_pods_of_the_source_before_have_is_not_what_is_there():
    before = desired_service(IN_PODS)
    after = desired_service(f"{IN_PODS}\nmodel: {{source: {{huggingFace: {{repo: o/m, revision: v2}}}}}}")
    template = only_of_kind(rendered_objects(before), "Deployment")["spec"]["template"]
    done = DownloadResult(DownloadReason.DOWNLOADED, 5, "v1").dump()
    end = {"name": "download", "state": {"terminated": {"exitCode": 0, "message": done}}}
    meta = {"name": "s-1", "uid": "1", "creationTimestamp": "2026-01-01T00:00:00Z", **template["metadata"]}
    there = parse_pod({"metadata": meta, "spec": template["spec"], "status": {"initContainerStatuses": [end]}})
    cache = lambda service: checked_status(healthy_state(service, job=None, pods=(there,)), service=service)["cache"]  # noqa: E731
    assert cache(before) == {"state": "Ready", "bytes": "5", "revision": "v1"}
    assert cache(after) == {"state": "Pending"}


UNPLANNED = {
    "invalid": PlanningResult(spec_error="spec.model.source.path: 'm' is a local folder"),
    "waits": PlanningResult(waiting_for="Job quire-read-1 reads config.json from claim models; its pod waits"),
    "unplannable": PlanningResult(unplannable=Unplannable(UnplannableReason.GPU_UNKNOWN, "no node says")),
}


@pytest.mark.parametrize("case", UNPLANNED)
def test_nothing_is_claimed_of_a_model_without_a_plan(case):
    verdict = UNPLANNED[case]
    reason = "Invalid" if case == "invalid" else "OnClaim"
    on_claim = desired_service("model: {source: {pvc: {claimName: models, path: m}}}\nlora: {maxLoaded: 0}")
    found = checked_status(ObservedState(), verdict, service=on_claim)
    assert conditions_by_type(found)["ModelCached"] == ("Unknown", reason)
    assert found["cache"] == {"state": "Pending"}
    found = checked_status(ObservedState(), verdict)
    assert conditions_by_type(found)["ModelCached"] == (
        ("Unknown", "Invalid") if case == "invalid" else ("False", "DownloadPending")
    )
    message = condition(found, "ModelCached")["message"]
    assert "Job" not in message and message.endswith("see ConfigValid" if case == "invalid" else "see Planned")
    if case == "invalid":
        kept = checked_status(healthy_state(), verdict, previous=checked_status(healthy_state()))
        assert conditions_by_type(kept)["ModelCached"] == ("Unknown", "Invalid"), (
            "what is there may be of the source before"
        )
        assert kept["cache"] == {"state": "Ready"}


def claim(size, *modes):
    spec = {"accessModes": list(modes or ("ReadWriteMany",)), "resources": {"requests": {"storage": size}}}
    return {"metadata": {"name": "s-models"}, "spec": spec, "status": {"phase": "Bound"}}


@pytest.mark.parametrize(
    ("size", "rejection", "reason", "words"),
    [
        ("1Gi", "", DownloadReason.NO_SPACE, "; claim s-models has 1Gi, but the previous and the next revision of the"),
        (
            "1Gi",
            "403 no resize",
            DownloadReason.NO_SPACE,
            "; claim s-models has 1Gi and cannot grow (403 no resize), but",
        ),
        # A claim that could not grow is named before it is full.
        (
            "1Gi",
            "403 no resize",
            DownloadReason.NOT_FOUND,
            "; claim s-models has 1Gi and cannot grow (403 no resize), but",
        ),
        ("1Gi", "", DownloadReason.NOT_FOUND, ""),
        ("1Ti", "", DownloadReason.NO_SPACE, ""),
    ],
)
def test_a_claim_that_is_too_small_is_named_with_both_sizes(size, rejection, reason, words):
    pods = (ended_download(reason, message="it failed"),)
    observed = healthy_state(job=job(), job_pods=pods, claim=claim(size), claim_rejection=rejection)
    message = condition(checked_status(observed), "ModelCached")["message"]
    assert words in message and ("claim s-models" in message) == bool(words)
    if words:
        assert message.endswith(f" model need {model_storage.claim_size(PLAN)}")


@pytest.mark.parametrize(
    ("modes", "replicas", "words"),
    [
        (("ReadWriteOnce",), 2, "; claim s-models is ReadWriteOnce, so all pods must run on one node; to use several"),
        (("ReadWriteOncePod",), 2, "; claim s-models is ReadWriteOncePod, so only one pod can use it; to use several"),
        (("ReadWriteOnce",), 1, ""),
        (("ReadWriteMany",), 2, ""),
        (("ReadWriteOnce", "ReadOnlyMany"), 2, ""),
    ],
)
def test_the_access_mode_is_named_with_several_replicas(modes, replicas, words):
    service = desired_service(f"replicas: {replicas}\nlora: {{maxLoaded: 4, maxRank: 16}}")
    observed = healthy_state(service, claim=claim("1Ti", *modes))
    found = checked_status(observed, service=service)
    message = condition(found, "ModelCached")["message"]
    assert words in message and ("claim s-models" in message) == bool(words)
    assert conditions_by_type(found)["Ready"] == ("True", "Ready")
