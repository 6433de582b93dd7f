# SPDX-License-Identifier: Apache-2.0
"""The engine's greedy output in float32 equals that of transformers and peft, token for token, for any schedule.

The oracle generates without a cache, with one full forward per token, so that it shares no technique with the engine.
"""

import dataclasses
import functools
import json
import random
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch
from msgspec.structs import replace
from peft.tuners.lora.variants import calculate_alora_offsets
from support import quantized_checkpoints
from support.gguf_files import K_TYPES, write_quantized_llama
from support.graph_captures import replace_captures
from support.near_ties import assert_greedy_tokens, assert_top_tokens
from support.quantized_checkpoints import FOLDER, write_dequantized
from support.scripted_drafts import ScriptedProposer
from support.tiny_checkpoints import (
    CHECKPOINTS,
    TRANSFORMERS_CHECKPOINTS,
    VOCAB,
    load_adapted_oracle,
    load_oracle,
    load_summed_oracle,
    make_adapter,
    make_checkpoint,
)
from transformers import Mxfp4Config

from quire_engine.core.engine import Engine
from quire_engine.kv_cache import state_manager
from quire_engine.kv_cache.swap_policy import SwapCosts
from quire_engine.speculation.draft_policy import DraftPolicy
from quire_engine.weights.gguf_conversion import convert_gguf
from quire_spec.engine.config import EngineConfig
from quire_spec.engine.sampling_params import SamplingParams
from quire_spec.engine.speculative_config import SpeculativeConfig
from quire_spec.errors import InvalidArgument, NotFound
from quire_spec.model.kv_layout import KVLayout
from quire_spec.model.memory_sizing import kv_block_bytes
from quire_spec.model.model_config import ModelConfig
from quire_spec.protocol.messages import SequenceRequest

NUM_TOKENS = 20
MAX_MODEL_LEN = 128
# float32, 7 sums of up to 112 terms per layer, logits around 30; an error of 1e-5 is typical.
MAX_LOGPROB_ERROR = 1e-4


class Reference(NamedTuple):
    """Output of the oracle for a prompt."""

    token_ids: list[int]
    logprobs: torch.Tensor
    """[NUM_TOKENS, VOCAB]."""


class Output(NamedTuple):
    token_ids: list[int]
    logprobs: list[list[list[float]]]


@torch.inference_mode()
def _reference(oracle: Any, prompts: list[list[int]], guesses: Sequence[Output] | None = None) -> list[Reference]:
    """Generate greedily for all prompts in one batch, padded on the right, which causal attention ignores.

    With long rope, prompts run one by one, because the longest row of a batch determines the rotation of all rows.

    Args:
        guesses: outputs of another engine. The oracle verifies all tokens of them at once, and generates those that it
            does not confirm. The result does not depend on them.
    """
    is_long_rope = (getattr(oracle.config, "rope_parameters", None) or {}).get("rope_type") == "longrope"
    if len(prompts) > 1 and is_long_rope:
        return [reference for prompt in prompts for reference in _reference(oracle, [prompt])]
    tokens = torch.zeros(len(prompts), max(map(len, prompts)) + NUM_TOKENS, dtype=torch.int64)
    for row, prompt in zip(tokens, prompts, strict=True):
        row[: len(prompt)] = torch.tensor(prompt)
    ends = torch.tensor([len(prompt) for prompt in prompts])
    rows, logprobs = torch.arange(len(prompts)), []
    if guesses is not None and not is_long_rope:
        places = ends[:, None] + torch.arange(NUM_TOKENS)
        tokens[rows[:, None], places] = torch.tensor([guess.token_ids for guess in guesses])
        tables = oracle(tokens[:, :-1]).logits[rows[:, None], places - 1].log_softmax(-1)
        return [
            Reference(guess.token_ids, table)
            if table.argmax(-1).tolist() == guess.token_ids
            else _reference(oracle, [prompt])[0]
            for prompt, guess, table in zip(prompts, guesses, tables, strict=True)
        ]
    for i in range(NUM_TOKENS):
        logits = oracle(tokens[:, : int(ends.max()) + i]).logits[rows, ends + i - 1]
        logprobs.append(logits.log_softmax(-1))
        tokens[rows, ends + i] = logits.argmax(-1)
    outputs = [row[end : end + NUM_TOKENS].tolist() for row, end in zip(tokens, ends.tolist(), strict=True)]
    return [Reference(t, table) for t, table in zip(outputs, torch.stack(logprobs, dim=1), strict=True)]


def _prompts(num: int, seed: int) -> list[list[int]]:
    """Return random prompts of 1 to 80 tokens. Every other one starts with a prefix of one of three stems."""
    rng = random.Random(seed)
    stems = [[rng.randrange(VOCAB) for _ in range(40)] for _ in range(3)]
    prompts = []
    for i in range(num):
        stem = rng.choice(stems)[: rng.randint(1, 40)] if i % 2 else []
        prompts.append(stem + [rng.randrange(VOCAB) for _ in range(rng.randint(1, 40))])
    return prompts


def _config(folder: Path, num_blocks: int | None = None, **changes: Any) -> EngineConfig:
    config = EngineConfig(
        model=str(folder), dtype="float32", max_model_len=MAX_MODEL_LEN, max_num_seqs=40, max_num_batched_tokens=512
    )
    config = dataclasses.replace(config, **changes)
    if num_blocks is not None:
        shape = ModelConfig.load(folder)
        num_layers = None if shape.variants is None else KVLayout.from_model(shape, MAX_MODEL_LEN).total_layers
        bytes_per_block = kv_block_bytes(shape, config.block_size, 4, num_layers=num_layers)
        config = dataclasses.replace(config, kv_cache_memory_bytes=num_blocks * bytes_per_block)
    config.validate()
    return config


def _generate(
    engine: Engine,
    prompts: list[list[int]],
    adapter_digests: list[str | None] | None = None,
    *,
    arrival_ratio: float = 1.0,
    sums: Mapping[str, list[tuple[str, float]]] = MappingProxyType({}),
    **params: Any,
) -> list[Output]:
    """Return the outputs of all prompts. `sums` are the parts of adapters that are weighted sums.

    Prompts arrive over time: in most steps a share `arrival_ratio` of the remaining ones, at least one.
    """
    rng = random.Random(1)
    waiting = list(range(len(prompts)))
    rng.shuffle(waiting)
    outputs = [Output([], []) for _ in prompts]
    params = {"temperature": 0.0, "max_tokens": NUM_TOKENS, "logprobs": 3} | params
    while waiting or engine.has_work:
        for _ in range(max(1, int(arrival_ratio * len(waiting))) if rng.random() < 0.7 else 0):
            if waiting:
                i = waiting.pop()
                adapter_digest = adapter_digests[i] if adapter_digests else None
                request = SequenceRequest(
                    i, prompts[i], SamplingParams.from_mapping(params | {"seed": i}), adapter_digest
                )
                engine.add(replace(request, adapter_parts=sums.get(str(adapter_digest), [])))
        for digest, path in engine.pop_adapter_reads():
            engine.add_adapter(digest, path, engine.read_adapter(path))
        for result in engine.step().results:
            assert result.error == ""
            outputs[result.id].token_ids.extend(result.token_ids)
            outputs[result.id].logprobs.extend(result.logprobs)
        engine.check_integrity()
    return outputs


def _check(outputs: list[Output], references: list[Reference]) -> None:
    for output, reference in zip(outputs, references, strict=True):
        num_comparable = assert_greedy_tokens(output.token_ids, reference.token_ids, reference.logprobs)
        assert len(output.logprobs) == len(output.token_ids)
        for entries, table in list(zip(output.logprobs, reference.logprobs, strict=True))[:num_comparable]:
            assert_top_tokens([int(e[0]) for e in entries[1:]], table)
            assert max(abs(e[1] - table[int(e[0])]) for e in entries) < MAX_LOGPROB_ERROR


class Case:
    """A checkpoint with prompts and their outputs from transformers."""

    def __init__(self, folder: Path, name: str) -> None:
        self.folder = make_checkpoint(folder, name)
        self.prompts = _prompts(33 if name in (*FAMILIES, *HYBRIDS) else 20, seed=len(name))
        self._references: list[Reference] = []

    @property
    def references(self) -> list[Reference]:
        return self._find_references(None)

    def check(self, outputs: list[Output]) -> None:
        """Compare the outputs of all prompts."""
        _check(outputs, self._find_references(outputs))

    def _find_references(self, guesses: list[Output] | None) -> list[Reference]:
        if not self._references:
            self._references = _reference(load_oracle(self.folder), self.prompts, guesses)
        return self._references


@pytest.fixture(scope="module")
def cases(tmp_path_factory):
    """Return a function from the name of a checkpoint to its case."""

    @functools.cache
    def make(name: str) -> Case:
        return Case(tmp_path_factory.mktemp(name), name)

    return make


SCENARIOS: dict[str, dict[str, Any]] = {
    "whole prompts": {"enable_chunked_prefill": False, "max_num_batched_tokens": 4096},
    "in chunks": {"max_num_seqs": 8, "max_num_batched_tokens": 16, "enable_prefix_caching": False},
    "preempted": {"block_size": 8, "num_blocks": MAX_MODEL_LEN // 8 + 4},
    "preempted, nothing cached": {"block_size": 8, "num_blocks": 20, "enable_prefix_caching": False},
    "preempted in chunks": {"block_size": 8, "num_blocks": 24, "max_num_batched_tokens": 40},
    "preempted and swapped": {"block_size": 8, "num_blocks": MAX_MODEL_LEN // 8 + 4, "swap_space": 0.001},
    "preempted and swapped, nothing cached": {
        "block_size": 8,
        "num_blocks": 20,
        "swap_space": 0.001,
        "enable_prefix_caching": False,
    },
    "preempted, by classes of transformers": {
        "block_size": 8,
        "num_blocks": 24,
        "max_num_batched_tokens": 40,
        "model_impl": "transformers",
    },
    "blocks of 32": {"block_size": 32},
    "blocks of 64": {"block_size": 64, "max_num_batched_tokens": 50},
    "blocks of 128": {"block_size": 128, "max_num_seqs": 33},
}


DENSE_FAMILIES = [
    *("gemma", "olmo2", "olmo3", "seed_oss", "exaone4", "apertus", "hunyuan", "ernie4_5", "internlm3", "glm"),
    *("cohere2", "phi", "starcoder2", "gpt_neox", "granite4", "nemotron", "arcee"),
]
SPARSE_FAMILIES = ["glm4_moe", "minimax_m2", "ernie4_5_moe", "hunyuan_moe", "qwen2_moe", "olmoe", "lfm2_moe"]
LATENT_FAMILIES = ["deepseek_v2", "deepseek_v3", "glm4_moe_lite", "mistral4"]
FAMILIES = ["llama", "mistral", "qwen2", "qwen3", "opt", "phi3", "gemma2"]
# The other checkpoints of a family differ in the model, not in the engine.
SOME_SCENARIOS = ["preempted in chunks"]
SIMILAR = [
    "exaone4-unlimited",
    "mistral3-mistral4",
    "kimi_k25",
    "phi-qk_layernorm",
    "gpt_neox-sequential",
    "glm4_moe-ungrouped",
    "qwen2_vl",
    "lfm2-biases",
    *("granite4-mamba", "falcon_h1-norm", "nemotron_h-latent"),
]
"""Only their logits are compared with transformers, because their layers are like those of another checkpoint."""
# Their layers have states, which are not swapped.
HYBRIDS = ["qwen3_5", "qwen3_next"]
STATE_FAMILIES = ["lfm2", "granite4-moe", "falcon_h1", "nemotron_h", "kimi_linear"]
BY_TRANSFORMERS = ["llama", "qwen3", "gemma2"]
BY_NAME = {
    name: [each for each in SCENARIOS if "transformers" not in each or name in BY_TRANSFORMERS] for name in FAMILIES
}
PAIRS = [
    (name, scenario)
    for name in (*CHECKPOINTS, *TRANSFORMERS_CHECKPOINTS)
    if name not in SIMILAR
    for scenario in BY_NAME.get(name, SOME_SCENARIOS)
]
PAIRS += [
    (name, scenario)
    for name in HYBRIDS
    for scenario in SCENARIOS
    if "swapped" not in scenario and "transformers" not in scenario and scenario not in SOME_SCENARIOS
]


@pytest.mark.parametrize(("name", "scenario"), PAIRS)
def test_outputs_equal_transformers(cases, name, scenario, monkeypatch):
    case = cases(name)
    # Swap always, even if it is not faster on this machine.
    monkeypatch.setattr(SwapCosts, "is_worthwhile", lambda *_: True)
    engine = Engine.from_config(_config(case.folder, **SCENARIOS[scenario]))
    case.check(_generate(engine, case.prompts, arrival_ratio=0.2))
    # Sequences that free the blocks outside their window may have enough of them, and are not swapped without them.
    if set(ModelConfig.load(case.folder).sliding_windows) == {None}:
        assert (engine.stats().num_preemptions > 0) == scenario.startswith("preempted")
        assert (engine.stats().num_swapped_in_blocks > 0) == ("swapped" in scenario)


@pytest.mark.parametrize("name", ["llama", "stablelm"])
def test_classes_of_transformers_verify_drafts(cases, name):
    folder = cases(name).folder
    prompts = [2 * prompt[:40] for prompt in cases(name).prompts[:4]]
    drafts = SpeculativeConfig("ngram", 3, prompt_lookup_min=1, prompt_lookup_max=2)
    engine = Engine.from_config(_config(folder, model_impl="transformers", speculative_config=drafts))
    outputs = _generate(engine, prompts)
    _check(outputs, _reference(load_oracle(folder), prompts, outputs))
    assert engine.stats().num_draft_tokens > 0


def test_outputs_equal_transformers_with_mxfp4_experts():
    """transformers dequantizes the experts, too."""
    folder, prompts = FOLDER / "mxfp4", [[token % 128 for token in prompt] for prompt in _prompts(8, seed=7)]
    oracle = load_oracle(folder, quantization_config=Mxfp4Config(dequantize=True))
    engine = Engine.from_config(_config(folder))
    _check(_generate(engine, prompts), _reference(oracle, prompts))


@pytest.mark.parametrize("name", FAMILIES)
def test_one_request_at_a_time(cases, name):
    case = cases(name)
    engine = Engine.from_config(_config(case.folder, enable_prefix_caching=False))
    for prompt, reference in list(zip(case.prompts, case.references, strict=True))[:5]:
        _check(_generate(engine, [prompt]), [reference])


# Rounding a logit of 20 once has an error of up to 2^-4 in bfloat16 and 2^-7 in float16.
@pytest.mark.parametrize(("dtype", "max_error"), [("bfloat16", 2**-3), ("float16", 2**-6)])
@pytest.mark.parametrize("name", FAMILIES)
def test_half_precision_logprobs_are_close(cases, name, dtype, max_error):
    case = cases(name)
    engine = Engine.from_config(_config(case.folder, dtype=dtype, **SCENARIOS["preempted in chunks"]))
    outputs = _generate(engine, case.prompts)
    assert all(len(output.token_ids) == NUM_TOKENS for output in outputs)
    assert _mean_error(outputs, case.references) < max_error


def _mean_error(outputs: list[Output], references: list[Reference]) -> float:
    """Mean absolute error of the log probabilities after the prompts."""
    errors = [
        abs(entry[1] - float(reference.logprobs[0][int(entry[0])]))
        for output, reference in zip(outputs, references, strict=True)
        for entry in output.logprobs[0]
    ]
    return sum(errors) / len(errors)


@pytest.mark.parametrize("name", ["qwen3_5", "nemotron_h"])
def test_states_in_bfloat16_are_close(cases, name):
    """Prompts are computed in chunks, after each of which the states are rounded."""
    case, changes = cases(name), {"mamba_ssm_cache_dtype": "bfloat16", "max_num_batched_tokens": 40}
    engine = Engine.from_config(_config(case.folder, **changes))
    assert MAX_LOGPROB_ERROR < _mean_error(_generate(engine, case.prompts), case.references) < 2**-3


@pytest.mark.parametrize("name", FAMILIES)
def test_outputs_equal_transformers_with_packed_weights(cases, name, monkeypatch):
    case = cases(name)
    # Real weights are packed. Those of the test are below the size limit.
    monkeypatch.setattr(sys.modules["quire_kernels.linear"], "MIN_PACKED", 0)
    engine = Engine.from_config(_config(case.folder, max_num_seqs=12, max_num_batched_tokens=12))
    _check(_generate(engine, case.prompts[:12], arrival_ratio=0.5), case.references[:12])


@pytest.mark.parametrize("name", [*FAMILIES, "phi3-longrope", "stablelm"])
def test_outputs_equal_transformers_from_the_prefix_cache(cases, name):
    case = cases(name)
    engine = Engine.from_config(_config(case.folder, block_size=8))
    case.check(_generate(engine, case.prompts))
    hits = engine.stats().prefix_cache_hits
    _check(_generate(engine, case.prompts, arrival_ratio=0.5), case.references)
    expected_hits = sum(min(len(prompt) // 8 * 8, len(prompt) - 1) for prompt in case.prompts)
    assert engine.stats().prefix_cache_hits - hits == expected_hits
    assert engine.stats().num_block_copies > 0


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"async_scheduling": True},
        {"max_num_batched_tokens": 16, "max_num_seqs": 8},
        {"scheduling_policy": "priority"},
    ],
    ids=str,
)
def test_blocks_that_have_left_the_window_of_all_layers_are_freed(cases, changes):
    """Six sequences of up to 13 blocks run in 22. One that generates keeps the blocks of its window of 24 tokens."""
    case, preempting = cases("mistral"), "scheduling_policy" in changes
    longest = sorted(range(len(case.prompts)), key=lambda i: len(case.prompts[i]))[-6:]
    engine = Engine.from_config(_config(case.folder, 22, block_size=8, **changes))
    for _ in range(2):  # the second time from the prefix cache, as far as it contains the prompts
        outputs: list[list[int]] = [[] for _ in longest]
        most_running, used, waiting = 0, [], list(range(len(longest)))
        while waiting or engine.has_work:
            # With priorities, each request preempts those before it.
            for i in waiting[: 1 if preempting else None]:
                params = {"temperature": 0.0, "max_tokens": NUM_TOKENS}
                engine.add(
                    SequenceRequest(
                        i,
                        case.prompts[longest[i]],
                        SamplingParams.from_mapping(params),
                        priority=-i if preempting else 0,
                    )
                )
                waiting.remove(i)
            result = engine.step()
            for delta in result.results:
                outputs[delta.id] += delta.token_ids
            most_running = max(most_running, result.stats.num_running)
            if result.stats.num_running and all(outputs):
                used.append(result.stats.num_used_blocks / result.stats.num_running)
            engine.check_integrity()
        assert outputs == [case.references[i].token_ids for i in longest]
        assert preempting or (most_running > 2 and max(used) <= 5)
    assert (engine.stats().num_preemptions > 0) == preempting


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"async_scheduling": True},
        {"max_num_batched_tokens": 16, "max_num_seqs": 8},
        {"speculative_config": SpeculativeConfig("ngram", 3, prompt_lookup_min=1, prompt_lookup_max=2)},
    ],
    ids=["default", "async", "chunks", "ngram"],
)
@pytest.mark.parametrize("name", ["gemma2", "gemma3", "gemma4", "gemma4_unified", "gpt_oss", "qwen2-windows"])
def test_layers_with_a_window_keep_the_blocks_of_their_window(cases, name, changes):
    """A sequence has three blocks for the window of 16 tokens, and all blocks of the other layers."""
    case, num_tokens = cases(name), MAX_MODEL_LEN - 40
    prompt = [random.Random(4).randrange(VOCAB) for _ in range(40)]
    layout = KVLayout.from_model(ModelConfig.load(case.folder), MAX_MODEL_LEN)
    num_windowed = layout.num_groups - layout.num_full_groups
    assert num_windowed > 0 < layout.num_full_groups
    engine = Engine.from_config(_config(case.folder, block_size=8, **changes))
    params = {"temperature": 0.0, "max_tokens": num_tokens, "ignore_eos": True}
    outputs = []
    for _ in range(2):  # the second time from the prefix cache
        engine.add(SequenceRequest(0, prompt, SamplingParams.from_mapping(params)))
        outputs.append([])
        while engine.has_work:
            result = engine.step()
            outputs[-1] += [token for delta in result.results for token in delta.token_ids]
            engine.check_integrity()
            # A step also has blocks for three draft tokens.
            num_tokens_of_step = 1 + 3 * ("speculative_config" in changes)
            num_blocks = -(-(len(prompt) + len(outputs[-1]) + num_tokens_of_step) // 8)
            if outputs[-1]:
                assert result.stats.num_used_blocks <= layout.num_full_groups * num_blocks + num_windowed * 4
    assert engine.stats().prefix_cache_hits == 32 + 7
    assert bool(engine.stats().num_draft_tokens) == ("speculative_config" in changes)
    full = torch.tensor([prompt + outputs[0]])
    with torch.inference_mode():
        logits = load_oracle(case.folder)(full).logits[0, len(prompt) - 1 : -1]
    assert outputs[0] == outputs[1] == logits.argmax(-1).tolist()


@pytest.mark.parametrize("name", [*HYBRIDS, *STATE_FAMILIES])
def test_prompts_continue_after_snapshots_of_states(cases, name):
    case = cases(name)
    engine = Engine.from_config(_config(case.folder, block_size=8))
    case.check(_generate(engine, case.prompts))
    hits = engine.stats().prefix_cache_hits
    some = [index for index, prompt in enumerate(case.prompts) if len(prompt) > 8][:8]
    prompts, references = [case.prompts[i] for i in some], [case.references[i] for i in some]
    for prompt, reference in zip(prompts, references, strict=True):
        _check(_generate(engine, [prompt]), [reference])
        _check(_generate(engine, [prompt]), [reference])
    # The second time, the snapshot before the last token exists; one of 18 snapshots may have been evicted before.
    stats = engine.stats()
    assert stats.prefix_cache_hits - hits >= sum((len(prompt) - 1) // 8 * 8 for prompt in prompts)
    assert (stats.num_states, stats.num_used_states) == (50, 0) and 0 < stats.num_state_snapshots <= 50


def test_prompts_with_the_same_beginning_continue_where_they_begin_to_differ(cases):
    case = cases("qwen3_5")
    rng = random.Random(1)
    stem = [rng.randrange(VOCAB) for _ in range(48)]
    prompts = [stem + [rng.randrange(VOCAB) for _ in range(20)] for _ in range(4)]
    references = _reference(load_oracle(case.folder), prompts)
    engine = Engine.from_config(_config(case.folder, block_size=16))
    hits = []
    for prompt, reference in zip(prompts, references, strict=True):
        before = engine.stats().prefix_cache_hits
        _check(_generate(engine, [prompt]), [reference])
        hits.append(engine.stats().prefix_cache_hits - before)
    # The second prompt finds the blocks of the first one, but a state only at its end. It leaves one after the stem.
    assert hits == [0, 0, 48, 48]


NGRAM_DRAFTS = SpeculativeConfig("ngram", 3, prompt_lookup_min=1, prompt_lookup_max=2)


@pytest.mark.parametrize("speculative_config", [None, NGRAM_DRAFTS], ids=["plain", "drafts"])
@pytest.mark.parametrize("enable_prefix_caching", [True, False])
def test_forks_of_a_sequence_with_a_state(cases, enable_prefix_caching, speculative_config):
    case = cases("qwen3_5")
    changes = {"block_size": 8, "enable_prefix_caching": enable_prefix_caching, "max_num_batched_tokens": 40}
    engine = Engine.from_config(_config(case.folder, **changes, speculative_config=speculative_config))
    prompt, reference = max(zip(case.prompts, case.references, strict=True), key=lambda pair: len(pair[0]))
    params = SamplingParams.from_mapping({"temperature": 0.0, "max_tokens": NUM_TOKENS})
    outputs: dict[int, list[int]] = {0: [], 1: [], 2: []}
    for fork in outputs:
        engine.add(SequenceRequest(fork, prompt, params, parent_id=0 if fork else None))
    while engine.has_work:
        for result in engine.step().results:
            outputs[result.id] += result.token_ids
        engine.check_integrity()
    assert outputs == dict.fromkeys(outputs, reference.token_ids)
    assert bool(engine.stats().num_draft_tokens) == (speculative_config is not None)


STATE_DRAFTS: dict[str, dict[str, Any]] = {
    "snapshots": {"max_num_batched_tokens": 40},
    "preempted": {"num_blocks": 20, "enable_prefix_caching": False},
    "bfloat16 states": {"mamba_ssm_cache_dtype": "bfloat16"},
    "two ranks": {"tensor_parallel_size": 2},
}


def _script_drafts(engine: Engine, prompts: Any, references: Any, adapter_digests: Any) -> None:
    """Make the engine verify drafts that are right for some tokens. Some are accepted as a whole, some in part, and
    some not at all."""
    keys = ((digest, tuple(prompt)) for digest, prompt in zip(adapter_digests, prompts, strict=True))
    outputs = {key: reference.token_ids for key, reference in zip(keys, references, strict=True)}

    def continuation(sequence, _):
        key = sequence.adapter_digest, tuple(sequence.prompt_token_ids)
        return outputs[key][len(sequence.output_token_ids) :]

    planner = engine._scheduler.draft_planner
    # On this device, the policy gives drafts to steps of any size.
    planner._proposer, planner._policy = ScriptedProposer(continuation, 0.8), DraftPolicy("cuda", 3)


@pytest.mark.parametrize(
    ("name", "scenario"),
    [(name, "snapshots") for name in ("qwen3_5", *STATE_FAMILIES)]
    + [("qwen3_5", scenario) for scenario in STATE_DRAFTS if scenario != "snapshots"]
    + [("nemotron_h", "preempted")],
)
def test_states_do_not_contain_rejected_drafts(cases, name, scenario, monkeypatch):
    case = cases(name)
    # A decoding sequence takes a snapshot after every block.
    monkeypatch.setattr(state_manager, "_MIN_DECODE_TOKENS", 8)
    changes = {"block_size": 8, "max_num_seqs": 12} | STATE_DRAFTS[scenario]
    engine = Engine.from_config(_config(case.folder, speculative_config=SpeculativeConfig("ngram", 3), **changes))
    _script_drafts(engine, case.prompts, case.references, [None] * len(case.prompts))
    generated = _generate(engine, case.prompts, arrival_ratio=0.2)
    if "mamba_ssm_cache_dtype" in changes:
        plain = _generate(Engine.from_config(_config(case.folder, **changes)), case.prompts)
        assert [output.token_ids for output in generated] == [output.token_ids for output in plain]
    else:
        _check(generated, case.references)
    counts, stats = engine._scheduler.draft_planner.counts, engine.stats()
    assert counts.num_draft_tokens > counts.num_accepted_tokens > sum(counts.accepted_per_position[1:]) > 10
    assert bool(stats.num_preemptions) == scenario.startswith("preempted")


@pytest.mark.parametrize("name", ["gemma2", "gemma3", "gpt_oss", "qwen2-windows"])
def test_more_sequences_run_if_layers_with_a_window_have_their_own_blocks(cases, name, monkeypatch):
    """In the memory of two sequences of the longest length."""
    case = cases(name)
    prompts, most_running = [[i] * 60 for i in range(8)], []
    for _ in range(2):
        engine = Engine.from_config(_config(case.folder, 2 * MAX_MODEL_LEN // 8, block_size=8))
        for i, prompt in enumerate(prompts):
            engine.add(
                SequenceRequest(
                    i, prompt, SamplingParams.from_mapping({"temperature": 0.0, "max_tokens": 60, "ignore_eos": True})
                )
            )
        num_running = []
        while engine.has_work:
            num_running.append(engine.step().stats.num_running)
        most_running.append(sum(num_running) / len(num_running))
        monkeypatch.setattr(KVLayout, "from_model", lambda shape, *_: KVLayout.uniform(shape.num_layers))
    assert most_running[0] > 1.2 * most_running[1], most_running


@pytest.mark.parametrize("fork_at_start", [True, False])
def test_forks_of_a_prompt_that_crosses_the_long_rope_threshold(cases, fork_at_start):
    folder = cases("phi3-longrope").folder
    threshold = ModelConfig.load(folder).long_rope_threshold
    prompt = [random.Random(3).randrange(VOCAB) for _ in range(threshold - 3)]
    (reference,) = _reference(load_oracle(folder), [prompt])
    engine = Engine.from_config(_config(folder, block_size=8))
    params = {"temperature": 0.0, "max_tokens": NUM_TOKENS}
    engine.add(SequenceRequest(0, prompt, SamplingParams.from_mapping(params)))
    outputs: dict[int, list[int]] = {0: [], 1: [], 2: []}
    for step in range(3 * NUM_TOKENS):
        # At the start, when forks share the prompt with the parent; or after the parent has crossed the threshold.
        if step == (0 if fork_at_start else 6):
            engine.add(SequenceRequest(1, prompt, SamplingParams.from_mapping(params), parent_id=0))
            engine.add(SequenceRequest(2, prompt, SamplingParams.from_mapping(params), parent_id=0))
        for result in engine.step().results:
            outputs[result.id] += result.token_ids
        engine.check_integrity()
    assert outputs == dict.fromkeys(outputs, reference.token_ids)


ADAPTERS: dict[str, dict[str, Any]] = {
    "all linears": {"r": 8},
    "queries and values": {"r": 4, "target_modules": ["q_proj", "v_proj"], "lora_alpha": 32},
    "rsLoRA with patterns": {
        "r": 6,
        "use_rslora": True,
        "rank_pattern": {"down_proj": 1, "self_attn.*": 16},
        "alpha_pattern": {".*k_proj": 40},
    },
    "the mlp of one layer": {
        "r": 3,
        "target_modules": ["gate_proj", "up_proj", "down_proj"],
        "layers_to_transform": 1,
        "use_dora": True,
    },
    "the vocabulary": {"r": 6, "target_modules": ["embed_tokens", "v_proj", "lm_head"], "use_rslora": True},
    "whole vocabulary and norms": {
        "r": 2,
        "target_modules": ["v_proj"],
        "modules_to_save": ["embed_tokens", "lm_head", "norm"],
    },
    "keys, small": {"r": 1, "target_modules": ["k_proj", "o_proj", "up_proj"], "lora_alpha": 4, "lora_bias": True},
}


# Names of these linears in other families.
TARGETS = {
    "phi3": {**dict.fromkeys(["q_proj", "k_proj", "v_proj"], "qkv_proj"), "gate_proj": "gate_up_proj"},
    "opt": {"o_proj": "out_proj", "gate_proj": "fc1", "down_proj": "fc2"},
}
TARGETS["phi3"]["up_proj"] = TARGETS["phi3"]["gate_proj"]
TARGETS["opt"]["up_proj"] = TARGETS["opt"]["gate_proj"]


def _rename_targets(config: dict[str, Any], family: str) -> dict[str, Any]:
    """Return a LoraConfig with the names of a family's linears."""
    text = json.dumps(config)
    for name, other in TARGETS.get(family, {}).items():
        text = re.sub(rf"\b{name}\b", other, text)
    return json.loads(text)


class AdapterCase(NamedTuple):
    folder: Path
    adapters: dict[str | None, Path | None]
    prompts: list[list[int]]
    adapter_digests: list[str | None]
    references: list[Reference]


@pytest.fixture(scope="module")
def adapter_cases(tmp_path_factory):
    """Return a function from a checkpoint to seven adapters and the base, with the outputs of six prompts for each."""

    @functools.cache
    def make(checkpoint: str) -> AdapterCase:
        root = tmp_path_factory.mktemp(checkpoint)
        folder = make_checkpoint(root / "model", checkpoint)
        adapters: dict[str | None, Path | None] = {None: None}
        for seed, (name, config) in enumerate(ADAPTERS.items()):
            adapters[name] = make_adapter(folder, root / name, seed=seed, **_rename_targets(config, checkpoint))
        prompts = _prompts(6, seed=5)
        adapter_digests = [name for name in adapters for _ in prompts]
        guesses = _generate(_engine_with(folder, adapters), prompts * len(adapters), adapter_digests)
        references = []
        for i, path in enumerate(adapters.values()):
            oracle = load_oracle(folder) if path is None else load_adapted_oracle(folder, path)
            references += _reference(oracle, prompts, guesses[i * len(prompts) :][: len(prompts)])
        return AdapterCase(folder, adapters, prompts * len(adapters), adapter_digests, references)

    return make


def _adapted_engine(case: AdapterCase, **changes: Any) -> Engine:
    return _engine_with(case.folder, case.adapters, **changes)


def _engine_with(folder: Path, adapters: Mapping[str | None, Path | None], **changes: Any) -> Engine:
    defaults = {"enable_lora": True, "max_loras": 7, "max_lora_rank": 16, "block_size": 8, "lora_modules_to_save": True}
    engine = Engine.from_config(_config(folder, **(defaults | changes)))
    for name, path in adapters.items():
        if name is not None:
            engine.add_adapter(name, path, engine.read_adapter(path))
    return engine


def _check_adapter(folder: Path, adapter: Path, prompts: list[list[int]], **changes: Any) -> None:
    """Compare the outputs with an adapter with those of peft."""
    outputs = _generate(_engine_with(folder, {"only": adapter}, **changes), prompts, ["only"] * len(prompts))
    _check(outputs, _reference(load_adapted_oracle(folder, adapter), prompts, outputs))


def test_each_adapter_changes_the_output(adapter_cases):
    adapted = adapter_cases("llama")
    tokens = [reference.token_ids for reference in adapted.references]
    assert len({str(tokens[i : i + 6]) for i in range(0, len(tokens), 6)}) == len(adapted.adapters)


@pytest.mark.parametrize(
    ("name", "target_modules"),
    [
        *((name, r".*language_model.*\.(q_proj|v_proj|o_proj|down_proj)") for name in ("gemma3-vision", "mistral3")),
        *((name, r".*language_model.*\.(k_proj|up_proj|down_proj)") for name in ("qwen2_5_vl", "qwen3_vl")),
        ("gemma4-moe", ["q_proj", "k_proj", "o_proj", "gate_proj", "down_proj"]),
        *((name, ["q_proj", "k_proj", "v_proj", "o_proj"]) for name in ("qwen3_moe-mixed", "mixtral", "gpt_oss")),
        *((name, "all-linear") for name in TRANSFORMERS_CHECKPOINTS if name != "gpt2"),
        *(
            (name, "all-linear")
            for name in (
                *(*DENSE_FAMILIES, "gemma4", "gemma4_unified", *SPARSE_FAMILIES, *LATENT_FAMILIES),
                *("lfm2", "granite4-moe", "kimi_linear"),
            )
        ),
        ("llama4", ["q_proj", "k_proj", "o_proj", "gate_proj", "down_proj"]),  # PEFT cannot run its router
        # PEFT refuses out_proj of these models.
        ("falcon_h1", ["in_proj", "q_proj", "v_proj", "o_proj", "gate_proj", "down_proj"]),
        ("nemotron_h-latent", ["fc1_latent_proj", "fc2_latent_proj", "in_proj"]),
        ("nemotron_h", ["in_proj", "q_proj", "v_proj", "o_proj", "up_proj", "down_proj"]),
        ("qwen3_next", ["q_proj", "o_proj", "in_proj_qkvz", "in_proj_ba", "out_proj", "shared_expert_gate"]),
        ("qwen3_5_moe", ["in_proj_qkv", "in_proj_z", "in_proj_a", "in_proj_b", "out_proj", "v_proj"]),
        ("qwen3_5-vision", r".*language_model.*\.(q_proj|in_proj_qkv|in_proj_z|out_proj|down_proj)"),
    ],
)
def test_adapter_of_some_linears_equals_peft(cases, name, target_modules, tmp_path):
    case, prompts = cases(name), _prompts(6, seed=5)
    path = make_adapter(case.folder, tmp_path, target_modules=target_modules)
    # For PEFT, the linears of these models include those of all experts.
    _check_adapter(case.folder, path, prompts, lora_experts=name in (*SPARSE_FAMILIES, *LATENT_FAMILIES, "kimi_linear"))


def test_adapters_of_classes_of_transformers_equal_peft(adapter_cases):
    adapted, with_norms = adapter_cases("llama"), "whole vocabulary and norms"
    engine = _adapted_engine(
        adapted._replace(adapters={name: path for name, path in adapted.adapters.items() if name != with_norms}),
        model_impl="transformers",
        max_loras=2,
    )
    rows = [i for i, name in enumerate(adapted.adapter_digests) if name != with_norms]
    prompts, digests, references = ([each[i] for i in rows] for each in adapted[2:])
    _check(_generate(engine, prompts, digests, arrival_ratio=0.3), references)
    with pytest.raises(InvalidArgument, match="which is supported for embed_tokens and lm_head; train other modules"):
        engine.read_adapter(adapted.adapters[with_norms])


@pytest.mark.parametrize("config", [{"use_dora": True}, {"lora_bias": True}], ids=str)
def test_magnitudes_and_biases_of_absorbed_projections_equal_peft(cases, config, tmp_path):
    """The engine never computes the output of kv_b_proj, which these would change."""
    case, prompts = cases("deepseek_v3"), _prompts(6, seed=5)
    path = make_adapter(case.folder, tmp_path, target_modules=["kv_b_proj", "q_b_proj"], **config)
    _check_adapter(case.folder, path, prompts)


ADAPTER_SCENARIOS: dict[str, dict[str, Any]] = {
    "one batch": {},
    "in chunks": {"max_num_batched_tokens": 40},
    "two slots for seven": {"max_loras": 2},
    "one slot for seven": {"max_loras": 1, "enable_prefix_caching": False},
    "preempted": {"num_blocks": MAX_MODEL_LEN // 8 + 4},
    "preempted, two slots": {"num_blocks": MAX_MODEL_LEN // 8 + 4, "max_loras": 2, "enable_prefix_caching": False},
    "drafts": {"speculative_config": NGRAM_DRAFTS, "num_blocks": MAX_MODEL_LEN // 8 + 4, "max_num_seqs": 3},
}


ADAPTER_PAIRS = [("llama", scenario) for scenario in ADAPTER_SCENARIOS if scenario != "drafts"]
ADAPTER_PAIRS += [(c, scenario) for c in ["qwen3_5"] for scenario in ("in chunks", "preempted, two slots", "drafts")]
ADAPTER_PAIRS += [(c, "preempted, two slots") for c in (*FAMILIES[1:], "llama-head_dim", "llama-biases")]


@pytest.mark.parametrize(("checkpoint", "scenario"), ADAPTER_PAIRS)
def test_adapters_in_one_batch_equal_peft(adapter_cases, checkpoint, scenario):
    adapted = adapter_cases(checkpoint)
    engine = _adapted_engine(adapted, **ADAPTER_SCENARIOS[scenario])
    if scenario == "drafts":
        _script_drafts(engine, adapted.prompts, adapted.references, adapted.adapter_digests)
    outputs = _generate(engine, adapted.prompts, adapted.adapter_digests, arrival_ratio=0.3)
    _check(outputs, adapted.references)
    if "slot" in scenario:
        assert engine.stats().num_adapter_evictions > 0
    if scenario == "drafts":
        counts = engine._scheduler.draft_planner.counts
        assert counts.num_draft_tokens > counts.num_accepted_tokens > sum(counts.accepted_per_position[1:]) > 10


QUANTIZED = ("awq", "bitsandbytes-nf4", "ct-fp8-block", "ct-int4-zeros", "ct-int8", "gptq-desc_act", "modelopt-nvfp4")


@pytest.mark.parametrize("name", (*QUANTIZED, "gguf"))
def test_adapters_on_a_quantized_base_equal_peft_on_the_dequantized_base(name, tmp_path):
    folder = quantized_checkpoints.FOLDER / name
    if name == "gguf":
        folder = tmp_path / "converted"
        convert_gguf(write_quantized_llama(tmp_path, K_TYPES), folder)
    dequantized = write_dequantized(folder, tmp_path / "dequantized")
    adapter = make_adapter(dequantized, tmp_path / "adapter", use_dora=True)
    prompts = [[token % quantized_checkpoints.VOCAB for token in prompt] for prompt in _prompts(8, seed=1)]
    engine, digests = _engine_with(folder, {"a": adapter}), [None] * 8 + ["a"] * 8
    outputs = _generate(engine, prompts * 2, digests, arrival_ratio=0.3)
    references = _reference(load_oracle(dequantized), prompts, outputs[:8])
    references += _reference(load_adapted_oracle(dequantized, adapter), prompts, outputs[8:])
    _check(outputs, references)


RANKS = {"r8": 8, "r16": 16, "r128": 128, "r9": 9, "r64": 64}


@pytest.fixture(scope="module")
def rank_case(tmp_path_factory):
    """Adapters of ranks from 8 to 128, one with DoRA and one of two modules; four prompts and outputs for each."""
    root = tmp_path_factory.mktemp("ranks")
    folder = make_checkpoint(root / "model", "llama")
    configs: dict[str, dict[str, Any]] = {name: {"r": rank, "lora_alpha": 2 * rank} for name, rank in RANKS.items()}
    configs |= {"dora": {"r": 8, "use_dora": True}, "some": {"r": 32, "target_modules": ["q_proj", "v_proj"]}}
    adapters = {
        name: make_adapter(folder, root / name, i, **config) for i, (name, config) in enumerate(configs.items())
    }
    prompts, references = _prompts(4, seed=7), []
    for path in adapters.values():
        references += _reference(load_adapted_oracle(folder, path), prompts)
    digests = [name for name in adapters for _ in prompts]
    return AdapterCase(folder, dict(adapters), prompts * len(adapters), digests, references)


@pytest.mark.parametrize(
    ("num_pages", "options"),
    [
        (256, {}),
        (1 << 10, {"max_loras": 7}),
        (140, {}),
        (128, {"enable_prefix_caching": False}),
        (140, {"tensor_parallel_size": 2}),
    ],
)
def test_adapters_of_many_ranks_share_pages_and_equal_peft(rank_case, num_pages, options):
    """With few pages, adapters leave for each other while others run, which leaves gaps between them."""
    limits = {"max_loras": 9, "max_lora_rank": 128, "max_loaded_lora_ranks": num_pages, "lora_modules_to_save": False}
    engine = _adapted_engine(rank_case, **(limits | options))
    for _ in range(2):
        outputs = _generate(engine, rank_case.prompts, rank_case.adapter_digests, arrival_ratio=0.3)
        _check(outputs, rank_case.references)
    in_slots = engine.adapter_states()
    assert (engine.stats().num_adapter_evictions > 0) == (num_pages < 256)
    assert (set(in_slots.values()) == {"slot"}) == (num_pages >= 256)


def test_eight_adapters_of_rank_8_and_one_of_rank_128_share_192_pages(rank_case, tmp_path):
    adapters: dict[str | None, Path | None] = {"large": rank_case.adapters["r128"]}
    adapters |= {f"a{i}": make_adapter(rank_case.folder, tmp_path / f"a{i}", 20 + i) for i in range(8)}
    prompts, digests = _prompts(1, seed=8) * 9, list(adapters)
    references = [_reference(load_adapted_oracle(rank_case.folder, path), prompts[:1])[0] for path in adapters.values()]
    case = AdapterCase(rank_case.folder, adapters, prompts, digests, references)
    limits = {"max_lora_rank": 128, "lora_modules_to_save": False}
    engine = _adapted_engine(case, max_loras=9, max_loaded_lora_ranks=192, **limits)
    _check(_generate(engine, prompts, digests), references)
    assert set(engine.adapter_states().values()) == {"slot"} and not engine.stats().num_adapter_evictions
    # Copies in host memory are limited to four times as much.
    assert engine._adapter_registry._max_host_bytes == 4 * engine.memory.lora_bytes
    assert engine.memory.lora_bytes * 6 == _adapted_engine(case, max_loras=9, **limits).memory.lora_bytes


INVOCATIONS: dict[str, tuple[int, ...]] = {"one": (5,), "two": (9, 9), "three": (5, 9, 2)}
INVOCATION_SCENARIOS: dict[str, dict[str, Any]] = {
    "one batch": {},
    "whole prompts": {"enable_chunked_prefill": False, "max_num_batched_tokens": 4096},
    "in chunks": {"max_num_batched_tokens": 7, "max_num_seqs": 7},
    "async": {"async_scheduling": True},
    "preempted": {"num_blocks": MAX_MODEL_LEN // 8 + 4, "enable_prefix_caching": False},
    "preempted and swapped": {"num_blocks": MAX_MODEL_LEN // 8 + 4, "swap_space": 0.001},
    "offloaded": {"num_blocks": MAX_MODEL_LEN // 8 + 4, "kv_offloading_size": 0.01},
    "one slot for five": {"max_loras": 1},
    "drafts": {"speculative_config": NGRAM_DRAFTS, "max_num_seqs": 3},
    "two devices": {"tensor_parallel_size": 2},
    "graphs of a GPU": {"max_num_batched_tokens": 32, "max_num_seqs": 8},
}


@pytest.fixture(scope="module")
def invocation_case(tmp_path_factory):
    """Return three adapters with an invocation, one of another kind and the base, and prompts in which invocations are
    at any place, several times or missing. Each prompt is sent to each adapter."""
    root, rng = tmp_path_factory.mktemp("invocations"), random.Random(8)
    folder = make_checkpoint(root / "model", "llama")
    adapters: dict[str | None, Path | None] = {None: None, "plain": make_adapter(folder, root / "plain", seed=9)}
    for seed, (name, tokens) in enumerate(INVOCATIONS.items()):
        options = {"target_modules": ["q_proj", "v_proj", "down_proj", "lm_head"]} if seed else {"lora_bias": True}
        adapters[name] = make_adapter(folder, root / name, seed, alora_invocation_tokens=list(tokens), **options)
    stem, prompts = [rng.randrange(10, VOCAB) for _ in range(48)], []
    for length in (0, 7, 8, 15, 31, 40, 48):
        middle = [token for _ in range(rng.randint(0, 3)) for token in rng.choice(list(INVOCATIONS.values()))]
        prompts.append(stem[:length] + middle + [rng.randrange(10, VOCAB) for _ in range(rng.randint(1, 20))])
    prompts += [[*stem[:23], *tokens] for tokens in INVOCATIONS.values()]
    references, digests = [], []
    for name, path in adapters.items():
        oracle = load_oracle(folder) if path is None else load_adapted_oracle(folder, path)
        for prompt in prompts:
            references.append(
                _invoked_reference(oracle, prompt) if name in INVOCATIONS else _reference(oracle, [prompt])[0]
            )
            digests.append(name)
    return AdapterCase(folder, adapters, prompts * len(adapters), digests, references)


@torch.inference_mode()
def _invoked_reference(oracle: Any, prompt: list[int]) -> Reference:
    """Generate greedily. As in peft's `generate`, the prompt alone decides from which token the adapter applies."""
    [offset] = calculate_alora_offsets(oracle.peft_config, "default", torch.tensor([prompt]))
    tokens, logprobs = list(prompt), []
    for i in range(NUM_TOKENS):
        offsets = [None if offset is None else offset + i]
        logprobs.append(oracle(torch.tensor([tokens]), alora_offsets=offsets).logits[0, -1].log_softmax(-1))
        tokens.append(int(logprobs[-1].argmax()))
    return Reference(tokens[len(prompt) :], torch.stack(logprobs))


def test_each_invocation_changes_some_outputs_but_not_all(invocation_case):
    size = len(invocation_case.prompts) // len(invocation_case.adapters)
    base, plain, *others = (
        [reference.token_ids for reference in invocation_case.references[i : i + size]]
        for i in range(0, len(invocation_case.references), size)
    )
    assert all(0 < sum(a == b for a, b in zip(base, other, strict=True)) < size for other in others)
    assert not any(a == b for a, b in zip(base, plain, strict=True))


@pytest.mark.parametrize("scenario", INVOCATION_SCENARIOS)
def test_adapters_apply_from_their_invocation_on(invocation_case, scenario, monkeypatch):
    monkeypatch.setattr(SwapCosts, "is_worthwhile", lambda *_: True)
    captures = replace_captures(monkeypatch) if "graphs" in scenario else []
    engine = _adapted_engine(invocation_case, **INVOCATION_SCENARIOS[scenario])
    for _ in range(2):  # the second time from the prefix cache, as far as it contains the prompts
        outputs = _generate(engine, invocation_case.prompts, invocation_case.adapter_digests, arrival_ratio=0.3)
        _check(outputs, invocation_case.references)
    assert (engine.stats().num_preemptions > 0) == (scenario in ("preempted", "preempted and swapped", "offloaded"))
    assert engine.stats().num_swapped_in_blocks > 0 or "swapped" not in scenario
    assert engine.stats().num_draft_tokens > 0 or scenario != "drafts"
    assert bool(captures) == ("graphs" in scenario)
    assert all(len(set(capture.replayed)) > 2 for capture in captures)


def test_adapters_apply_from_their_invocation_on_in_bfloat16(invocation_case):
    """In which the compiled kernels run; test_batch_invariance.py compares their bits."""
    case = invocation_case
    engine = _adapted_engine(case, dtype="bfloat16", max_num_batched_tokens=40)
    outputs = _generate(engine, case.prompts, case.adapter_digests, arrival_ratio=0.3)
    errors = [
        abs(entry[1] - float(reference.logprobs[0][int(entry[0])]))
        for output, reference in zip(outputs, case.references, strict=True)
        for entry in output.logprobs[0]
    ]
    assert sum(errors) / len(errors) < 2**-3


def test_blocks_before_the_invocation_are_those_of_the_base_model(invocation_case):
    """So the cache contains them after any request for the base model or for such an adapter."""
    rng = random.Random(2)
    for order in ([None, "one", "two", "three"], ["three", "one", None, "two"]):
        engine = _adapted_engine(invocation_case, block_size=8)
        prefix = [rng.randrange(10, VOCAB) for _ in range(40)]
        hits = []
        for name in order:
            prompt = prefix + list(INVOCATIONS.get(name, ())) + [11, 12, 13]
            before = engine.stats().prefix_cache_hits
            _generate(engine, [prompt], [name])
            hits.append(engine.stats().prefix_cache_hits - before)
        assert hits == [0, 40, 40, 40]
        # A plain adapter shares none of them. The same adapter finds its own blocks after the invocation.
        before = engine.stats().prefix_cache_hits
        _generate(engine, [[*prefix, 11, 12, 13]], ["plain"])
        assert engine.stats().prefix_cache_hits == before
        _generate(engine, [prefix + [9, 9] + [11] * 20] * 2, ["two", "two"], arrival_ratio=0.1)
        assert engine.stats().prefix_cache_hits - before >= 40 + 56


SUMMANDS: dict[str, dict[str, Any]] = {
    "a": {"r": 8},
    "b": {"r": 4, "target_modules": ["q_proj", "v_proj"], "lora_alpha": 32},
    "c": {"r": 3, "target_modules": ["embed_tokens", "v_proj", "lm_head"]},
    "one": {"r": 2, "alora_invocation_tokens": [5]},
    "other": {"r": 5, "alora_invocation_tokens": [5], "target_modules": ["q_proj", "o_proj"]},
}
SUMS: dict[str, list[tuple[str, float]]] = {
    "a and b": [("a", 0.7), ("b", 0.3)],
    "b without a": [("b", 1.5), ("a", -1.0)],
    "all": [("a", 0.25), ("b", 0.0), ("c", 2.0)],
    "half of a": [("a", 0.5)],
    "invoked": [("one", 0.4), ("other", 0.6)],
}


@pytest.fixture(scope="module")
def sum_case(tmp_path_factory):
    """Return adapters, and prompts for each adapter, for the base and for each sum."""
    root = tmp_path_factory.mktemp("sums")
    folder = make_checkpoint(root / "model", "llama")
    adapters: dict[str | None, Path | None] = {None: None}
    for seed, (name, config) in enumerate(SUMMANDS.items()):
        adapters[name] = make_adapter(folder, root / name, seed, **config)
    prompts, references, digests = _prompts(5, seed=6), [], []
    prompts += [[*prompts[0], 5, *prompts[1]]]
    for name in (*adapters, *SUMS):
        if name in SUMS:
            model = load_summed_oracle(folder, {part: adapters[part] for part, _ in SUMS[name]}, SUMS[name])
        else:
            model = load_oracle(folder) if name is None else load_adapted_oracle(folder, adapters[name])
        is_invoked = name in ("one", "other", "invoked")
        for prompt in prompts:
            references.append(_invoked_reference(model, prompt) if is_invoked else _reference(model, [prompt])[0])
            digests.append(name)
    return AdapterCase(folder, adapters, prompts * (1 + len(SUMMANDS) + len(SUMS)), digests, references)


SUM_SCENARIOS: dict[str, dict[str, Any]] = {
    "one batch": {"max_loras": 10},
    "few slots and host copies": {"max_loras": 2, "max_cpu_loras": 3, "enable_prefix_caching": False},
    "preempted in chunks": {"num_blocks": MAX_MODEL_LEN // 8 + 4, "max_num_batched_tokens": 40},
    "two devices": {"tensor_parallel_size": 2, "max_loras": 4},
}


@pytest.mark.parametrize("scenario", SUM_SCENARIOS)
def test_weighted_sums_of_adapters_equal_peft(sum_case, scenario):
    engine = _adapted_engine(sum_case, **SUM_SCENARIOS[scenario])
    for _ in range(2):
        outputs = _generate(engine, sum_case.prompts, sum_case.adapter_digests, arrival_ratio=0.3, sums=SUMS)
        _check(outputs, sum_case.references)
    # A sum ends with one of its adapters.
    engine.remove_adapter("a")
    assert not {"a", "a and b", "b without a", "all", "half of a"} & engine.adapter_states().keys()
    with pytest.raises(NotFound, match="'a' of a sum is not loaded"):
        _generate(engine, [[1, 2]], ["a and b"], sums=SUMS)


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        (["dora"], "an adapter with use_dora cannot be added"),
        (["a", "bias"], "an adapter with lora_bias cannot be added"),
        (["trained", "a"], "an adapter with trainable_token_indices cannot be added"),
        (["whole", "a"], "an adapter with modules_to_save cannot be added"),
        (["a", "one"], "different alora_invocation_tokens"),
        (["a", "b", "large"], "the sum of the adapters' ranks is 18, but max_lora_rank is 16"),
    ],
)
def test_adapters_that_cannot_be_added_are_refused(sum_case, tmp_path, parts, message):
    engine = _adapted_engine(sum_case)
    kinds: dict[str, dict[str, Any]] = {
        "dora": {"use_dora": True},
        "bias": {"target_modules": ["q_proj"], "lora_bias": True},
        "trained": {"trainable_token_indices": [4, 5]},
        "whole": {"target_modules": ["v_proj"], "modules_to_save": ["norm"]},
        "large": {"r": 6},
    }
    for name in kinds.keys() & set(parts):
        path = make_adapter(sum_case.folder, tmp_path / name, **kinds[name])
        engine.add_adapter(name, path, engine.read_adapter(path))
    states = engine.adapter_states()
    with pytest.raises(InvalidArgument, match=re.escape(message)):
        _generate(engine, [[1, 2]], ["sum"], sums={"sum": [(part, 0.5) for part in parts]})
    engine.check_integrity()
    assert engine.adapter_states() == states
