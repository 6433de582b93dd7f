# SPDX-License-Identifier: Apache-2.0
"""What is kept of the layers that image builds leave behind: those of the newest builds.

buildah keeps an image for every step of every build and never removes one. A build says which of them it used.
"""

import json
import re
from collections.abc import Callable
from pathlib import Path

BUILDS = 3
"""Different builds whose layers are kept: people go back and forth between a few checkouts."""
DIGITS = 11
"""Of an image's id, as buildah shows it after a step."""
_STEP = re.compile(rf"^--> (?:Using cache )?([0-9a-f]{{{DIGITS}}})", re.MULTILINE)


def used(said: str) -> set[str]:
    """Images that a build consists of, by what it said: one a step, also of stages that only others copy from."""
    return set(_STEP.findall(said))


def prune(buildah: Callable[..., str], file: Path, latest: set[str]) -> int:
    """Remove the images that no newest build used; returns how many.

    `buildah(command, *arguments)` runs it, `latest` is what the build used that has just ended, and `file` remembers
    the builds before it.
    """
    builds = [sorted(latest), *(build for build in _builds(file) if set(build) != latest)][:BUILDS]
    file.write_text(json.dumps(builds))
    kept = {image for build in builds for image in build}
    found = json.loads(buildah("images", "--all", "--no-trunc", "--json") or "[]")
    by_age = sorted(found, key=lambda image: str(image["createdatraw"]), reverse=True)
    old = list(dict.fromkeys(image["id"].removeprefix("sha256:") for image in by_age))
    old = [image for image in old if image[:DIGITS] not in kept]
    if old:
        # The newest first: what others were made from cannot go before them. In one command: each takes a second.
        buildah("rmi", *old)
    return len(old)


def _builds(file: Path) -> list[list[str]]:
    try:
        builds: list[list[str]] = json.loads(file.read_text())
    except (OSError, ValueError):
        return []
    return builds
