# SPDX-License-Identifier: Apache-2.0
"""How a model's download ended: what the Job's program writes to its termination message and the operator reads."""

import json
from dataclasses import dataclass
from enum import StrEnum

from quire_spec.dataclass_json import drop_nulls, from_json, to_json
from quire_spec.errors import ConfigError

MAX_MESSAGE_BYTES = 3072
"""Of the document; the kubelet takes 4096 in all."""


class DownloadReason(StrEnum):
    """What came of a download. All but the first and the last are reasons of the condition ModelCached."""

    DOWNLOADED = "Downloaded"
    AUTH_FAILED = "AuthFailed"
    """The place refuses us: no Secret, a wrong one, or one without access."""
    NOT_FOUND = "NotFound"
    """No such repository, revision, folder or file."""
    NO_SPACE = "NoSpace"
    """The volume is full."""
    DIGEST_MISMATCH = "DigestMismatch"
    """What came is not what the source says it should be."""
    SOURCE_INVALID = "SourceInvalid"
    """What is there is no model that could be served, or the source is not one of ours."""
    UNREACHABLE = "Unreachable"
    """Right, but not now: network, proxy, or a place that is busy."""


PERMANENT_REASONS = (
    DownloadReason.AUTH_FAILED,
    DownloadReason.NOT_FOUND,
    DownloadReason.NO_SPACE,
    DownloadReason.DIGEST_MISMATCH,
    DownloadReason.SOURCE_INVALID,
)
"""Results that somebody has to do something about."""


@dataclass(frozen=True, slots=True)
class DownloadResult:
    """How one run of the download ended."""

    result: DownloadReason
    bytes: int
    """That are on the volume, of whole and partial files."""
    revision: str | None = None
    """Commit that was fetched, where the place has commits."""
    message: str = ""
    """What went wrong, in a sentence; holds no secret."""

    def dump(self) -> str:
        """As a termination message."""
        message = self.message
        while True:
            text = json.dumps(drop_nulls(to_json(self)) | {"message": message}, separators=(",", ":"))
            if len(text.encode()) <= MAX_MESSAGE_BYTES:
                return text
            message = message[: len(message) * 3 // 4] + "…"

    @classmethod
    def parse(cls, text: str) -> "DownloadResult | None":
        """Read a termination message; None for one that the program did not write."""
        try:
            return from_json(cls, json.loads(text))
        except (ValueError, ConfigError):
            return None
