# SPDX-License-Identifier: Apache-2.0
"""`quire render | kubectl apply`: the rendered objects run without an operator."""

import subprocess
import sys
from pathlib import Path

import pytest
from nodocker_cluster import images
from support.cluster import ROOT
from support.engine_processes import wait_for
from support.pod_cluster import (
    KIND_EXAMPLES,
    create_examples_volume,
    diagnostics,
    is_ready,
    service_endpoint,
    serving_pods,
)


@pytest.fixture(scope="module")
def namespace(cluster):
    """A namespace with the rendered objects of examples/kind/tales.yaml and a ready pod."""
    quire = str(Path(sys.executable).with_name("quire"))
    argv = [
        quire,
        "render",
        f"--file={KIND_EXAMPLES}/tales.yaml",
        f"--volume=examples={ROOT}/examples",
        f"--image={images.SERVER_IMAGE}",
    ]
    rendered = subprocess.run(argv, capture_output=True, text=True, check=True).stdout
    with cluster.namespace("rendered") as name:
        create_examples_volume(cluster, name)
        cluster.kubectl("apply", "--filename=-", namespace=name, stdin=rendered)
        try:
            wait_for(lambda: any(map(is_ready, serving_pods(cluster, name))), 300, "a ready pod")
        except AssertionError as error:
            raise AssertionError(diagnostics(cluster, name)) from error
        yield name


def test_pod_has_the_rendered_restrictions(cluster, namespace):
    """As reported by the kernel, not by the manifest."""
    inside = cluster.kubectl("exec", "deploy/tales", "--", "cat", "/proc/self/status", namespace=namespace)
    status = dict(line.split(":\t", 1) for line in inside.splitlines() if ":\t" in line)
    assert status["Uid"].split() == ["1000"] * 4
    assert int(status["CapEff"], 16) == int(status["CapBnd"], 16) == 0
    assert status["NoNewPrivs"] == "1"
    assert status["Seccomp"] == "2"
    with pytest.raises(AssertionError, match="Read-only file system"):
        cluster.kubectl("exec", "deploy/tales", "--", "touch", "/opt/x", namespace=namespace)


def test_base_and_adapter_answer_through_the_service(cluster, namespace):
    with service_endpoint(cluster, namespace) as service:
        plain = service.text("tales", "Once upon a time")
        pirate = service.text("pirate", "Once upon a time")
    assert plain
    assert pirate
    assert plain != pirate
