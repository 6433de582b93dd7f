# SPDX-License-Identifier: Apache-2.0
"""The last release before pod.json, from its commit."""

import subprocess
import sysconfig
import venv
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


def install(folder: Path) -> Path:
    """Install the packages of the release into a new environment, and return its interpreter.

    Everything else comes from the environment of the tests. PYTHONPATH would not be enough, because the interpreter in
    the server's stubs ignores it.
    """
    tree = folder / "tree"
    tree.mkdir()
    extract(tree, "operator", "backend", "kernels", "crds")
    venv.create(folder / "env", symlinks=True)
    site_packages = sysconfig.get_path("purelib", vars={"base": str(folder / "env")})
    lines = [str(tree / name) for name in ("operator", "backend", "kernels")]
    lines.append(f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})")
    Path(site_packages, "old_release.pth").write_text("\n".join(lines) + "\n")
    return folder / "env/bin/python"


def _git(*arguments: str) -> bytes:
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, check=False)
    if done.returncode:
        argv = ["git", "rev-parse", "--is-shallow-repository"]
        shallow = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=True)
        assert shallow.stdout.strip() == "true", done.stderr.decode()
        pytest.skip(f"commit {OLD_COMMIT} is not in this shallow clone")
    return done.stdout
