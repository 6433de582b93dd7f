# SPDX-License-Identifier: Apache-2.0
"""Fixtures of the tests with real pods: one cluster with a node. They take minutes; only `make e2e` runs them."""

import os
import re
from pathlib import Path

import pytest
import yaml
from nodocker_cluster import images, node
from support.chart import CHART, helm
from support.cluster import KUBECONFIG_VARIABLE
from support.pod_cluster import OPERATOR_NAMESPACE, cluster_with_node, diagnostics

HERE = Path(__file__).parent
ENABLE_VARIABLE = "QUIRE_PODS"


def pytest_collection_modifyitems(items):
    """Mark all tests of this folder, and skip them unless they are enabled."""
    marks = [pytest.mark.pods, pytest.mark.timeout(600)]
    if not os.environ.get(ENABLE_VARIABLE):
        marks.append(pytest.mark.skip(reason="runs real pods on a node, which takes minutes: make e2e"))
    for item in items:
        if item.path.is_relative_to(HERE):
            for mark in marks:
                item.add_marker(mark)


@pytest.fixture(scope="session", autouse=True)
def node_packages():
    """Install the node's Debian packages before the first test: on a new machine no earlier step has done so."""
    if not os.environ.get(KUBECONFIG_VARIABLE):
        node.install_packages(print)


@pytest.fixture(scope="session")
def cluster(tmp_path_factory):
    """A cluster whose node has the images of this checkout."""
    with cluster_with_node(tmp_path_factory.mktemp("pods")) as cluster:
        yield cluster


def image(name):
    """Split an image name into the chart's values: registry, and repository with tag."""
    registry, repository, tag = re.fullmatch(r"(.+)/(.+):(.+)", name).groups()
    return registry, {"repository": repository, "tag": tag}


@pytest.fixture(scope="module")
def operator(cluster, tmp_path_factory):
    """Install the chart; yield the namespace of its Deployment `quire`."""
    registry, operator = image(images.OPERATOR_IMAGE)
    values = {"image": {"registry": registry, "operator": operator, "cpu": image(images.SERVER_IMAGE)[1]}}
    file = tmp_path_factory.mktemp("chart") / "values.yaml"
    file.write_text(yaml.safe_dump(values))
    where = ["-n", OPERATOR_NAMESPACE, "--kubeconfig", cluster.kubeconfig]
    helm("install", "quire", CHART, "--create-namespace", "-f", file, *where)
    try:
        cluster.kubectl("rollout", "status", "deployment/quire", "--timeout=55s", namespace=OPERATOR_NAMESPACE)
    except AssertionError as error:
        raise AssertionError(diagnostics(cluster, OPERATOR_NAMESPACE)) from error
    yield OPERATOR_NAMESPACE
    helm("uninstall", "quire", *where)
