# SPDX-License-Identifier: Apache-2.0
"""Tokenizer and Detokenizer: text to token ids, and a growing list of token ids to a growing text.

Owns stop strings and everything about characters; knows no request, no socket and no torch. The text process and the
offline LLM call it. Only the `tokenizers` library is used: a model's tokenizer is what its tokenizer.json says.
"""

import codecs
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import tokenizers

from quire_engine.pieces import Pieces
from quire_spec.dataclass_json import read_json_object
from quire_spec.engine.sampling_params import SamplingParams
from quire_spec.errors import ConfigError, InvalidArgument

TOKENIZER_FILE = "tokenizer.json"

NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_INVALID_BYTES = {0xDC00 + byte: "�" for byte in range(0x80, 0x100)}
"""What the codec's "surrogateescape" makes of invalid bytes, to U+FFFD."""

_BEGINNING = 8
"""Tokens at the end of a prompt in which a character may begin that they do not complete, special ones included."""


class Tokenizer:
    """The tokenizer of a checkpoint. Thread-safe; the slow methods release the interpreter's lock.

    Raises:
        ConfigError: tokenizer.json is missing, or has a decoder that cannot be streamed, or it or tokenizer_config.json
            is broken.
    """

    def __init__(self, folder: Path) -> None:
        path = folder / TOKENIZER_FILE
        try:
            self._tokenizer = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises nothing more precise
            raise ConfigError(f"{path}: {error}") from error
        # A checkpoint may carry the truncation and padding of its training; a server must not cut prompts silently.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        config = folder / "tokenizer_config.json"
        try:
            _apply_config(self._tokenizer, read_json_object(config) if config.exists() else {})
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ConfigError(
                f"{config}: its tokens cannot be read ({type(error).__name__}: {error}); save the tokenizer again"
            ) from error
        self.pieces = Pieces(self._tokenizer)
        """Bytes of each token."""
        added = self._tokenizer.get_added_tokens_decoder()
        self.added: Mapping[int, str] = {i: token.content for i, token in added.items()}
        """Tokens that stand beside the model's own vocabulary, special ones and others."""
        self.special_ids: Collection[int] = frozenset(i for i, token in added.items() if token.special)
        """Tokens that skip_special_tokens leaves out of a text."""
        self.vocab_size: int = self._tokenizer.get_vocab_size(with_added_tokens=True)

    @classmethod
    def find(cls, folder: Path) -> Self | None:
        """The tokenizer of a checkpoint, or None if it has none: then requests bring and get token ids."""
        return cls(folder) if (folder / TOKENIZER_FILE).exists() else None

    @property
    def max_token_bytes(self) -> int:
        """Bytes of text that the longest token of the vocabulary stands for."""
        return max((len(self.pieces.rest(i)) for i in self._tokenizer.get_vocab().values()), default=1)

    def encode(self, text: str, max_tokens: int | None = None, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`, with the special tokens that the checkpoint's tokenizer adds, or without.

        Of a text with more than `max_tokens`, the last ones, special tokens included.

        Raises:
            InvalidArgument: `text` has characters that no encoding can carry (lone surrogates).
        """
        if max_tokens is None:
            ids: list[int] = self._encode([text], "the prompt", add_special_tokens)[0].ids
            return ids
        [encoding] = self._encode([text], "the prompt", special=False)
        num_added = self._tokenizer.num_special_tokens_to_add(False) if add_special_tokens else 0
        encoding.truncate(max(0, max_tokens - num_added), direction="left")
        kept: list[int] = self._tokenizer.post_process(encoding, add_special_tokens=add_special_tokens).ids
        return kept[-max_tokens:]

    def bad_word_ids(self, words: Sequence[str]) -> list[list[int]]:
        """Each word as the tokens that begin a text with it and as those that go on with it, after a space.

        Raises:
            InvalidArgument: a word has no token at all, or is not valid Unicode.

        Source: `SamplingParams.update_from_tokenizer` of vLLM, which leaves the second out where it has more or fewer
        tokens: " there" would be taken, which is one.
        """
        stripped = [word.lstrip() for word in words]
        runs = [e.ids for e in self._encode([p + w for w in stripped for p in ("", " ")], "bad_words", special=False)]
        found = []
        for word, first, later in zip(words, runs[::2], runs[1::2], strict=True):
            if not first:
                raise InvalidArgument(f"sampling parameter 'bad_words': {word[:80]!r} has no tokens in this vocabulary")
            found.append(first)
            if later[-len(first) :] != first:
                found.append(later)
        return found

    def _encode(self, texts: Sequence[str], what: str, special: bool = True) -> list[tokenizers.Encoding]:
        try:
            # The batch call releases the interpreter's lock and, being "fast", keeps no offsets.
            return list(self._tokenizer.encode_batch_fast(texts, add_special_tokens=special))
        except (UnicodeError, TypeError) as error:
            raise InvalidArgument(f"{what}: not valid Unicode text: it holds half of a surrogate pair") from error

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of `token_ids`, as a text of its own."""
        text: str = self._tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)
        return text

    def token_text(self, token_id: int) -> str:
        """What one token stands for, inside a text; U+FFFD for the bytes of an incomplete character."""
        return self.pieces.rest(token_id).decode(errors="replace")


@dataclass(frozen=True, slots=True)
class Delta:
    """What some tokens added to an output."""

    text: str
    """Text that no later token can change."""
    num_tokens: int
    """How many of the tokens belong to the output; fewer than were pushed when a stop string was found before."""
    stopped: bool
    """A stop string was found: the request is over, with finish reason "stop"."""
    stop: str | None = None
    """The stop string that was found."""


class Detokenizer:
    """Turns the output tokens of one request into text, piece by piece; the pieces together are the output.

    The output goes on with its prompt, so that the space before its first word is kept; `prompt_token_ids` serve only
    to see whether there is text before it. Invalid bytes become U+FFFD, but never the bytes of a character that later
    tokens may complete. Costs time linear in the output.
    """

    def __init__(
        self, tokenizer: Tokenizer | None, params: SamplingParams, prompt_token_ids: Sequence[int] | None = None
    ) -> None:
        """`tokenizer` None gives no text; `prompt_token_ids` None stands for a prompt with some text."""
        tokenizer = tokenizer if params.detokenize else None
        self._pieces = tokenizer.pieces if tokenizer else None
        self._skipped = tokenizer.special_ids if tokenizer and params.skip_special_tokens else frozenset()
        kept_apart = tokenizer is None or params.skip_special_tokens or params.spaces_between_special_tokens
        self._joined: Mapping[int, str] = {} if kept_apart or tokenizer is None else tokenizer.added
        """Tokens that stand beside each other without a space."""
        self._last_joined = False
        self._first = prompt_token_ids is not None and not self._has_text(prompt_token_ids)
        self._codec = codecs.getincrementaldecoder("utf-8")(self._pieces.errors if self._pieces else "replace")
        self._stops = params.stop
        self._min_tokens = params.min_tokens
        self._include_stop = params.include_stop_str_in_output
        self._overlap = max((len(stop) for stop in params.stop), default=1) - 1
        """Characters at the end of the text that may be the beginning of a stop string."""
        self._window = ""
        """The end of the text: what was not handed out, and `_overlap` characters at least."""
        self._num_sent = 0
        """Characters at the start of `_window` that were handed out."""
        self._num_tokens = 0
        if not self._first and prompt_token_ids is not None:
            # The output may complete a character that the prompt's last tokens begin: a byte each, at most three.
            self._text(prompt_token_ids[-_BEGINNING:], final=False)

    def push(self, token_ids: Sequence[int], finished: bool, stop_token: bool = False) -> Delta:
        """Take the next tokens. `finished` says that they are the last, so that nothing is held back.

        `stop_token` says that the last of them is what ended the output (finish reason "stop"): it is not part of the
        text unless include_stop_str_in_output.
        """
        end = len(token_ids) - (1 if stop_token and not self._include_stop else 0)
        if not self._stops:
            self._window += self._text(token_ids[:end], finished)
            return Delta(self._take(finished), len(token_ids), stopped=False)
        for i, token_id in enumerate(token_ids):
            start = len(self._window)
            self._window += self._text([token_id] if i < end else [], finished and i == len(token_ids) - 1)
            self._num_tokens += 1
            if self._num_tokens > self._min_tokens and (found := self._find_stop(start)) is not None:
                cut, stop = found
                self._window = self._window[:cut]
                return Delta(self._take(True), i + 1, stopped=True, stop=stop)
        return Delta(self._take(finished), len(token_ids), stopped=False)

    def _text(self, token_ids: Sequence[int], final: bool) -> str:
        if self._pieces is None:
            return ""
        parts = []
        for token_id in token_ids:
            if token_id not in self._skipped and (piece := self._pieces.rest(token_id)):
                if self._first:
                    self._first, piece = False, self._pieces.first(token_id)
                if self._joined:
                    joined = token_id in self._joined
                    piece = self._joined[token_id].encode() if joined and self._last_joined else piece
                    self._last_joined = joined
                parts.append(piece)
        text = self._codec.decode(b"".join(parts), final)
        return text if self._pieces.errors == "replace" or text.isascii() else text.translate(_INVALID_BYTES)

    def _find_stop(self, start: int) -> tuple[int, str] | None:
        """Where to cut the window, and the stop string that ends first after `start`, the first given if several do."""
        found = []
        for stop in self._stops:
            if (at := self._window.find(stop, max(0, start - len(stop) + 1))) >= 0:
                found.append((at + len(stop), at, stop))
        if not found:
            return None
        end, at, stop = min(found, key=lambda entry: entry[0])
        return end if self._include_stop else at, stop

    def _take(self, everything: bool) -> str:
        size = len(self._window)
        held = 0 if everything or self._include_stop else self._overlap
        end = max(self._num_sent, size - held)
        text = self._window[self._num_sent : end]
        kept = max(0, size - self._overlap)
        self._window, self._num_sent = self._window[kept:], end - kept
        return text

    def _has_text(self, token_ids: Sequence[int]) -> bool:
        pieces = self._pieces
        return pieces is not None and any(i not in self._skipped and pieces.rest(i) for i in token_ids)


def _apply_config(tokenizer: tokenizers.Tokenizer, config: dict[str, Any]) -> None:
    """Add the tokens that tokenizer_config.json names, as transformers does on loading it.

    Special tokens in a text are such, unless split_special_tokens has them be letters like any others.

    Its add_bos_token and add_eos_token are not read: beside a tokenizer.json, transformers ignores them as well.
    Source: `TokenizersBackend` in transformers 5, src/transformers/tokenization_utils_tokenizers.py
    """
    for _, entry in sorted((config.get("added_tokens_decoder") or {}).items(), key=lambda item: int(item[0])):
        if tokenizer.token_to_id(entry["content"]) is None:
            (tokenizer.add_special_tokens if entry.get("special") else tokenizer.add_tokens)([_added_token(entry)])
    named = [config[name] for name in NAMED_TOKENS if config.get(name)]
    extra = config.get("extra_special_tokens") or config.get("additional_special_tokens") or []
    more = list(extra.values()) if isinstance(extra, dict) else list(extra)
    known = {token.content for token in tokenizer.get_added_tokens_decoder().values() if token.special}
    wanted = [_added_token(token) for token in (*named, *more)]
    tokenizer.add_special_tokens([token for token in wanted if token.content not in known])
    tokenizer.encode_special_tokens = bool(config.get("split_special_tokens"))


def _added_token(token: str | dict[str, Any]) -> tokenizers.AddedToken:
    if isinstance(token, str):
        return tokenizers.AddedToken(token, special=True, normalized=False)
    flags = {key: token[key] for key in ("single_word", "lstrip", "rstrip", "normalized", "special") if key in token}
    return tokenizers.AddedToken(token["content"], **flags)
