# SPDX-License-Identifier: Apache-2.0
"""A signal that comes while a process still imports ends it without words, with the exit code of a shell."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from quire_spec import starting

QUIRE = str(Path(sys.executable).with_name("quire"))
COMMANDS = [
    [QUIRE, "validate"], [QUIRE, "operate"], [QUIRE, "serve"],
    *([sys.executable, "-m", f"quire_{name}"] for name in ("server", "server.download", "server.read_model", "engine")),
]  # fmt: skip
SIGNALLED = "import os, sys; os.kill(os.getpid(), int(os.environ['NUMBER'])); sys.exit('alive after the signal')"


def run(argv, **environment):
    done = subprocess.run(
        argv, env=os.environ | environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60
    )
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("argv", COMMANDS, ids=lambda argv: " ".join(argv[-2:]))
def test_a_signal_in_the_middle_of_the_imports(argv, number, tmp_path):
    """argparse is what all of them import early: here it is a module that sends the signal."""
    (tmp_path / "argparse.py").write_text(SIGNALLED)
    assert run(argv, PYTHONPATH=str(tmp_path), NUMBER=str(int(number))) == (128 + number, "", "")


BECOME = """
import sys
from quire_operator.serve import become
become((sys.executable, "-c", sys.argv[1]), {})
"""
BECOMES = """
import os, signal
from quire_spec import starting
os.kill(os.getpid(), signal.SIGINT)
print("held back", flush=True)
starting.quietly()
"""


def test_between_quire_serve_and_what_it_becomes_a_signal_waits():
    assert run([sys.executable, "-c", BECOME, BECOMES]) == (130, "held back\n", "")


@pytest.mark.parametrize(
    ("line", "argv", "ours"),
    [
        ("python -m quire_server.download --into x", "-m --into x", True),
        ("python -X dev -mquire_server", "-m", True),
        ("python -m quire_servers", "-m", False),
        ("python -m theirs", "-m", False),
        ("python theirs.py -m quire_server", "theirs.py -m quire_server", False),
        ("", "", False),
    ],
)
def test_a_program_of_somebody_else_keeps_its_signals(monkeypatch, line, argv, ours):
    """Only `python -m` of the package itself is ours, while it is being looked for; in another program there are no
    arguments."""
    calls = []
    monkeypatch.setattr(starting, "quietly", lambda: calls.append(True))
    monkeypatch.setattr(sys, "orig_argv", line.split())
    monkeypatch.setattr(sys, "argv", argv.split())
    starting.quietly_as("quire_server")
    assert bool(calls) == ours
