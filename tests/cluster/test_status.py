# SPDX-License-Identifier: Apache-2.0
"""Statuses at a real API server: nothing of them is dropped or refused, and kubectl shows what people look for."""

import re

import pytest
from support.observed_factories import (
    GENERATION,
    NOW,
    PLAN,
    PLANNING_RESULT,
    deployment,
    desired_service,
    healthy_state,
    job,
    pod_report,
    ready_pod,
    starting_pod,
    terminated_container,
    with_adapter,
)

from quire_operator.controller.status.observed_state import ObservedState, PlanningResult
from quire_operator.controller.status.status import build_status
from quire_operator.kube.api_client import ApiClient
from quire_operator.kube.cluster_config import ClusterConfig
from quire_operator.kube.errors import InvalidObject, WriteConflict
from quire_operator.kube.resources import LLM_SERVICE
from quire_operator.plan.errors import Unplannable, UnplannableReason
from quire_spec.documents.download_result import DownloadReason, DownloadResult
from quire_spec.documents.pod_status import AdapterState

API = ("quire.dev/v1alpha1", "LLMService")
MANIFEST = {
    "apiVersion": API[0],
    "kind": API[1],
    "metadata": {"name": "s"},
    "spec": {
        "model": {"source": {"huggingFace": {"repo": "o/m"}}},
        "replicas": 2,
        "lora": {"maxLoaded": 4, "maxRank": 16},
    },
}
SERVICE = desired_service()
SAID = pod_report(SERVICE)
GOOD = ready_pod("s-0", SAID)
FAILED = ready_pod("s-1", with_adapter(SAID, "sql", AdapterState.FAILED, "HTTP 404: " + "x" * 5000))
WITHOUT_GPU = starting_pod("s-1", unschedulable="0/1 nodes are available: 1 Insufficient nvidia.com/gpu.")
DOWNLOAD = starting_pod(
    "j",
    terminated=terminated_container(
        "download", 1, "Error", DownloadResult(DownloadReason.AUTH_FAILED, 1, None, "HTTP 401").dump()
    ),
)

STATUSES = {
    "well": build_status(SERVICE, GENERATION, PLANNING_RESULT, healthy_state(), {}, NOW),
    "nothing seen": build_status(SERVICE, GENERATION, PlanningResult(), ObservedState(), {}, NOW),
    "cannot be read": build_status(None, GENERATION, PlanningResult(spec_error="spec.x: y\nspec.z: w"),
    ObservedState(), {}, NOW),
    "does not fit": build_status(
        SERVICE, GENERATION, PlanningResult(PLAN, "", Unplannable(UnplannableReason.DOES_NOT_FIT, "t" * 40_000)),
        healthy_state(), {}, NOW
    ),
    "adapter failed": build_status(SERVICE, GENERATION, PLANNING_RESULT, healthy_state(pods=(GOOD, FAILED)), {}, NOW),
    "no GPU": build_status(
        SERVICE,
        GENERATION,
        PLANNING_RESULT,
        healthy_state(pods=(GOOD, WITHOUT_GPU), workload=deployment(2, ready=1)),
        {},
        NOW,
    ),
    "refused token": build_status(SERVICE, GENERATION, PLANNING_RESULT, ObservedState(job=job(),
    job_pods=(DOWNLOAD,)), {},
    NOW),
}  # fmt: skip


@pytest.fixture
def service(cluster, namespace):
    """A function that writes a status to a service and gives what is stored."""
    cluster.apply(MANIFEST, namespace)

    def write(found):
        return cluster.merge(*API, "s", {"status": found}, namespace, "status")["status"]

    return write


@pytest.mark.parametrize("case", STATUSES)
def test_the_api_server_stores_the_whole_status(service, case):
    assert service(STATUSES[case]) == STATUSES[case]


def columns(cluster, namespace, *flags):
    head, row = cluster.kubectl("get", "llm", *flags, namespace=namespace).splitlines()
    starts = [m.start() for m in re.finditer(r"(?<!\S)\S", head)]
    cells = [row[a:b].strip() for a, b in zip(starts, [*starts[1:], None], strict=True)]
    return dict(zip(head.split(), cells, strict=True))


def test_kubectl_get_shows_columns(cluster, namespace, service):
    service(STATUSES["well"])
    shown = columns(cluster, namespace)
    assert shown.pop("AGE")
    assert shown == {
        "NAME": "s", "READY": "True", "REASON": "Ready", "MODEL": "s", "GPU": "NVIDIA-L4", "TP": "1", "REPLICAS": "2",
        "ADAPTERS": "2/2", "URL": "http://s.team.svc:8004/v1",
    }  # fmt: skip
    service(STATUSES["no GPU"])
    shown = columns(cluster, namespace)
    assert (shown["READY"], shown["REASON"]) == ("False", "InsufficientGPU")


def test_kubectl_describe_shows_messages(cluster, namespace, service):
    service(STATUSES["adapter failed"])
    text = cluster.kubectl("describe", "llm", "s", namespace=namespace)
    for words in ("Message:", "1 of 2 adapters are on all 2 ready pods; sql: pod s-1: HTTP 404", "Kv Tokens", "Failed"):
        assert words in text, text


async def test_status_fields_are_removed_and_another_service_is_not_written(cluster, namespace, service):
    written = service(STATUSES["well"])
    meta = cluster.get(*API, "s", namespace)["metadata"]
    meta = {name: meta[name] for name in ("name", "namespace", "resourceVersion")}
    first_version = meta["resourceVersion"]
    less = written | {"plan": {k: v for k, v in written["plan"].items() if k not in ("measured", "gpu")}}
    async with ApiClient(ClusterConfig.from_environment(str(cluster.kubeconfig))) as client:

        async def write(found, **precondition):
            manifest = {"apiVersion": API[0], "kind": API[1], "metadata": meta | precondition, "status": found}
            body = await client.set_status(LLM_SERVICE, manifest)
            meta["resourceVersion"] = body["metadata"]["resourceVersion"]
            return body["status"]

        assert await write(less) == less
        assert await write(written) == written
        for version in (first_version, "1"):
            with pytest.raises(WriteConflict, match="the object has been modified"):
                await write(less, resourceVersion=version)
        with pytest.raises(InvalidObject, match=r"status\.models"):
            await write(less | {"models": 1})
        assert cluster.get(*API, "s", namespace)["status"] == written
        cluster.delete(*API, "s", namespace)
        cluster.apply(MANIFEST, namespace)
        with pytest.raises(WriteConflict):
            await write(less)
        assert "status" not in cluster.get(*API, "s", namespace)
