# SPDX-License-Identifier: Apache-2.0
"""Reads what a plan needs of a model, wherever its files are: config.json, and the index or the header of the weights.

A few kilobytes, by range requests: the weights stay where they are. Used by `quire plan` and by the operator, before
anything is downloaded.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from quire_operator.plan.checkpoint import CONFIG_FILE, INDEX_FILE, WEIGHTS_FILE, CheckpointInfo
from quire_operator.plan.remote_readers import HttpReader, HubReader, S3Reader
from quire_spec.documents.adapter_catalog import SecretRef, Source
from quire_spec.errors import ConfigError, Unavailable
from quire_spec.model.safetensors_header import LENGTH_BYTES, header_length
from quire_spec.net.redaction import check_header_value
from quire_spec.net.s3 import CREDENTIAL_KEYS

MAX_JSON_BYTES = 64 * 2**20
"""Of config.json or an index; the largest indexes have about 10 MB."""

SecretReader = Callable[[SecretRef], Mapping[str, str]]
"""The keys and values of a Secret; raises ConfigError when it cannot be read."""


class SourceReader(Protocol):
    """A folder of files somewhere."""

    def display_name(self, name: str) -> str:
        """A file's URL or path, for messages; no secrets."""
        ...

    def read_range(self, name: str, start: int, max_bytes: int) -> bytes | None:
        """Up to `max_bytes` bytes from `start`; None: there is no such file.

        Raises:
            Unavailable, NotFound: the place cannot be reached, refuses us, or does not exist.
        """
        ...


def read_checkpoint(reader: SourceReader) -> CheckpointInfo:
    """What a plan needs of the model.

    Raises:
        ConfigError: there is no config.json, or a file is not what its name says.
        Unavailable, NotFound: as `Files.read`.
    """
    config = _read_json(reader, CONFIG_FILE)
    if config is None:
        raise ConfigError(f"{reader.display_name(CONFIG_FILE)}: there is none; give the folder of a Hugging Face model")
    index = _read_json(reader, INDEX_FILE)
    header = _read_header(reader) if index is None else None
    try:
        return CheckpointInfo.from_files(config, index, header)
    except ConfigError as error:
        raise ConfigError(f"{reader.display_name('').rstrip('/')}: {error}") from error


def open_source_reader(source: Source, folder: Path | None, read_secret: SecretReader) -> SourceReader:
    """The files of a model source; `folder` is what a path or a claim means here.

    Raises:
        ConfigError: a claim without a folder, a Secret that cannot be read, or a URL that is none.
        AccessDenied: what a Secret holds cannot be sent.
    """
    if folder is not None:
        return FolderReader(folder)
    if source.huggingFace is not None:
        ref, token = source.huggingFace.tokenSecretRef, None
        if ref is not None:
            key = ref.key or "token"
            if (token := _secret_values(read_secret, ref, (key,)).get(key)) is None:
                raise ConfigError(f"secret {ref.name!r}: has no key {key!r}; add it, or correct the key")
        return HubReader(source.huggingFace, token)
    if source.s3 is not None:
        return S3Reader(source.s3, _secret_values(read_secret, source.s3.credentialsSecretRef, CREDENTIAL_KEYS))
    if source.http is not None:
        return HttpReader(source.http, _secret_values(read_secret, source.http.headersSecretRef))
    raise ConfigError("spec.model.source: the files cannot be read from here; give --volume or --model-config")


def _secret_values(
    read_secret: SecretReader, ref: SecretRef | None, keys: Sequence[str] | None = None
) -> dict[str, str]:
    """What a Secret holds under some keys, None: all, without the newline at its end that most files have; nothing
    where none is named. Raises as `secrets`, and AccessDenied for what cannot be sent."""
    all_values = {} if ref is None else {key: value.strip() for key, value in read_secret(ref).items()}
    selected = {key: value for key, value in all_values.items() if keys is None or key in keys}
    for key, value in selected.items():
        assert ref is not None, "values come of a Secret"
        check_header_value(value, ref.name, key)
    return selected


@dataclass(frozen=True, slots=True)
class FolderReader:
    """A folder of this machine, or one config.json, which then says all that is known."""

    path: Path

    def display_name(self, name: str) -> str:
        return str(self.path / name) if self.path.is_dir() else str(self.path)

    def read_range(self, name: str, start: int, max_bytes: int) -> bytes | None:
        path = self.path / name
        if not self.path.is_dir():
            if name != CONFIG_FILE:
                return None
            path = self.path
        try:
            with path.open("rb") as file:
                file.seek(start)
                return file.read(max_bytes)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise Unavailable(f"{path}: {error.strerror}") from error


def _read_json(reader: SourceReader, name: str) -> Any:
    """A parsed JSON file; None: there is none."""
    data = reader.read_range(name, 0, MAX_JSON_BYTES + 1)
    if data is None:
        return None
    if len(data) > MAX_JSON_BYTES:
        raise ConfigError(f"{reader.display_name(name)}: more than {MAX_JSON_BYTES} bytes; this is no {name}")
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{reader.display_name(name)}: not JSON: {error}") from error


def _read_header(reader: SourceReader) -> Any:
    """The parsed header of model.safetensors; None: there is none."""
    length_prefix = reader.read_range(WEIGHTS_FILE, 0, LENGTH_BYTES)
    if length_prefix is None:
        return None
    try:
        data = reader.read_range(WEIGHTS_FILE, LENGTH_BYTES, header_length(length_prefix))
        return json.loads(data or b"")
    except ConfigError as error:
        raise ConfigError(f"{reader.display_name(WEIGHTS_FILE)}: {error}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{reader.display_name(WEIGHTS_FILE)}: its header is not JSON: {error}") from error
