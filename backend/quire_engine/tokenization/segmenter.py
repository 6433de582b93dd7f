# SPDX-License-Identifier: Apache-2.0
"""Cuts a rendered conversation after its control tokens, so that each segment can be encoded by itself.

Before anything else, a tokenizer splits a text at its added tokens. Therefore, the token ids of the segments, joined
together, are the token ids of the whole text. `Tokenizer` encodes the segments and caches their ids.

Source of the idea: `entrypoints/openai/parallel_prompt_encode.py` of SGLang 0.5
"""

import re
from collections.abc import Callable, Collection, Sequence

import tokenizers

_SHAPE = re.compile(r"<[^<>\s]{1,60}>|\[[A-Z_/]{1,60}\]")
"""Forms of control tokens. One regular expression finds control tokens fast, even if a vocabulary has thousands of
them."""
_PROBE = " a b\n\nc{0}d e{0} f{0}\ng{0}{0}  h"


class Segmenter:
    """Cuts texts for one tokenizer."""

    def __init__(self, tokenizer: tokenizers.Tokenizer, encode: Callable[[Sequence[str]], list[list[int]]]) -> None:
        """`encode` returns the ids of texts, without the special tokens that the tokenizer adds."""
        added_tokens = tokenizer.get_added_tokens_decoder().values()
        self._tokens: Collection[str] = frozenset()
        if not tokenizer.encode_special_tokens:
            self._tokens = frozenset(filter(_cuttable(added_tokens).__contains__, (t.content for t in added_tokens)))
        # Some tokenizers treat the start of a text differently from text that follows a token. Such tokenizers get
        # whole texts.
        if any(not _is_exact(token, self.split, encode) for token in sorted(self._tokens)[:8]):
            self._tokens = frozenset()

    @property
    def is_exact(self) -> bool:
        """True if texts are cut into segments. Otherwise, `split` returns each text as one segment."""
        return bool(self._tokens)

    def split(self, text: str) -> list[str]:
        """Return the segments of a text; each segment except the last ends with a control token."""
        segments, start = [], 0
        if self._tokens:
            for match in _SHAPE.finditer(text):
                if match[0] in self._tokens:
                    segments.append(text[start : match.end()])
                    start = match.end()
        return [*segments, text[start:]] if start < len(text) or not segments else segments


def _cuttable(added_tokens: Collection[tokenizers.AddedToken]) -> Collection[str]:
    """Return the added tokens that the tokenizer recognizes at every place where a text contains them."""
    contents = [token.content for token in added_tokens]
    # These are the ends of all tokens. If a token begins with one of them, its beginning can be part of an earlier
    # match.
    ends = {content[i:] for content in contents for i in range(1, len(content))}
    return {
        token.content
        for token in added_tokens
        if not (token.normalized or token.lstrip or token.rstrip or token.single_word)
        and _SHAPE.fullmatch(token.content)
        and not any(token.content[:i] in ends for i in range(1, len(token.content) + 1))
        and sum(content.startswith(token.content) for content in contents) == 1
    }


def _is_exact(
    token: str, split: Callable[[str], list[str]], encode: Callable[[Sequence[str]], list[list[int]]]
) -> bool:
    text = _PROBE.format(token)
    return [i for ids in encode(split(text)) for i in ids] == encode([text])[0]
