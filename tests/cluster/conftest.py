# SPDX-License-Identifier: Apache-2.0
"""One API server with the CRD for the session, and a namespace of its own for each test."""

from pathlib import Path

import pytest
from support.cluster import NO_CLUSTER_REASON, current_crd_server, is_available, running_cluster

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


@pytest.fixture(scope="session")
def current(cluster, tmp_path_factory):
    """An API server that takes the CRD as a current Kubernetes does, if only for that."""
    with current_crd_server(cluster, tmp_path_factory.mktemp("definitions")) as current:
        current.install_crd()
        yield current


@pytest.fixture
def namespace(cluster):
    """The name of a new namespace."""
    with cluster.namespace() as name:
        yield name
