# SPDX-License-Identifier: Apache-2.0
"""A tiny Llama checkpoint, shared by the tests of one worker module."""

import pytest
from support.tiny_checkpoints import make_checkpoint

from quire_spec.model.model_config import ModelConfig


@pytest.fixture(scope="package")
def llama_folder(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("llama"), "llama")


@pytest.fixture(scope="package")
def llama_shape(llama_folder):
    return ModelConfig.load(llama_folder)
