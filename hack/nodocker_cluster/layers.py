# SPDX-License-Identifier: Apache-2.0
"""Pruning of image layers: only those of the newest builds are kept.

buildah keeps an image for every step of every build and never removes one. The output of a build names those it used.
"""

import json
import re
from collections.abc import Callable
from pathlib import Path

NUM_KEPT_BUILDS = 3
"""Number of different builds whose layers are kept, for switching between a few checkouts."""
ID_DIGITS = 11
"""Digits of an image's id in buildah's output."""
_STEP = re.compile(rf"^--> (?:Using cache )?([0-9a-f]{{{ID_DIGITS}}})", re.MULTILINE)


def parse_layer_ids(build_output: str) -> set[str]:
    """Return the image ids in a build's output: one per step, including stages that other stages copy from."""
    return set(_STEP.findall(build_output))


def prune(buildah: Callable[..., str], builds_file: Path, latest: set[str]) -> int:
    """Remove the images that none of the newest builds used; return how many.

    `buildah(command, *arguments)` runs buildah, `latest` contains the images of the build that has just ended, and
    `builds_file` stores those of earlier builds.
    """
    builds = [sorted(latest), *(build for build in _read_builds(builds_file) if set(build) != latest)][:NUM_KEPT_BUILDS]
    builds_file.write_text(json.dumps(builds))
    kept = {image for build in builds for image in build}
    images = json.loads(buildah("images", "--all", "--no-trunc", "--json") or "[]")
    by_age = sorted(images, key=lambda image: str(image["createdatraw"]), reverse=True)
    stale = list(dict.fromkeys(image["id"].removeprefix("sha256:") for image in by_age))
    stale = [image for image in stale if image[:ID_DIGITS] not in kept]
    if stale:
        # Newest first, because an image cannot be removed before its descendants. One command, because each takes a
        # second.
        buildah("rmi", *stale)
    return len(stale)


def _read_builds(file: Path) -> list[list[str]]:
    try:
        builds: list[list[str]] = json.loads(file.read_text())
    except (OSError, ValueError):
        return []
    return builds
