#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Check commit subjects: `scope: imperative summary`, at most 72 characters. Part of `make check`, and a git hook.

python hack/commits.py                 the commits since the convention began
python hack/commits.py --message FILE  one message, as the hook commit-msg gets it (`make hooks` installs it)
"""

import argparse
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CONVENTION_BEGAN = "297884b8d7b710fb68baaa6b4935dc33c9972ff5"
"""The last commit before the convention was introduced. This commit and older commits are not checked."""
LANDED_WITHOUT_VERB = frozenset(
    (
        "docs: tools, reasoning, structured outputs, batch files, live page",
        "server: responses, tools, runtime adapters, batch files, live page",
    )
)
"""Subjects in the history that violate the convention. They are not corrected, because this would change the ids of all
later commits. A new commit cannot have such a subject, because the hook rejects it."""
MAX_CHARS = 72
_SUBJECT = re.compile(r"(?P<scope>[a-z0-9_./-]{2,40}): (?P<verb>[a-z][a-z-]*) \S.*[^.]")
_NOT_IMPERATIVE = re.compile(r".*(?:ed|ing)$")
_VERBS = frozenset(("need", "feed", "embed", "bring", "proceed", "exceed", "string", "ping", "speed"))
"""Verbs that are imperatives although they end in "ed" or "ing" like a participle."""


def problem(subject: str) -> str | None:
    """Return a text that describes what is wrong with a subject; None if the subject follows the convention."""
    if subject.startswith(("Merge ", "Revert ", "fixup! ", "squash! ")):
        return None
    if len(subject) > MAX_CHARS:
        return f"has {len(subject)} characters; use at most {MAX_CHARS} and put the rest into the body"
    match = _SUBJECT.fullmatch(subject)
    if match is None:
        return "is not `scope: imperative summary` in lower case without a full stop"
    if _NOT_IMPERATIVE.match(match["verb"]) and match["verb"] not in _VERBS:
        return f"begins with {match['verb']!r}; begin with a verb in the imperative, such as 'add'"
    return None


def subjects() -> list[str]:
    """Return the subjects of all commits since the convention was introduced. In a shallow clone, return only the
    subject of the newest commit."""
    for selection in ([f"{CONVENTION_BEGAN}..HEAD"], ["-1"]):
        done = subprocess.run(["git", "log", "--format=%s", *selection], cwd=ROOT, capture_output=True, text=True)
        if done.returncode == 0:
            return done.stdout.splitlines()
    return []


def main() -> int:
    """Print the subjects that violate the convention; return 1 if there are any."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--message", type=Path, metavar="FILE", help="check the message in this file instead of the history"
    )
    args = parser.parse_args()
    if args.message:
        checked = args.message.read_text().splitlines()[:1]
    else:
        checked = [subject for subject in subjects() if subject not in LANDED_WITHOUT_VERB]
    found = [f"commit {subject!r}: {why}" for subject in checked if (why := problem(subject))]
    print(*found, f"commits: {len(checked)} checked", sep="\n")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
