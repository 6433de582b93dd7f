# SPDX-License-Identifier: Apache-2.0
"""Pieces: the bytes that each token adds to a text, so that a stream is decoded in time linear in its length.

A tokenizer's decoder maps a whole list of tokens to a text; decoding a growing list again and again is quadratic, and
decoding a window of it is wrong where bytes are invalid. The decoders of byte-level BPE and of SentencePiece-style
tokenizers are local: each token adds its bytes, whatever stands before it, except that the first token of a text may
lose its space. This module reads the decoder's description and keeps that table. text.py is its only user.
"""

import json
import re
from collections.abc import Callable
from typing import Any

import tokenizers

from quire_spec.errors import ConfigError

_Stage = Callable[[str, bool], str | bytes]
"""From a token, and whether it is a text's first, to the text or the bytes that it adds."""


class Pieces:
    """Bytes by token id, for a token that goes on with a text and for one that begins it.

    Raises:
        ConfigError: the tokenizer's decoder is not local, or not one that this table knows.
    """

    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._stages: list[_Stage] = []
        self._lead = b""
        """Taken once from the start of a text."""
        self._fused = False
        """A decoder sees the whole text from here on, not single tokens."""
        self.errors = "replace"
        """How bytes that are no UTF-8 are decoded: "replace" as the byte-level decoder does, one U+FFFD for each broken
        character; "surrogateescape" keeps them apart, for one U+FFFD a byte as the byte-fallback decoder does."""
        self._read(tokenizer)
        self._table: dict[int, bytes] = {}

    def rest(self, token_id: int) -> bytes:
        """Bytes of a token that goes on with a text; none for an id that is not in the vocabulary."""
        piece = self._table.get(token_id)
        if piece is None:
            piece = self._table[token_id] = self._piece(token_id, first=False)
        return piece

    def first(self, token_id: int) -> bytes:
        """Bytes of a token that begins a text."""
        return self._piece(token_id, first=True).removeprefix(self._lead)

    def _piece(self, token_id: int, first: bool) -> bytes:
        token = self._tokenizer.id_to_token(token_id)
        if token is None:
            return b""
        piece: str | bytes = token
        for stage in self._stages:
            if isinstance(piece, bytes):
                break
            piece = stage(piece, first)
        return piece.encode() if isinstance(piece, str) else piece

    def _read(self, tokenizer: tokenizers.Tokenizer) -> None:
        decoder = tokenizer.decoder
        if decoder is None:
            self._stages.append(_join)
            return
        # The pickled state is the decoder's part of tokenizer.json; serializing the tokenizer would write it all.
        spec: dict[str, Any] = json.loads(decoder.__getstate__())
        for part in spec["decoders"] if spec["type"] == "Sequence" else [spec]:
            self._add(part)

    def _add(self, part: dict[str, Any]) -> None:
        kind = part["type"]
        if kind == "ByteLevel" and not self._fused and self.errors == "replace":
            self._stages.append(_byte_level)
            self._fused = True
        elif kind == "ByteFallback" and not self._fused:
            self._stages.append(_byte_fallback)
            self.errors = "surrogateescape"
        elif kind == "Fuse":
            self._fused = True
        elif kind == "Metaspace" and not self._fused:
            prepended = part["prepend_scheme"] != "never"
            self._stages.append(_replacer(part["replacement"], " ", "" if prepended else " "))
        elif kind == "Replace" and "String" in part["pattern"] and not self._fused:
            self._stages.append(_replacer(part["pattern"]["String"], part["content"], part["content"]))
        elif kind == "Strip" and self._fused and part["stop"] == 0 and part["start"] <= 1:
            self._lead = part["content"].encode() if part["start"] else b""
        else:
            raise ConfigError(
                f"tokenizer.json: decoder {json.dumps(part, ensure_ascii=False)[:200]} is not supported; supported are "
                "ByteLevel, and Metaspace, ByteFallback, Fuse, Replace and Strip as SentencePiece models use them"
            )


def _replacer(old: str, new: str, new_at_start: str) -> _Stage:
    return lambda token, first: token.replace(old, new_at_start if first else new)


def _join(token: str, first: bool) -> str:
    """A tokenizer without a decoder joins its tokens with spaces."""
    return token if first else " " + token


def _byte_fallback(token: str, first: bool) -> str | bytes:
    match = _BYTE_TOKEN.fullmatch(token)
    return bytes.fromhex(match[1]) if match else token


def _byte_level(token: str, first: bool) -> bytes:
    try:
        return bytes([_BYTE_OF[character] for character in token])
    except KeyError:
        # An added token outside the alphabet, such as one with spaces in it, stands for itself.
        return token.encode()


def _byte_alphabet() -> dict[str, int]:
    """The character that byte-level BPE writes for each byte: itself if printable, else the next from U+0100.

    Source: `bytes_to_unicode` of GPT-2, https://github.com/openai/gpt-2/blob/master/src/encoder.py
    """
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}


_BYTE_TOKEN = re.compile("<0x([0-9A-Fa-f]{2})>")
_BYTE_OF = _byte_alphabet()
