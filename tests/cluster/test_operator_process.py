# SPDX-License-Identifier: Apache-2.0
"""`quire operate` and `kopf run` as processes: killed, restarted, stopped; handlers, ports and liveness."""

import os
import re
import signal
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import urlopen

import pytest
from nodocker_cluster.ports import free_ports
from support.cluster import running_cluster
from support.controller_harness import CHILDREN, child_objects, llm_service
from support.engine_processes import wait_for

from quire_operator.controller.operator_process import PORT_VARIABLE

LIVE = '{"controller": "running", "watches": "current", "work_queue": "moving"}'
API, KIND = "quire.dev/v1alpha1", "LLMService"


def operator(cluster, namespace, tmp_path, *flags):
    """Run `quire operate` for one namespace."""
    argv = [str(Path(sys.executable).with_name("quire")), "operate", f"--kubeconfig={cluster.kubeconfig}"]
    argv += [f"--namespace={namespace}", "--host=127.0.0.1", "--port=0", *flags]
    return running(tmp_path, *argv, *([] if "--liveness-port" in str(flags) else ["--liveness-port=0"]))


@contextmanager
def running(tmp_path, *argv, **environment):
    """The process and its log file; killed at the end if it still runs."""
    log = tmp_path / f"operator-{len(list(tmp_path.iterdir()))}.log"
    with log.open("wb") as file:
        process = subprocess.Popen(
            argv, stdout=file, stderr=file, env={**os.environ, "PYTHONUNBUFFERED": "1", **environment}
        )
    try:
        yield process, log
    finally:
        process.kill()
        process.wait(10)


def get(log, path):
    """Status and text of the operator's port."""
    return fetch(wait_for(lambda: re.search(r"port=(\d+)", log.read_text()), 120, "port")[1], path)


def fetch(port, path):
    """Status and text of a path; 0 if the port does not answer."""
    try:
        with urlopen(f"http://127.0.0.1:{port}{path}", timeout=10) as answer:
            return answer.status, answer.read().decode()
    except HTTPError as error:
        return error.code, error.read().decode()
    except OSError as error:
        return 0, str(error)


def test_restarts_after_a_kill_and_stops_on_sigterm(cluster, namespace, kubelet, tmp_path):
    cluster.apply(llm_service(), namespace)
    with operator(cluster, namespace, tmp_path) as (process, _):
        wait_for(lambda: child_objects(cluster, namespace), 120, "the first child")
        process.send_signal(signal.SIGKILL)
        assert process.wait(10) == -signal.SIGKILL
    (liveness_port,) = free_ports(1)
    with operator(cluster, namespace, tmp_path, f"--liveness-port={liveness_port}") as (process, log):
        done = lambda: len(child_objects(cluster, namespace)) >= len(CHILDREN) + 2  # noqa: E731
        wait_for(done, 120, "all children")
        wait_for(lambda: status(cluster, namespace).get("plan"), 120, "a plan in the status")
        assert get(log, "/health/live")[0] == 200 and get(log, "/health/ready")[0] == 200
        assert fetch(liveness_port, "/health/live") == (200, LIVE)
        # An edit and a deletion come through kopf.
        cluster.merge(API, KIND, "tales", {"spec": {"replicas": 2}}, namespace)
        deployment = lambda: cluster.get("apps/v1", "Deployment", "tales", namespace)  # noqa: E731
        wait_for(lambda: deployment()["spec"]["replicas"] == 2, 120, "the edit")
        # What was made before, the one that was killed may have made.
        counted = 'quire_operator_writes_total{kind="Deployment"'
        wait_for(lambda: counted in get(log, "/metrics")[1], 120, "the edit counted")
        meta = cluster.get(API, KIND, "tales", namespace)["metadata"]
        assert "finalizers" not in meta and "annotations" not in meta, "kopf leaves no traces"
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0, log.read_text()
    assert '"level": "error"' not in log.read_text(), log.read_text()


def test_waits_for_a_missing_crd_and_logs_it(tmp_path):
    with running_cluster(tmp_path / "cluster") as bare:
        if bare.programs is None:
            pytest.skip("a cluster that was given has the definition")
        (tmp_path / "logs").mkdir()
        with operator(bare, "default", tmp_path / "logs") as (process, log):
            wait_for(lambda: "CRD llmservices.quire.dev is not installed" in log.read_text(), 120, "what is missing")
            assert "waiting for it version=v1alpha1; install it: helm upgrade" in log.read_text()
            assert get(log, "/health/ready") == (503, "reading the cluster\n")
            bare.install_crd()
            wait_for(lambda: get(log, "/health/ready")[0] == 200, 15, "ready")
            bare.apply(llm_service(paused=True), "default")
            wait_for(lambda: status(bare, "default").get("conditions"), 15, "a status")
            process.send_signal(signal.SIGTERM)
            assert process.wait(20) == 0, log.read_text()


def test_kopf_run_serves_all_namespaces(cluster, namespace, kubelet, tmp_path):
    health_port, liveness_port = free_ports(2)
    argv = [sys.executable, "-m", "kopf", "run", "-m", "quire_operator.controller.kopf_handlers", "--standalone", "-A"]
    environment = {"KUBECONFIG": str(cluster.kubeconfig), PORT_VARIABLE: str(health_port)}
    liveness = f"--liveness=http://127.0.0.1:{liveness_port}/health/live"
    with running(tmp_path, *argv, liveness, **environment) as (process, log):
        wait_for(lambda: fetch(health_port, "/health/ready")[0] == 200, 120, "ready")
        assert fetch(liveness_port, "/health/live") == (200, LIVE)
        cluster.apply(llm_service(), namespace)
        wait_for(lambda: len(child_objects(cluster, namespace)) >= len(CHILDREN) + 2, 120, "all children")
        cluster.merge(API, KIND, "tales", {"spec": {"replicas": 2}}, namespace)
        deployment = lambda: cluster.get("apps/v1", "Deployment", "tales", namespace)  # noqa: E731
        wait_for(lambda: deployment()["spec"]["replicas"] == 2, 120, "the edit")
        meta = cluster.get(API, KIND, "tales", namespace)["metadata"]
        assert "finalizers" not in meta and "annotations" not in meta, "kopf leaves no traces"
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0, log.read_text()


def test_without_a_cluster_the_error_names_kubeconfig(tmp_path):
    argv = [str(Path(sys.executable).with_name("quire")), "operate"]
    bare = {k: v for k, v in os.environ.items() if not k.startswith("KUBE")} | {"HOME": str(tmp_path)}
    done = subprocess.run(argv, capture_output=True, text=True, env=bare, timeout=60, check=False)
    assert done.returncode == 1 and "--kubeconfig" in done.stderr


def status(cluster, namespace):
    return cluster.get(API, KIND, "tales", namespace).get("status", {})
