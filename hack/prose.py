#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Check that the project's text is plain English: `python hack/prose.py [PATH ...]`, part of `make check`.

The check reads Markdown and YAML files. In Python files, it reads docstrings, comments and string literals; in C and
C++ files, it reads comments. The check reports phrases that are hard to read; CONTRIBUTING.md has the rules. A text
without such phrases can still be unclear.
"""

import argparse
import ast
import io
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

RULES = {
    "write 'is not a NOUN'": r"(?<!there )(?<!There )\b(?:is|are|was|were) no (?!longer|more|less|fewer|doubt)[a-z]+",
    "name the agent": r"\bwho(?:ever|so)\b|\bwhatever\b|\b(?:no|some|any)body\b",
    "data reports, returns, contains": r"\b(?:is|are|was|were|be|been) (?:told|said)\b"
    r"|\btells? (?:of|it|them|whether|how|what|where)\b|\bsays? (?:so|nothing)\b",
    "say it without the idiom": r"\bin vain\b|\bwithout a word\b|\blets? in\b|\bhas to be one\b|\bmay not fall\b",
    "write 'exists'": r"\b(?:is|are|was|were) not there\b"
    r"|\b(?:that|which|it|they) (?:is|are) there\b(?! (?:an?|any|no)\b)",
    "write 'X does it'": r"\bis (?:the )?[a-z]+'s to [a-z]+",
    "write 'continues' or 'is removed'": r"\bgo(?:es)? on\b|\bwent on\b",
    "write 'delays' or 'blocks'": r"\b(?:holds?|held) (?:up|back)\b",
    "begin with the subject": r"(?:^|[.:;] )What (?!if\b|it\b|to\b|is what\b)[a-z ]{3,60}? "
    r"(?:is|are|goes|comes|has|was|were|does|may)\b",
    "give 'who' a noun": r"(?:^|[.:;,] )[Ww]ho (?:waits|has|was|comes|asks|wants|reads|writes|runs|needs|calls)\b",
}
"""Maps each piece of advice to a pattern. The check gives the advice if the pattern matches a phrase."""

ALLOWED = {
    "hack/prose.py": "contains the patterns",
    "hack/tiny": "training text of the tiny model, which is fiction",
    "examples/models": "vocabulary of the tiny model",
    "tests/operator/golden": "rendered, checked at their source",
}
"""Maps path prefixes to the reason why the check does not read files below them."""

_PATTERNS = {advice: re.compile(pattern, re.MULTILINE) for advice, pattern in RULES.items()}
_C_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
_FENCED = re.compile(r"```.*?```", re.DOTALL)


def passages(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the passages of a file that people read. For each passage, yield the number of its first line, and its
    text."""
    source = path.read_text(encoding="utf-8")
    if path.suffix == ".md":
        yield 1, _FENCED.sub(lambda block: "\n" * block.group().count("\n"), source)
    elif path.suffix in (".yaml", ".yml"):
        yield 1, source
    elif path.suffix in (".c", ".cpp", ".h"):
        for comment in _C_COMMENT.finditer(source):
            yield source.count("\n", 0, comment.start()) + 1, comment.group()
    elif path.suffix == ".py":
        for token in tokenize.generate_tokens(io.StringIO(source).readline):
            if token.type == tokenize.COMMENT:
                yield token.start[0], token.string
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
                yield node.lineno, node.value


def findings(paths: list[Path]) -> Iterator[str]:
    """Yield a line for each phrase that was found. It contains the place, the phrase and the advice."""
    for path in paths:
        for first_line, text in passages(path):
            for advice, pattern in _PATTERNS.items():
                for match in pattern.finditer(text):
                    line = first_line + text.count("\n", 0, match.start())
                    yield f"{path.relative_to(ROOT)}:{line}: {match.group().strip()!r}: {advice}"


def checked_files() -> list[Path]:
    """Return the files of the repository that the check reads."""
    done = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True)
    return [
        ROOT / name
        for name in done.stdout.splitlines()
        if name.endswith((".md", ".py", ".yaml", ".yml", ".c", ".cpp", ".h"))
        and not name.startswith(tuple(ALLOWED))
        and (ROOT / name).is_file()
        and not (ROOT / name).is_symlink()
    ]


def main() -> int:
    """Print the phrases that were found; return 1 if there are any."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", nargs="*", metavar="PATH", help="files or folders (default: the whole repository)")
    args = parser.parse_args()
    prefixes = [Path(path).resolve() for path in args.paths] or [ROOT]
    files = [path for path in checked_files() if any(path.is_relative_to(prefix) for prefix in prefixes)]
    found = list(findings(files))
    print(*found, f"prose: {len(found)} phrases in {len(files)} files", sep="\n")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
