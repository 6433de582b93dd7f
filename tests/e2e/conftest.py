# SPDX-License-Identifier: Apache-2.0
"""One running `quire serve` of the example for all tests that leave it as they found it."""

import pytest
from support.service import example, serving


@pytest.fixture(scope="session")
def service(tmp_path_factory):
    with serving(example(), tmp_path_factory.mktemp("serve")) as service:
        yield service
