# SPDX-License-Identifier: Apache-2.0
"""The soak and the measurement of the edge: they run, and the soak tells a wrong answer from a right one."""

import subprocess
import sys
from pathlib import Path

import pytest
from support.quire_serve import StreamedResponse

ROOT = Path(__file__).resolve().parents[2]
# The scripts in tests/bench are run by path and import their neighbours by bare name.
sys.path.insert(0, str(ROOT / "tests" / "bench"))

import soak  # noqa: E402

pytestmark = pytest.mark.timeout(600)


def run(script, *arguments):
    command = [sys.executable, str(ROOT / "tests/bench" / script), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=500, check=False)


@pytest.mark.server
def test_a_short_soak_finds_nothing_wrong():
    done = run("soak.py", "--minutes", "0.1", "--clients", "8")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith("right ")
    assert {line.split()[0] for line in done.stdout.splitlines()[-5:]} == {
        "supervisor",
        "core",
        "text",
        "server",
        "stub",
    }


@pytest.mark.server
def test_the_edge_is_measured_by_both_kinds_of_clients():
    done = run("frontend.py", "4", "20")
    assert done.returncode == 0, done.stderr
    assert [line.split()[0] for line in done.stdout.splitlines()] == ["client", *["http"] * 3, *["grpc"] * 3]


class Alone:
    """A service that answers everything with the model's name."""

    def text(self, model, prompt, **parameters):
        return f"{model} says {parameters['max_tokens']}"


@pytest.mark.parametrize(
    ("model", "text", "error", "found"),
    [
        ("pirate", "pirate says 12", None, "right"),
        ("swapped", "sql says 12", None, "right"),
        ("swapped", "tales says 12", None, "wrong"),
        ("pirate", "sql says 12", None, "wrong"),
        ("pirate", "pirate says", None, "wrong"),
        ("pirate", "pirate says", "UNAVAILABLE: try\nagain", "errors"),
        ("swapped", "", "Request for unknown model: 'swapped' is not found", "absent"),
        ("pirate", "", "Request for unknown model: 'pirate' is not found", "errors"),
    ],
)
def test_answers_are_judged_by_what_was_said_alone(model, text, error, found):
    judge = soak.Soak(Alone(), 0)
    judge._check_response(model, soak.PROMPTS[0], 12, StreamedResponse([text], error=error))
    tally = judge.outcomes
    counted = {
        "right": tally.num_right,
        "absent": tally.num_absent,
        "errors": tally.errors.total(),
        "wrong": len(tally.wrong),
    }
    assert counted == {name: int(name == found) for name in counted}
    assert list(tally.errors) in ([], [" ".join((error or "").split())])
