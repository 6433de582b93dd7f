# SPDX-License-Identifier: Apache-2.0
"""A new release of the operator, and models that are on their way: who keeps serving meanwhile, and with what."""

import re
import shutil
import subprocess

import pytest
import yaml
from support.chart import ROOT
from support.cluster import CRD_FILE
from support.controller_harness import TINY, ControllerHarness, llm_service
from support.doc_snippets import code_blocks
from support.engine_processes import wait_for
from support.fake_kubelet import COMPLETED, FakeContainer
from support.fake_model_server import FakeModelServer

from quire_operator.api.llmservice import LLMService
from quire_operator.cli import main
from quire_operator.controller import plan_service
from quire_operator.plan import build_plan, plan, planner
from quire_operator.render import model_storage, pod_template

API, KIND = "quire.dev/v1alpha1", "LLMService"
DOWNLOAD = "model-download"


@pytest.fixture
def model_url():
    model_server = FakeModelServer()
    yield model_server.url
    model_server.close()


@pytest.fixture
def new_release(monkeypatch):
    """One that plans otherwise, renders pods otherwise, and has other images."""

    def begin():
        for module in (planner, plan_service, build_plan):
            monkeypatch.setattr(module, "VERSION", 99)
        monkeypatch.setattr(pod_template, "_STARTUP_PERIOD_S", 7)
        return {"images": {"GPU": "quire:next-gpu", "CPU": "quire:next-cpu"}}

    return begin


def test_an_upgrade_of_the_operator_restarts_no_pod(cluster, namespace, kubelet, new_release):
    # The previous release does not know the OpenAI API.
    with pytest.MonkeyPatch.context() as previous_release, ControllerHarness(cluster, namespace) as old:
        previous_release.setattr(LLMService, "openai_port", None)
        cluster.apply(llm_service(), namespace)
        old.wait_settled()
        before = old.child("Deployment")
    settings = new_release()
    with ControllerHarness(cluster, namespace, settings) as new:
        new.wait_settled()
        assert [write for write in new.recorded_writes if write[0] not in (KIND, "Event")] == []
        # Neither when another field of the service changes, nor when the pods are edited by hand.
        cluster.merge(API, KIND, "tales", {"spec": {"replicas": 2, "disruption": {"pdb": "None"}}}, namespace)
        new.wait_settled()
        theirs = {"spec": {"template": {"spec": {"containers": [{"name": "server", "image": "theirs"}]}}}}
        path = cluster.path("apps/v1", "Deployment", namespace, "tales")
        cluster.request("PATCH", path, theirs, "application/strategic-merge-patch+json")
        wait_for(lambda: new.child("Deployment")["spec"]["template"] == before["spec"]["template"], 20, "as it was")
        assert new.child("Deployment")["spec"]["replicas"] == 2
        assert new.status()["plan"]["plannerVersion"] == plan.VERSION
        assert "openai" not in ports(new) | new.status()["address"]
        # The first change of the pods brings the new release's.
        cluster.merge(API, KIND, "tales", {"spec": {"engine": {"maxModelLen": 1024}}}, namespace)
        new.wait_settled()
        (server,) = new.child("Deployment")["spec"]["template"]["spec"]["containers"]
        assert (server["image"], server["startupProbe"]["periodSeconds"]) == ("quire:next-cpu", 7)
        assert new.status()["plan"]["plannerVersion"] == 99
        assert ports(new)["openai"] == 8004
        assert new.status()["address"]["url"] == f"http://tales.{namespace}.svc:8004/v1"


def test_any_change_of_the_pods_brings_the_image_of_the_release(cluster, namespace, kubelet, new_release):
    """Also a change that does not affect the plan: an older image may not read what the new release renders."""
    with ControllerHarness(cluster, namespace) as old:
        cluster.apply(llm_service(), namespace)
        old.wait_settled()
        before = old.status()["plan"]
    with ControllerHarness(cluster, namespace, new_release()) as new:
        new.wait_settled()
        assert image(new) == before["image"]["value"]
        cluster.merge(API, KIND, "tales", {"spec": {"openai": {"live": True}}}, namespace)
        new.wait_settled()
        assert image(new) == "quire:next-cpu"
        plan = new.status()["plan"]
        assert (plan["inputsHash"], plan["image"]["value"]) == (before["inputsHash"], "quire:next-cpu")


def test_a_pinned_image_before_pod_json_is_named_and_never_gets_a_new_template(cluster, namespace, kubelet):
    with pytest.MonkeyPatch.context() as previous_release, ControllerHarness(cluster, namespace) as old:
        previous_release.setattr(pod_template, "server_arguments", lambda: ["--engine=e", "--served-name=tales"])
        cluster.apply(llm_service(runtime={"image": "quire:pinned"}), namespace)
        old.wait_settled()
        before = old.child("Deployment")["spec"]["template"]
    with ControllerHarness(cluster, namespace) as new:
        new.wait_settled()
        condition = new.condition("ConfigValid")
        assert (condition["status"], condition["reason"]) == ("True", "ImageOutdated")
        assert "spec.runtime.image: 'quire:pinned' is older than the operator" in condition["message"]
        cluster.merge(API, KIND, "tales", {"spec": {"rollout": {"updatePolicy": "Auto"}}}, namespace)
        new.wait_settled()
        assert new.child("Deployment")["spec"]["template"] == before
        cluster.merge(API, KIND, "tales", {"spec": {"openai": {"live": True}}}, namespace)
        wait_for(lambda: new.condition("ConfigValid")["reason"] == "Invalid", 20, "the change is rejected")
        assert new.child("Deployment")["spec"]["template"] == before
        condition = new.condition("ConfigValid")
        assert "spec.runtime.image: 'quire:pinned' is older than the operator and cannot read" in condition["message"]
        cluster.merge(API, KIND, "tales", {"spec": {"runtime": {"image": "quire:current"}}}, namespace)
        new.wait_settled()
        assert image(new) == "quire:current" and new.condition("ConfigValid")["reason"] == "Accepted"


def test_update_policy_auto_upgrades_pods(cluster, namespace, kubelet, new_release):
    with ControllerHarness(cluster, namespace) as old:
        cluster.apply(llm_service(rollout={"updatePolicy": "Auto"}), namespace)
        old.wait_settled()
    with ControllerHarness(cluster, namespace, new_release()) as new:
        wait_for(lambda: image(new) == "quire:next-cpu", 120, "the new release's image")
        new.wait_settled()


def test_pods_keep_the_previous_model_until_the_next_is_downloaded(cluster, namespace, kubelet, model_url):
    slow = FakeContainer()
    kubelet.set_behavior(lambda body: of_download(body, namespace, "/a"), slow)
    with ControllerHarness(cluster, namespace) as operator:
        cluster.apply(llm_service(model=http_source(f"{model_url}/a")), namespace)
        operator.wait_settled()
        deployment = operator.child("Deployment")
        assert deployment["spec"]["replicas"] == 0, "no pod takes a GPU before there is a model"
        assert operator.condition("ModelCached")["status"] == "False"
        kubelet.set_behavior(lambda body: of_download(body, namespace, "/a"), COMPLETED)
        wait_for(lambda: operator.child("Deployment")["spec"]["replicas"] == 1, 120, "a pod")
        wait_for(lambda: operator.condition("Available").get("status") == "True", 120, "Available")
        operator.wait_settled()
        template = operator.child("Deployment")["spec"]["template"]

        kubelet.set_behavior(lambda body: of_download(body, namespace, "/b"), slow)
        cluster.merge(API, KIND, "tales", {"spec": {"model": http_source(f"{model_url}/b")}}, namespace)
        wait_for(
            lambda: len(jobs(cluster, namespace)) == 1 and not done(jobs(cluster, namespace)[0]), 30, "the second Job"
        )
        wait_for(lambda: operator.status().get("observedGeneration") == 2, 20, "judged")
        operator.requeue()
        deployment = operator.child("Deployment")
        assert (deployment["spec"]["replicas"], deployment["spec"]["template"]) == (1, template)
        assert operator.condition("Ready")["status"] != "True"
        cluster.merge(API, KIND, "tales", {"spec": {"replicas": 2}}, namespace)
        wait_for(lambda: operator.child("Deployment")["spec"]["replicas"] == 2, 20, "scaled meanwhile")

        kubelet.set_behavior(lambda body: of_download(body, namespace, "/b"), COMPLETED)
        wait_for(lambda: operator.child("Deployment")["spec"]["template"] != template, 120, "the new model")
        operator.wait_settled()


def test_an_upgrade_downloads_nothing_again(cluster, namespace, kubelet, new_release, model_url, monkeypatch):
    kubelet.set_behavior(lambda body: of_download(body, namespace, "/a"), COMPLETED)
    kubelet.set_behavior(lambda body: of_download(body, namespace, "/b"), COMPLETED)
    with ControllerHarness(cluster, namespace) as old:
        cluster.apply(llm_service(model=http_source(f"{model_url}/a")), namespace)
        wait_for(lambda: old.condition("Available").get("status") == "True", 120, "Available")
        old.wait_settled()
        said = {kind: old.condition(kind)["reason"] for kind in ("ModelCached", "Available", "Ready")}
    (before,) = jobs(cluster, namespace)
    settings = new_release()
    # Its Jobs look otherwise, too.
    monkeypatch.setattr(model_storage, "PROGRESS_PORT_VARIABLE", "QUIRE_OTHER_PORT")
    with ControllerHarness(cluster, namespace, settings) as new:
        new.wait_settled()
        assert [write for write in new.recorded_writes if write[0] not in (KIND, "Event")] == []
        assert [job["metadata"]["uid"] for job in jobs(cluster, namespace)] == [before["metadata"]["uid"]]
        assert {kind: new.condition(kind)["reason"] for kind in said} == said
        assert new.condition("ModelCached")["status"] == "True"
        # Another model is another matter.
        cluster.merge(API, KIND, "tales", {"spec": {"model": http_source(f"{model_url}/b")}}, namespace)
        wait_for(lambda: names_of(jobs(cluster, namespace)).isdisjoint(names_of([before])), 120, "its own Job")
        new.wait_settled()
        assert "QUIRE_OTHER_PORT" in str(jobs(cluster, namespace))


@pytest.mark.skipif(shutil.which("jq") is None, reason="the command of the document needs jq")
def test_the_documented_diff_shows_the_changes_of_a_release(cluster, namespace, kubelet, new_release, tmp_path, capsys):
    """The command of docs/upgrade.md, with the image that the pods have, and with a new release."""
    shown = next(text for text in code_blocks(ROOT / "docs/upgrade.md", "sh") if "kubectl diff" in text)
    program = re.search(r"jq '([^']+)'", shown)[1]
    with ControllerHarness(cluster, namespace) as old:
        cluster.apply(llm_service(), namespace)
        old.wait_settled()
        cluster.merge(API, KIND, "tales", {"spec": {"disruption": {"pdb": "None"}}}, namespace)
        old.wait_settled()
    live = tmp_path / "tales.yaml"
    live.write_text(cluster.kubectl("get", "llm", "tales", "-o", "yaml", namespace=namespace))

    def differs(image):
        argv = ["render", "-f", str(live), "--volume", f"models={TINY.parent}", "--image", image, "-o", "json"]
        assert main.main(argv) == 0
        rendered = capsys.readouterr().out
        text = subprocess.run(["jq", program], input=rendered, capture_output=True, text=True, check=True).stdout
        return cluster.kubectl("diff", "-f", "-", namespace=namespace, stdin=text, codes=(0, 1))

    assert differs(image(old)) == ""
    new_release()
    changed = [
        line for line in differs("quire:next-cpu").splitlines() if line[0] in "+-" and line[:3] not in ("+++", "---")
    ]
    assert any("quire:next-cpu" in line for line in changed) and any("periodSeconds: 7" in line for line in changed)


def http_source(url):
    return {"source": {"http": {"url": url}}}


def ports(operator):
    return {port["name"]: port["port"] for port in operator.child("Service")["spec"]["ports"]}


def image(operator):
    return operator.child("Deployment")["spec"]["template"]["spec"]["containers"][0]["image"]


def of_download(body, namespace, which):
    labels = body["metadata"]["labels"]
    here = body["metadata"]["namespace"] == namespace and labels.get("app.kubernetes.io/component") == DOWNLOAD
    return here and any(f'{which}"' in text for text in body["spec"]["containers"][0]["args"])


def jobs(cluster, namespace):
    return cluster.items("batch/v1", "Job", namespace, labelSelector=f"app.kubernetes.io/component={DOWNLOAD}")


def names_of(found):
    return {job["metadata"]["name"] for job in found}


def done(job):
    return bool(job.get("status", {}).get("conditions"))


def test_a_status_that_an_older_crd_cannot_hold_is_written_and_told_once(cluster, namespace, kubelet, fake_pods):
    """Also if another operator process takes over."""

    def differences_told():
        events = cluster.items("events.k8s.io/v1", "Event", namespace)
        return [event["note"] for event in events if event["reason"] == "KVLayoutsDiffer"]

    def is_dropped():
        found = {"servedName": "s", "conditions": []}
        return "servedName" not in cluster.merge(API, KIND, "tales", {"status": found}, namespace, "status")["status"]

    crd = yaml.safe_load(CRD_FILE.read_text())
    status = crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["status"]
    status["properties"] = {name: status["properties"][name] for name in ("conditions", "observedGeneration")}
    fake_pods.pod_options = lambda pod: {"kv_differences": ["block_size"]}
    try:
        cluster.apply_crd(crd)
        cluster.apply(llm_service(paused=True), namespace)
        wait_for(is_dropped, 30, "the older CRD")
        with ControllerHarness(cluster, namespace) as operator:
            cluster.merge(API, KIND, "tales", {"spec": {"paused": False}}, namespace)
            wait_for(differences_told, 60, operator.status)
            wait_for(lambda: operator.condition("Ready").get("status") == "True", 60, operator.status)
            assert set(operator.status()) == {"conditions", "observedGeneration"}
            operator.requeue()
            writes = list(operator.recorded_writes)
            for _ in range(3):
                operator.requeue()
            assert operator.recorded_writes == writes and len(differences_told()) == 1
        with ControllerHarness(cluster, namespace) as operator:
            operator.wait_settled()
            operator.requeue()
            writes = list(operator.recorded_writes)
            operator.requeue()
            assert operator.recorded_writes == writes and len(differences_told()) == 1
    finally:
        cluster.install_crd()
