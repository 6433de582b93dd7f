# SPDX-License-Identifier: Apache-2.0
"""The n-gram lookup finds what a plain search over the tokens finds."""

from hypothesis import given
from hypothesis import strategies as st

from quire_engine.sequence import Sequence
from quire_engine.speculation.proposer import NgramProposer
from quire_spec.engine.sampling_params import SamplingParams


def _search(tokens: list[int], lengths: range, max_tokens: int) -> list[int]:
    for length in reversed(lengths):
        for start in range(len(tokens) - length):
            if tokens[start : start + length] == tokens[-length:]:
                return tokens[start + length : start + length + max_tokens]
    return []


@given(
    # Tokens whose bytes overlap, so that a match at a part of a token would be noticed.
    st.lists(st.sampled_from([0, 1, 256, 65536, 1 << 24]), min_size=1, max_size=40),
    st.integers(1, 40),
    st.integers(1, 3),
    st.integers(0, 2),
    st.integers(1, 4),
)
def test_lookup_equals_a_search(tokens: list[int], num_prompt: int, smallest: int, more: int, max_tokens: int) -> None:
    lengths = range(smallest, smallest + more + 1)
    proposer = NgramProposer(lengths)
    sequence = Sequence(0, tokens[:num_prompt], SamplingParams(), 0, 100)
    # The lookup continues from the tokens that it has seen.
    for end in range(len(sequence.prompt_token_ids), len(tokens) + 1):
        sequence.output_token_ids = tokens[num_prompt:end]
        assert proposer.propose(sequence, max_tokens) == _search(tokens[:end], lengths, max_tokens)
