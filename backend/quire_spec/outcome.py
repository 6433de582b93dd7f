# SPDX-License-Identifier: Apache-2.0
"""How a model's download ended: what the Job's program writes to its termination message and the operator reads."""

import json
from dataclasses import dataclass
from enum import StrEnum

from quire_spec.document import compact, from_json, to_json
from quire_spec.errors import ConfigError

MAX_BYTES = 3072
"""Of the document; the kubelet takes 4096 in all."""


class Result(StrEnum):
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


LASTING = (Result.AUTH_FAILED, Result.NOT_FOUND, Result.NO_SPACE, Result.DIGEST_MISMATCH, Result.SOURCE_INVALID)
"""Results that somebody has to do something about."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """How one run of the download ended."""

    result: Result
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
            text = json.dumps(compact(to_json(self)) | {"message": message}, separators=(",", ":"))
            if len(text.encode()) <= MAX_BYTES:
                return text
            message = message[: len(message) * 3 // 4] + "…"

    @classmethod
    def parse(cls, text: str) -> "Outcome | None":
        """Read a termination message; None for one that the program did not write."""
        try:
            return from_json(cls, json.loads(text))
        except (ValueError, ConfigError):
            return None
