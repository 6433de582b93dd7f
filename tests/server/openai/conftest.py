# SPDX-License-Identifier: Apache-2.0
"""One front before real text and core processes, shared by the tests that do not kill it."""

import shutil

import pytest
from support.openai_front import TINY, running_front


@pytest.fixture(scope="package")
def front(tmp_path_factory):
    """A front for a checkpoint without a chat template."""
    folder = tmp_path_factory.mktemp("front")
    shutil.copytree(TINY, folder / "model", ignore=shutil.ignore_patterns("*.jinja"))
    with running_front(folder, model=folder / "model") as front:
        yield front


@pytest.fixture(scope="package")
def client(front):
    with front.client() as client:
        yield client
