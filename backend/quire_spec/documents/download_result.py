# SPDX-License-Identifier: Apache-2.0
"""Result of a model download. The download program in the Job writes the result as its termination message, and the
operator reads it."""

import json
from dataclasses import dataclass
from enum import StrEnum

from quire_spec.dataclass_json import drop_nulls, from_json, to_json
from quire_spec.errors import ConfigError

KEPT_FOLDERS_VARIABLE = "QUIRE_KEPT_FOLDERS"
"""Environment variable with the names of the folders that pods use, separated by commas. If it is set, the download
program removes all other revisions from the volume. It is a variable for the same reason as PROGRESS_PORT_VARIABLE.
"""
MAX_MESSAGE_BYTES = 3072
"""Maximum size of the result in bytes. The kubelet keeps only 4096 bytes in total for the termination messages of all
containers of a pod."""


class DownloadReason(StrEnum):
    """Outcome of a download. Every value except the first and the last can also be the reason of the condition
    ModelCached."""

    DOWNLOADED = "Downloaded"
    AUTH_FAILED = "AuthFailed"
    """The source denies access, because the Secret is missing, is wrong, or does not grant permission."""
    NOT_FOUND = "NotFound"
    """The repository, revision, folder or file does not exist."""
    NO_SPACE = "NoSpace"
    """The volume is full."""
    DIGEST_MISMATCH = "DigestMismatch"
    """The digest of the content is not the one that the source announces."""
    SOURCE_INVALID = "SourceInvalid"
    """The files are not a model that Quire can serve, or Quire does not support this kind of source."""
    UNREACHABLE = "Unreachable"
    """The network, a proxy or the source failed temporarily."""


PERMANENT_REASONS = (
    DownloadReason.AUTH_FAILED,
    DownloadReason.NOT_FOUND,
    DownloadReason.NO_SPACE,
    DownloadReason.DIGEST_MISMATCH,
    DownloadReason.SOURCE_INVALID,
)
"""If a download fails for one of these reasons, every retry fails too, until a user corrects the cause."""


@dataclass(frozen=True, slots=True)
class DownloadResult:
    """Outcome of one run of the download."""

    result: DownloadReason
    bytes: int
    """Number of bytes on the volume; complete and partial files both count."""
    revision: str | None = None
    """The commit that was downloaded; None if the source has no commits."""
    message: str = ""
    """The error as one sentence. It never contains secrets."""

    def dump(self) -> str:
        """Return the termination message."""
        message = self.message
        while True:
            text = json.dumps(drop_nulls(to_json(self)) | {"message": message}, separators=(",", ":"))
            if len(text.encode()) <= MAX_MESSAGE_BYTES:
                return text
            message = message[: len(message) * 3 // 4] + "…"

    @classmethod
    def parse(cls, text: str) -> "DownloadResult | None":
        """Parse a termination message; return None if the download program did not write it."""
        try:
            return from_json(cls, json.loads(text))
        except (ValueError, ConfigError):
            return None
