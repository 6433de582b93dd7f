# SPDX-License-Identifier: Apache-2.0
"""One front before real text and core processes, shared by the tests that do not kill it."""

import pytest
from support.openai_front import running_front


@pytest.fixture(scope="package")
def front(tmp_path_factory):
    with running_front(tmp_path_factory.mktemp("front")) as front:
        yield front


@pytest.fixture(scope="package")
def client(front):
    with front.client() as client:
        yield client
