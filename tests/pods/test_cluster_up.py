# SPDX-License-Identifier: Apache-2.0
"""`make cluster-up` and `make cluster-down`: a node that runs pods, and a complete cleanup.

These tests run before those that share a cluster, because a machine has one node at a time.
"""

import os
import signal
import subprocess
import sys

import pytest
import yaml
from nodocker_cluster import archive, binaries, cgroups, controllers, local, network, processes
from nodocker_cluster.control_plane import NODE_NAME
from support.cluster import KUBECONFIG_VARIABLE, ROOT
from support.engine_processes import wait_for
from support.pod_cluster import assert_nothing_left

STARTER = """
import sys, time
from pathlib import Path
from nodocker_cluster import archive, binaries, control_plane, network, node
folder = Path(sys.argv[1])
plane = control_plane.start(folder, binaries.find(), network.NETWORK.host, dies_with_us=True)
node.start(plane, archive.write_pause_archive(folder / "pause.tar"), dies_with_us=True)
print("started", flush=True)
time.sleep(600)
"""
POD = f"""
apiVersion: v1
kind: Pod
metadata: {{name: hello}}
spec:
  containers:
  - name: hello
    image: {archive.BUSYBOX_IMAGE}
    command: [/bin/busybox, sh, -c, "echo hello; /bin/busybox sleep 600"]
"""


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """A separate cache with the programs that were found, so that a cluster of this machine's user is not affected."""
    if os.environ.get(KUBECONFIG_VARIABLE):
        pytest.skip(f"{KUBECONFIG_VARIABLE} is set: tests run on that cluster and start none")
    found = binaries.find()
    assert found is not None, "Kubernetes' programs are missing; make e2e installs them"
    for folder in (found.folder, controllers.DNS.find_or_build(print)):
        (tmp_path / folder.name).symlink_to(folder)
    monkeypatch.setenv("QUIRE_CLUSTER_CACHE", str(tmp_path))
    yield tmp_path
    local.down()


def environment():
    return os.environ | {"PYTHONPATH": str(ROOT / "hack")}


def run(*arguments):
    argv = [sys.executable, "-m", "nodocker_cluster", *map(str, arguments)]
    return subprocess.run(argv, env=environment(), capture_output=True, text=True, timeout=240, check=False)


def test_killed_starter_leaves_no_processes_or_mounts(cache, tmp_path):
    """When a test run is killed, the node and the control plane end with it."""
    folder = tmp_path / "killed"
    folder.mkdir()
    with subprocess.Popen(
        [sys.executable, "-c", STARTER, str(folder)], env=environment(), stdout=subprocess.PIPE
    ) as run:
        try:
            assert run.stdout.readline() == b"started\n"
        finally:
            run.kill()
    wait_for(lambda: not [*processes.running_processes(folder)] and not network.is_connected(), 20, "their end")
    cgroups.remove_stale()
    assert_nothing_left(folder)


def test_up_run_a_pod_and_down_after_a_crash(cache):
    up = run("up")
    assert up.returncode == 0, up.stderr
    folder = cache / "up"
    kubeconfig = folder / "admin.kubeconfig"
    assert f"export KUBECONFIG={kubeconfig}" in up.stdout

    again = run("up")
    assert again.returncode == 1
    assert "run make cluster-down" in again.stderr

    loaded = run("load", archive.write_busybox_archive(cache / "busybox.tar"))
    assert loaded.returncode == 0, loaded.stderr

    def kubectl(*arguments, stdin=None):
        argv = [binaries.find().path("kubectl"), f"--kubeconfig={kubeconfig}", *arguments]
        return subprocess.run(argv, input=stdin, capture_output=True, text=True, timeout=60, check=False).stdout

    assert NODE_NAME in kubectl("get", "nodes")
    # A namespace's ServiceAccount is created some time after the namespace; pods are rejected until then.
    wait_for(lambda: "default" in kubectl("get", "serviceaccounts"), 30, "the ServiceAccount")
    assert kubectl("create", "--filename=-", stdin=yaml.safe_dump(yaml.safe_load(POD)))
    wait_for(lambda: kubectl("logs", "hello") == "hello\n", 60, "the pod's output")
    lookup = "exec", "hello", "--", "/bin/busybox", "nslookup", f"kubernetes.default.svc.{network.DNS_DOMAIN}"
    wait_for(lambda: network.NETWORK.api_service in kubectl(*lookup), 30, "the address of a Service's name")

    for process in processes.running_processes(folder):
        if process.name == "kube-apiserver":
            os.kill(process.pid, signal.SIGKILL)
    down = run("down")
    assert down.returncode == 0, down.stderr
    assert_nothing_left(folder)
    assert not folder.exists()
    assert "no cluster was up" in run("down").stdout
