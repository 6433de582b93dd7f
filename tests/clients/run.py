# SPDX-License-Identifier: Apache-2.0
"""`make test-clients`: starts the example with `quire serve` and runs checks.py with pinned clients against it."""

import hashlib
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

from support.quire_serve import EXAMPLES, example_document, running_service

FOLDER = Path(__file__).parent
ENVIRONMENT = FOLDER.parents[1] / ".venv-clients"
TEMPLATE = """{{ bos_token }}{% for tool in tools or [] %}{{ tool | tojson }}
{% endfor %}{% for message in messages %}{{ message.role }}: {{ message.content }}
{%- for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}

{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"""


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
    with tempfile.TemporaryDirectory(prefix="quire-clients-") as temporary:
        folder, document = Path(temporary), example_document()
        flags = []
        if not (EXAMPLES / "models/tiny/chat_template.jinja").exists():
            (folder / "chat.jinja").write_text(TEMPLATE)
            flags = ["--chat-template", str(folder / "chat.jinja")]
        with running_service(document, folder, *flags) as service:
            assert service.status()["tool_call_parser"] == "hermes"
            url = f"http://127.0.0.1:{service.ports['openai']}/v1"
            return subprocess.run([python, FOLDER / "checks.py", url], check=False, timeout=300).returncode


if __name__ == "__main__":
    sys.exit(main())
