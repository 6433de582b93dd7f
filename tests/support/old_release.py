# SPDX-License-Identifier: Apache-2.0
"""The last release before pod.json, from its commit."""

import subprocess
from pathlib import Path

import pytest

OLD_COMMIT = "a5127745"
ROOT = Path(__file__).resolve().parents[2]


def old_text(path: str) -> str:
    """Return a file of the release; skip the test in a shallow clone without the commit."""
    return _git("show", f"{OLD_COMMIT}:{path}").decode()


def extract(folder: Path, *paths: str) -> None:
    """Write files of the release to a folder; skip the test in a shallow clone without the commit."""
    archive = _git("archive", OLD_COMMIT, *paths)
    subprocess.run(["tar", "x"], cwd=folder, input=archive, check=True)


def _git(*arguments: str) -> bytes:
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, check=False)
    if done.returncode:
        argv = ["git", "rev-parse", "--is-shallow-repository"]
        shallow = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=True)
        assert shallow.stdout.strip() == "true", done.stderr.decode()
        pytest.skip(f"commit {OLD_COMMIT} is not in this shallow clone")
    return done.stdout
