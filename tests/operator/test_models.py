# SPDX-License-Identifier: Apache-2.0
"""What a Job that reads a claim has found, whichever of its and its pods' news comes first."""

from types import SimpleNamespace

import pytest
from support.operating import TINY, message
from support.planning import service

from quire_operator.kube import kinds
from quire_operator.reconcile.cache import Cache
from quire_operator.reconcile.models import Models
from quire_operator.reconcile.planning import Planning
from quire_operator.render import reader
from quire_spec.errors import ConfigError


def _pod(said: str) -> dict:
    ended = {"exitCode": 0, "message": said}
    return {"metadata": {"name": "pod"}, "status": {"containerStatuses": [{"state": {"terminated": ended}}]}}


class Pods:
    """A client whose API server has these pods."""

    def __init__(self, *bodies: dict) -> None:
        self.bodies, self.asked, self.deleted = bodies, [], []

    async def list(self, kind, namespace, labels):
        self.asked.append((kind, namespace, labels))
        return SimpleNamespace(items=self.bodies)

    async def delete(self, kind, namespace, name, uid):
        self.deleted.append(name)


async def _found(pods: Pods):
    """What a Job has found that is known to be complete, while none of its pods is known."""
    asked = service("model: {source: {pvc: {claimName: models, path: tiny}}}")
    job = reader.job(asked, asked.spec.model.source.pvc, "image")
    job["metadata"] |= {"uid": "j1", "resourceVersion": "1"}
    job["status"] = {"conditions": [{"type": "Complete", "status": "True"}]}
    cache = Cache()
    cache.put(kinds.JOB, job)
    models = Models(pods, cache, lambda key, seconds: None, lambda kind, verb: None)  # type: ignore[arg-type]
    return await models.of(asked, "u1", {}, "image"), job["metadata"]["name"]


async def test_a_job_that_is_known_to_be_over_before_its_pod_is():
    pods = Pods(_pod(message(TINY)))
    checkpoint, job = await _found(pods)
    assert checkpoint.shape.num_layers > 0
    assert pods.asked == [(kinds.POD, "team", f"job-name={job}")]
    assert pods.deleted == []


async def test_a_source_that_no_pod_has_is_told_as_render_tells_it():
    asked = service("device: CPU\nmodel: {source: {path: models/tiny}}")
    planning = Planning(Pods(), Models(Pods(), Cache(), None, None), {})  # type: ignore[arg-type]
    verdict = await planning.judge(asked, "u1", "digest", None, None, {})
    assert "'models/tiny' is a folder of one machine, and no pod has it" in verdict.invalid
    assert "use pvc" in verdict.invalid


async def test_a_job_whose_pod_said_nothing():
    with pytest.raises(ConfigError, match="ended without a word"):
        await _found(Pods(_pod("")))
