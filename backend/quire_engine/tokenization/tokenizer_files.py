# SPDX-License-Identifier: Apache-2.0
"""Reads the files of a checkpoint's tokenizer, as transformers does.

Usually, this is tokenizer.json. If it does not exist, the files of another format are read, which
quire_spec.documents.tokenizer_files lists. tokenizer.py calls this module.
"""

from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors

from quire_engine.tokenization.byte_pair_ranks import read_tekken, read_tiktoken
from quire_engine.tokenization.sentencepiece_model import read_sentencepiece_model
from quire_engine.tokenization.tokenizer_config import (
    SPECIAL_TOKENS_ATTRIBUTES,
    TOKENIZER_FILE,
    read_tokenizer_config,
)
from quire_spec.documents.tokenizer_files import TOKENIZER_CONFIG_FILE, TokenizerFormat, find_tokenizer
from quire_spec.errors import ConfigError

VOCAB_FILE, MERGES_FILE = "vocab.json", "merges.txt"
_BYTE_LEVEL_CLASSES = (None, "GPT2Tokenizer", "GPT2TokenizerFast")
_SENTENCEPIECE_CLASSES = (None, "LlamaTokenizer", "LlamaTokenizerFast")
_END_OF_TEXT = "<|endoftext|>"


def has_tokenizer(folder: Path) -> bool:
    """Return whether a checkpoint's folder contains a tokenizer in one of the supported formats."""
    return _find(folder) is not None


def _find(folder: Path) -> tuple[TokenizerFormat, tuple[str, ...]] | None:
    return find_tokenizer(lambda name: (folder / name).exists())


def read_tokenizer(folder: Path) -> tokenizers.Tokenizer:
    """Return the tokenizer of a checkpoint, including the tokens that tokenizer_config.json names.

    Raises:
        ConfigError: there is no tokenizer, a file is invalid, or the tokenizer's class cannot be built from its files.
    """
    config_path, config = folder / TOKENIZER_CONFIG_FILE, read_tokenizer_config(folder)
    kind, (name, *_) = _find(folder) or (TokenizerFormat.TOKENIZERS, (TOKENIZER_FILE,))
    path = folder / name
    if kind is TokenizerFormat.TOKENIZERS:
        tokenizer = _read_tokenizer_json(path)
        _apply_tokenizer_config(tokenizer, config, config_path)
        return tokenizer
    defaults: dict[str, Any] = {}
    if kind is TokenizerFormat.SENTENCEPIECE:
        _check_class(config_path, config, _SENTENCEPIECE_CLASSES, name)
        tokenizer, bos, eos = read_sentencepiece_model(path)
        defaults = {"add_bos_token": True, "bos_token": bos, "eos_token": eos}
    elif kind is TokenizerFormat.TEKKEN:
        tokenizer = read_tekken(path)
        defaults = {"add_bos_token": True}
    elif kind is TokenizerFormat.TIKTOKEN:
        tokenizer = read_tiktoken(path, config, config_path)
    else:
        _check_class(config_path, config, _BYTE_LEVEL_CLASSES, f"{VOCAB_FILE} with {MERGES_FILE}")
        tokenizer = _read_byte_level(folder, bool(config.get("add_prefix_space")))
        defaults = {"bos_token": _END_OF_TEXT, "eos_token": _END_OF_TEXT}
    _apply_tokenizer_config(tokenizer, config, config_path)
    _add_post_processor(tokenizer, defaults | config, config_path)
    return tokenizer


def _read_tokenizer_json(path: Path) -> tokenizers.Tokenizer:
    try:
        tokenizer = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises nothing more precise
        raise ConfigError(f"{path}: {error}") from error
    # A checkpoint can contain the truncation and padding that were used in training. A server must not truncate prompts
    # silently.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _read_byte_level(folder: Path, add_prefix_space: bool) -> tokenizers.Tokenizer:
    """Read GPT-2's format, which OPT also uses.

    Source: `GPT2Tokenizer` in transformers 5, src/transformers/models/gpt2/tokenization_gpt2.py
    """
    try:
        model = models.BPE.from_file(str(folder / VOCAB_FILE), str(folder / MERGES_FILE))
    except Exception as error:  # the library raises nothing more precise
        raise ConfigError(f"{folder / VOCAB_FILE} with {MERGES_FILE}: {error}; download both again") from error
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=add_prefix_space)
    tokenizer.decoder = decoders.ByteLevel()
    if tokenizer.token_to_id(_END_OF_TEXT) is not None:
        tokenizer.add_special_tokens([_END_OF_TEXT])
    return tokenizer


def _check_class(path: Path, config: dict[str, Any], known: tuple[str | None, ...], files: str) -> None:
    """Raise ConfigError if the class of the tokenizer has rules that the tokenizer's files do not contain."""
    name = config.get("tokenizer_class")
    if name not in known:
        raise ConfigError(
            f"{path}: tokenizer_class {name!r} cannot be built from {files}; save {TOKENIZER_FILE} with "
            "save_pretrained of transformers"
        )


def _add_post_processor(tokenizer: tokenizers.Tokenizer, config: dict[str, Any], path: Path) -> None:
    """If add_bos_token is set, make the tokenizer add the beginning-of-sequence token before each text; if
    add_eos_token is set, make it add the end-of-sequence token after each text."""
    template, special_tokens = "$A", []
    for name, form in (("bos_token", "{} $A"), ("eos_token", "{} {}")):
        if not config.get(f"add_{name}"):
            continue
        entry = config.get(name)
        token = entry["content"] if isinstance(entry, dict) else entry
        token_id = None if token is None else tokenizer.token_to_id(token)
        if token_id is None:
            raise ConfigError(
                f"{path}: {name} {token!r} is not in the vocabulary; correct {name}, or set add_{name} to false"
            )
        template = form.format(token) if name == "bos_token" else form.format(template, token)
        special_tokens.append((token, token_id))
    if special_tokens:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=template.split(), special_tokens=list(dict.fromkeys(special_tokens))
        )


def _apply_tokenizer_config(tokenizer: tokenizers.Tokenizer, config: dict[str, Any], path: Path) -> None:
    try:
        _add_config_tokens(tokenizer, config)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ConfigError(
            f"{path}: invalid token entries ({type(error).__name__}: {error}); save the tokenizer again"
        ) from error


def _add_config_tokens(tokenizer: tokenizers.Tokenizer, config: dict[str, Any]) -> None:
    """Add the tokens that tokenizer_config.json names, as transformers does.

    A special token in a text is encoded as a special token, unless split_special_tokens is set. The settings
    add_bos_token and add_eos_token are ignored here, because transformers also ignores them if a tokenizer.json exists.

    Source: `TokenizersBackend` in transformers 5, src/transformers/tokenization_utils_tokenizers.py
    """
    for _, entry in sorted((config.get("added_tokens_decoder") or {}).items(), key=lambda item: int(item[0])):
        if tokenizer.token_to_id(entry["content"]) is None:
            (tokenizer.add_special_tokens if entry.get("special") else tokenizer.add_tokens)([_added_token(entry)])
    named_tokens = [config[name] for name in SPECIAL_TOKENS_ATTRIBUTES if config.get(name)]
    extra_tokens = config.get("extra_special_tokens") or config.get("additional_special_tokens") or []
    extra_token_list = list(extra_tokens.values()) if isinstance(extra_tokens, dict) else list(extra_tokens)
    known_special_tokens = {token.content for token in tokenizer.get_added_tokens_decoder().values() if token.special}
    special_tokens = [_added_token(token) for token in (*named_tokens, *extra_token_list)]
    tokenizer.add_special_tokens([token for token in special_tokens if token.content not in known_special_tokens])
    tokenizer.encode_special_tokens = bool(config.get("split_special_tokens"))


def _added_token(token: str | dict[str, Any]) -> tokenizers.AddedToken:
    if isinstance(token, str):
        return tokenizers.AddedToken(token, special=True, normalized=False)
    flags = {key: token[key] for key in ("single_word", "lstrip", "rstrip", "normalized", "special") if key in token}
    return tokenizers.AddedToken(token["content"], **flags)
