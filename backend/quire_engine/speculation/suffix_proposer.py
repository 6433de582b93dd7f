# SPDX-License-Identifier: Apache-2.0
"""Suffix decoding: searches past outputs for the last tokens of a sequence, and proposes the tokens that followed
there. Torch-free.

Source: Oliaro et al. 2024 (SuffixDecoding); names and defaults as in vLLM's v1/spec_decode/suffix_decoding.py.
"""

from array import array

from quire_engine.sequence import Sequence
from quire_engine.speculation.proposer import DraftProposer, NgramProposer
from quire_engine.speculation.suffix_cache import SuffixCache
from quire_spec.engine.speculative_config import SpeculativeConfig

_OWN_MATCHES = range(2, 17)
"""For each n in this range, the proposer can also search the sequence itself for an earlier copy of its last n
tokens."""


class SuffixProposer(DraftProposer):
    """Searches past outputs of the same adapter and salt, and the sequence itself, for the longest match of its last
    tokens.
    """

    def __init__(self, config: SpeculativeConfig) -> None:
        self._depth = config.suffix_decoding_max_tree_depth
        self._spec_factor = config.suffix_decoding_max_spec_factor
        self._min_probability = config.suffix_decoding_min_token_prob
        self._own_context = NgramProposer(_OWN_MATCHES)
        max_outputs = config.suffix_decoding_max_cached_requests
        self._cache = SuffixCache(self._depth, max_outputs) if max_outputs else None

    def propose(self, sequence: Sequence, max_tokens: int) -> list[int]:
        """See DraftProposer."""
        length, draft = self._own_context.find(sequence, max_tokens)
        # The tree contains runs of up to `_depth` tokens. Such a run contains both the match and the draft.
        max_match = max(1, self._depth - max_tokens)
        if self._cache is not None and (tree := self._cache.tree_for(sequence)) is not None:
            context = array("I", sequence.tokens(max(0, sequence.num_tokens - max_match), sequence.num_tokens))
            match, followers = tree.follow(context.tobytes(), max_match, max_tokens, self._min_probability)
            # If both matches have equal lengths, the tree is used, because it has frequencies.
            if followers and match >= min(length, max_match):
                length, draft = match, followers
        return draft[: int(self._spec_factor * length)]

    def observe(self, sequence: Sequence) -> None:
        """See DraftProposer."""
        if self._cache is not None:
            self._cache.store(sequence, is_complete=False)

    def finish(self, sequence: Sequence) -> None:
        """See DraftProposer."""
        if self._cache is not None and sequence.output_token_ids:
            self._cache.store(sequence, is_complete=True)
