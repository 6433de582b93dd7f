# SPDX-License-Identifier: Apache-2.0
"""An upgrade with Helm from the last release before the renaming, and a rollback, replace no running pod.

The operator of that release runs from its commit, beside the chart. The chart installs the CRD and the operator; the
operator renders the pods of LLMServices.
"""

import contextlib
import os
import subprocess
import sys

import pytest
import yaml
from support.chart import CHART, ROOT, helm
from support.cluster import running_cluster
from support.controller_harness import ControllerHarness, answer_model_readers, llm_service, make_claim
from support.engine_processes import wait_for
from support.fake_kubelet import FakeKubelet

OLD_COMMIT = "297884b"
SYSTEM, NAMESPACE = "quire-system", "team-a"
API, KIND = "quire.dev/v1alpha1", "LLMService"
VALUES = {"watchNamespaces": [NAMESPACE], "operator": {"lease": True, "workers": 4}, "resources": {"limits": {}}}
"""Values that the old chart accepts; operator.lease has no effect any more."""
ENTRY = "import sys; from quire_operator.entry import main; sys.exit(main())"


@pytest.fixture(scope="module")
def old_tree(tmp_path_factory):
    """The old chart and the packages of its operator."""
    folder = tmp_path_factory.mktemp("old")
    paths = ["charts/quire", "operator", "backend", "crds"]
    archive = subprocess.run(["git", "archive", OLD_COMMIT, *paths], cwd=ROOT, capture_output=True, check=False)
    if archive.returncode:
        shallow = subprocess.run(
            ["git", "rev-parse", "--is-shallow-repository"], cwd=ROOT, capture_output=True, text=True, check=True
        )
        assert shallow.stdout.strip() == "true", archive.stderr.decode()
        pytest.skip(f"commit {OLD_COMMIT} is not in this shallow clone")
    subprocess.run(["tar", "x"], cwd=folder, input=archive.stdout, check=True)
    return folder


@contextlib.contextmanager
def old_operator(cluster, old_tree):
    environment = os.environ | {"PYTHONPATH": f"{old_tree}/operator:{old_tree}/backend"}
    options = ["--kubeconfig", cluster.kubeconfig, "--namespace", NAMESPACE, "--host", "127.0.0.1", "--port", "0"]
    log = (old_tree / "operator.log").open("a")
    command = [sys.executable, "-c", ENTRY, "operate", *options, "--cpu-image", "quire:old-cpu"]
    with log, subprocess.Popen(command, env=environment, cwd=old_tree, stdout=log, stderr=log) as process:
        try:
            yield
        finally:
            process.terminate()
            process.wait(30)


def test_helm_upgrade_and_rollback_replace_no_pod(tmp_path_factory, old_tree):
    with running_cluster(tmp_path_factory.mktemp("upgrade-cluster")) as cluster:
        cluster.require_controllers()
        cluster.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE}})
        (old_tree / "values.yaml").write_text(yaml.safe_dump(VALUES))

        def release(command, *arguments):
            helm(command, "quire", *arguments, "-n", SYSTEM, "--kubeconfig", cluster.kubeconfig)

        def available():
            conditions = cluster.get(API, KIND, "tales", NAMESPACE).get("status", {}).get("conditions", [])
            return {c["type"]: c["status"] for c in conditions}.get("Available") == "True"

        def serving():
            pods = cluster.items("v1", "Pod", NAMESPACE, labelSelector="app.kubernetes.io/component=server")
            template = cluster.get("apps/v1", "Deployment", "tales", NAMESPACE)["spec"]["template"]
            return {pod["metadata"]["uid"] for pod in pods}, template

        def change_max_surge(value):
            """Change a field that does not restart pods, and wait until the operator has observed it."""
            patch = {"spec": {"rollout": {"maxSurge": value}}}
            generation = cluster.merge(API, KIND, "tales", patch, NAMESPACE)["metadata"]["generation"]
            wait_for(
                lambda: cluster.get(API, KIND, "tales", NAMESPACE)["status"].get("observedGeneration") == generation,
                60,
                "the operator has observed the change",
            )

        release("install", old_tree / "charts/quire", "-f", old_tree / "values.yaml", "--create-namespace")
        with FakeKubelet(cluster, "node-chart") as node:
            answer_model_readers(node)
            cluster.apply(make_claim(), NAMESPACE)
            with old_operator(cluster, old_tree):
                wait_for(lambda: cluster.apply(llm_service(), NAMESPACE), 30, "the CRD is served")
                wait_for(available, 90, "the service is available")
            before = serving()
            pods, template = before
            assert len(pods) == 1
            assert template["spec"]["containers"][0]["image"] == "quire:old-cpu"

            release("upgrade", CHART, "-f", old_tree / "values.yaml")
            with ControllerHarness(cluster, NAMESPACE, {"images": {"GPU": "quire:gpu", "CPU": "quire:new-cpu"}}) as new:
                change_max_surge(1)
                new.wait_settled()
                assert new.condition("Available")["status"] == "True"
            assert serving() == before

            release("rollback")
            with old_operator(cluster, old_tree):
                change_max_surge(0)
                wait_for(available, 60, "the service is available")
            assert serving() == before
