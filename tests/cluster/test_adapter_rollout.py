# SPDX-License-Identifier: Apache-2.0
"""A new content of an adapter on two real servers: verified on both, then switched on both, then rolled back."""

import contextlib
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest
from support.controller_harness import ControllerHarness, answer_model_readers, llm_service, make_claim
from support.engine_processes import wait_for
from support.fake_kubelet import FakeKubelet
from support.served_pods import ServedPods

pytestmark = pytest.mark.timeout(500)

API = ("quire.dev/v1alpha1", "LLMService")
PROMPT = "Once upon a time"


def adapter(name, folder, **fields):
    return {"name": name, "source": {"pvc": {"claimName": "models", "path": f"adapters/{folder}"}}, **fields}


FIXED = [adapter("pirate", "pirate"), adapter("sql", "sql")]
SERVICE = llm_service(
    replicas=2,
    model={"source": {"pvc": {"claimName": "models", "path": "models/tiny"}}, "servedName": "tales"},
    adapters=[*FIXED, adapter("style", "pirate")],
    lora={"maxLoaded": 4, "maxRank": 16},
    engine={"dtype": "float32", "maxNumSeqs": 4},
)


@pytest.fixture(scope="module")
def kubelet(cluster):
    cluster.require_controllers()
    with FakeKubelet(cluster, "node-rollout", gpus=2) as node:
        answer_model_readers(node)
        yield node


class Rollout:
    """A ready service of two real servers."""

    def __init__(self, cluster, namespace, operator, pods):
        self.cluster, self.namespace, self.operator, self.pods = cluster, namespace, operator, pods

    def edit(self, folder, **fields):
        adapters = [*FIXED, adapter("style", folder, **fields)]
        self.cluster.merge(*API, "tales", {"spec": {"adapters": adapters}}, self.namespace)

    def servers(self):
        return list(self.pods.running.values())

    def statuses(self):
        keys = [(server.folder / "admin.key").read_text() for server in self.servers()]
        documents = [server.status(key) for server, key in zip(self.servers(), keys, strict=True)]
        return [{entry["name"]: entry for entry in document["adapters"]} for document in documents]

    def texts(self, model, max_tokens=16):
        return [server.text(model, PROMPT, max_tokens=max_tokens, temperature=0) for server in self.servers()]

    def entry(self):
        entries = self.operator.status().get("adapters", [])
        return next((entry for entry in entries if entry["name"] == "style"), {})

    def until_switched(self, wanted):
        """Wait until all servers answer with `wanted`; return the seconds between the first and the last."""
        switched = {}

        def all_switched():
            for server, text in zip(self.servers(), self.texts("style"), strict=True):
                if text == wanted:
                    switched.setdefault(server.host, time.monotonic())
            return len(switched) == 2

        wait_for(all_switched, 120, lambda: (self.entry(), self.statuses()))
        return max(switched.values()) - min(switched.values())


@pytest.fixture
def rollout(cluster, kubelet):
    with contextlib.ExitStack() as stack:
        # Paths of sockets must be short; tmp_path is not in a worker of xdist.
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="rollout-")))
        namespace = stack.enter_context(cluster.namespace())
        cluster.apply(make_claim(), namespace)
        pods = stack.enter_context(ServedPods(kubelet, SERVICE, folder))
        operator = stack.enter_context(ControllerHarness(cluster, namespace))
        cluster.apply(SERVICE, namespace)
        # Two servers start beside other tests.
        wait_for(lambda: operator.condition("Ready").get("status") == "True", 240, operator.status)
        yield Rollout(cluster, namespace, operator, pods)


def test_verified_switched_and_rolled_back(rollout):
    pirate, sql = rollout.texts("pirate")[0], rollout.texts("sql")[0]
    assert pirate != sql and rollout.texts("style") == [pirate] * 2

    # A content that one of the pods does not verify changes nothing.
    rollout.edit("sql", canary={"prompt": PROMPT, "expect": "never", "maxTokens": 2})
    wait_for(lambda: rollout.entry().get("state") == "Failed", 120, rollout.operator.status)
    assert "CanaryFailed: the output is" in rollout.entry()["message"]
    assert rollout.operator.condition("AdaptersReady")["reason"] == "LoadFailed"
    assert rollout.texts("style") == [pirate] * 2
    for status in rollout.statuses():
        assert (status["style"]["state"], status["style"]["candidate"]["state"]) == ("Ready", "Failed")

    # With another canary it switches, and an open request finishes on the content with which it began.
    long_text, lengths = rollout.servers()[0].text("pirate", PROMPT, max_tokens=200, temperature=0), []

    def keep_asking():
        while not done.is_set():
            text = rollout.servers()[0].text("style", PROMPT, max_tokens=200, temperature=0)
            lengths.append(text in (long_text, sql_text))

    sql_text = rollout.servers()[0].text("sql", PROMPT, max_tokens=200, temperature=0)
    done = threading.Event()
    clients = [threading.Thread(target=keep_asking) for _ in range(2)]
    for client in clients:
        client.start()
    try:
        rollout.edit("sql", canary={"prompt": PROMPT, "expect": sql[:3]})
        assert rollout.until_switched(sql) <= 2.0
    finally:
        done.set()
        for client in clients:
            client.join()
    assert lengths and all(lengths), "no output mixes two contents"
    wait_for(lambda: rollout.operator.condition("Ready").get("status") == "True", 120, rollout.operator.status)
    for status in rollout.statuses():
        assert status["style"]["digest"] == status["sql"]["digest"]
        assert status["style"]["previous"]["state"] == "Verified"
        assert status["style"]["previous"]["digest"] == status["pirate"]["digest"]

    # The previous content stays loaded for a rollback.
    env = {**os.environ, "KUBECONFIG": str(rollout.cluster.kubeconfig)}
    quire = str(Path(sys.executable).with_name("quire"))
    command = [quire, "adapter", "rollback", "style", "-n", rollout.namespace]
    done_text = subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout
    assert "the previous content is live when all pods have verified it" in done_text
    assert rollout.until_switched(pirate) <= 2.0
    spec = rollout.cluster.get(*API, "tales", rollout.namespace)["spec"]["adapters"][2]
    assert spec["source"]["pvc"]["path"] == "adapters/pirate" and "canary" not in spec
    missing = subprocess.run([*command[:3], "nothing", *command[4:]], env=env, capture_output=True, text=True)
    assert missing.returncode == 1 and "adapter 'nothing': does not exist in namespace" in missing.stderr
    never = subprocess.run([*command[:3], "sql", *command[4:]], env=env, capture_output=True, text=True)
    assert never.returncode == 1 and "has no previous content" in never.stderr
