# SPDX-License-Identifier: Apache-2.0
"""Restarts of containers across an upgrade and a rollback, with the real processes of both releases.

The operator and the pods of the last release before pod.json run from its commit. A restart of a container starts the
image that the pod has, with the pod's template and the files that the ConfigMap has then.
"""

import json
import subprocess
import sys

import pytest
from nodocker_cluster.ports import free_ports
from support.old_release import install
from support.quire_serve import EXAMPLES, PORTS
from support.rendered_pod import RenderedPod

from quire_operator.controller.status.rollout import OLD_SUPERVISOR_ERROR
from quire_operator.render.pod_template import server_arguments

pytestmark = [pytest.mark.server, pytest.mark.timeout(300)]

KEY = "rendered-key"
SERVICE = """
apiVersion: quire.dev/v1alpha1
kind: LLMService
metadata: {name: tales, uid: u-1}
spec:
  device: CPU
  model: {source: {pvc: {claimName: shared, path: models/tiny}}, servedName: once-upon}
  adapters: [{name: pirate, source: {pvc: {claimName: shared, path: adapters/pirate}}}]
  lora: {maxLoaded: 2, maxRank: 16}
  rollout: {drainSeconds: 5}
  openai: {port: %d, corsAllowedOrigins: ["https://chat.example"]}
  runtime: {ports: {http: %d, grpc: %d, metrics: %d, health: %d}}
"""
OPERATOR = """
import asyncio, json, sys
from pathlib import Path
from quire_operator.api import crd
from quire_operator.api.llmservice import LLMService
from quire_operator.controller.apply.child_objects import LiveObjects, build_child_objects
from quire_operator.controller.template_revision import pods_digest
from quire_operator.plan.checkpoint import CheckpointInfo
from quire_operator.plan.checkpoint_files import read_local_checkpoint
from quire_operator.plan.inputs import PlannerInputs
from quire_operator.plan.planner import make_plan
from quire_operator.render.context import RenderContext

file, image, key, model = sys.argv[1:]
body = crd.require_valid(crd.single_service(file))
service = LLMService.from_body(body)
checkpoint = asyncio.run(read_local_checkpoint(Path(model), CheckpointInfo.from_files))
plan = make_plan(PlannerInputs.from_service(service, checkpoint, None), {"CPU": image, "GPU": image})
children = build_child_objects(
    service, pods_digest(body, service), plan, RenderContext(admin_key=key), LiveObjects(json.load(sys.stdin))
)
json.dump(list(children.manifests), sys.stdout)
"""
"""One pass of the operator. It prints the objects that it applies if the Deployment on standard input exists."""


@pytest.fixture(scope="module")
def old_python(tmp_path_factory):
    return install(tmp_path_factory.mktemp("old"))


def test_restarts_across_upgrade_and_rollback(old_python, tmp_path, tmp_path_factory):
    *ports, openai_port = free_ports(5)
    file = tmp_path / "service.yaml"
    file.write_text(SERVICE % (openai_port, *ports))
    ports = dict(zip((*PORTS, "openai"), (*ports, openai_port), strict=True))

    def applied(python, image, live=None):
        """Return the objects that the operator of a release applies, and the Deployment."""
        argv = [str(python), "-c", OPERATOR, str(file), image, KEY, str(EXAMPLES / "models/tiny")]
        done = subprocess.run(argv, input=json.dumps(live), cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        manifests = json.loads(done.stdout)
        return manifests, next(m for m in manifests if m["kind"] == "Deployment")

    def assert_pod_answers(manifests, python):
        """Start the container with the image of a release, and send a request to each API."""
        # The path of a Unix socket is limited, so the folder has a short name.
        pod = RenderedPod(manifests, tmp_path_factory.mktemp("pod"), ports, python)
        try:
            pod.wait_ready(120)
            status = pod.request("health", "/status", key=KEY).body
            assert (status["served_name"], sorted(status["models"])) == ("once-upon", ["once-upon", "pirate"])
            answer = pod.request("http", "/v2/models/pirate/generate", {"text_input": "Hello", "max_tokens": 4})
            assert answer.status == 200, answer
            body = {"model": "once-upon", "prompt": "Hello", "max_tokens": 4}
            assert pod.request("openai", "/v1/completions", body).status == 200
        finally:
            assert pod.stop(60) == 0

    old_manifests, old_deployment = applied(old_python, "quire:old")
    assert "--engine=" in str(old_deployment) and "--config=" not in str(old_deployment)

    # The upgrade replaces no pod. A container that restarts gets the same template and the same files.
    kept_manifests, kept_deployment = applied(sys.executable, "quire:old", old_deployment)
    assert kept_deployment["spec"]["template"] == old_deployment["spec"]["template"]
    assert configmaps(kept_manifests) == configmaps(old_manifests)
    assert_pod_answers(kept_manifests, old_python)

    # A revision of the new release: its image reads pod.json, and images before it still find engine.json.
    new_manifests, new_deployment = applied(sys.executable, "quire:new")
    assert "--config=" in str(new_deployment)
    assert_pod_answers(with_template(new_manifests, old_deployment), old_python)

    # The rollback keeps the pods of the new release, whose containers restart with the new image.
    back_manifests, back_deployment = applied(old_python, "quire:new", new_deployment)
    assert back_deployment["spec"]["template"] == new_deployment["spec"]["template"]
    assert configmaps(back_manifests) == configmaps(new_manifests)
    assert_pod_answers(back_manifests, sys.executable)


def configmaps(manifests):
    """Return the names and the content of the immutable ConfigMaps."""
    return {m["metadata"]["name"]: m["data"] for m in manifests if m.get("immutable")}


def with_template(manifests, deployment):
    """Return the objects of one release with the arguments of the pods of another one."""
    (old,) = (c for c in deployment["spec"]["template"]["spec"]["containers"] if c["name"] == "server")
    result = json.loads(json.dumps(manifests))
    (container,) = (
        container
        for manifest in result
        if manifest["kind"] == "Deployment"
        for container in manifest["spec"]["template"]["spec"]["containers"]
        if container["name"] == "server"
    )
    container["args"] = old["args"]
    return result


def test_a_pod_of_this_release_with_an_image_before_pod_json_says_so(old_python, tmp_path):
    """The operator recognizes this output in the termination message of the container."""
    argv = [str(old_python), "-m", "quire_server", *server_arguments()]
    done = subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and OLD_SUPERVISOR_ERROR in done.stderr
