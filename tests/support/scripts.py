# SPDX-License-Identifier: Apache-2.0
"""Scripts of hack/ as modules: they are run by path and belong to no package."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parents[2]


def script(name: str) -> ModuleType:
    """The script hack/NAME.py; like Python itself, it finds its neighbours by bare name."""
    if str(ROOT / "hack") not in sys.path:
        sys.path.append(str(ROOT / "hack"))
    spec = importlib.util.spec_from_file_location(name, ROOT / f"hack/{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
