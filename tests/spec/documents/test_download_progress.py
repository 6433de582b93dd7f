# SPDX-License-Identifier: Apache-2.0
"""DownloadProgress: derived values, and parsing of untrusted text."""

import json

import pytest

from quire_spec.dataclass_json import to_json
from quire_spec.documents.download_progress import DownloadProgress, format_bytes


@pytest.mark.parametrize(
    ("progress", "percent", "eta_s"),
    [
        (DownloadProgress(0), None, None),
        (DownloadProgress(5, None, 5), None, None),
        (DownloadProgress(0, 0, 5), None, 0),
        (DownloadProgress(299, 300, 0), 99, None),
        (DownloadProgress(300, 300, 7), 100, 0),
        (DownloadProgress(301, 300, 7), 100, 0),
        (DownloadProgress(100, 300, 7), 33, 28),
    ],
)
def test_percent_and_eta(progress, percent, eta_s):
    assert (progress.percent, progress.eta_s) == (percent, eta_s)


def test_round_trip():
    for progress in (DownloadProgress(0), DownloadProgress(1, 2), DownloadProgress(2**62, 2**62, 3)):
        assert DownloadProgress.parse(json.dumps(to_json(progress))) == progress
    assert DownloadProgress.parse('{"bytes": 1, "of_a_later_release": 2}') == DownloadProgress(1)


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "{}", '{"bytes": -1}', '{"bytes": 1.5}', '{"bytes": "1"}', '{"bytes": 9223372036854775808}',
     '{"bytes": 1, "total": -2}', "[" * 100_000],
)  # fmt: skip
def test_parse_rejects_invalid_text(text):
    assert DownloadProgress.parse(text) is None


def test_format_bytes():
    assert [format_bytes(size) for size in (0, 1536, 2**20, 2**30 - 1, 3 * 2**30)] == [
        "0.0 KiB", "1.5 KiB", "1.0 MiB", "1024.0 MiB", "3.0 GiB",
    ]  # fmt: skip
