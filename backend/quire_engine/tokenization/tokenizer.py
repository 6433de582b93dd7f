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

from quire_engine.tokenization.token_bytes import TokenBytesTable
from quire_spec.dataclass_json import read_json_object
from quire_spec.engine.sampling_params import SamplingParams
from quire_spec.errors import ConfigError, InvalidArgument

TOKENIZER_FILE = "tokenizer.json"

SPECIAL_TOKENS_ATTRIBUTES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_SURROGATES_TO_REPLACEMENT = {0xDC00 + byte: "�" for byte in range(0x80, 0x100)}
"""What the codec's "surrogateescape" makes of invalid bytes, to U+FFFD."""

_MAX_INCOMPLETE_CHARACTER_TOKENS = 8
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
        config_path = folder / "tokenizer_config.json"
        try:
            _apply_tokenizer_config(self._tokenizer, read_json_object(config_path) if config_path.exists() else {})
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ConfigError(
                f"{config_path}: its tokens cannot be read ({type(error).__name__}: {error}); save the tokenizer again"
            ) from error
        self.token_bytes = TokenBytesTable(self._tokenizer)
        """Bytes of each token."""
        added_tokens = self._tokenizer.get_added_tokens_decoder()
        self.added_tokens: Mapping[int, str] = {i: token.content for i, token in added_tokens.items()}
        """Tokens that stand beside the model's own vocabulary, special ones and others."""
        self.special_token_ids: Collection[int] = frozenset(i for i, token in added_tokens.items() if token.special)
        """Tokens that skip_special_tokens leaves out of a text."""
        self.vocab_size: int = self._tokenizer.get_vocab_size(with_added_tokens=True)

    @classmethod
    def from_folder(cls, folder: Path) -> Self | None:
        """The tokenizer of a checkpoint, or None if it has none: then requests bring and get token ids."""
        return cls(folder) if (folder / TOKENIZER_FILE).exists() else None

    @property
    def max_token_bytes(self) -> int:
        """Bytes of text that the longest token of the vocabulary stands for."""
        return max((len(self.token_bytes.bytes_of(i)) for i in self._tokenizer.get_vocab().values()), default=1)

    def encode(self, text: str, max_tokens: int | None = None, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`, with the special tokens that the checkpoint's tokenizer adds, or without.

        Of a text with more than `max_tokens`, the last ones, special tokens included.

        Raises:
            InvalidArgument: `text` has characters that no encoding can carry (lone surrogates).
        """
        if max_tokens is None:
            token_ids: list[int] = self._encode([text], "the prompt", add_special_tokens)[0].ids
            return token_ids
        [encoding] = self._encode([text], "the prompt", add_special_tokens=False)
        num_added = self._tokenizer.num_special_tokens_to_add(False) if add_special_tokens else 0
        encoding.truncate(max(0, max_tokens - num_added), direction="left")
        truncated_ids: list[int] = self._tokenizer.post_process(encoding, add_special_tokens=add_special_tokens).ids
        return truncated_ids[-max_tokens:]

    def bad_word_ids(self, words: Sequence[str]) -> list[list[int]]:
        """Each word as the tokens that begin a text with it and as those that go on with it, after a space.

        Raises:
            InvalidArgument: a word has no token at all, or is not valid Unicode.

        Source: `SamplingParams.update_from_tokenizer` of vLLM, which leaves the second out where it has more or fewer
        tokens: " there" would be taken, which is one.
        """
        stripped = [word.lstrip() for word in words]
        encoded_words = [
            e.ids
            for e in self._encode([p + w for w in stripped for p in ("", " ")], "bad_words", add_special_tokens=False)
        ]
        bad_word_ids = []
        for word, ids_at_start, ids_after_space in zip(words, encoded_words[::2], encoded_words[1::2], strict=True):
            if not ids_at_start:
                raise InvalidArgument(f"sampling parameter 'bad_words': {word[:80]!r} has no tokens in this vocabulary")
            bad_word_ids.append(ids_at_start)
            if ids_after_space[-len(ids_at_start) :] != ids_at_start:
                bad_word_ids.append(ids_after_space)
        return bad_word_ids

    def _encode(
        self, texts: Sequence[str], input_name: str, add_special_tokens: bool = True
    ) -> list[tokenizers.Encoding]:
        try:
            # The batch call releases the interpreter's lock and, being "fast", keeps no offsets.
            return list(self._tokenizer.encode_batch_fast(texts, add_special_tokens=add_special_tokens))
        except (UnicodeError, TypeError) as error:
            raise InvalidArgument(f"{input_name}: not valid Unicode text: it holds half of a surrogate pair") from error

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of `token_ids`, as a text of its own."""
        text: str = self._tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)
        return text

    def token_text(self, token_id: int) -> str:
        """What one token stands for, inside a text; U+FFFD for the bytes of an incomplete character."""
        return self.token_bytes.bytes_of(token_id).decode(errors="replace")


@dataclass(frozen=True, slots=True)
class TextDelta:
    """What some tokens added to an output."""

    text: str
    """Text that no later token can change."""
    num_tokens: int
    """How many of the tokens belong to the output; fewer than were pushed when a stop string was found before."""
    stopped: bool
    """A stop string was found: the request is over, with finish reason "stop"."""
    stop_string: str | None = None
    """The stop string that was found."""


class IncrementalDetokenizer:
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
        self._token_bytes = tokenizer.token_bytes if tokenizer else None
        self._skipped_token_ids = (
            tokenizer.special_token_ids if tokenizer and params.skip_special_tokens else frozenset()
        )
        adds_spaces = tokenizer is None or params.skip_special_tokens or params.spaces_between_special_tokens
        self._unspaced_tokens: Mapping[int, str] = {} if adds_spaces or tokenizer is None else tokenizer.added_tokens
        """Tokens that stand beside each other without a space."""
        self._last_was_unspaced = False
        self._at_text_start = prompt_token_ids is not None and not self._has_text(prompt_token_ids)
        self._utf8_decoder = codecs.getincrementaldecoder("utf-8")(
            self._token_bytes.decode_errors if self._token_bytes else "replace"
        )
        self._stop_strings = params.stop
        self._min_tokens = params.min_tokens
        self._include_stop_string = params.include_stop_str_in_output
        self._stop_buffer_length = max((len(stop) for stop in params.stop), default=1) - 1
        """Characters at the end of the text that may be the beginning of a stop string."""
        self._text_window = ""
        """The end of the text: what was not handed out, and `_overlap` characters at least."""
        self._num_emitted_chars = 0
        """Characters at the start of `_window` that were handed out."""
        self._num_tokens = 0
        if not self._at_text_start and prompt_token_ids is not None:
            # The output may complete a character that the prompt's last tokens begin: a byte each, at most three.
            self._decode_tokens(prompt_token_ids[-_MAX_INCOMPLETE_CHARACTER_TOKENS:], final=False)

    def update(self, token_ids: Sequence[int], finished: bool, stop_terminated: bool = False) -> TextDelta:
        """Take the next tokens. `finished` says that they are the last, so that nothing is held back.

        `stop_token` says that the last of them is what ended the output (finish reason "stop"): it is not part of the
        text unless include_stop_str_in_output.
        """
        end = len(token_ids) - (1 if stop_terminated and not self._include_stop_string else 0)
        if not self._stop_strings:
            self._text_window += self._decode_tokens(token_ids[:end], finished)
            return TextDelta(self._emit_text(finished), len(token_ids), stopped=False)
        for i, token_id in enumerate(token_ids):
            start = len(self._text_window)
            self._text_window += self._decode_tokens(
                [token_id] if i < end else [], finished and i == len(token_ids) - 1
            )
            self._num_tokens += 1
            if self._num_tokens > self._min_tokens and (stop_match := self._match_stop_string(start)) is not None:
                end_offset, stop_string = stop_match
                self._text_window = self._text_window[:end_offset]
                return TextDelta(self._emit_text(True), i + 1, stopped=True, stop_string=stop_string)
        return TextDelta(self._emit_text(finished), len(token_ids), stopped=False)

    def _decode_tokens(self, token_ids: Sequence[int], final: bool) -> str:
        if self._token_bytes is None:
            return ""
        chunks = []
        for token_id in token_ids:
            if token_id not in self._skipped_token_ids and (chunk := self._token_bytes.bytes_of(token_id)):
                if self._at_text_start:
                    self._at_text_start, chunk = False, self._token_bytes.first_bytes_of(token_id)
                if self._unspaced_tokens:
                    is_unspaced = token_id in self._unspaced_tokens
                    chunk = (
                        self._unspaced_tokens[token_id].encode() if is_unspaced and self._last_was_unspaced else chunk
                    )
                    self._last_was_unspaced = is_unspaced
                chunks.append(chunk)
        text = self._utf8_decoder.decode(b"".join(chunks), final)
        return (
            text
            if self._token_bytes.decode_errors == "replace" or text.isascii()
            else text.translate(_SURROGATES_TO_REPLACEMENT)
        )

    def _match_stop_string(self, new_text_start: int) -> tuple[int, str] | None:
        """Where to cut the window, and the stop string that ends first after `start`, the first given if several do."""
        matches = []
        for stop_string in self._stop_strings:
            if (
                start_offset := self._text_window.find(stop_string, max(0, new_text_start - len(stop_string) + 1))
            ) >= 0:
                matches.append((start_offset + len(stop_string), start_offset, stop_string))
        if not matches:
            return None
        end_offset, start_offset, stop_string = min(matches, key=lambda entry: entry[0])
        return end_offset if self._include_stop_string else start_offset, stop_string

    def _emit_text(self, flush: bool) -> str:
        window_length = len(self._text_window)
        num_held_back = 0 if flush or self._include_stop_string else self._stop_buffer_length
        end = max(self._num_emitted_chars, window_length - num_held_back)
        text = self._text_window[self._num_emitted_chars : end]
        window_start = max(0, window_length - self._stop_buffer_length)
        self._text_window, self._num_emitted_chars = self._text_window[window_start:], end - window_start
        return text

    def _has_text(self, token_ids: Sequence[int]) -> bool:
        token_bytes = self._token_bytes
        return token_bytes is not None and any(
            i not in self._skipped_token_ids and token_bytes.bytes_of(i) for i in token_ids
        )


def _apply_tokenizer_config(tokenizer: tokenizers.Tokenizer, config: dict[str, Any]) -> None:
    """Add the tokens that tokenizer_config.json names, as transformers does on loading it.

    Special tokens in a text are such, unless split_special_tokens has them be letters like any others.

    Its add_bos_token and add_eos_token are not read: beside a tokenizer.json, transformers ignores them as well.
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
