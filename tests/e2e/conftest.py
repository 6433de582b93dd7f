# SPDX-License-Identifier: Apache-2.0
"""One running `quire serve` of the example for all tests that do not change its state."""

import pytest
from support.quire_serve import example_document, running_service


@pytest.fixture(scope="session")
def service(tmp_path_factory):
    with running_service(example_document(), tmp_path_factory.mktemp("serve")) as service:
        yield service
