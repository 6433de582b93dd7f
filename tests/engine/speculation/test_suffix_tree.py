# SPDX-License-Identifier: Apache-2.0
"""The suffix tree finds what a plain search over the windows finds, and its cache is bounded and never shared."""

import time
import tracemalloc
from array import array
from collections import Counter
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from quire_engine.sequence import Sequence
from quire_engine.speculation.suffix_cache import SuffixCache
from quire_engine.speculation.suffix_proposer import SuffixProposer
from quire_engine.speculation.suffix_tree import SuffixTree
from quire_spec.constants import AdapterDigest
from quire_spec.engine.sampling_params import SamplingParams
from quire_spec.engine.speculative_config import SpeculativeConfig

# Tokens whose bytes overlap, so that a match at a part of a token would be noticed.
TOKENS = st.lists(st.sampled_from([0, 1, 256, 65536]), min_size=1, max_size=8)


def _pack(tokens: list[int]) -> bytes:
    return array("I", tokens).tobytes()


def _followers(windows: list[list[int]], run: list[int]) -> Counter[int]:
    return Counter(w[len(run)] for w in windows if len(w) > len(run) and w[: len(run)] == run)


def _num_starts(windows: list[list[int]], run: list[int]) -> int:
    return sum(w[: len(run)] == run for w in windows)


def _windows(texts: list[list[int]]) -> list[list[int]]:
    return [text[start : start + 6] for text in texts for start in range(len(text))]


@given(st.lists(TOKENS, max_size=6), st.lists(TOKENS, max_size=6), TOKENS, st.integers(1, 6), st.floats(0.05, 1.0))
def test_tree_equals_a_search(
    texts: list[list[int]], others: list[list[int]], context: list[int], max_tokens: int, min_probability: float
) -> None:
    tree, kept, removed = SuffixTree(), _windows(texts), _windows(others)
    for window in removed + kept:
        tree.add(_pack(window))
    for window in removed:
        tree.remove(_pack(window))
    length, draft = tree.follow(_pack(context), 5, max_tokens, min_probability)
    lengths = [n for n in range(1, min(5, len(context)) + 1) if _followers(kept, context[-n:])]
    assert length == max(lengths, default=0)
    run, probability = context[len(context) - length :], 1.0
    for token in draft:
        followers = _followers(kept, run)
        # Any of the most frequent tokens is right.
        assert followers[token] == max(followers.values())
        probability *= followers[token] / _num_starts(kept, run)
        run = [*run, token]
    assert not draft or probability >= min_probability - 1e-9
    if length and len(draft) < max_tokens and (followers := _followers(kept, run)):
        assert probability * max(followers.values()) / _num_starts(kept, run) < min_probability + 1e-9
    for window in kept:
        tree.remove(_pack(window))
    assert (tree.num_windows, tree.num_bytes) == (0, SuffixTree().num_bytes)


def _sequence(prompt: list[int], output: list[int], adapter: str | None = None, salt: str | None = None) -> Sequence:
    sequence = Sequence(0, prompt, SamplingParams(), 0, 10_000)
    sequence.output_token_ids = list(output)
    sequence.adapter_digest = None if adapter is None else AdapterDigest(adapter)
    sequence.cache_salt = salt
    return sequence


def test_outputs_are_shared_only_within_an_adapter_and_a_salt() -> None:
    config = SpeculativeConfig("suffix", 4)
    proposer = SuffixProposer(config)
    proposer.finish(_sequence([1, 2, 3], [4, 5, 6, 7, 8], "a", "s"))
    others = [("a", None), (None, "s"), ("b", "s"), ("a", "t"), (None, None)]
    assert proposer.propose(_sequence([9, 2, 3], [], "a", "s"), 4) == [4, 5]
    assert not any(proposer.propose(_sequence([9, 2, 3], [], *other), 4) for other in others)


@settings(max_examples=30)
@given(st.lists(st.tuples(TOKENS, st.booleans()), max_size=30), st.integers(1, 3), st.integers(300, 20_000))
def test_cache_stays_within_its_limits(texts: list[tuple[list[int], bool]], max_outputs: int, max_bytes: int) -> None:
    cache = SuffixCache(6, max_outputs, max_bytes)
    sequences = []
    for tokens, interrupted in texts:
        sequence = _sequence([1, 2], [])
        for token in tokens * 2:
            sequence.output_token_ids.append(token)
            cache.store(sequence, is_complete=False)
            assert cache.num_bytes <= max_bytes
        sequences.append(sequence)
        if not interrupted:
            cache.store(sequence, is_complete=True)
    for sequence in sequences:
        cache.store(sequence, is_complete=True)
    for _ in range(400):
        cache.store(_sequence([], [1, 2]), is_complete=True)
    tree = cache.tree_for(_sequence([], []))
    assert tree is None or tree.num_windows <= 2 * (max_outputs + 1)


def test_estimated_memory_and_time() -> None:
    """The estimate is the memory that Python allocates, and one token costs microseconds."""
    random, cache = Random(0), SuffixCache(24, 10_000)
    proposer = SuffixProposer(SpeculativeConfig("suffix", 3))
    outputs = [[random.randrange(50_000) for _ in range(200)] for _ in range(40)]
    tracemalloc.start()
    for output in outputs:
        cache.store(_sequence([], output + output[:50]), is_complete=True)
    allocated, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert 0.7 * allocated < cache.num_bytes < 1.5 * allocated
    sequence = _sequence(outputs[0][:100], [])
    start = time.thread_time()
    for token in outputs[0][100:]:
        proposer.observe(sequence)
        proposer.propose(sequence, 3)
        sequence.output_token_ids.append(token)
    assert (time.thread_time() - start) / 100 < 500e-6
