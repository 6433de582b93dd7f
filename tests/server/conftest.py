# SPDX-License-Identifier: Apache-2.0
"""A real server with a fake text process, shared by the tests that leave it as they found it."""

import pytest
from support.frontend_harness import running_frontend


@pytest.fixture(scope="session")
def running(tmp_path_factory):
    with running_frontend(tmp_path_factory.mktemp("frontend")) as running:
        running.add_model("sql")
        yield running
