# SPDX-License-Identifier: Apache-2.0
"""`make test-clients`: starts the example with `quire serve` and runs checks.py with pinned clients against it."""

import hashlib
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

from support.quire_serve import example_document, running_service

FOLDER = Path(__file__).parent
ENVIRONMENT = FOLDER.parents[1] / ".venv-clients"


def create_environment() -> Path:
    """Return the Python of the clients' environment; install it if its requirements have changed."""
    requirements, python = FOLDER / "requirements.txt", ENVIRONMENT / "bin/python"
    stamp = ENVIRONMENT / hashlib.sha256(requirements.read_bytes()).hexdigest()[:16]
    if not stamp.exists():
        venv.create(ENVIRONMENT, with_pip=True, symlinks=True)
        subprocess.run([python, "-m", "pip", "install", "--quiet", "-r", requirements], check=True)
        stamp.touch()
    return python


def main() -> int:
    """Return the exit code of the checks."""
    python = create_environment()
    with (
        tempfile.TemporaryDirectory(prefix="quire-clients-") as temporary,
        running_service(example_document(), Path(temporary)) as service,
    ):
        assert service.status()["tool_call_parser"] == "hermes"
        url = f"http://127.0.0.1:{service.ports['openai']}/v1"
        return subprocess.run([python, FOLDER / "checks.py", url], check=False, timeout=300).returncode


if __name__ == "__main__":
    sys.exit(main())
