# SPDX-License-Identifier: Apache-2.0
"""One API server with the CRD for the session, and a namespace of its own with a claim for each test."""

from pathlib import Path

import pytest
from support.cluster import NO_CLUSTER_REASON, is_available, running_cluster
from support.controller_harness import answer_model_readers, make_claim
from support.fake_kubelet import FakeKubelet
from support.fake_model_server import FakeModelServer
from support.fake_pods import FakePods

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items):
    """Everything in this folder needs a cluster; without one it is skipped with what to run."""
    absent = [] if is_available() else [pytest.mark.skip(reason=NO_CLUSTER_REASON)]
    for item in items:
        if item.path.is_relative_to(HERE):
            for mark in (pytest.mark.cluster, *absent):
                item.add_marker(mark)


@pytest.fixture(scope="session")
def cluster(tmp_path_factory):
    """A cluster with the CRD installed."""
    with running_cluster(tmp_path_factory.mktemp("cluster")) as cluster:
        cluster.install_crd()
        yield cluster


@pytest.fixture(scope="module")
def kubelet(cluster, request):
    """A node without containers, on which the Jobs that read a claim find the tiny model."""
    cluster.require_controllers()
    with FakeKubelet(cluster, request.path.stem.replace("_", "-")) as kubelet:
        answer_model_readers(kubelet)
        yield kubelet


@pytest.fixture(scope="module")
def fake_pods(kubelet):
    """Makes the server pods of the node answer on their admin port."""
    with FakePods(kubelet) as fake_pods:
        yield fake_pods


@pytest.fixture(scope="module")
def place():
    """A server that models are downloaded from."""
    place = FakeModelServer()
    yield place
    place.close()


@pytest.fixture
def namespace(cluster):
    """The name of a new namespace with the claim `models`."""
    with cluster.namespace() as name:
        cluster.apply(make_claim(), name)
        yield name
