# SPDX-License-Identifier: Apache-2.0
"""The documents of the repository and their code blocks."""

import re
import shlex
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DOCS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


def code_blocks(document: Path, language: str) -> list[str]:
    """Return the code blocks of one language; blocks in lists are dedented."""
    matches = re.findall(rf"^( *)```{language}\n(.*?)^\1```$", document.read_text(), re.MULTILINE | re.DOTALL)
    return ["\n".join(line.removeprefix(indent) for line in text.splitlines()) + "\n" for indent, text in matches]


def shell_commands(text: str) -> list[list[str]]:
    """Return the commands of a shell block, with continued lines and here-documents joined."""
    text = re.sub(r"<<-?'?EOF'?\n.*?\nEOF\n", "\n", text, flags=re.DOTALL).replace("\\\n", " ")
    command_lines: list[list[str]] = []
    pending = ""
    for line in text.splitlines():
        pending = f"{pending}\n{line}" if pending else line
        try:
            words = shlex.split(pending, comments=True)
        except ValueError:
            continue
        pending = ""
        if words:
            command_lines.append(words)
    assert not pending, f"a quote is open: {pending}"
    return command_lines
