# SPDX-License-Identifier: Apache-2.0
"""The parts of a vllm_backend model repository that are not served."""

import pytest

from quire_server.model_server.vllm_repository import log_ignored_parts
from quire_spec.errors import ConfigError


def test_names_what_is_not_served(tmp_path, caplog):
    for version in ("vllm_model/1", "vllm_model/2", "vllm_model/10", "vllm_model/011", "embedder/1"):
        (tmp_path / version).mkdir(parents=True)
        if "vllm" in version:
            (tmp_path / version / "model.json").write_text('{"model": "m"}')
    config = tmp_path / "vllm_model/config.pbtxt"
    config.write_text(
        'backend: "vllm"\ninstance_group [{count: 2 kind: KIND_MODEL}]\n'
        'parameters {key: "REPORT_CUSTOM_METRICS" value {string_value: "yes"}}'
    )
    log_ignored_parts(tmp_path)
    log = caplog.text
    assert "not_served=1,2" in log and "served only with --model-repository: embedder" in log
    assert "instance_group, parameters['REPORT_CUSTOM_METRICS']" in log
    config.write_text("backend: [")
    with pytest.raises(ConfigError, match=r"config\.pbtxt: not a model configuration"):
        log_ignored_parts(tmp_path)
    config.write_text('backend: "python"')
    with pytest.raises(ConfigError, match=r"backend 'python' is not vllm"):
        log_ignored_parts(tmp_path / "vllm_model")
