# SPDX-License-Identifier: Apache-2.0
"""The documents of the repository, and the code blocks in them."""

import re
import shlex
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DOCS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


def blocks(document: Path, language: str) -> list[str]:
    """Code blocks of one language; those in lists lose their indent."""
    found = re.findall(rf"^( *)```{language}\n(.*?)^\1```$", document.read_text(), re.MULTILINE | re.DOTALL)
    return ["\n".join(line.removeprefix(indent) for line in text.splitlines()) + "\n" for indent, text in found]


def commands(text: str) -> list[list[str]]:
    """Commands of a shell block, continued lines and here-documents taken together."""
    text = re.sub(r"<<-?'?EOF'?\n.*?\nEOF\n", "\n", text, flags=re.DOTALL).replace("\\\n", " ")
    joined: list[list[str]] = []
    kept = ""
    for line in text.splitlines():
        kept = f"{kept}\n{line}" if kept else line
        try:
            words = shlex.split(kept, comments=True)
        except ValueError:
            continue
        kept = ""
        if words:
            joined.append(words)
    assert not kept, f"a quote is open: {kept}"
    return joined
