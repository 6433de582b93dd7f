# SPDX-License-Identifier: Apache-2.0
"""An upgrade with Helm from the last release before pod.json, and a rollback, replace no running pod.

The operator of that release runs from its commit, beside the chart. The chart installs the CRD and the operator; the
operator renders the pods of LLMServices. tests/e2e/test_pod_upgrade.py starts the processes of such pods.
"""

import contextlib
import os
import subprocess
import sys

import pytest
import yaml
from support.chart import CHART, helm
from support.cluster import running_cluster
from support.controller_harness import ControllerHarness, answer_model_readers, llm_service, make_claim
from support.engine_processes import wait_for
from support.fake_kubelet import FailedMount, FakeKubelet
from support.old_release import extract

SYSTEM, NAMESPACE = "quire-system", "team-a"
API, KIND = "quire.dev/v1alpha1", "LLMService"
VALUES = {"watchNamespaces": [NAMESPACE], "operator": {"workers": 4}, "resources": {"limits": {}}}
OLD_IMAGE, NEW_IMAGE = "quire:old-cpu", "quire:new-cpu"


def start_container(cluster, pod):
    """Refuse a pod whose image cannot read its arguments or its files."""
    if pod["metadata"]["namespace"] != NAMESPACE:
        return  # the operator of the chart
    (server,) = pod["spec"]["containers"]
    (name,) = [v["configMap"]["name"] for v in pod["spec"]["volumes"] if v["name"] == "engine"]
    files = (cluster.get("v1", "ConfigMap", name, NAMESPACE) or {"data": {}})["data"]
    option, file = ("--engine=", "engine.json") if server["image"] == OLD_IMAGE else ("--config=", "pod.json")
    if file not in files or not any(argument.startswith(option) for argument in server["args"]):
        raise FailedMount(f"{server['image']} with {server['args']} and {sorted(files)}")


@pytest.fixture(scope="module")
def old_tree(tmp_path_factory):
    """The old chart and the packages of its operator."""
    folder = tmp_path_factory.mktemp("old")
    extract(folder, "charts/quire", "operator", "backend", "crds")
    return folder


@contextlib.contextmanager
def old_operator(cluster, old_tree):
    environment = os.environ | {"PYTHONPATH": f"{old_tree}/operator:{old_tree}/backend"}
    options = ["--kubeconfig", cluster.kubeconfig, "--namespace", NAMESPACE, "--host", "127.0.0.1", "--port", "0"]
    log = (old_tree / "operator.log").open("a")
    command = [sys.executable, "-m", "quire_operator.cli", "operate", *options, "--cpu-image", OLD_IMAGE]
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

        def change(spec):
            """Change the spec, and wait until the operator has observed it."""
            generation = cluster.merge(API, KIND, "tales", {"spec": spec}, NAMESPACE)["metadata"]["generation"]
            wait_for(
                lambda: cluster.get(API, KIND, "tales", NAMESPACE)["status"].get("observedGeneration") == generation,
                60,
                "the operator has observed the change",
            )

        def assert_pods_restart(node):
            """Restart the containers, and wait until the pods are ready again."""
            pods = cluster.items("v1", "Pod", NAMESPACE, labelSelector="app.kubernetes.io/component=server")
            restarts = {pod["metadata"]["uid"]: pod["status"]["containerStatuses"][0]["restartCount"] for pod in pods}
            for pod in pods:
                node.restart(pod)

            def restarted():
                live = cluster.items("v1", "Pod", NAMESPACE, labelSelector="app.kubernetes.io/component=server")
                states = {pod["metadata"]["uid"]: pod["status"]["containerStatuses"][0] for pod in live}
                assert states.keys() == restarts.keys(), "no pod is replaced"
                return all(s["ready"] and s["restartCount"] > restarts[uid] for uid, s in states.items())

            wait_for(restarted, 120, "the containers run again")

        new_settings = {"images": {"GPU": "quire:gpu", "CPU": NEW_IMAGE}}
        release("install", old_tree / "charts/quire", "-f", old_tree / "values.yaml", "--create-namespace")
        with FakeKubelet(cluster, "node-chart", on_start=lambda pod, _: start_container(cluster, pod)) as node:
            answer_model_readers(node)
            cluster.apply(make_claim(), NAMESPACE)
            with old_operator(cluster, old_tree):
                wait_for(lambda: cluster.apply(llm_service(), NAMESPACE), 120, "the CRD is served")
                wait_for(available, 120, "the service is available")
            before = serving()
            pods, template = before
            assert len(pods) == 1
            assert template["spec"]["containers"][0]["image"] == OLD_IMAGE

            release("upgrade", CHART, "-f", old_tree / "values.yaml")
            with ControllerHarness(cluster, NAMESPACE, new_settings) as new:
                change({"rollout": {"maxSurge": 1}})
                new.wait_settled()
                assert new.condition("Available")["status"] == "True"
                assert_pods_restart(node)
            assert serving() == before

            release("rollback")
            with old_operator(cluster, old_tree):
                change({"rollout": {"maxSurge": 0}})
                wait_for(available, 120, "the service is available")
                assert_pods_restart(node)
            assert serving() == before

            # A change of the pods gives them the template and the image of the new release. A rollback keeps both.
            release("upgrade", CHART, "-f", old_tree / "values.yaml")
            with ControllerHarness(cluster, NAMESPACE, new_settings) as new:
                change({"openai": {"live": True}})
                wait_for(
                    lambda: new.condition("Ready").get("reason") == "PodsUnreachable", 120, "the pods are replaced"
                )
                new.wait_settled()
            replaced = serving()
            pods, template = replaced
            assert pods.isdisjoint(before[0]) and template["spec"]["containers"][0]["image"] == NEW_IMAGE
            release("rollback")
            with old_operator(cluster, old_tree):
                change({"rollout": {"maxSurge": 1}})
                wait_for(available, 120, "the service is available")
                assert_pods_restart(node)
            assert serving() == replaced
