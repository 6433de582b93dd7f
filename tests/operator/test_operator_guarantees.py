# SPDX-License-Identifier: Apache-2.0
"""docs/operator-guarantees.md names twenty pains, and only tests that are there."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "docs/operator-guarantees.md").read_text()
ROWS = re.findall(r"^\| (\d+) \|.*\| ([^|]+) \|$", TEXT, re.MULTILINE)


def test_all_twenty_have_a_proof_or_say_that_it_is_open():
    assert [int(number) for number, _ in ROWS] == list(range(1, 21))
    for number, proof in ROWS:
        assert re.fullmatch(r"`tests/\S+`(, `tests/\S+`)*|\*open\*", proof), number


def test_the_tests_that_it_names_are_there():
    named = re.findall(r"`(tests/\S+\.py)::(\w+)`", TEXT)
    assert named
    for file, name in named:
        source = (ROOT / file).read_text()
        assert re.search(rf"^ *(async )?def {name}\(", source, re.MULTILINE), f"{file}::{name}"
