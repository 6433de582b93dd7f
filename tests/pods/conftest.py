# SPDX-License-Identifier: Apache-2.0
"""One cluster with a node for all tests of real pods. They take minutes: `make e2e` runs them, `make test` does not."""

import os
from pathlib import Path

import pytest
from support.pods import with_node

HERE = Path(__file__).parent
WANTED = "QUIRE_PODS"


def pytest_collection_modifyitems(items):
    """Everything in this folder runs real pods."""
    marks = [pytest.mark.pods, pytest.mark.timeout(600)]
    if not os.environ.get(WANTED):
        marks.append(pytest.mark.skip(reason="runs real pods on a node, which takes minutes: make e2e"))
    for item in items:
        if item.path.is_relative_to(HERE):
            for mark in marks:
                item.add_marker(mark)


@pytest.fixture(scope="session")
def cluster(tmp_path_factory):
    """A cluster whose node has the images of this checkout."""
    with with_node(tmp_path_factory.mktemp("pods")) as cluster:
        yield cluster
