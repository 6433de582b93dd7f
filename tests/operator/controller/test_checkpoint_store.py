# SPDX-License-Identifier: Apache-2.0
"""What a Job that reads a claim has found, whichever of its and its pods' news comes first."""

import asyncio
from types import SimpleNamespace

import pytest
from aiohttp import web
from support.controller_harness import TINY, termination_message
from support.fake_sources import start_server
from support.planning import llm_service

from quire_operator.controller.object_cache import ObjectCache
from quire_operator.controller.observe.checkpoint_store import CheckpointStore
from quire_operator.controller.observe.pod_warnings import PodWarnings, latest_warning
from quire_operator.controller.parsed_service import ParsedService
from quire_operator.controller.plan_service import PlanService
from quire_operator.kube import resources
from quire_operator.render import model_reader_job
from quire_spec.errors import ConfigError, Unavailable


def _pod(said: str) -> dict:
    ended = {"exitCode": 0, "message": said}
    return {"metadata": {"name": "pod"}, "status": {"containerStatuses": [{"state": {"terminated": ended}}]}}


class Pods:
    """A client whose API server has these pods."""

    def __init__(self, *bodies: dict) -> None:
        self.bodies, self.asked, self.deleted = bodies, [], []

    async def list(self, resource, namespace, label_selector):
        self.asked.append((resource, namespace, label_selector))
        return SimpleNamespace(items=self.bodies)

    async def delete(self, resource, namespace, name, uid):
        self.deleted.append(name)


KILLED = {"state": {"terminated": {"exitCode": 137, "message": "killed"}}}
OVER = {"type": "Complete", "status": "True"}


async def _found(pods: Pods, how: dict = OVER):
    """What a Job has found that is known to be over, while none of its pods is known."""
    asked = llm_service("model: {source: {pvc: {claimName: models, path: tiny}}}")
    job = model_reader_job.job(asked, asked.spec.model.source, "image")
    job["metadata"] |= {"uid": "j1", "resourceVersion": "1"}
    job["status"] = {"conditions": [how]}
    cache = ObjectCache()
    cache.upsert(resources.JOB, job)
    models = CheckpointStore(pods, cache, PodWarnings(pods), lambda key, seconds: None, lambda kind, verb: None, None)  # type: ignore[arg-type]
    return await models.get(asked, "u1", {}, "image"), job["metadata"]["name"]


async def test_a_job_that_is_known_to_be_over_before_its_pod_is():
    pods = Pods(_pod(termination_message(TINY)))
    checkpoint, job = await _found(pods)
    assert checkpoint.shape.num_layers > 0
    assert pods.asked == [(resources.POD, "team", f"job-name={job}")]
    assert pods.deleted == []


def _event(type_: str, reason: str, note: str, at: str) -> dict:
    return {"type": type_, "reason": reason, "note": note, "deprecatedLastTimestamp": f"2026-01-01T00:{at}Z"}


MOUNT = 'MountVolume.SetUp failed for volume "claim" : hostPath type check failed: /examples is not a directory'
SCHEDULED = _event("Normal", "Scheduled", "assigned", "00:00")
FAILED_MOUNT = _event("Warning", "FailedMount", MOUNT, "02:30")
EVENTS = {
    "none": ([], ""),
    "all is well": ([SCHEDULED], ""),
    "it cannot be mounted": ([FAILED_MOUNT, SCHEDULED], f"FailedMount: {MOUNT}"),
    "and that is summed up": (
        [SCHEDULED, FAILED_MOUNT, _event("Warning", "FailedMount", "Unable to attach or mount volumes: a b", "02:40")],
        f"FailedMount: {MOUNT}",
    ),
    "in the second of its scheduling": (
        [_event("Warning", "FailedMount", MOUNT, "00:00"), SCHEDULED],
        f"FailedMount: {MOUNT}",
    ),
    "it was mounted then": ([SCHEDULED, FAILED_MOUNT, _event("Normal", "Pulling", "an image", "03:00")], ""),
    "it had no node before": ([_event("Warning", "FailedScheduling", "0/1 nodes", "00:00")], ""),
}


@pytest.mark.parametrize("case", EVENTS)
def test_what_the_events_of_a_pod_complain_of(case):
    found, words = EVENTS[case]
    assert latest_warning(found) == words


async def test_a_source_that_no_pod_has_is_told_as_render_tells_it():
    asked = llm_service("device: CPU\nmodel: {source: {path: models/tiny}}")
    planning = PlanService(Pods(), CheckpointStore(Pods(), ObjectCache(), PodWarnings(Pods()), None, None, None), {})  # type: ignore[arg-type]
    desired = ParsedService(("team", asked.name), "u1", 1, asked, "digest", "")
    verdict = await planning.plan_for(desired, None, None, {})
    assert "'models/tiny' is a local folder, which pods cannot read" in verdict.spec_error
    assert "use pvc" in verdict.spec_error


async def test_a_job_whose_pod_said_nothing():
    with pytest.raises(ConfigError, match="ended without a result"):
        await _found(Pods(_pod("")))


async def test_a_job_whose_pod_is_gone_is_started_again():
    """Its node went away, or it was deleted: the model is unknown."""
    pods = Pods()
    with pytest.raises(Unavailable, match=r"claim 'models', path 'tiny': the Job .* its pod was deleted"):
        await _found(pods)
    assert len(pods.deleted) == 1


async def test_a_job_that_had_no_time_says_nothing_of_the_model():
    """It is started again, where a model that is wrong is left alone for a while."""
    late = {"type": "Failed", "status": "True", "reason": "DeadlineExceeded", "message": "active longer than specified"}
    pods = Pods()
    with pytest.raises(Unavailable, match=r"claim 'models', path 'tiny': the Job .* its deadline .* \(active longer"):
        await _found(pods, late)
    assert len(pods.deleted) == 1
    with pytest.raises(ConfigError, match=r"the Job that reads config\.json failed: killed"):
        await _found(Pods({"metadata": {"name": "pod"}, "status": {"containerStatuses": [KILLED]}}), late)


async def test_a_place_that_asks_to_be_left_alone_is_asked_no_sooner():
    """However often news of its service bring it back; another place is not kept waiting by it."""
    asked = []

    async def busy(request):
        asked.append(request.path)
        return web.Response(status=429, headers={"Retry-After": "2" if request.path.startswith("/a/") else "0"})

    server = await start_server(busy)
    client = Pods()
    models = CheckpointStore(
        client, ObjectCache(), PodWarnings(client), lambda key, seconds: None, lambda kind, verb: None, None
    )  # type: ignore[arg-type]

    async def ask(folder):
        with pytest.raises(Unavailable) as error:
            await models.get(
                llm_service(f"model: {{source: {{http: {{url: '{server.make_url(folder)}'}}}}}}"), "u", {}, "i"
            )
        return str(error.value)

    for _ in range(2):
        assert (await ask("/a")).endswith("/a/config.json: HTTP 429; the server requests a delay of 2 s")
    for _ in range(2):
        assert "HTTP 429; the server requests a delay of 0 s" in await ask("/b")
    assert asked == ["/a/config.json", "/b/config.json", "/b/config.json"]
    async with asyncio.timeout(20):
        while len(asked) < 4:
            await asyncio.sleep(0.05)
            await ask("/a")
    assert asked[3:] == ["/a/config.json"]
    await server.close()
