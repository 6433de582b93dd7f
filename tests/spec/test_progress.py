# SPDX-License-Identifier: Apache-2.0
"""The document of a download's progress: what it works out, and that nothing odd is read from it."""

import json

import pytest

from quire_spec.document import to_json
from quire_spec.progress import Progress, in_units


@pytest.mark.parametrize(
    ("progress", "percent", "left_s"),
    [
        (Progress(0), None, None),
        (Progress(5, None, 5), None, None),
        (Progress(0, 0, 5), None, 0),
        (Progress(299, 300, 0), 99, None),
        (Progress(300, 300, 7), 100, 0),
        (Progress(301, 300, 7), 100, 0),
        (Progress(100, 300, 7), 33, 28),
    ],
)
def test_percent_and_rest(progress, percent, left_s):
    assert (progress.percent, progress.left_s) == (percent, left_s)


def test_what_is_written_is_read():
    for progress in (Progress(0), Progress(1, 2), Progress(2**62, 2**62, 3)):
        assert Progress.parse(json.dumps(to_json(progress))) == progress
    assert Progress.parse('{"bytes": 1, "of_a_later_release": 2}') == Progress(1)


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "{}", '{"bytes": -1}', '{"bytes": 1.5}', '{"bytes": "1"}', '{"bytes": 9223372036854775808}',
     '{"bytes": 1, "total": -2}', "[" * 100_000],
)  # fmt: skip
def test_anything_else_is_not(text):
    assert Progress.parse(text) is None


def test_units():
    assert [in_units(size) for size in (0, 1536, 2**20, 2**30 - 1, 3 * 2**30)] == [
        "0.0 KiB", "1.5 KiB", "1.0 MiB", "1024.0 MiB", "3.0 GiB",
    ]  # fmt: skip
