# SPDX-License-Identifier: Apache-2.0
"""Conversations that are encoded in cached segments have the ids of the whole text, or are not cut."""

import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from support.tokenizer import make_tokenizer

from quire_engine.tokenization.segment_cache import SegmentCache
from quire_engine.tokenization.segmenter import Segmenter

KINDS = ("byte_level", "gpt2", "llama", "gemma", "metaspace", "unigram", "words")
TOKENS = ("<|im_start|>", "<|im_end|>", "<think>", "[INST]")
AMBIGUOUS = ("<|im_end|><|im_start|>", "x<|", "[INST][/INST]")
PIECES = (*TOKENS, *AMBIGUOUS, "<|", "|>", "<", " ", "  ", "\n", "a", "Hello, ", "日本", "🙂", "fox's", "1234", "<b>")


def make_segmenter(kind: str, ambiguous: bool = False) -> tuple[Segmenter, tokenizers.Tokenizer]:
    tokenizer = make_tokenizer(kind)
    tokenizer.add_special_tokens(list(TOKENS[:2]))
    tokenizer.add_tokens([tokenizers.AddedToken(text, normalized=False) for text in TOKENS[2:]])
    tokenizer.add_tokens([tokenizers.AddedToken(text, normalized=False) for text in AMBIGUOUS if ambiguous])
    tokenizer.add_tokens([tokenizers.AddedToken("<b>", normalized=True), tokenizers.AddedToken("a", lstrip=True)])
    return Segmenter(tokenizer, lambda texts: encode(tokenizer, texts)), tokenizer


def encode(tokenizer: tokenizers.Tokenizer, texts: list[str]) -> list[list[int]]:
    return [encoding.ids for encoding in tokenizer.encode_batch(texts, add_special_tokens=False)]


SEGMENTERS = {(kind, flag): make_segmenter(kind, flag) for kind in KINDS for flag in (False, True)}


@given(st.lists(st.sampled_from(PIECES), max_size=12).map("".join), st.booleans())
def test_ids_of_segments_are_those_of_the_text(text: str, ambiguous: bool) -> None:
    for kind in KINDS:
        segmenter, tokenizer = SEGMENTERS[kind, ambiguous]
        segments = segmenter.split(text)
        assert "".join(segments) == text
        ids = [i for segment_ids in encode(tokenizer, segments) for i in segment_ids]
        assert ids == encode(tokenizer, [text])[0], kind


def test_common_tokenizers_are_cut_behind_each_control_token() -> None:
    segmenter, _ = SEGMENTERS["byte_level", False]
    assert segmenter.is_exact
    assert segmenter.split("a<|im_end|>\n<|im_start|>b") == ["a<|im_end|>", "\n<|im_start|>", "b"]
    assert [kind for kind in KINDS if SEGMENTERS[kind, False][0].is_exact] != list(KINDS), "one of them must fall back"
    # A token that overlaps with another one cannot end a segment.
    assert SEGMENTERS["byte_level", True][0].split("a<|im_end|>b") == ["a<|im_end|>b"]


@given(st.lists(st.tuples(st.sampled_from(["", "s"]), st.lists(st.sampled_from("abcdefgh"), max_size=6)), max_size=20))
def test_the_cache_encodes_a_segment_once_and_stays_within_its_bound(texts: list[tuple[str, list[str]]]) -> None:
    cache, max_bytes = SegmentCache(max_bytes=1600), 1600
    for salt, segments in texts:
        encoded: list[str] = []

        def encode_all(missing: list[tuple[bool, str]], encoded: list[str] = encoded) -> list[list[int]]:
            encoded += [text for _, text in missing]
            return [[ord(text)] for _, text in missing]

        pairs = [(False, text) for text in segments]
        assert cache.encode(salt, pairs, encode_all) == [ord(text) for text in segments]
        assert len(encoded) == len(set(encoded)) and cache.num_bytes <= max_bytes
        cached = cache.encode(salt, pairs[-1:], encode_all)
        assert cached == [ord(text) for text in segments[-1:]]


def test_salts_share_no_segment() -> None:
    cache, calls = SegmentCache(), []
    for salt in ("", "a", "a", "b"):
        cache.encode(salt, [(True, "x")], lambda missing: calls.append(missing) or [[1] for _ in missing])
    assert len(calls) == 3
