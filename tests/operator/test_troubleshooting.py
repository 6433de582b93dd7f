# SPDX-License-Identifier: Apache-2.0
"""docs/troubleshooting.md and the code name the same reasons, and commands that there are."""

import re
from itertools import chain
from pathlib import Path

from quire_operator.cli.main import main
from quire_operator.controller.status.conditions import ConditionReason, ConditionType
from quire_operator.controller.status.events import EventReason
from quire_operator.plan.errors import UnplannableReason
from quire_operator.plan.plan import FitReason
from quire_spec.documents.download_result import DownloadReason

TEXT = (Path(__file__).resolve().parents[2] / "docs/troubleshooting.md").read_text()
REASONS = {str(reason) for reason in chain(ConditionReason, FitReason, UnplannableReason, EventReason)}
SECTIONS = dict(re.findall(r"^## (.*?)\n(.*?)(?=^##|\Z)", TEXT, re.MULTILINE | re.DOTALL))
ROWS = re.compile(r"^\| `(\w+)` \| (.*) \|$", re.MULTILINE)


def test_every_reason_is_explained_once_and_no_other():
    explained = [row[0] for kind in (*ConditionType, "Events") for row in ROWS.findall(SECTIONS[kind])]
    assert sorted(explained) == sorted(set(explained)), "twice"
    assert set(explained) == REASONS


def test_every_condition_has_its_section_in_their_order():
    assert [name for name in SECTIONS if name in set(ConditionType)] == [str(kind) for kind in ConditionType]


def test_every_reason_says_what_it_means_what_to_do_and_where_to_look():
    for kind in ConditionType:
        for name, rest in ROWS.findall(SECTIONS[kind]):
            meaning, fix, look = re.split(r" \| | \|$", rest + " |")[:3]
            assert meaning.endswith("."), name
            assert fix.strip(), name
            if fix != "Nothing.":
                assert look.strip(), name


def test_results_of_a_download_are_reasons():
    assert {str(result) for result in DownloadReason} <= {str(reason) for reason in ConditionReason}


def test_a_reason_is_one_word_that_kubernetes_takes():
    for reason in REASONS:
        assert re.fullmatch(r"[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?", reason) and len(reason) <= 128


def test_its_quire_commands_are_there(capsys):
    commands = {words.split()[0] for words in re.findall(r"`quire ([^`]+)`", TEXT)}
    assert commands
    for command in commands:
        try:
            main([command, "--help"])
        except SystemExit as end:
            assert end.code == 0
        assert "usage" in capsys.readouterr().out
