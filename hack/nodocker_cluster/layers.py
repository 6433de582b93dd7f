# SPDX-License-Identifier: Apache-2.0
"""What is kept of the layers that image builds leave behind: those of the newest builds.

buildah keeps an image for every step of every build and never removes one. A build says which of them it used.
"""

import json
import re
from collections.abc import Callable
from pathlib import Path

NUM_KEPT_BUILDS = 3
"""Different builds whose layers are kept: people go back and forth between a few checkouts."""
ID_DIGITS = 11
"""Of an image's id, as buildah shows it after a step."""
_STEP = re.compile(rf"^--> (?:Using cache )?([0-9a-f]{{{ID_DIGITS}}})", re.MULTILINE)


def parse_layer_ids(build_output: str) -> set[str]:
    """Images that a build consists of, by what it said: one a step, also of stages that only others copy from."""
    return set(_STEP.findall(build_output))


def prune(buildah: Callable[..., str], builds_file: Path, latest: set[str]) -> int:
    """Remove the images that no newest build used; returns how many.

    `buildah(command, *arguments)` runs it, `latest` is what the build used that has just ended, and `file` remembers
    the builds before it.
    """
    builds = [sorted(latest), *(build for build in _read_builds(builds_file) if set(build) != latest)][:NUM_KEPT_BUILDS]
    builds_file.write_text(json.dumps(builds))
    kept = {image for build in builds for image in build}
    images = json.loads(buildah("images", "--all", "--no-trunc", "--json") or "[]")
    by_age = sorted(images, key=lambda image: str(image["createdatraw"]), reverse=True)
    stale = list(dict.fromkeys(image["id"].removeprefix("sha256:") for image in by_age))
    stale = [image for image in stale if image[:ID_DIGITS] not in kept]
    if stale:
        # The newest first: what others were made from cannot go before them. In one command: each takes a second.
        buildah("rmi", *stale)
    return len(stale)


def _read_builds(file: Path) -> list[list[str]]:
    try:
        builds: list[list[str]] = json.loads(file.read_text())
    except (OSError, ValueError):
        return []
    return builds
