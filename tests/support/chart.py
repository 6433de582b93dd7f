# SPDX-License-Identifier: Apache-2.0
"""The chart as tests see it: rendered by Helm, as objects."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "charts/quire"


def helm(*arguments: str | Path, check: bool = True, timeout_s: float = 120) -> subprocess.CompletedProcess[str]:
    """A command of Helm."""
    command = [sys.executable, str(ROOT / "hack/helm.py"), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)
    assert not check or done.returncode == 0, done.stdout + done.stderr
    return done


def rendered(folder: Path, values: dict[str, Any] | None = None, name: str = "quire") -> list[dict[str, Any]]:
    """Every object of the chart with these values, for the namespace quire-system."""
    file = folder / "values.yaml"
    file.write_text(yaml.safe_dump(values or {}))
    return documents(helm("template", name, CHART, "-n", "quire-system", "-f", file).stdout)


def documents(text: str) -> list[dict[str, Any]]:
    """The objects of a text, by libyaml: the definition alone takes the parser in Python a second."""
    return [found for found in yaml.load_all(text, yaml.CSafeLoader) if found]


def one(objects: list[dict[str, Any]], kind: str, name: str | None = None) -> dict[str, Any]:
    """The only object of a kind."""
    (found,) = [o for o in objects if o["kind"] == kind and name in (None, o["metadata"]["name"])]
    return found
