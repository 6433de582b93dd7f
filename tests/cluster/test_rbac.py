# SPDX-License-Identifier: Apache-2.0
"""The operator with the chart's ServiceAccount: it has all rights that it needs, and uses all that it has.

What it asked for is what the API server wrote into its audit log, so this wants a control plane of our own.
"""

import contextlib
import functools
import http.server
import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import yaml
from nodocker_cluster import processes
from nodocker_cluster.control_plane import AUDIT_LOG
from support import disaggregated_set
from support.chart import CHART, ROOT, helm
from support.cluster import optional_crd, running_cluster
from support.controller_harness import answer_model_readers, llm_service, make_claim
from support.engine_processes import wait_for
from support.fake_kubelet import FakeKubelet
from support.own_address import own_address

from quire_operator.kube import rbac
from quire_operator.kube.api_client import ApiClient
from quire_operator.kube.cluster_config import ClusterConfig
from quire_operator.kube.errors import ObjectNotFound, WriteConflict
from quire_operator.kube.resources import EVENT, LLM_SERVICE

API, KIND = "quire.dev/v1alpha1", "LLMService"
SYSTEM, ACCOUNT = "quire-system", "system:serviceaccount:quire-system:quire"

HOST = own_address()
"""The operator never reads from loopback addresses."""
VALUES = {"operator": {"logFormat": "text"}, "sources": {"allowedCIDRs": [f"{HOST}/32"]}}

UNSEEN = {
    # Checked by an admission plugin of the API server that is off by default, not by a request.
    ("quire.dev", "llmservices/finalizers", "update"),
    # Asked for only where a pod waits for long; a test below asks.
    ("events.k8s.io", "events", "list"),
    # Asked for only where Kueue keeps a pod waiting.
    ("kueue.x-k8s.io", "workloads", "list"),
}
OPTIONAL = [
    ("monitoring.coreos.com/v1", "PodMonitor"),
    ("keda.sh/v1alpha1", "ScaledObject"),
    ("inference.networking.k8s.io/v1", "InferencePool"),
    ("gateway.networking.k8s.io/v1", "HTTPRoute"),
]
GROUPS = "leaderworkerset.x-k8s.io/v1", "LeaderWorkerSet"
ROLES = disaggregated_set.API, disaggregated_set.KIND


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    """A cluster with the chart on it, the optional kinds, and a node."""
    with running_cluster(tmp_path_factory.mktemp("rights")) as cluster:
        if cluster.programs is None:
            pytest.skip("reads the API server's audit log, which a cluster that was given does not show")
        cluster.require_controllers()
        for _, kind in (*OPTIONAL, GROUPS):
            cluster.apply_crd(optional_crd(kind))
        cluster.apply_crd(disaggregated_set.CRD)
        install(cluster, "install", VALUES)
        with FakeKubelet(cluster, "node-rights") as node:
            answer_model_readers(node)
            yield cluster


def install(cluster, command, values):
    file = cluster.folder / "values.yaml"
    file.write_text(yaml.safe_dump(values))
    more = ["--create-namespace"] if command == "install" else []
    helm(command, "quire", CHART, "-n", SYSTEM, "--kubeconfig", cluster.kubeconfig, "-f", file, *more)


@contextlib.contextmanager
def operating(cluster):
    """`quire operate` with the arguments of the chart's Deployment, as its ServiceAccount."""
    (container,) = cluster.get("apps/v1", "Deployment", "quire", SYSTEM)["spec"]["template"]["spec"]["containers"]
    config = yaml.safe_load(cluster.token_kubeconfig(SYSTEM, "quire").read_text())
    config["contexts"][0]["context"]["namespace"] = SYSTEM
    file = cluster.folder / "operator.kubeconfig"
    file.write_text(yaml.safe_dump(config))
    argv = [str(Path(sys.executable).with_name("quire")), *container["args"]]
    argv += [f"--kubeconfig={file}", "--host=127.0.0.1", "--port=0", "--liveness-port=0", "--resync=5"]
    log = cluster.folder / "operator.log"
    with log.open("w") as output, subprocess.Popen(argv, stdout=output, stderr=output) as process:
        try:
            yield
        finally:
            process.terminate()
            ended = process.wait(20)
        assert ended == 0, log.read_text()[-3000:]


class Models(http.server.SimpleHTTPRequestHandler):
    """Logs nothing: a client that reads only the head of a file disconnects."""

    def log_message(self, *_):
        pass

    def copyfile(self, source, outputfile):
        with contextlib.suppress(ConnectionError):
            super().copyfile(source, outputfile)


@pytest.fixture(scope="module")
def models():
    """URL of the folder examples/models."""
    handler = functools.partial(Models, directory=ROOT / "examples/models")
    with http.server.ThreadingHTTPServer((HOST, 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://{HOST}:{server.server_address[1]}"
        server.shutdown()


def asked(cluster):
    """Every (group, resource, verb) that the operator asked for, with the status codes of the answers."""
    found = {}
    for line in (cluster.folder / "control-plane" / AUDIT_LOG).read_text().splitlines():
        with contextlib.suppress(ValueError):  # the last line may be half written
            event = json.loads(line)
            if event["user"]["username"] == ACCOUNT and "objectRef" in event:
                ref = event["objectRef"]
                resource = "/".join(filter(None, (ref["resource"], ref.get("subresource"))))
                code = event.get("responseStatus", {}).get("code", 0)
                # Apply of an object that does not exist needs the right to create it, and is logged as a patch.
                verbs = {event["verb"], "create"} if code == 201 else {event["verb"]}
                for verb in verbs:
                    found.setdefault((ref.get("apiGroup", ""), resource, verb), set()).add(code)
    return found


def granted(cluster):
    """The same, of the roles that the chart made for it."""
    found = set()
    for kind, name, namespace in (
        ("ClusterRole", "quire", None),
        ("ClusterRole", "quire-nodes", None),
    ):
        for rule in cluster.get("rbac.authorization.k8s.io/v1", kind, name, namespace)["rules"]:
            found |= {(g, r, v) for g in rule["apiGroups"] for r in rule["resources"] for v in rule["verbs"]}
    return found


def test_the_roles_equal_the_rbac_table(cluster):
    wanted = set()
    for rule in rbac.RULES:
        said = rule.to_json()
        wanted |= {(said["apiGroups"][0], said["resources"][0], verb) for verb in said["verbs"]}
    assert granted(cluster) == wanted


def test_grants_exactly_the_rights_that_the_operator_uses(cluster, models):
    with cluster.namespace() as namespace:
        # Watches are written down when they end, so it is read after the operator; before the namespace ends, which
        # refuses events from then on.
        with operating(cluster):
            live(cluster, namespace, models)
        used = asked(cluster)
    refused = {what: codes for what, codes in used.items() if codes & {401, 403}}
    assert refused == {}
    assert set(used) <= granted(cluster)
    unused = granted(cluster) - set(used) - UNSEEN
    assert not unused, sorted(unused)


async def test_a_deleted_or_replaced_service_is_detected_without_the_right_to_get(cluster):
    """A status is not written to it, and it is read anew: without the right to get."""
    login = ClusterConfig.from_kubeconfig(cluster.token_kubeconfig(SYSTEM, "quire"))
    with cluster.namespace() as namespace:
        made = cluster.apply(llm_service(paused=True), namespace)
        status = {"observedGeneration": 1}
        async with ApiClient(login) as client:
            for name, error in (("tales", WriteConflict), ("absent", ObjectNotFound)):
                meta = {"name": name, "namespace": namespace, "resourceVersion": "1"}
                manifest = {"metadata": meta, "status": status}
                with pytest.raises(error):
                    await client.set_status(LLM_SERVICE, manifest)
            found = await client.list_one(LLM_SERVICE, namespace, "tales")
            assert found["metadata"]["uid"] == made["metadata"]["uid"] and "status" not in found
            assert await client.list_one(LLM_SERVICE, namespace, "absent") is None


async def test_events_of_pods_are_readable(cluster):
    async with ApiClient(ClusterConfig.from_kubeconfig(cluster.token_kubeconfig(SYSTEM, "quire"))) as client:
        assert (await client.list(EVENT, "default", field_selector="regarding.uid=nobody")).items == ()


def test_watched_namespaces_need_no_rights_in_others(cluster):
    """Installed with watchNamespaces, and without the right to read nodes: no ClusterRole is left for the operator."""
    with cluster.namespace() as namespace:
        cluster.apply(llm_service("elsewhere"), "default")
        install(cluster, "upgrade", {"watchNamespaces": [namespace], "rbac": {"readNodes": False}})
        for name in ("quire", "quire-nodes"):
            absent(cluster, None, "rbac.authorization.k8s.io/v1", "ClusterRole", name)
        before = asked(cluster)
        with operating(cluster):
            cluster.apply(make_claim(), namespace)
            cluster.apply(llm_service(), namespace)
            available(cluster, namespace, "tales")
        refused = {what: codes for what, codes in asked(cluster).items() if codes & {401, 403}}
        assert refused == {what: codes for what, codes in before.items() if codes & {401, 403}}
        assert not cluster.get(API, KIND, "elsewhere", "default").get("status"), "it is in no watched namespace"


def live(cluster, namespace, models):
    """The whole life of two services, with all that they can have."""
    everything = {
        "replicas": 2,
        "adapters": [{"name": "a", "source": {"http": {"url": f"{models}/a", "headersSecretRef": {"name": "web"}}}}],
        # Two pods at least: a service that may have one has no PodDisruptionBudget.
        "autoscaling": {
            "kind": "ScaledObject",
            "minReplicas": 2,
            "maxReplicas": 3,
            "prometheusAddress": "http://prometheus:9090",
        },
        "observability": {"podMonitor": "Auto"},
        "networking": {
            "inferencePool": {"endpointPicker": {"name": "picker"}},
            "httpRoute": {"parentRefs": [{"name": "gateway"}]},
        },
    }
    cluster.apply(make_claim(), namespace)
    secret = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "web"}, "stringData": {"Authorization": "x"}}
    cluster.apply(secret, namespace)
    cluster.apply(llm_service(**everything), namespace)
    downloaded = {"model": {"source": {"http": {"url": f"{models}/tiny"}}}, "cache": {"deletionPolicy": "Delete"}}
    cluster.apply(llm_service("fetched", **downloaded), namespace)
    gpu = {"device": "GPU", "model": {"source": {"http": {"url": f"{models}/tiny"}}}, "cache": {"mode": "EmptyDir"}}
    cluster.apply(llm_service("on-gpu", **gpu, autoscaling={"maxReplicas": 2}), namespace)
    for name in ("tales", "fetched", "on-gpu"):
        available(cluster, namespace, name)
    # Then without most of it.
    less = {
        "replicas": 1,
        "adapters": None,
        "autoscaling": None,
        "observability": {"podMonitor": "None"},
        "networking": {"inferencePool": None, "httpRoute": None, "networkPolicy": {"enabled": False}},
        "engine": {"maxModelLen": 256},
    }
    cluster.merge(API, KIND, "tales", {"spec": less}, namespace)
    cluster.merge(API, KIND, "fetched", {"spec": {"cache": {"mode": "EmptyDir"}}}, namespace)
    cluster.merge(API, KIND, "on-gpu", {"spec": {"autoscaling": None}}, namespace)
    gone = [("networking.k8s.io/v1", "NetworkPolicy", "tales"), ("v1", "Secret", "tales-credentials")]
    gone += [(*kind, "tales") for kind in OPTIONAL]
    gone += [("v1", "PersistentVolumeClaim", "fetched-models"), ("policy/v1", "PodDisruptionBudget", "tales")]
    for version, kind, name in gone:
        absent(cluster, namespace, version, kind, name)
    # Pods of the first template could come back as long as there is a ReplicaSet of it, and would read its engine map.
    first = empty_set(cluster, namespace)
    cluster.delete("apps/v1", "ReplicaSet", first["metadata"]["name"], namespace)
    name = next(v["configMap"]["name"] for v in first["spec"]["template"]["spec"]["volumes"] if v["name"] == "engine")
    absent(cluster, namespace, "v1", "ConfigMap", name)
    # Groups of pods, and one pod again.
    cluster.merge(API, KIND, "tales", {"spec": {"engine": {"pipelineParallelSize": 2}}}, namespace)
    wait_for(lambda: cluster.get(*GROUPS, "tales", namespace), 120, "a LeaderWorkerSet")
    cluster.merge(API, KIND, "tales", {"spec": {"engine": {"pipelineParallelSize": None}}}, namespace)
    absent(cluster, namespace, *GROUPS, "tales")
    # The same with pods of two roles.
    roles = {"disaggregation": {"prefill": {}, "decode": {}}, "engine": {"kvCacheOffloading": {"memory": "64Mi"}}}
    cluster.merge(API, KIND, "tales", {"spec": roles}, namespace)
    wait_for(lambda: cluster.get(*ROLES, "tales", namespace), 120, "a DisaggregatedSet")
    cluster.merge(API, KIND, "tales", {"spec": {"disaggregation": None}}, namespace)
    absent(cluster, namespace, *ROLES, "tales")
    # A service that is made again before the garbage collector has come, which is stopped meanwhile.
    old = cluster.get("apps/v1", "Deployment", "on-gpu", namespace)["metadata"]["uid"]
    with halted(cluster, "kube-controller-manager"):
        cluster.delete(API, KIND, "on-gpu", namespace)
        cluster.apply(llm_service("on-gpu", **gpu), namespace)
        wait_for(lambda: made_again(cluster, namespace, old), 120, "on-gpu is made again")


def made_again(cluster, namespace, old):
    found = cluster.get("apps/v1", "Deployment", "on-gpu", namespace)
    return found and found["metadata"]["uid"] != old


@contextlib.contextmanager
def halted(cluster, program):
    """Without a program of the control plane for a while."""
    (pid,) = [p.pid for p in processes.running_processes(cluster.folder / "control-plane") if p.name == program]
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def available(cluster, namespace, name):
    def found():
        conditions = (cluster.get(API, KIND, name, namespace) or {}).get("status", {}).get("conditions", [])
        return any(c["type"] == "Available" and c["status"] == "True" for c in conditions)

    wait_for(found, 240, f"{name} available")


def absent(cluster, namespace, version, kind, name):
    wait_for(lambda: cluster.get(version, kind, name, namespace) is None, 120, f"{kind} {name} gone")


def empty_set(cluster, namespace):
    """The ReplicaSet of `tales` whose pods were replaced."""
    selector = "app.kubernetes.io/instance=tales"

    def found():
        sets = cluster.items("apps/v1", "ReplicaSet", namespace, labelSelector=selector)
        # A new set has no replicas at first, either.
        oldest = min(sets, key=lambda rs: int(rs["metadata"]["annotations"]["deployment.kubernetes.io/revision"]))
        return oldest if len(sets) > 1 and not oldest["spec"]["replicas"] else None

    return wait_for(found, 120, "pods are replaced")
