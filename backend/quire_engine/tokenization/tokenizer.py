# SPDX-License-Identifier: Apache-2.0
"""The tokenizer of a checkpoint: converts text to token ids, and complete lists of token ids to text.

The module tokenizer_files.py reads the files. This module does not depend on requests, sockets or torch. Its callers
are the offline LLM and the text process's request manager.
"""

import json
from collections.abc import Collection, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Self

import tokenizers

from quire_engine.tokenization.control_tokens import split_marked
from quire_engine.tokenization.segment_cache import SegmentCache
from quire_engine.tokenization.segmenter import Segmenter
from quire_engine.tokenization.token_bytes import TokenBytesTable
from quire_engine.tokenization.tokenizer_config import read_tokenizer_config, special_token_texts
from quire_engine.tokenization.tokenizer_files import has_tokenizer, read_tokenizer
from quire_spec.errors import PROCESS_ENDS, InvalidArgument


class Tokenizer:
    """The tokenizer of a checkpoint. It is thread-safe, and its slow methods release the GIL.

    Raises:
        ConfigError: there is no tokenizer, its decoder cannot be streamed, or one of its files is invalid.
    """

    def __init__(self, folder: Path) -> None:
        self._tokenizer = read_tokenizer(folder)
        self.token_bytes = TokenBytesTable(self._tokenizer)
        """Bytes of each token."""
        added_tokens = self._tokenizer.get_added_tokens_decoder()
        self.added_tokens: Mapping[int, str] = {i: token.content for i, token in added_tokens.items()}
        """The text of each token that was added to the model's own vocabulary, by token id. Some of these tokens are
        special tokens."""
        self.special_token_ids: Collection[int] = frozenset(i for i, token in added_tokens.items() if token.special)
        """The ids of tokens that skip_special_tokens removes from a text."""
        self.vocab_size: int = self._tokenizer.get_vocab_size(with_added_tokens=True)
        self._segment_cache = SegmentCache()
        config = read_tokenizer_config(folder)
        self._special_tokens = special_token_texts(config)
        template = config.get("response_template")
        self.response_template = json.dumps(template) if template else ""
        """JSON text of the description of the outputs; empty if the checkpoint has none."""

    @classmethod
    def from_folder(cls, folder: Path) -> Self | None:
        """Return the tokenizer of a checkpoint, or None if the checkpoint has none.

        Without a tokenizer, requests can contain only token ids.
        """
        return cls(folder) if has_tokenizer(folder) else None

    # The names of the following methods are those of transformers, because programs for vLLM call them on the result of
    # LLM.get_tokenizer().

    def __len__(self) -> int:
        return self.vocab_size

    @property
    def bos_token_id(self) -> int | None:
        """Id of the token that begins a text."""
        return self._special_id("bos_token")

    @property
    def eos_token_id(self) -> int | None:
        """Id of the token that ends a text."""
        return self._special_id("eos_token")

    @property
    def pad_token_id(self) -> int | None:
        """Id of the padding token."""
        return self._special_id("pad_token")

    @property
    def all_special_ids(self) -> list[int]:
        """Ids of the special tokens."""
        return sorted(self.special_token_ids)

    def get_vocab(self) -> dict[str, int]:
        """Return the ids of all tokens by their texts in the vocabulary."""
        vocab: dict[str, int] = self._tokenizer.get_vocab(with_added_tokens=True)
        return vocab

    def convert_tokens_to_ids(self, token: str) -> int | None:
        """Return the id of a token of the vocabulary, or None."""
        token_id: int | None = self._tokenizer.token_to_id(token)
        return token_id

    def convert_ids_to_tokens(self, token_id: int) -> str | None:
        """Return the text of a token in the vocabulary, or None."""
        token: str | None = self._tokenizer.id_to_token(token_id)
        return token

    def _special_id(self, name: str) -> int | None:
        text = self._special_tokens.get(name)
        return None if text is None else self.convert_tokens_to_ids(text)

    @property
    def max_token_bytes(self) -> int:
        """Length of the longest token in the vocabulary, in bytes of text."""
        return max((len(self.token_bytes.bytes_of(i)) for i in self._tokenizer.get_vocab().values()), default=1)

    def encode(
        self,
        text: str,
        max_tokens: int | None = None,
        add_special_tokens: bool = True,
        truncation_side: str = "left",
    ) -> list[int]:
        """Return the token ids of `text`.

        If `add_special_tokens` is true, they include the special tokens that the tokenizer adds. If the result would
        have more than `max_tokens` tokens, special tokens included, the text is truncated on its `truncation_side`.

        Raises:
            InvalidArgument: `text` contains lone surrogates, which no encoding can represent.
        """
        if max_tokens is None:
            token_ids: list[int] = self._encode([text], "the prompt", add_special_tokens)[0].ids
            return token_ids
        [encoding] = self._encode([text], "the prompt", add_special_tokens=False)
        num_added = self._tokenizer.num_special_tokens_to_add(False) if add_special_tokens else 0
        encoding.truncate(max(0, max_tokens - num_added), direction=truncation_side)
        truncated_ids: list[int] = self._tokenizer.post_process(encoding, add_special_tokens=add_special_tokens).ids
        return truncated_ids[-max_tokens:] if truncation_side == "left" else truncated_ids[:max_tokens]

    def encode_pair(
        self, first: str, second: str, max_tokens: int | None = None, truncation_side: str = "right"
    ) -> tuple[list[int], int]:
        """Return the token ids of two texts with their special tokens, and the position of the first token of type 1,
        which is part of the second text; 0 if the tokenizer gives all tokens the same type.

        If there would be more than `max_tokens` tokens, the longer text is truncated first, as sentence-transformers
        does it (`longest_first` of the library tokenizers).
        """
        a, b = self._encode([first, second], "the texts of a pair", add_special_tokens=False)
        if max_tokens is not None:
            room = max(0, max_tokens - self._tokenizer.num_special_tokens_to_add(True))
            short, long = sorted((len(a.ids), len(b.ids)))
            if short + long > room:
                short = min(short, room // 2)
                lengths = short, room - short
                for encoding, length in zip(
                    (a, b), lengths if len(a.ids) <= len(b.ids) else lengths[::-1], strict=True
                ):
                    encoding.truncate(length, direction=truncation_side)
        pair = self._tokenizer.post_process(a, b, add_special_tokens=True)
        types: list[int] = pair.type_ids
        token_ids: list[int] = pair.ids
        return token_ids, types.index(1) if 1 in types else 0

    @cached_property
    def _segmenter(self) -> Segmenter:
        """The segmenter. It is built when the first conversation arrives. Building it takes time, because the segmenter
        encodes texts to test itself."""
        return Segmenter(self._tokenizer, lambda texts: self._encode_segments([(False, text) for text in texts]))

    def encode_rendered(self, text: str, cache_salt: str = "") -> list[int]:
        """Return the token ids of a rendered conversation.

        Control tokens that are marked in `text` are encoded as plain text. Each `cache_salt` has its own cached
        segments. Raises the errors of `encode`.
        """
        # The first segment of a later piece continues the text before it.
        segments = [
            (i > 0 and j == 0, segment)
            for i, piece in enumerate(split_marked(text))
            for j, segment in enumerate(self._segmenter.split(piece))
        ]
        if self._segmenter.is_exact:
            return self._segment_cache.encode(cache_salt, segments, self._encode_segments)
        return [i for ids in self._encode_segments(segments) for i in ids]

    def _encode_segments(self, segments: Sequence[tuple[bool, str]]) -> list[list[int]]:
        """Return the token ids of each segment.

        A segment consists of a flag and a text. The flag is True if other text precedes the segment.
        """
        [newline] = self._encode(["\n"], "messages", add_special_tokens=False)
        # Continued text is encoded after a newline. There, no tokenizer adds the space that it would add at the start
        # of a text.
        encodings = self._encode(
            [f"\n{text}" if is_continued else text for is_continued, text in segments], "messages", False
        )
        id_lists: list[list[int]] = []
        for (is_continued, text), encoding in zip(segments, encodings, strict=True):
            if is_continued and encoding.ids[: len(newline.ids)] == newline.ids:
                id_lists.append(encoding.ids[len(newline.ids) :])
            else:
                id_lists.append(self._encode([text], "messages", False)[0].ids if is_continued else encoding.ids)
        return id_lists

    def bad_word_ids(self, words: Sequence[str]) -> list[list[int]]:
        """Return the token ids of each word in two forms: at the start of a text, and after a space.

        Raises:
            InvalidArgument: a word has no tokens, or is not valid Unicode.

        Source: `SamplingParams.update_from_tokenizer` of vLLM. vLLM omits the second form if it has another number of
            tokens, so that " there", which is one token, would not be forbidden.
        """
        stripped = [word.lstrip() for word in words]
        encoded_words = [
            e.ids
            for e in self._encode([p + w for w in stripped for p in ("", " ")], "bad_words", add_special_tokens=False)
        ]
        bad_word_ids = []
        for word, ids_at_start, ids_after_space in zip(words, encoded_words[::2], encoded_words[1::2], strict=True):
            if not ids_at_start:
                raise InvalidArgument(f"sampling parameter 'bad_words': {word[:80]!r} has no tokens; leave it out")
            bad_word_ids.append(ids_at_start)
            if ids_after_space[-len(ids_at_start) :] != ids_at_start:
                bad_word_ids.append(ids_after_space)
        return bad_word_ids

    def _encode(
        self, texts: Sequence[str], input_name: str, add_special_tokens: bool = True
    ) -> list[tokenizers.Encoding]:
        try:
            # encode_batch_fast is used even for one text. The batch calls release the GIL, and this one does not
            # compute offsets.
            return list(self._tokenizer.encode_batch_fast(texts, add_special_tokens=add_special_tokens))
        except (UnicodeError, TypeError) as error:
            raise InvalidArgument(f"{input_name}: must be valid Unicode, but contains a lone surrogate") from error
        except PROCESS_ENDS:
            raise
        except BaseException as error:
            # A pattern of the tokenizer can need more attempts for a text than its library allows. The library then
            # panics.
            raise InvalidArgument(
                f"{input_name}: the tokenizer of this model cannot encode this text ({str(error)[:200]}); shorten it, "
                "above all long runs of spaces or of the same character"
            ) from error

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Return the text of `token_ids`, as if no text preceded them."""
        try:
            text: str = self._tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)
        except PROCESS_ENDS:
            raise
        except BaseException as error:
            raise InvalidArgument(f"tokens: the tokenizer cannot decode them ({str(error)[:200]})") from error
        return text

    def token_text(self, token_id: int) -> str:
        """Return the text of a token that is not the first token of a text.

        The bytes of an incomplete character are replaced with U+FFFD.
        """
        return self.token_bytes.bytes_of(token_id).decode(errors="replace")
