# SPDX-License-Identifier: Apache-2.0
"""A file that controls which readiness the server reports on its own ports. The supervisor writes the file, and
preload.c reads it.

The server itself checks only that a model is loaded. If the file is used, the server reports a model as ready only if
the file also reports the model as ready.
"""

import contextlib
import logging
import os
from collections.abc import Mapping
from pathlib import Path

logger = logging.getLogger(__name__)

NAME = "readiness"
VARIABLE = "QUIRE_READINESS_FILE"
"""Environment variable that contains the path of the file. The server reads it."""


class ReadinessFile:
    """The readiness file. Each line begins with + (ready) or - (not ready). The first line is for the server. Each
    other line is for one model of Quire, and the name of the model follows the sign.

    If a model is not in the file, the server reports its own readiness for this model.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._content = ""

    def write(self, is_ready: bool, models: Mapping[str, bool]) -> None:
        """Replace the content of the file atomically. Do nothing if the content is the same as before."""
        lines = [_sign(is_ready), *(_sign(is_model_ready) + name for name, is_model_ready in sorted(models.items()))]
        content = "\n".join(lines) + "\n"
        if content == self._content:
            return
        new = self.path.with_suffix(".new")
        try:
            new.write_text(content)
            os.replace(new, self.path)
            self._content = content
        except OSError as error:
            # As long as the file does not exist, the server and all models are reported as not ready. The next change
            # writes the file again.
            logger.error("readiness cannot be written, the server reports not ready error=%s", error)
            self._content = ""
            with contextlib.suppress(OSError):
                self.path.unlink(missing_ok=True)


def _sign(is_ready: bool) -> str:
    return "+" if is_ready else "-"
