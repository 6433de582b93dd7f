# SPDX-License-Identifier: Apache-2.0
"""`make test-clients`: starts the example with `quire serve` and runs the checks of each pinned client against it.

With --install-only, it only installs the clients.
"""

import hashlib
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

import router_checks
from support.quire_serve import example_document, running_service

FOLDER = Path(__file__).parent
ENVIRONMENTS = FOLDER.parents[1] / ".venv-clients"
CHECKS = {
    "requirements.txt": "checks.py",
    "requirements-langchain.txt": "langchain_checks.py",
    "requirements-litellm.txt": "litellm_checks.py",
    "requirements-anthropic.txt": "anthropic_checks.py",
}
"""Checks by the packages that they need. LiteLLM and LangChain need different releases of the openai package."""


def create_environment(requirements: Path) -> Path:
    """Return the Python of a client's environment; install it if its requirements have changed."""
    environment = ENVIRONMENTS / requirements.stem
    python = environment / "bin/python"
    stamp = environment / hashlib.sha256(requirements.read_bytes()).hexdigest()[:16]
    if not stamp.exists():
        venv.create(environment, with_pip=True, symlinks=True, clear=True)
        subprocess.run([python, "-m", "pip", "install", "--quiet", "-r", requirements], check=True)
        stamp.touch()
    return python


def main() -> int:
    """Return the exit code of the first checks that fail."""
    pythons = {checks: create_environment(FOLDER / requirements) for requirements, checks in CHECKS.items()}
    routers = create_environment(FOLDER / "requirements-routers.txt").parent
    if sys.argv[1:] == ["--install-only"]:
        return 0
    with (
        tempfile.TemporaryDirectory(prefix="quire-clients-") as temporary,
        running_service(example_document(), Path(temporary)) as service,
    ):
        assert service.status()["tool_call_parser"] == "hermes"
        url = f"http://127.0.0.1:{service.ports['openai']}/v1"
        for checks, python in pythons.items():
            if code := subprocess.run([python, FOLDER / checks, url], check=False, timeout=300).returncode:
                return code
    router_checks.main(routers)
    return 0


if __name__ == "__main__":
    sys.exit(main())
