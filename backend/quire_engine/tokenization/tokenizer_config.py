# SPDX-License-Identifier: Apache-2.0
"""tokenizer_config.json of a checkpoint, with what older checkpoints have in other files: special_tokens_map.json and
chat_template.json."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from quire_spec.dataclass_json import read_json_object
from quire_spec.documents.tokenizer_files import TOKENIZER_CONFIG_FILE, TokenizerFormat, find_tokenizer
from quire_spec.errors import ConfigError

TOKENIZER_FILE = "tokenizer.json"
ADDED_TOKENS_FILE = "added_tokens.json"
_SPECIAL_TOKENS_FILE = "special_tokens_map.json"
_OLDER_TEMPLATE_FILE = "chat_template.json"
_TEKKEN_FILE, _TEKKEN_TOKENS = "tekken.json", {"bos_token": "<s>", "eos_token": "</s>"}
"""Entries of a checkpoint with tekken.json, which often has no tokenizer_config.json."""
_TEKKEN_END_ID = 2
"""Id of `</s>` in a tekken.json that does not contain its special tokens."""
SPECIAL_TOKENS_ATTRIBUTES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


def read_tokenizer_config(folder: Path) -> dict[str, Any]:
    """Return the entries of tokenizer_config.json. Entries of the older files are used if it has none of that name.

    Raises:
        ConfigError: a file is not a JSON object.
    """
    config = _read(folder / TOKENIZER_CONFIG_FILE)
    older = {name: value for name, value in _read(folder / _SPECIAL_TOKENS_FILE).items() if name.endswith("_token")}
    older |= {name: value for name, value in _read(folder / _OLDER_TEMPLATE_FILE).items() if name == "chat_template"}
    return (_TEKKEN_TOKENS if _is_tekken(folder) else {}) | older | config


def special_token_texts(config: Mapping[str, Any]) -> dict[str, str]:
    """Return the texts of the special tokens that the entries of a tokenizer_config.json name, such as bos_token."""
    entries = {name: config[name] for name in SPECIAL_TOKENS_ATTRIBUTES if config.get(name)}
    return {name: entry if isinstance(entry, str) else str(entry["content"]) for name, entry in entries.items()}


def read_eos_token_id(folder: Path) -> int | None:
    """Return the id of the tokenizer's end-of-sequence token, without loading the tokenizer. None if the files name no
    such token.

    Raises:
        ConfigError: a file is invalid.
    """
    config = read_tokenizer_config(folder)
    text = special_token_texts(config).get("eos_token")
    if text is None:
        return None
    by_id: Mapping[str, Any] = config.get("added_tokens_decoder") or {}
    for token_id, entry in by_id.items():
        if isinstance(entry, Mapping) and entry.get("content") == text:
            return int(token_id)
    path = folder / TOKENIZER_FILE
    is_tekken = not path.exists() and _is_tekken(folder)
    path = folder / _TEKKEN_FILE if is_tekken else path
    if not path.exists():
        return None
    try:
        if is_tekken:
            special_tokens = msgspec.json.decode(path.read_bytes(), type=_TekkenFile).special_tokens
            if special_tokens is None:
                return _TEKKEN_END_ID
            return next((token.rank for token in special_tokens if token.token_str == text), None)
        tokens = msgspec.json.decode(path.read_bytes(), type=_TokenizerFile).added_tokens
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigError(f"{path}: {error}") from error
    return next((token.id for token in tokens if token.content == text), None)


def _is_tekken(folder: Path) -> bool:
    found = find_tokenizer(lambda name: (folder / name).exists())
    return found is not None and found[0] is TokenizerFormat.TEKKEN


class _AddedToken(msgspec.Struct):
    id: int
    content: str


class _TokenizerFile(msgspec.Struct):
    added_tokens: list[_AddedToken] = []


class _TekkenToken(msgspec.Struct):
    rank: int
    token_str: str


class _TekkenFile(msgspec.Struct):
    special_tokens: list[_TekkenToken] | None = None


def _read(path: Path) -> dict[str, Any]:
    return read_json_object(path) if path.exists() else {}
