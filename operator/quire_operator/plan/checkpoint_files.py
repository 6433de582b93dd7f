# SPDX-License-Identifier: Apache-2.0
"""Reads the files that a plan needs: config.json, and the index or the header of the weights.

It needs only a few kilobytes, which it gets with range requests. The weights are not downloaded. Called by `quire plan`
and the operator.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

from quire_operator.plan.checkpoint import CONFIG_FILE, INDEX_FILE, WEIGHTS_FILE
from quire_sources.credentials import SecretValues
from quire_sources.factory import SourceFactory, SourceOptions
from quire_sources.reader import SourceReader, read_range
from quire_sources.readers.folder_reader import FolderReader
from quire_spec.documents.adapter_catalog import Source
from quire_spec.errors import ConfigError
from quire_spec.model.safetensors_header import LENGTH_BYTES, header_length

T = TypeVar("T")
Parser: TypeAlias = Callable[[object, object, object], T]
"""A function that takes the parsed config.json, index and header. It is `CheckpointInfo.from_files`, or its equivalent
for a draft model."""

MAX_JSON_BYTES = 64 * 2**20
"""Maximum size of config.json or an index; the largest indexes have about 10 MB."""


async def read_source_checkpoint(source: Source, read_secret: SecretValues, parse: Parser[T]) -> T:
    """Read the checkpoint of a remote source; raises ConfigError, Unavailable and NotFound."""
    async with SourceFactory(SourceOptions(), read_secret) as sources:
        return await read_checkpoint(sources.open_reader(source), parse)


async def read_local_checkpoint(path: Path, parse: Parser[T]) -> T:
    """Read the folder of a model, or a single config.json. If there is only a config.json, the size of the weights is
    estimated from it.

    Raises:
        ConfigError, Unavailable: see `read_checkpoint`.
    """
    if path.is_dir():
        return await read_checkpoint(FolderReader.unrestricted(path), parse)
    config = await _read_json(FolderReader.unrestricted(path.parent), path.name)
    try:
        return parse(config, None, None)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error


async def read_checkpoint(reader: SourceReader, parse: Parser[T]) -> T:
    """Read the files that a plan for the model needs, pass them to `parse`, and return its result.

    Raises:
        ConfigError: config.json does not exist, or a file has invalid content.
        Unavailable, NotFound: `SourceReader.open` raised this error.
    """
    config = await _read_json(reader, CONFIG_FILE)
    if config is None:
        path = reader.display_name(CONFIG_FILE)
        raise ConfigError(f"{path}: does not exist; give the folder of a Hugging Face model")
    index = await _read_json(reader, INDEX_FILE)
    header = await _read_header(reader) if index is None else None
    try:
        return parse(config, index, header)
    except ConfigError as error:
        raise ConfigError(f"{reader.display_name('').rstrip('/')}: {error}") from error


async def _read_json(reader: SourceReader, name: str) -> Any:
    """Return a parsed JSON file; None if it does not exist."""
    data = await read_range(reader, name, 0, MAX_JSON_BYTES + 1)
    if data is None:
        return None
    path = reader.display_name(name)
    if len(data) > MAX_JSON_BYTES:
        raise ConfigError(f"{path}: is larger than {MAX_JSON_BYTES} bytes, so it is not a valid {name}; replace it")
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: not JSON: {error}") from error


async def _read_header(reader: SourceReader) -> Any:
    """Return the parsed header of model.safetensors; None if the file does not exist."""
    length_prefix = await read_range(reader, WEIGHTS_FILE, 0, LENGTH_BYTES)
    if length_prefix is None:
        return None
    try:
        data = await read_range(reader, WEIGHTS_FILE, LENGTH_BYTES, header_length(length_prefix))
        return json.loads(data or b"")
    except ConfigError as error:
        raise ConfigError(f"{reader.display_name(WEIGHTS_FILE)}: {error}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{reader.display_name(WEIGHTS_FILE)}: its header is not JSON: {error}") from error
