# SPDX-License-Identifier: Apache-2.0
"""Checks that an adapter's tokenizer has no tokens which the base model's tokenizer has not.

Trainers save a copy of the tokenizer beside an adapter. Requests of an adapter are encoded and decoded with the base
model's tokenizer, so an added token would silently become other tokens. The files are untrusted: they are parsed, but
no tokenizer is built from them. The engine calls this module before it reads an adapter.
"""

import filecmp
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import msgspec

from quire_engine.tokenization.tokenizer import Tokenizer
from quire_engine.tokenization.tokenizer_config import (
    ADDED_TOKENS_FILE,
    TOKENIZER_FILE,
    read_tokenizer_config,
    special_token_texts,
)
from quire_spec.dataclass_json import read_json_object
from quire_spec.documents.adapter_digest import MAX_TOKENIZER_BYTES, TOKENIZER_FILES
from quire_spec.documents.tokenizer_files import TOKENIZER_CONFIG_FILE
from quire_spec.errors import ConfigError, InvalidArgument, truncated_repr

_ERRORS = (AttributeError, KeyError, TypeError, ValueError, RecursionError)
"""What the code below raises for JSON of another structure."""


class _AddedToken(msgspec.Struct):
    id: int
    content: str


class _Model(msgspec.Struct):
    vocab: dict[str, int] | list[tuple[str, float]] = {}


class _TokenizerFile(msgspec.Struct):
    model: _Model
    added_tokens: list[_AddedToken] = []


def check_adapter_tokens(folder: Path, base: Tokenizer, base_folder: Path) -> None:
    """Check the tokenizer files in the folder of an adapter. `base_folder` is the folder of the base model's tokenizer.

    A padding token may be added, because neither a prompt nor an output contains it.

    Raises:
        InvalidArgument: a file is invalid, or has a token that the base model's tokenizer does not have with this id.
    """
    try:
        for name in TOKENIZER_FILES:
            if (folder / name).exists() and (size := (folder / name).stat().st_size) > MAX_TOKENIZER_BYTES:
                raise InvalidArgument(
                    f"adapter {str(folder)!r}: {name} has {size} bytes; at most {MAX_TOKENIZER_BYTES} are supported"
                )
        config = read_tokenizer_config(folder)
        names = {text: name for name, text in reversed(special_token_texts(config).items())}
        padding = next((text for text, name in names.items() if name == "pad_token"), None)
        for file, text, token_id in chain(_file_tokens(folder, base_folder), _config_tokens(config)):
            base_id = base.convert_tokens_to_ids(text)
            if (text != padding) if base_id is None else token_id not in (None, base_id):
                token = truncated_repr(text) + ("" if token_id is None else f" with id {token_id}")
                known = "does not have" if base_id is None else f"has with id {base_id}"
                raise InvalidArgument(
                    f"adapter {str(folder)!r}: {file} has the token {token}, which the base model's "
                    f"tokenizer {known}. Prompts and outputs of an adapter use the base model's tokenizer: train the "
                    "adapter without added tokens, or merge it into the model and serve the result"
                )
    except (*_ERRORS, ConfigError, OSError, msgspec.MsgspecError) as error:
        raise InvalidArgument(
            f"adapter {str(folder)!r}: the tokenizer files are invalid ({type(error).__name__}: {error}); save the "
            "tokenizer again, or remove its files"
        ) from error


def _file_tokens(folder: Path, base_folder: Path) -> Iterator[tuple[str, str, int]]:
    """Yield the file, the text and the id of each token in tokenizer.json, unless the file is that of the base model,
    and in added_tokens.json, which older versions of transformers write."""
    path = folder / TOKENIZER_FILE
    if path.exists() and not _are_equal(path, base_folder / TOKENIZER_FILE):
        file = msgspec.json.decode(path.read_bytes(), type=_TokenizerFile)
        vocab = file.model.vocab
        ids = vocab.items() if isinstance(vocab, dict) else ((piece, i) for i, (piece, _) in enumerate(vocab))
        yield from ((TOKENIZER_FILE, text, token_id) for text, token_id in ids)
        yield from ((TOKENIZER_FILE, token.content, token.id) for token in file.added_tokens)
    if (folder / ADDED_TOKENS_FILE).exists():
        tokens = read_json_object(folder / ADDED_TOKENS_FILE)
        yield from ((ADDED_TOKENS_FILE, text, int(token_id)) for text, token_id in tokens.items())


def _config_tokens(config: dict[str, Any]) -> Iterator[tuple[str, str, int | None]]:
    """Yield the file, the text and the id, if it is known, of each token in tokenizer_config.json."""
    entries = config.get("added_tokens_decoder") or {}
    by_id = entries.items() if entries else ()
    yield from ((TOKENIZER_CONFIG_FILE, entry["content"], int(token_id)) for token_id, entry in by_id)
    extra = config.get("extra_special_tokens") or config.get("additional_special_tokens") or []
    texts = [*(extra.values() if isinstance(extra, dict) else extra), *special_token_texts(config).values()]
    yield from ((TOKENIZER_CONFIG_FILE, text if isinstance(text, str) else text["content"], None) for text in texts)


def _are_equal(path: Path, base_path: Path) -> bool:
    return base_path.exists() and filecmp.cmp(path, base_path, shallow=False)
