# SPDX-License-Identifier: Apache-2.0
"""Result of a model download. The program in the Job writes it as its termination message; the operator reads it."""

import json
from dataclasses import dataclass
from enum import StrEnum

from quire_spec.dataclass_json import drop_nulls, from_json, to_json
from quire_spec.errors import ConfigError

MAX_MESSAGE_BYTES = 3072
"""Maximum size of the document. The kubelet keeps 4096 bytes for the termination messages of all containers of a
pod."""


class DownloadReason(StrEnum):
    """Outcome of a download. All values except the first and the last are reasons of the condition ModelCached."""

    DOWNLOADED = "Downloaded"
    AUTH_FAILED = "AuthFailed"
    """The source denies access: the Secret is missing, wrong, or lacks permission."""
    NOT_FOUND = "NotFound"
    """The repository, revision, folder or file does not exist."""
    NO_SPACE = "NoSpace"
    """The volume is full."""
    DIGEST_MISMATCH = "DigestMismatch"
    """The digest of the content differs from the digest that the source announces."""
    SOURCE_INVALID = "SourceInvalid"
    """The files are not a model that Quire can serve, or the kind of source is not supported."""
    UNREACHABLE = "Unreachable"
    """Temporary failure of the network, a proxy or the source."""


PERMANENT_REASONS = (
    DownloadReason.AUTH_FAILED,
    DownloadReason.NOT_FOUND,
    DownloadReason.NO_SPACE,
    DownloadReason.DIGEST_MISMATCH,
    DownloadReason.SOURCE_INVALID,
)
"""Reasons for which a retry fails again; a user must correct the cause."""


@dataclass(frozen=True, slots=True)
class DownloadResult:
    """Outcome of one run of the download."""

    result: DownloadReason
    bytes: int
    """Bytes on the volume, in complete and partial files."""
    revision: str | None = None
    """Downloaded commit, if the source has commits."""
    message: str = ""
    """The error in one sentence, without secrets."""

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
