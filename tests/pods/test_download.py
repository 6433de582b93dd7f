# SPDX-License-Identifier: Apache-2.0
"""A model download by the real Job in a real pod: a wrong digest is rejected, progress is reported, a new pod resumes
the download of a deleted one, and the model is served.

The source is a pod that runs tests/support/fake_sources.py. The tests depend on each other and run in order, on one
service.
"""

import hashlib
import json
import re
from pathlib import Path

import pytest
from nodocker_cluster import images
from support import fake_sources
from support.cluster import ROOT
from support.engine_processes import wait_for
from support.pod_cluster import (
    LLM_SERVICE_KIND,
    OPERATOR_NAMESPACE,
    create_examples_volume,
    current_condition,
    diagnostics,
    example_service,
    get_service,
    service_endpoint,
)

from quire_spec.net.addresses import format_for_url

WEIGHTS = ROOT / "examples/models/tiny/model.safetensors"
PORT = 8000
HOLD = "/tmp/hold"
PLACE = f"""
import asyncio, pathlib, re, sys
sys.path.insert(0, "/place")
from aiohttp import web
from sources import FakeHttpServer

class Place(FakeHttpServer):
    async def handle(self, request):
        print(request.method, request.path, request.headers.get("Range", "-"), flush=True)
        return await super().handle(request)

    async def _send(self, request, response, data):
        if re.fullmatch(r"bytes=\\d+-\\d+", request.headers.get("Range", "")):
            await response.write(data)  # the planner reads a few bytes
        else:
            await super()._send(request, response, data)

async def main():
    files = Place({{f"/{{path.name}}": path.read_bytes() for path in pathlib.Path("/examples/models/tiny").iterdir()}})
    files.send_rest = asyncio.Event()
    app = web.Application()
    app.router.add_route("*", "/{{path:.*}}", files.handle)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, port={PORT}).start()
    while True:
        (files.send_rest.clear if pathlib.Path("{HOLD}").exists() else files.send_rest.set)()
        await asyncio.sleep(0.1)

asyncio.run(main())
"""


def place(namespace):
    """Return the objects of the source: ConfigMap, Pod and Service."""
    labels = {"app": "place"}
    volumes = [
        {"name": "place", "configMap": {"name": "place"}},
        {"name": "examples", "persistentVolumeClaim": {"claimName": "examples", "readOnly": True}},
        {"name": "tmp", "emptyDir": {}},
    ]
    container = {
        "name": "place",
        "image": images.SERVER_IMAGE,
        "command": ["python3", "/place/place.py"],
        "readinessProbe": {"httpGet": {"path": "/config.json", "port": PORT}, "periodSeconds": 1},
        "volumeMounts": [
            {"name": "place", "mountPath": "/place"},
            {"name": "examples", "mountPath": "/examples", "readOnly": True},
            {"name": "tmp", "mountPath": "/tmp"},
        ],
    }
    program = {"place.py": PLACE, "sources.py": Path(fake_sources.__file__).read_text()}
    meta = {"name": "place", "namespace": namespace}
    pod = {
        "automountServiceAccountToken": False,
        "containers": [container],
        "volumes": volumes,
        "terminationGracePeriodSeconds": 0,
    }
    ports = [{"port": PORT, "protocol": "TCP"}]
    return (
        {"apiVersion": "v1", "kind": "ConfigMap", "metadata": meta, "data": program},
        {"apiVersion": "v1", "kind": "Pod", "metadata": {**meta, "labels": labels}, "spec": pod},
        {"apiVersion": "v1", "kind": "Service", "metadata": meta, "spec": {"selector": labels, "ports": ports}},
    )


def models_volume(cluster, namespace, folder):
    """Create a volume for the operator's claim if the cluster has no storage class."""
    if not cluster.programs:
        return
    folder.mkdir()
    folder.chmod(0o777)  # Kubernetes does not apply fsGroup to a hostPath
    claim = {"namespace": namespace, "name": "tales-models"}
    spec = {
        "capacity": {"storage": "20Gi"},
        "accessModes": ["ReadWriteOnce"],
        "storageClassName": "",
        "hostPath": {"path": str(folder), "type": "Directory"},
        "claimRef": claim,
    }
    meta = {"name": f"models-{namespace}"}
    cluster.apply({"apiVersion": "v1", "kind": "PersistentVolume", "metadata": meta, "spec": spec})


@pytest.fixture(scope="module")
def namespace(cluster, operator, tmp_path_factory):
    """A namespace with the source and an LLMService with a wrong digest."""
    with cluster.namespace("download") as name:
        create_examples_volume(cluster, name)
        models_volume(cluster, name, tmp_path_factory.mktemp("models") / "volume")
        # A namespace's ServiceAccount is created some time after the namespace; pods are rejected until then.
        wait_for(lambda: cluster.get("v1", "ServiceAccount", "default", name), 30, "the ServiceAccount")
        for thing in place(name):
            cluster.apply(thing, name)
        wait = ["wait", "pod/place", "--for=condition=Ready", "--timeout=50s"]
        cluster.kubectl(*wait, namespace=name)
        host = cluster.get("v1", "Service", "place", name)["spec"]["clusterIP"]
        http = {"url": f"http://{format_for_url(host)}:{PORT}/", "sha256": "0" * 64}
        cluster.apply(example_service(model={"source": {"http": http}}, adapters=[]), name)
        yield name


def until(cluster, namespace, check, seconds, what):
    """Wait for a condition; on a timeout, include diagnostics of all pods in the error."""
    try:
        return wait_for(check, seconds, what)
    except AssertionError as error:
        status = json.dumps(get_service(cluster, namespace).get("status", {}), indent=1)
        stories = "\n".join(diagnostics(cluster, name) for name in (namespace, OPERATOR_NAMESPACE))
        raise AssertionError(f"{error}\n{status}\n{stories}") from error


def downloading(cluster, namespace):
    """Return the names of the running download pods."""
    selector = "app.kubernetes.io/component=model-download"
    found = cluster.items("v1", "Pod", namespace, labelSelector=selector)
    return [
        pod["metadata"]["name"]
        for pod in found
        if pod["status"].get("phase") == "Running" and "deletionTimestamp" not in pod["metadata"]
    ]


def test_rejects_a_wrong_digest(cluster, namespace):
    def refused():
        return current_condition(cluster, namespace, "ModelCached").get("reason") == "DigestMismatch"

    until(cluster, namespace, refused, 120, "DigestMismatch")
    right = hashlib.sha256(WEIGHTS.read_bytes()).hexdigest()
    message = current_condition(cluster, namespace, "ModelCached")["message"]
    assert f"sha256 is {right}, not {'0' * 64}" in message
    assert current_condition(cluster, namespace, "Ready")["reason"] == "DigestMismatch"


def test_reports_download_progress(cluster, namespace):
    cluster.kubectl("exec", "place", "--", "touch", HOLD, namespace=namespace)
    right = hashlib.sha256(WEIGHTS.read_bytes()).hexdigest()
    cluster.merge(*LLM_SERVICE_KIND, "tales", {"spec": {"model": {"source": {"http": {"sha256": right}}}}}, namespace)

    def reported():
        """Five eighths of the weights, and the tokenizer."""
        cache = get_service(cluster, namespace).get("status", {}).get("cache", {})
        percent = int(cache.get("progress", "0%").removesuffix("%"))
        return 60 <= percent <= 66 and percent

    percent = until(cluster, namespace, reported, 90, "progress")
    assert f"({percent}%)" in current_condition(cluster, namespace, "ModelCached")["message"]
    # Not by its short name: kubectl resolves short names from a discovery cache that may be minutes old.
    assert f"{percent}%" in cluster.kubectl("get", "llmservices", "tales", "--output=wide", namespace=namespace)
    (name,) = downloading(cluster, namespace)

    def logged():
        return f"percent={percent}" in cluster.kubectl("logs", name, namespace=namespace)

    until(cluster, namespace, logged, 20, "the same in the log")


def test_download_resumes_after_its_pod_was_deleted(cluster, namespace):
    (first,) = downloading(cluster, namespace)
    cluster.kubectl("delete", "pod", first, namespace=namespace)

    def resumed():
        asked = cluster.kubectl("logs", "place", namespace=namespace)
        return re.search(rf"GET /{WEIGHTS.name} bytes=([1-9]\d*)-$", asked, re.MULTILINE)

    start = int(until(cluster, namespace, resumed, 120, "a request for the rest")[1])
    assert start > WEIGHTS.stat().st_size // 2
    cluster.kubectl("exec", "place", "--", "rm", HOLD, namespace=namespace)
    until(
        cluster, namespace, lambda: current_condition(cluster, namespace, "Ready").get("status") == "True", 240, "Ready"
    )
    assert current_condition(cluster, namespace, "ModelCached")["reason"] == "Downloaded"
    cache = get_service(cluster, namespace)["status"]["cache"]
    assert (cache["state"], set(cache)) == ("Ready", {"state", "bytes"})
    with service_endpoint(cluster, namespace) as clients:
        assert clients.text("tales", "Once upon a time", max_tokens=1)
