# SPDX-License-Identifier: Apache-2.0
"""Table of the bytes that each token adds to a text.

With this table, a stream is decoded in time that is linear in its length. A tokenizer's decoder converts a whole list
of tokens to text. If the growing list were decoded again for each new token, decoding would take quadratic time. If
only a part of the list were decoded, the text would be wrong where bytes are invalid. The decoders of byte-level BPE
and SentencePiece tokenizers are local: the bytes that a token adds do not depend on the tokens before it. There is one
exception: the first token of a text can lose its space. This module reads the decoder's description and builds the
table from it. The tokenizer owns the table, and the detokenizer reads it.
"""

import json
import re
from collections.abc import Callable
from typing import Any

import tokenizers

from quire_spec.errors import ConfigError

_TokenDecoder = Callable[[str, bool], str | bytes]
"""Function that returns the text or the bytes that a token adds. Its second argument is True if the token is the first
of a text."""


class TokenBytesTable:
    """Maps token ids to bytes. The first token of a text can have other bytes than the same token inside a text.

    Raises:
        ConfigError: the tokenizer's decoder is not supported, or the bytes of a token depend on the tokens before it.
    """

    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._token_decoders: list[_TokenDecoder] = []
        self._stripped_prefix = b""
        """Prefix that is removed once from the start of a text."""
        self._is_fused = False
        """True if the remaining decoders apply to the whole text, not to single tokens."""
        self.decode_errors = "replace"
        """Codec error handler for bytes that are not UTF-8. "replace" returns one U+FFFD per invalid character, as the
        byte-level decoder does. "surrogateescape" converts each invalid byte to a surrogate, which later becomes one
        U+FFFD, as in the byte-fallback decoder."""
        self._parse_decoder(tokenizer)
        self._bytes_by_id: dict[int, bytes] = {}

    def bytes_of(self, token_id: int) -> bytes:
        """Return the bytes of a token inside a text. They are empty if the id is not in the vocabulary."""
        token_bytes = self._bytes_by_id.get(token_id)
        if token_bytes is None:
            token_bytes = self._bytes_by_id[token_id] = self._decode_token(token_id, at_start=False)
        return token_bytes

    def first_bytes_of(self, token_id: int) -> bytes:
        """Return the bytes of a token that is the first of a text."""
        return self._decode_token(token_id, at_start=True).removeprefix(self._stripped_prefix)

    def _decode_token(self, token_id: int, at_start: bool) -> bytes:
        token = self._tokenizer.id_to_token(token_id)
        if token is None:
            return b""
        decoded: str | bytes = token
        for token_decoder in self._token_decoders:
            if isinstance(decoded, bytes):
                break
            decoded = token_decoder(decoded, at_start)
        return decoded.encode() if isinstance(decoded, str) else decoded

    def _parse_decoder(self, tokenizer: tokenizers.Tokenizer) -> None:
        decoder = tokenizer.decoder
        if decoder is None:
            self._token_decoders.append(_join_with_spaces)
            return
        # The pickled state of the decoder is only its part of tokenizer.json. The state of the whole tokenizer would
        # also contain the vocabulary.
        config: dict[str, Any] = json.loads(decoder.__getstate__())
        for decoder_config in config["decoders"] if config["type"] == "Sequence" else [config]:
            self._add_decoder(decoder_config)

    def _add_decoder(self, decoder_config: dict[str, Any]) -> None:
        decoder_type = decoder_config["type"]
        if decoder_type == "ByteLevel" and not self._is_fused and self.decode_errors == "replace":
            self._token_decoders.append(_byte_level)
            self._is_fused = True
        elif decoder_type == "ByteFallback" and not self._is_fused:
            self._token_decoders.append(_byte_fallback)
            self.decode_errors = "surrogateescape"
        elif decoder_type == "WordPiece" and not self._is_fused:
            self._token_decoders.append(_word_piece(decoder_config["prefix"], decoder_config["cleanup"]))
        elif decoder_type == "Fuse":
            self._is_fused = True
        elif decoder_type == "Metaspace" and not self._is_fused:
            prepends_space = decoder_config["prepend_scheme"] != "never"
            self._token_decoders.append(_replacer(decoder_config["replacement"], " ", "" if prepends_space else " "))
        elif decoder_type == "Replace" and "String" in decoder_config["pattern"] and not self._is_fused:
            self._token_decoders.append(
                _replacer(decoder_config["pattern"]["String"], decoder_config["content"], decoder_config["content"])
            )
        elif (
            decoder_type == "Strip" and self._is_fused and decoder_config["stop"] == 0 and decoder_config["start"] <= 1
        ):
            self._stripped_prefix = decoder_config["content"].encode() if decoder_config["start"] else b""
        else:
            raise ConfigError(
                f"tokenizer.json: decoder {json.dumps(decoder_config, ensure_ascii=False)[:200]} is not supported; "
                "use ByteLevel, WordPiece, or the decoders of SentencePiece models (Metaspace, ByteFallback, Fuse, "
                "Replace, Strip)"
            )


def _replacer(old: str, new: str, new_at_start: str) -> _TokenDecoder:
    return lambda token, at_start: token.replace(old, new_at_start if at_start else new)


_CLEAN_UPS = (
    *((f" {mark}", mark) for mark in (".", "?", "!", ",")),
    *((" ' ", "'"), (" n't", "n't"), (" 'm", "'m"), (" do not", " don't")),
    *((f" {end}", end) for end in ("'s", "'ve", "'re")),
)
"""What the decoder WordPiece replaces in each token, in this order, as in the library tokenizers."""


def _word_piece(prefix: str, has_cleanup: bool) -> _TokenDecoder:
    """Return the decoder of BERT: a token that begins with the prefix continues a word."""

    def decode(token: str, at_start: bool) -> str:
        if not at_start:
            token = token.removeprefix(prefix) if token.startswith(prefix) else f" {token}"
        for old, new in _CLEAN_UPS if has_cleanup else ():
            token = token.replace(old, new)
        return token

    return decode


def _join_with_spaces(token: str, at_start: bool) -> str:
    """Decode like a tokenizer that has no decoder: it joins tokens with spaces."""
    return token if at_start else " " + token


def _byte_fallback(token: str, at_start: bool) -> str | bytes:
    match = _BYTE_TOKEN_PATTERN.fullmatch(token)
    return bytes.fromhex(match[1]) if match else token


def _byte_level(token: str, at_start: bool) -> bytes:
    try:
        return bytes([_BYTE_DECODER[character] for character in token])
    except KeyError:
        # An added token outside the byte alphabet, such as one with spaces, is its own text.
        return token.encode()


def _build_byte_decoder() -> dict[str, int]:
    """Return the map from characters to bytes that byte-level BPE uses.

    A printable byte is represented by the character with the same code. The other bytes are represented, in order, by
    the characters from U+0100 on.

    Source: `bytes_to_unicode` of GPT-2, https://github.com/openai/gpt-2/blob/master/src/encoder.py
    """
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    unprintable = [byte for byte in range(256) if byte not in printable]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(unprintable)}


_BYTE_TOKEN_PATTERN = re.compile("<0x([0-9A-Fa-f]{2})>")
_BYTE_DECODER = _build_byte_decoder()
