# SPDX-License-Identifier: Apache-2.0
"""Documents of checkpoints: what is read of them, and the memory that hostile ones need."""

import contextlib
import json
import tracemalloc

import pytest

from quire_spec.errors import ConfigError
from quire_spec.model import checkpoint_documents
from quire_spec.model.checkpoint_documents import MAX_CONFIG_VALUES, parse_config, parse_header, parse_index

EMBEDDING = "model.embed_tokens.weight"
ENTRY = {"dtype": "BF16", "shape": [2], "data_offsets": [0, 4]}


@pytest.mark.parametrize(
    ("index", "total", "names"),
    [
        ({"metadata": {"total_size": 16, "format": "pt"}, "weight_map": {"a": "b"}}, 16, []),
        ({"metadata": {"total_size": 1.6e10}, "weight_map": {EMBEDDING[6:]: "x"}}, 1.6e10, [EMBEDDING[6:]]),
        ({"weight_map": {EMBEDDING: "x", "not_embed_tokens.weight": "y"}}, None, [EMBEDDING]),
        ({"metadata": None, "weight_map": None}, None, []),
        ({}, None, []),
    ],
)  # fmt: skip
def test_an_index_is_reduced_to_its_size_and_embedding(index, total, names):
    for text in (json.dumps(index), json.dumps(index, indent=2)):
        reduced = parse_index(text.encode())
        assert (reduced["metadata"]["total_size"], list(reduced["weight_map"])) == (total, names)


@pytest.mark.parametrize("index", [[], "x", {"metadata": {"total_size": "9"}}, {"metadata": []}, 10**400])
def test_an_index_of_other_types_has_no_size(index):
    assert parse_index(json.dumps(index).encode()) == {}


def test_a_header_is_reduced_to_its_end_and_embedding():
    header = {"__metadata__": {"format": "pt"}, "a": ENTRY, "embed_tokens.weight": ENTRY | {"data_offsets": [4, 99]}}
    reduced = parse_header(json.dumps(header).encode() + b"   ")
    assert reduced.keys() == {"last", "embed_tokens.weight"} and reduced["last"]["data_offsets"][1] == 99


@pytest.mark.parametrize(
    "header", [{}, {"__metadata__": {}}, {"a": {}}, {"a": {"data_offsets": [0, "1"]}}, [], {"a": 1}]
)
def test_rejects_a_header_without_tensors(header):
    with pytest.raises(ConfigError, match="no tensors with offsets"):
        parse_header(json.dumps(header).encode())


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b'{"a": SECRET}', "not JSON: Expecting value in line 1, column 7"),
        (b"\xff", "not JSON: not UTF-8"),
        (b"[" * 100_000, "not JSON: nested too deeply"),
        (b"[" + b"0," * MAX_CONFIG_VALUES + b"0]", "has more than 250000 values"),
        (b" " * (8 * 2**20 + 1), "is larger than 8388608 bytes"),
    ],
)
def test_rejects_a_config_without_quoting_it(data, message):
    with pytest.raises(ConfigError, match=message) as error:
        parse_config(data)
    assert "SECRET" not in str(error.value)


HOSTILE = {
    "a 20 MB config of lists": ("parse_config", "b'[' + b'[],' * 6_990_000 + b'0]'"),
    "a config of lists below the limit of size": ("parse_config", "(b'[' + b'[],' * 2_790_000 + b'0]')[:2**23]"),
    "a config of objects below the limit of values": ("parse_config", "b'[' + b'{\"a\":0.1},' * 120_000 + b'0]'"),
    "a config of one text": ("parse_config", "b'\"' + '\\U0001f600'.encode() * 2_000_000 + b'\"'"),
    "an index of 16 MiB": ("parse_index", "b'{\"weight_map\":{' + b'\"a\":1,' * 2_700_000 + b'\"b\":1}}'"),
    "an index with 16 MiB of metadata": ("parse_index", "b'{\"metadata\":{\"x\":[' + b'[],' * 5_000_000 + b'0]}}'"),
    "a header of 8 MiB": ("parse_header", "b'{' + b'\"a\":{\"data_offsets\":[0,1]},' * 290_000 + b'\"b\":1}'"),
    "a header of different names": ("parse_header", "b'{' + b''.join(b'\"%x\":1,' % i for i in range(800_000)) + b'0'"),
    "a header of names below the limit of fields": (
        "parse_header", "b'{' + b''.join(b'\"%x\":1,' % i for i in range(399_990)) + b'\"b\":1}'"
    ),
}  # fmt: skip


@pytest.mark.parametrize(("function", "document"), HOSTILE.values(), ids=HOSTILE)
def test_hostile_documents_need_little_memory(function, document):
    """The largest amount of memory that Python and msgspec allocate beside the text of the document."""
    max_bytes = getattr(checkpoint_documents, f"MAX_{function.rpartition('_')[2].upper()}_BYTES")
    data = eval(document)[: max_bytes + 1]
    tracemalloc.start()
    with contextlib.suppress(ConfigError):
        getattr(checkpoint_documents, function)(data)
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak_bytes <= 100 * 2**20, f"{peak_bytes / 2**20:.0f} MiB"
