# SPDX-License-Identifier: Apache-2.0
"""Cache of past outputs for suffix decoding. Torch-free.

There is a separate suffix tree for each adapter and cache salt. Therefore, the drafts of a tenant never depend on
outputs of another adapter or salt, and the duration of its requests does not depend on them either. Outputs are added
while they grow, one window per token. Therefore, a step never has to add a whole long output at once. The memory of all
trees is limited: the oldest outputs are removed first.
"""

from array import array
from collections import deque
from dataclasses import dataclass, field
from typing import TypeAlias
from weakref import WeakKeyDictionary

from quire_engine.sequence import Sequence
from quire_engine.speculation.suffix_tree import TOKEN_BYTES, SuffixTree
from quire_spec.constants import AdapterDigest

MAX_TREE_BYTES = 64 << 20
"""Maximum estimated memory of all trees together. It is enough for about 130,000 tokens of outputs that have nothing in
common."""
_NUM_PROMPT_TOKENS = 8
"""This number of tokens from the end of the prompt is stored together with each output. With these tokens, a search can
also find the beginning of the output."""

Partition: TypeAlias = tuple[AdapterDigest | None, str | None]
"""Adapter and cache salt."""


@dataclass(eq=False, slots=True)
class _Text:
    """The stored tokens of one output. The tree contains the windows of the output from index num_removed to index
    num_added - 1."""

    partition: Partition
    next_index: int
    """Index of the next token of the sequence that must be stored."""
    tokens: bytearray = field(default_factory=bytearray)
    num_added: int = 0
    num_removed: int = 0
    is_evicted: bool = False


class SuffixCache:
    """Suffix trees over the outputs of an engine."""

    def __init__(self, depth: int, max_outputs: int, max_bytes: int = MAX_TREE_BYTES) -> None:
        """`depth` is the number of tokens in a window. `max_bytes` limits the estimated memory."""
        self._depth = depth
        self._max_outputs = max_outputs
        self._max_bytes = max_bytes
        self._trees: dict[Partition, SuffixTree] = {}
        self._texts: deque[_Text] = deque()
        """The stored outputs, oldest first."""
        self._text_by_sequence: WeakKeyDictionary[Sequence, _Text] = WeakKeyDictionary()
        self.num_bytes = 0
        """Estimated memory of all trees and texts."""

    def tree_for(self, sequence: Sequence) -> SuffixTree | None:
        """Return the tree for the adapter and the salt of a sequence; None if the tree would be empty."""
        return self._trees.get((sequence.adapter_digest, sequence.cache_salt))

    def store(self, sequence: Sequence, *, is_complete: bool) -> None:
        """Add the windows that have become complete with the latest tokens of a sequence.

        If `is_complete` is True, the output has ended, and the shorter windows at its end are added, too.
        """
        text = self._text_by_sequence.get(sequence)
        if text is None:
            start = max(0, len(sequence.prompt_token_ids) - _NUM_PROMPT_TOKENS)
            text = _Text((sequence.adapter_digest, sequence.cache_salt), start)
            self._text_by_sequence[sequence] = text
            self._texts.append(text)
        if text.is_evicted:
            return
        new_tokens = array("I", sequence.tokens(text.next_index, sequence.num_tokens)).tobytes()
        text.next_index = sequence.num_tokens
        text.tokens += new_tokens
        self.num_bytes += len(new_tokens)
        last = len(text.tokens) // TOKEN_BYTES - (1 if is_complete else self._depth)
        while text.num_added <= last and not text.is_evicted:
            self._add_window(text)
            # For each window that is added, at most two windows are removed. So the removal of a long output never
            # delays a step.
            self._remove_windows(2 if len(self._texts) > self._max_outputs else 0)
        while self.num_bytes > self._max_bytes:
            self._remove_windows(1)

    def _add_window(self, text: _Text) -> None:
        if (tree := self._trees.get(text.partition)) is None:
            tree = self._trees[text.partition] = SuffixTree()
        self.num_bytes -= tree.num_bytes
        tree.add(self._window(text, text.num_added))
        self.num_bytes += tree.num_bytes
        text.num_added += 1

    def _remove_windows(self, num_windows: int) -> None:
        """Remove the first `num_windows` windows of the oldest output. If none of its windows is left, remove the
        output, too."""
        text = self._texts[0]
        for _ in range(min(num_windows, text.num_added - text.num_removed)):
            tree = self._trees[text.partition]
            self.num_bytes -= tree.num_bytes
            tree.remove(self._window(text, text.num_removed))
            self.num_bytes += tree.num_bytes
            text.num_removed += 1
            if not tree.num_windows:
                self.num_bytes -= tree.num_bytes
                del self._trees[text.partition]
        if num_windows and text.num_removed == text.num_added:
            self._texts.popleft()
            self.num_bytes -= len(text.tokens)
            text.is_evicted, text.tokens = True, bytearray()

    def _window(self, text: _Text, index: int) -> bytes:
        """Return the window of a text that starts at token `index`."""
        return bytes(text.tokens[index * TOKEN_BYTES : (index + self._depth) * TOKEN_BYTES])
