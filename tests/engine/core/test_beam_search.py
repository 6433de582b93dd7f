# SPDX-License-Identifier: Apache-2.0
"""Beam search in float32 equals transformers' `generate(num_beams=...)`, token for token, for any schedule."""

import dataclasses
import itertools
import random
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from support.tiny_checkpoints import VOCAB, load_adapted_oracle, load_oracle, make_adapter, make_checkpoint

from quire_engine.core.engine import Engine
from quire_engine.kv_cache.swap_policy import SwapCosts
from quire_spec.engine.config import EngineConfig
from quire_spec.engine.sampling_params import SamplingParams
from quire_spec.engine.speculative_config import SpeculativeConfig
from quire_spec.errors import InvalidArgument
from quire_spec.model.memory_sizing import kv_block_bytes
from quire_spec.model.model_config import ModelConfig
from quire_spec.protocol.messages import SequenceRequest

NUM_TOKENS = 14
GRID = list(itertools.product((2, 4, 8), (-1.0, 0.0, 1.0, 2.0), (True, False, "never")))
IDS_PER_REQUEST = 16


class Case(NamedTuple):
    """A request and its outputs, best first, with their log probabilities."""

    prompt: list[int]
    params: dict[str, Any]
    adapter: str | None
    outputs: list[list[int]]
    scores: list[float]


class Suite(NamedTuple):
    folder: Path
    adapters: dict[str, Path]
    cases: list[Case]


def _search(oracle: Any, prompt: list[int], **arguments: Any) -> tuple[list[list[int]], list[float]]:
    """Return the outputs of transformers and their scores."""
    ids, stop_ids = torch.tensor([prompt]), arguments.get("eos_token_id") or []
    settings = {"max_new_tokens": NUM_TOKENS, "do_sample": False, "pad_token_id": 0, "return_dict_in_generate": True}
    with torch.inference_mode():
        result = oracle.generate(ids, attention_mask=torch.ones_like(ids), output_scores=True, **settings, **arguments)
    outputs = []
    for row in result.sequences[:, len(prompt) :].tolist():
        end = next((i + 1 for i, token in enumerate(row) if token in stop_ids), NUM_TOKENS)
        outputs.append(row[:end])
    return outputs, result.sequences_scores.tolist()


@pytest.fixture(scope="module")
def suite(tmp_path_factory: pytest.TempPathFactory) -> Suite:
    """All parameters on the base model, and some requests with an adapter."""
    suite = _make_suite(tmp_path_factory.mktemp("beams"), "llama", GRID)
    assert len({len(output) for case in suite.cases for output in case.outputs}) > 5
    return suite


@pytest.fixture(scope="module")
def gemma_suite(tmp_path_factory: pytest.TempPathFactory) -> Suite:
    """Some parameters on a model that has a window in some layers."""
    return _make_suite(tmp_path_factory.mktemp("gemma-beams"), "gemma3", GRID[2::6])


@pytest.fixture(scope="module")
def state_suite(tmp_path_factory: pytest.TempPathFactory) -> Suite:
    """Some parameters on a model whose layers have states."""
    return _make_suite(tmp_path_factory.mktemp("state-beams"), "qwen3_5", GRID[2::9])


def _make_suite(root: Path, name: str, grid: list[tuple[int, float, bool | str]]) -> Suite:
    rng = random.Random(2)
    folder = make_checkpoint(root / "model", name)
    adapters = {"a": make_adapter(folder, root / "a", seed=1)}
    oracles = {None: load_oracle(folder), "a": load_adapted_oracle(folder, adapters["a"])}
    stem = [rng.randrange(1, VOCAB) for _ in range(21)]
    cases = []
    for index, (width, length_penalty, early_stopping) in enumerate([*grid, *grid[::9]]):
        adapter = None if index < len(grid) else "a"
        prompt = stem[: rng.randint(1, 21)] + [rng.randrange(1, VOCAB) for _ in range(rng.randint(1, 20))]
        arguments = {"num_beams": width, "length_penalty": length_penalty, "early_stopping": early_stopping}
        first, _ = _search(oracles[adapter], prompt, num_beams=width, num_return_sequences=width)
        # Tokens of some beams, so that outputs of several lengths compete.
        stop_ids = sorted({first[0][5], first[-1][8], first[width // 2][11]})
        outputs, scores = _search(
            oracles[adapter], prompt, num_return_sequences=width, eos_token_id=stop_ids, **arguments
        )
        params = {"use_beam_search": True, "n": width, "max_tokens": NUM_TOKENS, "stop_token_ids": stop_ids}
        params |= {"length_penalty": length_penalty, "early_stopping": early_stopping}
        cases.append(Case(prompt, params, adapter, outputs, scores))
    return Suite(folder, adapters, cases)


def _engine(suite: Suite, num_blocks: int | None = None, **changes: Any) -> Engine:
    config = EngineConfig(
        model=str(suite.folder), dtype="float32", max_model_len=64, max_num_seqs=40, max_num_batched_tokens=512
    )
    config = dataclasses.replace(config, block_size=8, enable_lora=True, max_lora_rank=8, **changes)
    if num_blocks is not None:
        block_bytes = kv_block_bytes(ModelConfig.load(suite.folder), config.block_size, 4)
        config = dataclasses.replace(config, kv_cache_memory_bytes=num_blocks * block_bytes)
    config.validate()
    engine = Engine.from_config(config)
    for name, path in suite.adapters.items():
        engine.add_adapter(name, path, engine.read_adapter(path))
    return engine


def _run(engine: Engine, requests: list[SequenceRequest], arrivals_per_step: int = 5) -> dict[int, list[int]]:
    """Return the output of each sequence; requests arrive over time."""
    outputs: dict[int, list[int]] = {}
    waiting = list(reversed(requests))
    while waiting or engine.has_work:
        for _ in range(min(arrivals_per_step, len(waiting))):
            engine.add(waiting.pop())
        for result in engine.step().results:
            assert result.error == ""
            outputs.setdefault(result.id, []).extend(result.token_ids)
        engine.check_integrity()
    return outputs


SCENARIOS: dict[str, dict[str, Any]] = {
    "default": {},
    "one step ahead": {"async_scheduling": True},
    "in chunks, nothing cached": {"max_num_batched_tokens": 40, "enable_prefix_caching": False},
    "preempted": {"num_blocks": 60},
    "preempted, nothing cached": {"num_blocks": 60, "enable_prefix_caching": False},
    "preempted and swapped": {"num_blocks": 60, "swap_space": 0.001, "enable_prefix_caching": False},
    "speculation": {"speculative_config": SpeculativeConfig("ngram", 3)},
}


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_searches_and_other_sequences_equal_transformers(
    suite: Suite, scenario: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Swap always, even if it is not faster on this machine.
    monkeypatch.setattr(SwapCosts, "is_worthwhile", lambda *_: True)
    engine = _engine(suite, **SCENARIOS[scenario])
    requests = []
    for index, case in enumerate(suite.cases):
        first_id = index * 2 * IDS_PER_REQUEST
        requests.append(SequenceRequest(first_id, case.prompt, SamplingParams.from_mapping(case.params), case.adapter))
        greedy = {"temperature": 0.0, "max_tokens": NUM_TOKENS}
        requests.append(
            SequenceRequest(first_id + IDS_PER_REQUEST, case.prompt, SamplingParams.from_mapping(greedy), case.adapter)
        )
    outputs = _run(engine, requests)
    for index, case in enumerate(suite.cases):
        first_id = index * 2 * IDS_PER_REQUEST
        assert [outputs[first_id + i] for i in range(len(case.outputs))] == case.outputs
        assert len(outputs[first_id + IDS_PER_REQUEST]) == NUM_TOKENS
    stats = engine.stats()
    assert (stats.num_preemptions > 0) == ("preempted" in scenario)
    assert (stats.num_swapped_in_blocks > 0) == ("swapped" in scenario)
    assert stats.num_block_copies > 0 and stats.num_used_blocks == 0


@pytest.mark.parametrize("scenario", ["one step ahead", "in chunks, nothing cached", "preempted"])
def test_searches_equal_transformers_with_windows_in_some_layers(gemma_suite: Suite, scenario: str) -> None:
    _check_searches(gemma_suite, scenario)


@pytest.mark.parametrize("scenario", ["in chunks, nothing cached", "preempted"])
def test_searches_equal_transformers_with_states(state_suite: Suite, scenario: str) -> None:
    _check_searches(state_suite, scenario)


def _check_searches(suite: Suite, scenario: str) -> None:
    engine = _engine(suite, **SCENARIOS[scenario])
    cases = dict(enumerate(suite.cases))
    requests = [
        SequenceRequest(i * IDS_PER_REQUEST, c.prompt, SamplingParams.from_mapping(c.params), c.adapter)
        for i, c in cases.items()
    ]
    outputs = _run(engine, requests)
    for i, case in cases.items():
        assert [outputs[i * IDS_PER_REQUEST + beam] for beam in range(len(case.outputs))] == case.outputs
    assert engine.stats().num_block_copies > 0 and engine.stats().num_used_blocks == 0


def test_scores_n_and_logprobs(suite: Suite) -> None:
    """`n` outputs of more beams are the first ones; their log probabilities add up to the score."""
    engine, case = _engine(suite), suite.cases[-1]
    params = case.params | {"n": 2, "best_of": case.params["n"], "logprobs": 3}
    engine.add(SequenceRequest(0, case.prompt, SamplingParams.from_mapping(params), case.adapter))
    results = []
    while engine.has_work:
        results += engine.step().results
    assert [result.token_ids for result in results] == case.outputs[:2]
    for index, result in enumerate(results):
        assert result.logprobs is not None and result.cumulative_logprob is not None
        assert [entries[0][0] for entries in result.logprobs] == result.token_ids
        assert all(len(entries) == 4 and entries[0][1] <= entries[1][1] for entries in result.logprobs)
        assert sum(entries[0][1] for entries in result.logprobs) == pytest.approx(result.cumulative_logprob, abs=1e-4)
        score = result.cumulative_logprob / len(result.token_ids) ** case.params["length_penalty"]
        assert score == pytest.approx(case.scores[index], rel=1e-4)
    engine.add(
        SequenceRequest(
            16, case.prompt, SamplingParams.from_mapping(params | {"logprob_token_ids": [7, 9]}), case.adapter
        )
    )
    while engine.has_work:
        for result in engine.step().results:
            assert result.logprobs is not None
            assert all([entry[0] for entry in entries[1:]] == [7, 9] for entries in result.logprobs)


@pytest.mark.parametrize(
    ("params", "arguments"),
    [
        ({"min_tokens": 9}, {"min_new_tokens": 9}),
        ({"repetition_penalty": 1.3}, {"repetition_penalty": 1.3}),
        ({"temperature": 0.0}, {}),
    ],
    ids=str,
)
def test_parameters_change_the_log_probabilities(
    suite: Suite, params: dict[str, Any], arguments: dict[str, Any]
) -> None:
    case, oracle = suite.cases[4], load_oracle(suite.folder)
    stop_ids = case.params["stop_token_ids"]
    expected, _ = _search(oracle, case.prompt, num_beams=4, num_return_sequences=4, eos_token_id=stop_ids, **arguments)
    request = {"use_beam_search": True, "n": 4, "max_tokens": NUM_TOKENS, "stop_token_ids": stop_ids} | params
    outputs = _run(_engine(suite), [SequenceRequest(0, case.prompt, SamplingParams.from_mapping(request))])
    assert [outputs[i] for i in range(4)] == expected


def test_dropped_beams_free_their_blocks_and_an_abort_frees_all(suite: Suite) -> None:
    engine, prompt = _engine(suite, enable_prefix_caching=False), list(range(1, 18))
    params = {"use_beam_search": True, "n": 4, "max_tokens": 40, "early_stopping": "never"}
    engine.add(SequenceRequest(0, prompt, SamplingParams.from_mapping(params)))
    for step in range(30):
        assert engine.step().results == []
        engine.check_integrity()
        # Two blocks of the prompt are shared; each beam has at most its own blocks after them.
        assert engine.stats().num_used_blocks <= 2 + 4 * (-(-(17 + step + 1) // 8) - 2)
        assert engine.stats().num_running == 4
    engine.abort([0])
    assert not engine.has_work and engine.stats().num_used_blocks == 0


@pytest.mark.parametrize("num_steps", [0, 1, 5])
@pytest.mark.parametrize("ids", [[7, 8, 9, 10], [8], [10, 7]], ids=str)
def test_an_abort_of_any_beam_ends_the_whole_search(suite: Suite, ids: list[int], num_steps: int) -> None:
    """The text process sends the ids of all outputs. The engine makes a set of them, in which 8 comes before 7."""
    engine = _engine(suite)
    params = {"use_beam_search": True, "n": 4, "max_tokens": 40, "early_stopping": "never"}
    engine.add(SequenceRequest(7, [1, 2, 3], SamplingParams.from_mapping(params)))
    for _ in range(num_steps):
        engine.step()
    engine.abort([*ids, 7] if num_steps == 0 else ids)
    engine.check_integrity()
    assert not engine.has_work and engine.stats().num_used_blocks == 0


def test_rejects_searches_that_never_fit(suite: Suite) -> None:
    engine = _engine(suite, num_blocks=12, max_num_seqs=8)
    for params, message in (
        ({"n": 9}, "'n': 9 beams are more than max_num_seqs 8"),
        ({"n": 1, "best_of": 4}, "'best_of': 4 beams of 43 tokens need 24 KV blocks, but the cache has 12"),
    ):
        with pytest.raises(InvalidArgument, match=message):
            engine.add(
                SequenceRequest(
                    0, [1, 2, 3], SamplingParams.from_mapping({"use_beam_search": True, "max_tokens": 40} | params)
                )
            )
    assert not engine.has_work
