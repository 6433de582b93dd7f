# SPDX-License-Identifier: Apache-2.0
"""Conversion of byte-pair ranks, as tiktoken reads them, to a tokenizer of the `tokenizers` library.

Mistral's tekken.json contains the ranks, the pattern that splits a text into words, and the special tokens. A tiktoken
file contains only the ranks, and the class of the tokenizer has the rest. Only tokenizer_files.py calls this module.

Sources: `Tekkenizer` in mistral-common 1.13; `TikTokenConverter` in transformers 5; tokenization_kimi.py of
moonshotai/Kimi-K2, tokenization_hy.py of tencent/Hunyuan-A13B and tokenization_qwen.py of Qwen/Qwen-7B.
"""

import base64
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import tokenizers
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers

from quire_spec.documents.tokenizer_files import check_tiktoken_class
from quire_spec.errors import ConfigError

_TEKKEN_TOKENS = (
    *("<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]"),
    *("[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]", "[IMG_END]", "[PREFIX]", "[MIDDLE]"),
    *("[SUFFIX]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[TOOL_CONTENT]"),
)
"""Special tokens of a tekken.json that does not contain them (up to version v7)."""
_MAX_SPECIAL_TOKENS = 100_000
_GPT4 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_UPPER, _LOWER = (rf"[{kinds}\p{{Lm}}\p{{Lo}}\p{{M}}&&[^\p{{Han}}]]" for kinds in (r"\p{Lu}\p{Lt}", r"\p{Ll}"))
_CONTRACTION = "(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_KIMI = "|".join(
    (
        r"[\p{Han}]+",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_CONTRACTION}",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_CONTRACTION}",
        *(r"\p{N}{1,3}", r" ?[^\s\p{L}\p{N}]+[\r\n]*", r"\s*[\r\n]+", r"\s+(?!\S)", r"\s+"),
    )
)


@dataclass(frozen=True, slots=True)
class _TiktokenClass:
    """What the class of a tokenizer adds to the ranks in a file."""

    pattern: str
    special_tokens: Callable[[Mapping[int, str], int], Sequence[str]]
    """Returns the special tokens that follow the ranks. Its arguments are the tokens that tokenizer_config.json names,
    by id, and the number of ranks."""
    is_normalized: bool = False
    """True if a text is converted to Unicode's normalization form C."""


def _extra_tokens(*names: str) -> Callable[[Mapping[int, str], int], Sequence[str]]:
    return lambda named, num_ranks: [*names, *(f"<|extra_{i}|>" for i in range(205))]


def _kimi_tokens(named: Mapping[int, str], num_ranks: int) -> Sequence[str]:
    return [named.get(i, f"<|reserved_token_{i}|>") for i in range(num_ranks, num_ranks + 258)]


_CLASSES = {
    "TikTokenTokenizer": _TiktokenClass(_KIMI, _kimi_tokens),
    "HYTokenizer": _TiktokenClass(
        _GPT4, _extra_tokens("<|endoftext|>", "<|startoftext|>", "<|bos|>", "<|eos|>", "<|pad|>"), is_normalized=True
    ),
    "QWenTokenizer": _TiktokenClass(
        _GPT4, _extra_tokens("<|endoftext|>", "<|im_start|>", "<|im_end|>"), is_normalized=True
    ),
}


class _TekkenConfig(msgspec.Struct):
    pattern: str
    default_vocab_size: int
    default_num_special_tokens: int


class _TekkenToken(msgspec.Struct):
    rank: int
    token_bytes: str


class _TekkenSpecialToken(msgspec.Struct):
    rank: int
    token_str: str


class _Tekken(msgspec.Struct):
    config: _TekkenConfig
    vocab: list[_TekkenToken]
    special_tokens: list[_TekkenSpecialToken] | None = None


def read_tekken(path: Path) -> tokenizers.Tokenizer:
    """Return the tokenizer of a tekken.json. Its special tokens have the first ids. It adds none of them to a text.

    Raises:
        ConfigError: the file is not a tekken.json.
    """
    try:
        file = msgspec.json.decode(path.read_bytes(), type=_Tekken)
        num_special = file.config.default_num_special_tokens
        written = file.special_tokens
        special_tokens = list(_TEKKEN_TOKENS) if written is None else [t.token_str for t in sorted(written, key=_rank)]
        if not len(special_tokens) <= num_special <= _MAX_SPECIAL_TOKENS:
            raise ValueError(f"config.default_num_special_tokens must be at least {len(special_tokens)}")
        special_tokens = [*special_tokens, *(f"<SPECIAL_{i}>" for i in range(len(special_tokens), num_special))]
        num_ranks = file.config.default_vocab_size - num_special
        ranks = {base64.b64decode(token.token_bytes): token.rank for token in file.vocab if token.rank < num_ranks}
        return _build(ranks, file.config.pattern, special_tokens, num_special)
    except (OSError, ValueError, msgspec.DecodeError) as error:
        raise ConfigError(f"{path}: not a tekken.json: {str(error)[:200]}; download it again") from error


def read_tiktoken(path: Path, config: Mapping[str, Any], config_path: Path) -> tokenizers.Tokenizer:
    """Return the tokenizer of a tiktoken file. `config` are the entries of tokenizer_config.json.

    Raises:
        ConfigError: the file is invalid, or the class of the tokenizer is unknown.
    """
    name = config.get("tokenizer_class")
    check_tiktoken_class(config_path, name, path.name)
    kind = _CLASSES[str(name)]
    try:
        # The ids of Hunyuan's tokens are their positions, which equal the written ranks.
        pairs = [line.split() for line in path.read_bytes().splitlines() if line.strip()]
        ranks = {base64.b64decode(token): int(rank) for token, rank in pairs}
        entries = config.get("added_tokens_decoder") or {}
        named = {int(i): str(entry["content"]) for i, entry in entries.items()}
        tokenizer = _build(ranks, kind.pattern, kind.special_tokens(named, len(ranks)), 0)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{path}: not a tiktoken file: {str(error)[:200]}; download it again") from error
    if kind.is_normalized:
        tokenizer.normalizer = normalizers.NFC()
    return tokenizer


def _rank(token: _TekkenSpecialToken) -> int:
    return token.rank


def _build(
    ranks: Mapping[bytes, int], pattern: str, special_tokens: Sequence[str], first_id: int
) -> tokenizers.Tokenizer:
    """Return a tokenizer whose tokens have the ids `first_id` + rank. The special tokens have the ids before them, or
    after them if `first_id` is 0.

    Raises:
        ValueError: the ranks have gaps or do not contain all bytes, or the pattern is invalid.
    """
    if sorted(ranks.values()) != list(range(len(ranks))) or not all(bytes([i]) in ranks for i in range(256)):
        raise ValueError("the ranks must be all numbers from 0 on, and all 256 bytes must have one")
    vocab = {_written(token): first_id + rank for token, rank in ranks.items()}
    first_special_id = 0 if first_id else len(ranks)
    # Where a special token is written like another token, the text is always encoded as the special token.
    vocab |= {token: first_special_id + i for i, token in enumerate(special_tokens)}
    merges = [
        (_written(token[:i]), _written(token[i:]))
        for token, _ in sorted(ranks.items(), key=lambda item: item[1])
        for i in sorted(
            (i for i in range(1, len(token)) if token[:i] in ranks and token[i:] in ranks),
            key=lambda i, token=token: (ranks[token[:i]], ranks[token[i:]]),  # type: ignore[misc]
        )
    ]
    try:
        tokenizer = tokenizers.Tokenizer(models.BPE(vocab, merges, ignore_merges=True))
        split = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    except Exception as error:  # the library raises nothing more precise
        raise ValueError(str(error)) from error
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([tokenizers.AddedToken(t, special=True, normalized=False) for t in special_tokens])
    return tokenizer


def _written(token: bytes) -> str:
    """Return the bytes of a token as byte-level tokenizers write them: each byte as one printable character."""
    return token.decode("latin-1").translate(_BYTE_CHARACTERS)


def _byte_characters() -> dict[int, int]:
    """Return the characters of the bytes that are not printable. In their order, they are U+0100 and the next ones."""
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: 256 + i for i, byte in enumerate(others)}


_BYTE_CHARACTERS = _byte_characters()
