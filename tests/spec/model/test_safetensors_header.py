# SPDX-License-Identifier: Apache-2.0
"""Expected length of a safetensors file, compared with files that the safetensors library writes."""

import json

import numpy as np
import pytest
from safetensors.numpy import save_file

from quire_spec.errors import ConfigError
from quire_spec.model.safetensors_header import (
    LENGTH_BYTES,
    MAX_HEADER_BYTES,
    expected_file_bytes,
    header_length,
    tensor_bytes,
)


def encode_length(value):
    return value.to_bytes(LENGTH_BYTES, "little")


@pytest.fixture
def saved(tmp_path):
    tensors = {"b": np.zeros((3, 5), np.float32), "a": np.zeros(7, np.float16), "none": np.zeros((0, 4), np.int8)}
    save_file(tensors, tmp_path / "saved", metadata={"format": "pt"})
    return tmp_path / "saved"


def test_length_of_a_complete_file(saved):
    data = saved.read_bytes()
    end = LENGTH_BYTES + header_length(data[:LENGTH_BYTES])
    assert tensor_bytes(json.loads(data[LENGTH_BYTES:end])) == len(data) - end == 3 * 5 * 4 + 7 * 2
    assert expected_file_bytes(saved) == len(data)


def test_lower_bound_for_a_file_truncated_at_any_byte(saved):
    data = saved.read_bytes()
    end = LENGTH_BYTES + header_length(data[:LENGTH_BYTES])
    for cut in range(len(data)):
        saved.write_bytes(data[:cut])
        lower_bound = LENGTH_BYTES if cut < LENGTH_BYTES else end if cut < end else len(data)
        assert expected_file_bytes(saved) == lower_bound


@pytest.mark.parametrize(
    "start", [b"", b"PK\x03\x04abc", b"PK\x03\x04abcd", encode_length(0), encode_length(MAX_HEADER_BYTES + 1)]
)
def test_rejects_invalid_header_length(start):
    with pytest.raises(ConfigError, match="does not begin like a safetensors file"):
        header_length(start)


def test_accepts_longest_header():
    assert header_length(encode_length(MAX_HEADER_BYTES)) == MAX_HEADER_BYTES


HEADERS = [
    [], {}, None, {"__metadata__": {"format": "pt"}}, {"a": None}, {"a": {}}, {"a": {"data_offsets": "xy"}},
    {"a": {"data_offsets": [0]}}, {"a": {"data_offsets": [0, -1]}}, {"a": {"data_offsets": [0, 1.5]}},
    {"a": {"data_offsets": [0, True]}}, {"a": {"data_offsets": {"1": 2}}},
]  # fmt: skip


@pytest.mark.parametrize("header", HEADERS)
def test_rejects_header_without_offsets(tmp_path, header):
    with pytest.raises(ConfigError, match="contains no tensors with offsets"):
        tensor_bytes(header)
    text = json.dumps(header).encode()
    (tmp_path / "file").write_bytes(encode_length(len(text)) + text)
    assert expected_file_bytes(tmp_path / "file") is None


@pytest.mark.parametrize("header", [b"{}x", b"\xff\xff", b"[" * 100_000])
def test_length_is_unknown_if_header_is_not_json(tmp_path, header):
    (tmp_path / "file").write_bytes(encode_length(len(header)) + header)
    assert expected_file_bytes(tmp_path / "file") is None
