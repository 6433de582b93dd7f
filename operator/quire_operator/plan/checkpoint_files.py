# SPDX-License-Identifier: Apache-2.0
"""Reads the files that a plan needs: config.json, and the index or the header of the weights.

It needs only a few kilobytes, which it gets with range requests. The weights are not downloaded. Called by `quire plan`
and the operator.
"""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

from quire_operator.plan.checkpoint import CONFIG_FILE, INDEX_FILE, WEIGHTS_FILE
from quire_sources.credentials import SecretValues
from quire_sources.factory import SourceFactory, SourceOptions
from quire_sources.http.borders import Borders
from quire_sources.reader import SourceReader, read_range
from quire_sources.readers.folder_reader import FolderReader
from quire_spec.documents.sources import Source
from quire_spec.documents.tokenizer_files import (
    ALL_FORMATS,
    FORMATS,
    TOKENIZER_CONFIG_FILE,
    TokenizerFormat,
    check_tiktoken_class,
)
from quire_spec.errors import ConfigError, truncated_repr
from quire_spec.model.checkpoint_documents import (
    MAX_CONFIG_BYTES,
    MAX_HEADER_BYTES,
    MAX_INDEX_BYTES,
    parse_config,
    parse_header,
    parse_index,
)
from quire_spec.model.gguf.config import config_from_header
from quire_spec.model.gguf.header import read_header
from quire_spec.model.quantization import MODELOPT_FILE, needs_modelopt_file, with_modelopt_file
from quire_spec.model.safetensors_header import LENGTH_BYTES, header_length

T = TypeVar("T")
Parser: TypeAlias = Callable[[object, object, object], T]
"""A function that takes the parsed config.json, index and header. It is `CheckpointInfo.from_files`, or its equivalent
for a draft model."""
_MAX_HIDDEN_VALUES = 10_000
"""Values of a document that are searched in an error message. A config.json of a model has fewer."""


async def read_source_checkpoint(
    source: Source,
    read_secret: SecretValues,
    parse: Parser[T],
    borders: Borders | None = None,
    needs_tokenizer: bool = False,
) -> T:
    """Read the checkpoint of a remote source; raises ConfigError, Unavailable and NotFound.

    With borders, only addresses inside of them are read, and errors do not quote what a server of another person sent.
    The hub is a server of the administrator.
    """
    async with SourceFactory(SourceOptions(borders=borders), read_secret) as sources:
        quotes_values = borders is None or source.huggingFace is not None
        return await read_checkpoint(sources.open_reader(source), parse, quotes_values, needs_tokenizer)


async def read_local_checkpoint(path: Path, parse: Parser[T], needs_tokenizer: bool = False) -> T:
    """Read the folder of a model, a GGUF file, or a single config.json. If there is only a config.json, the size of the
    weights is estimated from it. In the last two cases, a tokenizer is not needed.

    Raises:
        ConfigError, Unavailable: see `read_checkpoint`.
    """
    if path.is_dir():
        return await read_checkpoint(FolderReader.unrestricted(path), parse, needs_tokenizer=needs_tokenizer)
    if path.suffix == ".gguf":
        gguf = read_header(path)
        try:
            return parse(config_from_header(gguf), {"metadata": {"total_size": gguf.num_bytes}}, None)
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from error
    data = await _read(FolderReader.unrestricted(path.parent), path.name, MAX_CONFIG_BYTES)
    try:
        return parse(parse_config(data or b""), None, None)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error


async def read_checkpoint(
    reader: SourceReader, parse: Parser[T], quotes_values: bool = True, needs_tokenizer: bool = False
) -> T:
    """Read the files that a plan for the model needs, pass them to `parse`, and return its result. If `quotes_values`
    is false, the error does not contain values of the files.

    Raises:
        ConfigError: config.json does not exist, or a file has invalid content; or `needs_tokenizer` is true, and the
            model has no tokenizer that the engine reads.
        Unavailable, NotFound: `SourceReader.open` raised this error.
    """
    config_data = await _read(reader, CONFIG_FILE, MAX_CONFIG_BYTES)
    if config_data is None:
        path = reader.display_name(CONFIG_FILE)
        raise ConfigError(f"{path}: does not exist; give the folder of a Hugging Face model")
    modelopt_data = None
    if needs_modelopt_file(_parse(reader, CONFIG_FILE, parse_config, config_data)):
        modelopt_data = await _read(reader, MODELOPT_FILE, MAX_CONFIG_BYTES)
    index_data = await _read(reader, INDEX_FILE, MAX_INDEX_BYTES)
    header_data = await _read_header(reader) if index_data is None else None
    # Parsed documents need much more memory than their text. They exist only until the next `await`, and therefore only
    # for one model at a time.
    index = _parse(reader, INDEX_FILE, parse_index, index_data)
    header = _parse(reader, WEIGHTS_FILE, parse_header, header_data)
    config = _parse(reader, CONFIG_FILE, parse_config, config_data)
    config = with_modelopt_file(config, _parse(reader, MODELOPT_FILE, parse_config, modelopt_data))
    try:
        parsed = parse(config, index, header)
    except ConfigError as error:
        text = str(error) if quotes_values else without_values(str(error), config)
        raise ConfigError(f"{reader.display_name('').rstrip('/')}: {text}") from error
    if needs_tokenizer:
        await _check_tokenizer(reader)
    return parsed


async def _check_tokenizer(reader: SourceReader) -> None:
    """Raise ConfigError if the model has no tokenizer that the engine reads."""
    for kind, names in FORMATS:
        if not all([await read_range(reader, name, 0, 1) is not None for name in names]):
            continue
        if kind is TokenizerFormat.TIKTOKEN:
            data = await _read(reader, TOKENIZER_CONFIG_FILE, MAX_CONFIG_BYTES)
            config = _parse(reader, TOKENIZER_CONFIG_FILE, parse_config, data) or {}
            check_tiktoken_class(reader.display_name(TOKENIZER_CONFIG_FILE), config.get("tokenizer_class"), names[0])
        return
    raise ConfigError(
        f"{reader.display_name('').rstrip('/')}: has no tokenizer ({ALL_FORMATS}); add the files, or set "
        "spec.engine.skipTokenizerInit and send input_ids"
    )


def without_values(text: str, document: object) -> str:
    """Return an error message about a document, in which every value of the document is replaced by `...`."""
    quoted: set[str] = set()
    for num_values, value in enumerate(_iter_values(document)):
        if num_values > _MAX_HIDDEN_VALUES:
            return "it is not the config.json of a supported model"
        forms = {truncated_repr(value).removesuffix("..."), str(value), str(value).lower()}
        quoted |= {form for form in forms if len(form) > 1 and form in text}
    for form in sorted(quoted, key=len, reverse=True):
        text = text.replace(form, "...")
    return text


def _iter_values(document: object) -> Iterator[object]:
    values = [document]
    while values:
        value = values.pop()
        if isinstance(value, Mapping):
            values += value.values()
        elif isinstance(value, list):
            values += value
        if not isinstance(value, bool | None):
            yield value


def _parse(reader: SourceReader, name: str, parse: Callable[[bytes], Any], data: bytes | None) -> Any:
    if data is None:
        return None
    try:
        return parse(data)
    except ConfigError as error:
        raise ConfigError(f"{reader.display_name(name)}: {error}") from error


async def _read(reader: SourceReader, name: str, max_bytes: int) -> bytes | None:
    """Return a file, of which at most `max_bytes` + 1 bytes are read; None if it does not exist."""
    return await read_range(reader, name, 0, max_bytes + 1)


async def _read_header(reader: SourceReader) -> bytes | None:
    """Return the header of model.safetensors; None if the file does not exist."""
    length_prefix = await read_range(reader, WEIGHTS_FILE, 0, LENGTH_BYTES)
    if length_prefix is None:
        return None
    try:
        length = min(header_length(length_prefix), MAX_HEADER_BYTES + 1)
    except ConfigError as error:
        raise ConfigError(f"{reader.display_name(WEIGHTS_FILE)}: {error}") from error
    return await read_range(reader, WEIGHTS_FILE, LENGTH_BYTES, length)
