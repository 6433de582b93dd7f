# SPDX-License-Identifier: Apache-2.0
"""Which reader loads the weights. test_loader.py loads checkpoints and defects with both."""

import importlib.util
import logging

import pytest

from quire_engine.weights.model_streamer import can_stream, stream_tensors
from quire_spec.errors import ConfigError


@pytest.mark.parametrize(
    ("load_format", "num_ranks", "expected"),
    [("auto", 1, False), ("safetensors", 1, False), ("runai_streamer", 1, True), ("runai_streamer", 2, False)],
)
def test_the_reader_follows_the_setting(load_format, num_ranks, expected, caplog, tmp_path):
    with caplog.at_level(logging.WARNING):
        assert can_stream(tmp_path, load_format, num_ranks) is expected
    assert bool(caplog.records) == (num_ranks > 1)


def test_without_the_package_one_line_says_why(monkeypatch, caplog, tmp_path):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with caplog.at_level(logging.WARNING):
        assert not can_stream(tmp_path, "auto", 1) and not caplog.records
        assert not can_stream(tmp_path, "runai_streamer", 1)
    (record,) = caplog.records
    assert "pip install 'quire-llm[streamer]'" in record.getMessage()


def test_a_file_that_cannot_be_read_is_an_error_with_a_way_out(tmp_path):
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"\x10\0\0\0\0\0\0\0{")
    with pytest.raises(ConfigError, match="set load_format to safetensors"):
        list(stream_tensors({"a": path}))
    with pytest.raises(ConfigError, match="set load_format to safetensors"):
        list(stream_tensors({"a": tmp_path / "missing.safetensors"}))
