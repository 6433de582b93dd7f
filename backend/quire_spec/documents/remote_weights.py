# SPDX-License-Identifier: Apache-2.0
"""Weights that stay in a bucket. The folder of such a model contains REMOTE_WEIGHTS_FILE in place of the weight files.

The download of the model writes the document; the engine reads it, and reads the weights with Model Streamer.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Self

from quire_spec.dataclass_json import from_json, read_json
from quire_spec.documents.sources import S3Source

REMOTE_WEIGHTS_FILE = "remote-weights.json"
"""The name is not hidden, so that a signature must cover the file."""


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """A weight file in the bucket."""

    size: int
    """Bytes."""
    version: str
    """ETag. It changes when the content changes."""


@dataclass(frozen=True, slots=True)
class RemoteWeights:
    """Where the weights of a model are, and which version of them belongs to the files of the folder."""

    source: S3Source
    files: dict[str, RemoteFile]
    """By their names, such as model.safetensors."""
    secret: str | None = None
    """Folder with one file for each key of the source's Secret, or a file with all of them as a JSON object. None: the
    identity of this machine or pod is used."""
    anonymous: bool = False
    """Requests are not signed, because there is neither a Secret nor an identity."""

    @classmethod
    def find(cls, folder: Path) -> Self | None:
        """Return the document of a model's folder; None if the folder contains the weights themselves.

        Raises:
            ConfigError: the document cannot be read.
        """
        path = folder / REMOTE_WEIGHTS_FILE
        return from_json(cls, read_json(path), str(path)) if path.is_file() else None

    @property
    def bucket(self) -> str:
        """Name of the bucket."""
        return self.source.uri.removeprefix("s3://").partition("/")[0]

    def key(self, name: str) -> str:
        """Return the key of a file in the bucket."""
        prefix = self.source.uri.removeprefix("s3://").partition("/")[2]
        return f"{prefix.strip('/')}/{name}".lstrip("/")

    def url(self, name: str) -> str:
        """Return the URL of a file, s3://BUCKET/KEY."""
        return f"s3://{self.bucket}/{self.key(name)}"
