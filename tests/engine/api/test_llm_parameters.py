# SPDX-License-Identifier: Apache-2.0
"""Each sampling parameter has the same effect as in transformers, in any batch and after preemption."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from support.near_ties import NEAR_TIE, assert_top_tokens
from support.tiny_checkpoints import VOCAB, make_checkpoint

from quire_engine import LLM, RequestOutput, SamplingParams
from quire_engine.requests import limits
from quire_engine.worker.sampling import logprobs
from quire_spec.errors import InvalidArgument

PROMPTS = [[5, 9, 9, 30], [7] * 11, [101, 102, 103, 104, 105, 106, 107]]
NUM = 24


def _greedy(**params: Any) -> SamplingParams:
    return SamplingParams(**({"temperature": 0.0, "max_tokens": NUM} | params))


def test_logit_bias_and_allowed_tokens(models: Any) -> None:
    bias = {17: 6.0, 200: 4.0}
    expected = models.expected(PROMPTS[0], sequence_bias={(token,): value for token, value in bias.items()})
    allowed = [3, 50, 51, 300]
    outputs = models.tokens(PROMPTS, _greedy(logit_bias=bias), _greedy(allowed_token_ids=allowed), _greedy())
    assert outputs[0] == expected != models.expected(PROMPTS[0])
    assert set(outputs[1]) <= set(allowed) and len(outputs[1]) == NUM
    assert outputs[2] == models.expected(PROMPTS[2])
    drawn = models.tokens(PROMPTS, SamplingParams(temperature=5.0, allowed_token_ids=allowed, max_tokens=NUM, seed=1))
    assert all(set(tokens) <= set(allowed) for tokens in drawn) and set(drawn[0]) == set(allowed)


def test_bad_words_are_not_generated(models: Any) -> None:
    # Tokens that are complete characters, so that a word made of them is tokenized into the same tokens.
    tokenizer = models.llm.tokenizer
    assert tokenizer is not None
    whole = [i for i in range(3, VOCAB - 2) if tokenizer.token_text(i).isascii()]
    plain = _greedy(allowed_token_ids=whole, max_tokens=60)
    [free] = models.tokens(["the quick"], plain)
    for length in (1, 2, 3):
        runs = [free[i : i + length] for i in range(len(free) - length)]
        run = next(run for run in runs if tokenizer.bad_word_ids([tokenizer.decode(run)])[0] == run)
        word = tokenizer.decode(run)
        [output] = models.llm.generate("the quick", replace(plain, bad_words=(word,)), use_tqdm=False)
        tokens = output.outputs[0].token_ids
        bias = {(token,): -1e9 for token in range(VOCAB) if token not in whole}
        expected = models.expected(
            output.prompt_token_ids, bad_words_ids=tokenizer.bad_word_ids([word]), sequence_bias=bias, max_new_tokens=60
        )
        assert tokens == expected
        assert not any(tokens[i : i + length] == run for i in range(len(tokens)))


def test_min_tokens_forbids_every_stop_token(models: Any) -> None:
    free = models.expected(PROMPTS[2])
    stop = free[4]
    expected = models.expected(PROMPTS[2], eos_token_id=stop, min_new_tokens=10, pad_token_id=stop)
    assert stop not in expected[:10]
    assert models.tokens([PROMPTS[2]], _greedy(stop_token_ids=[stop], min_tokens=10)) == [expected]
    ended = models.tokens([PROMPTS[2]], _greedy(stop_token_ids=[stop]))[0]
    assert ended == free[: free.index(stop) + 1]


def test_min_tokens_forbids_eos_even_with_ignore_eos(models: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    end = models.expected(PROMPTS[2])[4]
    expected = models.expected(PROMPTS[2], eos_token_id=end, min_new_tokens=10, pad_token_id=end)[:10]
    monkeypatch.setattr(models.llm.engine.input_processor, "_eos_token_ids", frozenset([end]))
    [tokens] = models.tokens([PROMPTS[2]], _greedy(ignore_eos=True, min_tokens=10))
    assert (tokens[:10], len(tokens)) == (expected, NUM)


def test_truncate_prompt_tokens_keeps_the_end(models: Any) -> None:
    llm, text = models.llm, "the quick brown fox jumps over the lazy dog"
    all_ids = llm.tokenizer.encode(text)
    [output] = llm.generate(text, _greedy(truncate_prompt_tokens=5), use_tqdm=False)
    # The special token before the prompt is kept, as transformers does on truncation.
    assert output.prompt_token_ids == [all_ids[0], *all_ids[-4:]]
    [output] = llm.generate({"prompt_token_ids": all_ids}, _greedy(truncate_prompt_tokens=5), use_tqdm=False)
    assert output.prompt_token_ids == all_ids[-5:]
    [output] = llm.generate(text * 20, _greedy(truncate_prompt_tokens=-1, max_tokens=28), use_tqdm=False)
    assert len(output.prompt_token_ids) == 100 and len(output.outputs[0].token_ids) == 28
    [output] = llm.generate(text, _greedy(truncate_prompt_tokens=100), use_tqdm=False)
    assert output.prompt_token_ids == all_ids


def test_without_detokenize_outputs_contain_only_token_ids(models: Any) -> None:
    [output] = models.llm.generate("the quick", _greedy(detokenize=False, logprobs=1), use_tqdm=False)
    [completion] = output.outputs
    assert completion.text == "" and len(completion.token_ids) == NUM
    assert {entry.decoded_token for entries in completion.logprobs or [] for entry in entries.values()} == {None}


def test_output_i_of_n_equals_a_single_output_with_seed_plus_i(models: Any) -> None:
    llm, params = models.load(), SamplingParams(seed=7, max_tokens=NUM, logprobs=0)
    prompt = list(range(1, 60))
    alone = [llm.generate(prompt, replace(params, seed=7 + i), use_tqdm=False)[0].outputs[0] for i in range(4)]
    # The prompt is computed once, even without prefix caching.
    bare = models.load(enable_prefix_caching=False)
    steps = [(llm, llm.engine.stats().prefix_cache_hits), (bare, 0)]
    for engine_, hits in steps:
        [output] = engine_.generate(prompt, replace(params, n=4, prompt_logprobs=1), use_tqdm=False)
        assert [(o.index, o.token_ids, o.text) for o in output.outputs] == [
            (i, one.token_ids, one.text) for i, one in enumerate(alone)
        ]
        assert engine_.engine.stats().prefix_cache_hits >= hits + 3 * 48
        _check_prompt_logprobs(models, output, 1)
        assert output.num_cached_tokens == 0
        engine_.engine.check_integrity()


def test_seeds_are_reproducible_in_any_batch(models: Any) -> None:
    kinds: list[dict[str, Any]] = [
        {"top_k": 20, "logprobs": 3},
        {"repetition_penalty": 1.5, "top_p": 0.9},
        {"frequency_penalty": 1.0, "allowed_token_ids": list(range(100, 200))},
        {"min_p": 0.05, "logit_bias": {7: 3.0}, "temperature": 1.7},
        {"temperature": 0.0, "presence_penalty": 1.0},
        {"min_tokens": 9, "stop_token_ids": list(range(120)), "prompt_logprobs": 0},
    ]
    params = [SamplingParams(**({"seed": 40 + i, "max_tokens": 16} | kind)) for i, kind in enumerate(kinds)]
    prompts = [PROMPTS[i % 3] for i in range(len(params))]
    alone = [models.tokens([prompt], p)[0] for prompt, p in zip(prompts, params, strict=True)]
    assert models.tokens(prompts, *params) == alone
    assert models.tokens(prompts[::-1], *params[::-1]) == alone[::-1]
    assert models.tokens(prompts, *params, max_num_seqs=3, max_num_batched_tokens=8, block_size=8) == alone


def test_best_of_returns_the_most_likely_outputs(models: Any) -> None:
    params = SamplingParams(seed=7, max_tokens=NUM)
    [every] = models.llm.generate(PROMPTS[0], replace(params, n=6, logprobs=0), use_tqdm=False)
    ranked = sorted(every.outputs, key=lambda one: -one.cumulative_logprob)
    [output] = models.llm.generate(PROMPTS[0], replace(params, n=2, best_of=6), use_tqdm=False)
    assert [one.token_ids for one in output.outputs] == [one.token_ids for one in ranked[:2]]
    assert [(one.index, one.logprobs, one.cumulative_logprob) for one in output.outputs] == [
        (0, None, None),
        (1, None, None),
    ]


def _check_prompt_logprobs(models: Any, output: RequestOutput, count: int) -> None:
    ids = output.prompt_token_ids
    with torch.inference_mode():
        table = models.references[None](torch.tensor([ids])).logits[0].log_softmax(-1)
    assert output.prompt_logprobs is not None and len(output.prompt_logprobs) == len(ids)
    assert output.prompt_logprobs[0] is None
    for position, entries in enumerate(output.prompt_logprobs[1:]):
        row, token = table[position], ids[position + 1]
        assert entries is not None and next(iter(entries)) == token
        others = sorted(entries.keys() - {token}, key=lambda i: -entries[i].logprob)
        top = others if len(others) == count else sorted(entries, key=lambda i: -entries[i].logprob)
        assert len(top) == count
        assert_top_tokens(top, row)
        lowest, highest = (int((row > row[token] + tie).sum()) + 1 for tie in (NEAR_TIE, -NEAR_TIE))
        assert lowest <= entries[token].rank <= highest
        for token_id, entry in entries.items():
            assert math.isclose(entry.logprob, row[token_id], abs_tol=1e-4)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"max_num_batched_tokens": 8, "max_num_seqs": 4, "block_size": 8},
        {"enable_chunked_prefill": False},
        # Partially prefilled sequences are preempted in favor of decoding ones.
        {"max_num_batched_tokens": 8, "max_num_seqs": 6, "block_size": 8, "kv_cache_memory_bytes": 17 * 8192},
    ],
    ids=str,
)
def test_prompt_logprobs_equal_transformers(
    models: Any, fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Logits of a few rows at a time, so that these parts differ from the prefill chunks.
    monkeypatch.setattr(logprobs, "_MAX_CHUNK_BYTES", 3 * 4 * VOCAB)
    llm = models.load(**fields)
    prompts = [*PROMPTS, [33], list(range(40, 90)), [7] * 60]
    counts = [0, 2, 5, 1, 3, None]
    plain = llm.generate(prompts, _greedy(), use_tqdm=False)
    outputs = llm.generate(prompts, [_greedy(prompt_logprobs=count) for count in counts], use_tqdm=False)
    for output, count, other in zip(outputs, counts, plain, strict=True):
        assert output.outputs[0].token_ids == other.outputs[0].token_ids
        if count is None:
            assert output.prompt_logprobs is None and output.num_cached_tokens is not None
        else:
            # The blocks that the first run cached are not used.
            assert output.num_cached_tokens == 0
            _check_prompt_logprobs(models, output, count)
    llm.engine.check_integrity()


def test_prompts_with_logprobs_fill_but_do_not_read_the_prefix_cache(models: Any) -> None:
    llm, prompt = models.load(), list(range(1, 60))
    cached = [
        llm.generate(prompt, _greedy(prompt_logprobs=count), use_tqdm=False)[0].num_cached_tokens
        for count in (0, None, 1)
    ]
    assert cached == [0, 48, 0]


def test_all_logprobs_require_max_logprobs_minus_one(models: Any) -> None:
    with pytest.raises(InvalidArgument, match=r"'prompt_logprobs': -1 \(all 320 tokens\) is more than max_logprobs 20"):
        models.llm.generate(PROMPTS[0], _greedy(prompt_logprobs=-1), use_tqdm=False)
    with pytest.raises(InvalidArgument, match="'logprobs': 21 is more than max_logprobs 20"):
        models.llm.generate(PROMPTS[0], _greedy(logprobs=21), use_tqdm=False)
    llm = models.load(max_logprobs=-1)
    [output] = llm.generate(PROMPTS[0], _greedy(prompt_logprobs=-1, logprobs=-1, max_tokens=2), use_tqdm=False)
    _check_prompt_logprobs(models, output, VOCAB)
    assert [len(entries) for entries in output.outputs[0].logprobs or []] == [VOCAB] * 2


def test_number_of_prompt_logprobs_is_bounded(models: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_PROMPT_LOGPROBS", 44)
    models.llm.generate([7] * 11, _greedy(prompt_logprobs=3), use_tqdm=False)
    with pytest.raises(InvalidArgument, match="'prompt_logprobs': got 4 for each of 11 tokens; at most 44 in total"):
        models.llm.generate([7] * 11, _greedy(prompt_logprobs=4), use_tqdm=False)


def test_parameters_that_forbid_all_tokens_are_rejected(models: Any) -> None:
    [word] = models.llm.get_tokenizer().bad_word_ids(["x"])[:1]
    assert len(word) == 1
    for allowed, params in (([40, 41], {"stop_token_ids": [40, 41, 42], "min_tokens": 2}), (word, {"bad_words": "x"})):
        with pytest.raises(InvalidArgument, match="'allowed_token_ids': bad_words and min_tokens forbid all"):
            models.tokens([[1, 2]], SamplingParams(allowed_token_ids=allowed, **params))
        assert not models.llm.engine.has_work
        [tokens] = models.tokens([[1, 2]], SamplingParams(allowed_token_ids=[*allowed, 60], **params))
        assert tokens[:2] == [60, 60]


def test_text_parameters_require_a_tokenizer(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "bare", "llama")
    llm = LLM(model=folder, dtype="float32", max_model_len=64, kv_cache_memory_bytes=2**21)
    for name in ("stop", "bad_words"):
        with pytest.raises(InvalidArgument, match=f"'{name}'.*no tokenizer"):
            llm.generate([[1, 2]], SamplingParams(**{name: ["x"]}), use_tqdm=False)


@pytest.mark.parametrize("is_async", [False, True])
def test_log_probabilities_of_named_tokens(models: Any, is_async: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal to those of all tokens, beside requests with other numbers of log probabilities, in chunks of two rows."""
    monkeypatch.setattr(logprobs, "max_rows", lambda *sizes: 2)
    llm = models.load(async_scheduling=is_async, max_logprobs=-1)
    named = {"logprobs": 1, "logprob_token_ids": (17, 200, 3)}
    params = [_greedy(logprobs=-1), _greedy(**named), _greedy(), _greedy(logprobs=2), _greedy(**named, seed=1)]
    outputs = [r.outputs[0] for r in llm.generate([PROMPTS[0]] * 5, params, use_tqdm=False)]
    assert len({tuple(output.token_ids) for output in outputs}) == 1 and outputs[2].logprobs is None
    for i in (1, 4):
        for token, every, entries in zip(outputs[0].token_ids, outputs[0].logprobs, outputs[i].logprobs, strict=True):
            assert list(entries) == list(dict.fromkeys((token, 17, 200, 3)))
            for j, entry in entries.items():
                assert entry.logprob == pytest.approx(every[j].logprob, abs=1e-4)
                assert entry.rank == every[j].rank
    assert all(len(entries) in (2, 3) for entries in outputs[3].logprobs)


@pytest.mark.parametrize(
    ("params", "problem"),
    [
        ({"logprob_token_ids": [5]}, "requires logprobs"),
        ({"logprobs": 1, "logprob_token_ids": []}, "must not be empty"),
        ({"logprobs": 1, "logprob_token_ids": [VOCAB]}, "logprob_token_ids"),
    ],
)
def test_named_tokens_are_checked(models: Any, params: dict[str, Any], problem: str) -> None:
    with pytest.raises(InvalidArgument, match=problem):
        models.llm.generate("a", SamplingParams(**params), use_tqdm=False)
