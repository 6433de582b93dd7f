# SPDX-License-Identifier: Apache-2.0
"""The engine's greedy output is transformers' and peft's in float32, token for token, however the work is cut up.

The oracle generates without a cache, one full forward a token, so that it shares no idea with the engine.
"""

import dataclasses
import functools
import json
import random
import re
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from support.tiny_checkpoints import CHECKPOINTS, VOCAB, load_adapted_oracle, load_oracle, make_adapter, make_checkpoint

from quire_engine.core.engine import Engine
from quire_engine.kv_cache.swap_policy import SwapCosts
from quire_spec.engine.config import EngineConfig
from quire_spec.model.memory_sizing import kv_block_bytes
from quire_spec.model.model_config import ModelConfig
from quire_spec.protocol.messages import SequenceRequest

NUM_TOKENS = 20
MAX_MODEL_LEN = 128
# float32 over 7 sums of up to 112 terms a layer, logits around 30; 1e-5 is typical.
MAX_LOGPROB_ERROR = 1e-4


class Reference(NamedTuple):
    """What the oracle makes of a prompt."""

    token_ids: list[int]
    logprobs: torch.Tensor
    """[NUM_TOKENS, VOCAB]."""


@torch.inference_mode()
def _reference(oracle: Any, prompts: list[list[int]]) -> list[Reference]:
    """Greedy generation of all prompts side by side, padded on the right, where causal attention does not see it.

    One by one where the longest row of a batch decides how all are rotated.
    """
    if len(prompts) > 1 and (getattr(oracle.config, "rope_parameters", None) or {}).get("rope_type") == "longrope":
        return [reference for prompt in prompts for reference in _reference(oracle, [prompt])]
    tokens = torch.zeros(len(prompts), max(map(len, prompts)) + NUM_TOKENS, dtype=torch.int64)
    for row, prompt in zip(tokens, prompts, strict=True):
        row[: len(prompt)] = torch.tensor(prompt)
    ends = torch.tensor([len(prompt) for prompt in prompts])
    rows, logprobs = torch.arange(len(prompts)), []
    for i in range(NUM_TOKENS):
        logits = oracle(tokens[:, : int(ends.max()) + i]).logits[rows, ends + i - 1]
        logprobs.append(logits.log_softmax(-1))
        tokens[rows, ends + i] = logits.argmax(-1)
    taken = [row[end : end + NUM_TOKENS].tolist() for row, end in zip(tokens, ends.tolist(), strict=True)]
    return [Reference(t, table) for t, table in zip(taken, torch.stack(logprobs, dim=1), strict=True)]


def _prompts(num: int, seed: int) -> list[list[int]]:
    """Random prompts of 1 to 80 tokens; every other one begins like one of three."""
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
        one = kv_block_bytes(ModelConfig.load(folder), config.block_size, 4)
        config = dataclasses.replace(config, kv_cache_memory_bytes=num_blocks * one)
    config.validate()
    return config


class Output(NamedTuple):
    token_ids: list[int]
    logprobs: list[list[list[float]]]


def _generate(
    engine: Engine,
    prompts: list[list[int]],
    adapters: list[str | None] | None = None,
    *,
    rush: float = 1.0,
    **params: Any,
) -> list[Output]:
    """Outputs of all prompts, which arrive over time: `rush` of those not there yet begin each step, at least one."""
    rng = random.Random(1)
    waiting = list(range(len(prompts)))
    rng.shuffle(waiting)
    outputs = [Output([], []) for _ in prompts]
    params = {"temperature": 0.0, "max_tokens": NUM_TOKENS, "logprobs": 3} | params
    while waiting or engine.has_work:
        for _ in range(max(1, int(rush * len(waiting))) if rng.random() < 0.7 else 0):
            if waiting:
                i = waiting.pop()
                adapter = adapters[i] if adapters else None
                engine.add(SequenceRequest(i, prompts[i], params | {"seed": i}, adapter))
        for digest, path in engine.pop_adapter_reads():
            engine.add_adapter(digest, path, engine.read_adapter(path))
        for result in engine.step().results:
            assert result.error == ""
            outputs[result.id].token_ids.extend(result.token_ids)
            outputs[result.id].logprobs.extend(result.logprobs)
        engine.check_integrity()
    return outputs


def _check(outputs: list[Output], references: list[Reference]) -> None:
    assert [o.token_ids for o in outputs] == [r.token_ids for r in references]
    for output, reference in zip(outputs, references, strict=True):
        for entries, table in zip(output.logprobs, reference.logprobs, strict=True):
            assert [int(e[0]) for e in entries[1:]] == table.topk(3).indices.tolist()
            assert max(abs(e[1] - table[int(e[0])]) for e in entries) < MAX_LOGPROB_ERROR


class Case(NamedTuple):
    folder: Path
    prompts: list[list[int]]
    references: list[Reference]


@pytest.fixture(scope="module")
def cases(tmp_path_factory):
    """By name, a checkpoint and what transformers makes of 33 prompts."""

    @functools.cache
    def make(name: str) -> Case:
        folder = make_checkpoint(tmp_path_factory.mktemp(name), name)
        prompts = _prompts(33, seed=len(name))
        return Case(folder, prompts, _reference(load_oracle(folder), prompts))

    return make


SCENARIOS: dict[str, dict[str, Any]] = {
    "at once": {"enable_chunked_prefill": False, "max_num_batched_tokens": 4096},
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
    "blocks of 32": {"block_size": 32},
    "blocks of 64": {"block_size": 64, "max_num_batched_tokens": 50},
    "blocks of 128": {"block_size": 128, "max_num_seqs": 33},
}


FAMILIES = ["llama", "mistral", "qwen2", "qwen3", "opt", "phi3", "gemma2"]
# The others of a family take another path in the model, not in the engine.
SOME_SCENARIOS = ["at once", "preempted in chunks", "blocks of 128"]
PAIRS = [(name, scenario) for name in CHECKPOINTS for scenario in (SCENARIOS if name in FAMILIES else SOME_SCENARIOS)]


@pytest.mark.parametrize(("name", "scenario"), PAIRS)
def test_outputs_equal_transformers(cases, name, scenario, monkeypatch):
    case = cases(name)
    # Whether it is quicker here is not the question.
    monkeypatch.setattr(SwapCosts, "is_worthwhile", lambda *_: True)
    engine = Engine.from_config(_config(case.folder, **SCENARIOS[scenario]))
    _check(_generate(engine, case.prompts, rush=0.2), case.references)
    assert (engine.stats().num_preemptions > 0) == scenario.startswith("preempted")
    assert (engine.stats().num_swapped_in_blocks > 0) == ("swapped" in scenario)


@pytest.mark.parametrize("name", FAMILIES)
def test_alone(cases, name):
    case = cases(name)
    engine = Engine.from_config(_config(case.folder, enable_prefix_caching=False))
    for prompt, reference in list(zip(case.prompts, case.references, strict=True))[:5]:
        _check(_generate(engine, [prompt]), [reference])


# Rounding a logit of 20 once costs up to 2^-4 in bfloat16 and 2^-7 in float16.
@pytest.mark.parametrize(("dtype", "max_error"), [("bfloat16", 2**-3), ("float16", 2**-6)])
@pytest.mark.parametrize("name", FAMILIES)
def test_in_half_precision(cases, name, dtype, max_error):
    case = cases(name)
    engine = Engine.from_config(_config(case.folder, dtype=dtype, **SCENARIOS["preempted in chunks"]))
    outputs = _generate(engine, case.prompts)
    assert all(len(output.token_ids) == NUM_TOKENS for output in outputs)
    errors = [
        abs(entry[1] - float(reference.logprobs[0][int(entry[0])]))
        for output, reference in zip(outputs, case.references, strict=True)
        for entry in output.logprobs[0]
    ]
    assert sum(errors) / len(errors) < max_error


@pytest.mark.parametrize("name", FAMILIES)
def test_with_packed_weights(cases, name, monkeypatch):
    case = cases(name)
    # Real weights are packed; these are too small to be.
    monkeypatch.setattr(sys.modules["quire_kernels.linear"], "MIN_PACKED", 0)
    engine = Engine.from_config(_config(case.folder, max_num_seqs=12, max_num_batched_tokens=12))
    _check(_generate(engine, case.prompts[:12], rush=0.5), case.references[:12])


@pytest.mark.parametrize("name", [*FAMILIES, "phi3-longrope"])
def test_from_the_prefix_cache(cases, name):
    case = cases(name)
    engine = Engine.from_config(_config(case.folder, block_size=8))
    _check(_generate(engine, case.prompts), case.references)
    hits = engine.stats().prefix_cache_hits
    _check(_generate(engine, case.prompts, rush=0.5), case.references)
    found = sum(min(len(prompt) // 8 * 8, len(prompt) - 1) for prompt in case.prompts)
    assert engine.stats().prefix_cache_hits - hits == found
    assert engine.stats().num_block_copies > 0


@pytest.mark.parametrize("caching", [True, False])
def test_forks(cases, caching):
    case = cases("llama")
    engine = Engine.from_config(_config(case.folder, enable_prefix_caching=caching, max_num_seqs=16))
    prompts = [case.prompts[i // 4] for i in range(32)]
    leaders = {i: None if i % 4 == 0 else i - i % 4 + (i % 4 == 3) for i in range(32)}
    outputs = [Output([], []) for _ in prompts]
    for i, prompt in enumerate(prompts):
        params = {"temperature": 0.0, "max_tokens": NUM_TOKENS, "logprobs": 3}
        engine.add(SequenceRequest(i, prompt, params, parent_id=leaders[i]))
    while engine.has_work:
        for result in engine.step().results:
            outputs[result.id].token_ids.extend(result.token_ids)
            outputs[result.id].logprobs.extend(result.logprobs)
        engine.check_integrity()
    _check(outputs, [case.references[i // 4] for i in range(32)])
    partial = [len(prompt) % 16 != 1 for prompt in prompts]
    assert engine.stats().num_block_copies == sum(3 for i in range(0, 32, 4) if partial[i])


@pytest.mark.parametrize("at_once", [True, False])
def test_forks_of_a_prompt_that_grows_beyond_a_switch_of_its_rope(cases, at_once):
    folder = cases("phi3-longrope").folder
    switch = ModelConfig.load(folder).long_rope_threshold
    prompt = [random.Random(3).randrange(VOCAB) for _ in range(switch - 3)]
    (reference,) = _reference(load_oracle(folder), [prompt])
    engine = Engine.from_config(_config(folder, block_size=8))
    params = {"temperature": 0.0, "max_tokens": NUM_TOKENS}
    engine.add(SequenceRequest(0, prompt, params))
    found: dict[int, list[int]] = {0: [], 1: [], 2: []}
    for step in range(3 * NUM_TOKENS):
        # At once, where they share the prompt with the leader; or when it has left it behind.
        if step == (0 if at_once else 6):
            engine.add(SequenceRequest(1, prompt, params, parent_id=0))
            engine.add(SequenceRequest(2, prompt, params, parent_id=0))
        for result in engine.step().results:
            found[result.id] += result.token_ids
        engine.check_integrity()
    assert found == dict.fromkeys(found, reference.token_ids)


@pytest.mark.parametrize("name", FAMILIES)
def test_draws_do_not_depend_on_company_or_preemption(cases, name):
    case = cases(name)
    params = {"temperature": 1.0, "top_p": 0.95, "logprobs": None}
    prompts = case.prompts[:12]
    ample = Engine.from_config(_config(case.folder))
    together = [output.token_ids for output in _draw(ample, prompts, params)]
    assert together == [_draw(ample, prompts, params, only=i)[i].token_ids for i in range(12)]
    scarce = Engine.from_config(_config(case.folder, block_size=8, num_blocks=MAX_MODEL_LEN // 8 + 2))
    assert together == [output.token_ids for output in _draw(scarce, prompts, params)]
    assert scarce.stats().num_preemptions > 0


def _draw(engine: Engine, prompts: list[list[int]], params: dict[str, Any], only: int | None = None) -> list[Output]:
    outputs = [Output([], []) for _ in prompts]
    for i, prompt in enumerate(prompts):
        if only in (None, i):
            engine.add(SequenceRequest(i, prompt, params | {"seed": i, "max_tokens": NUM_TOKENS}))
    while engine.has_work:
        for result in engine.step().results:
            outputs[result.id].token_ids.extend(result.token_ids)
    return outputs


ADAPTERS: dict[str, dict[str, Any]] = {
    "all linears": {"r": 8},
    "queries and values": {"r": 4, "target_modules": ["q_proj", "v_proj"], "lora_alpha": 32},
    "rsLoRA with patterns": {
        "r": 6,
        "use_rslora": True,
        "rank_pattern": {"down_proj": 1, "self_attn.*": 16},
        "alpha_pattern": {".*k_proj": 40},
    },
    "the mlp of one layer": {"r": 3, "target_modules": ["gate_proj", "up_proj", "down_proj"], "layers_to_transform": 1},
    "the vocabulary": {"r": 6, "target_modules": ["embed_tokens", "v_proj", "lm_head"], "use_rslora": True},
    "keys, small": {"r": 1, "target_modules": ["k_proj", "o_proj", "up_proj"], "lora_alpha": 4},
}


# What other families call the linears that are named above.
TARGETS = {
    "phi3": {**dict.fromkeys(["q_proj", "k_proj", "v_proj"], "qkv_proj"), "gate_proj": "gate_up_proj"},
    "opt": {"o_proj": "out_proj", "gate_proj": "fc1", "down_proj": "fc2"},
}
TARGETS["phi3"]["up_proj"] = TARGETS["phi3"]["gate_proj"]
TARGETS["opt"]["up_proj"] = TARGETS["opt"]["gate_proj"]


def _renamed(config: dict[str, Any], family: str) -> dict[str, Any]:
    """A LoraConfig for the linears of a family."""
    text = json.dumps(config)
    for name, other in TARGETS.get(family, {}).items():
        text = re.sub(rf"\b{name}\b", other, text)
    return json.loads(text)


class AdapterCase(NamedTuple):
    folder: Path
    adapters: dict[str | None, Path | None]
    prompts: list[list[int]]
    owners: list[str | None]
    references: list[Reference]


@pytest.fixture(scope="module")
def adapter_cases(tmp_path_factory):
    """By checkpoint, six adapters and the base, and what peft makes of six prompts with each, the same six for all."""

    @functools.cache
    def make(checkpoint: str) -> AdapterCase:
        root = tmp_path_factory.mktemp(checkpoint)
        folder = make_checkpoint(root / "model", checkpoint)
        adapters: dict[str | None, Path | None] = {None: None}
        for seed, (name, config) in enumerate(ADAPTERS.items()):
            adapters[name] = make_adapter(folder, root / name, seed=seed, **_renamed(config, checkpoint))
        mine = _prompts(6, seed=5)
        owners = [name for name in adapters for _ in mine]
        references = []
        for path in adapters.values():
            references += _reference(load_oracle(folder) if path is None else load_adapted_oracle(folder, path), mine)
        return AdapterCase(folder, adapters, mine * len(adapters), owners, references)

    return make


def _adapted_engine(case: AdapterCase, **changes: Any) -> Engine:
    defaults = {"enable_lora": True, "max_loras": 6, "max_lora_rank": 16, "block_size": 8}
    engine = Engine.from_config(_config(case.folder, **(defaults | changes)))
    for name, path in case.adapters.items():
        if name is not None:
            engine.add_adapter(name, path, engine.read_adapter(path))
    return engine


def test_each_adapter_changes_the_output(adapter_cases):
    adapted = adapter_cases("llama")
    outputs = {owner: [] for owner in adapted.adapters}
    for owner, reference in zip(adapted.owners, adapted.references, strict=True):
        outputs[owner].append(reference.token_ids)
    assert len({str(tokens) for tokens in outputs.values()}) == len(adapted.adapters)


ADAPTER_SCENARIOS: dict[str, dict[str, Any]] = {
    "side by side": {},
    "in chunks": {"max_num_batched_tokens": 40},
    "two slots for six": {"max_loras": 2},
    "one slot for six": {"max_loras": 1, "enable_prefix_caching": False},
    "preempted": {"num_blocks": MAX_MODEL_LEN // 8 + 4},
    "preempted, two slots": {"num_blocks": MAX_MODEL_LEN // 8 + 4, "max_loras": 2, "enable_prefix_caching": False},
}


ADAPTER_PAIRS = [("llama", scenario) for scenario in ADAPTER_SCENARIOS]
ADAPTER_PAIRS += [(c, "preempted, two slots") for c in (*FAMILIES[1:], "llama-head_dim", "llama-biases")]


@pytest.mark.parametrize(("checkpoint", "scenario"), ADAPTER_PAIRS)
def test_adapters_side_by_side_equal_peft(adapter_cases, checkpoint, scenario):
    adapted = adapter_cases(checkpoint)
    engine = _adapted_engine(adapted, **ADAPTER_SCENARIOS[scenario])
    _check(_generate(engine, adapted.prompts, adapted.owners, rush=0.3), adapted.references)
    if "slot" in scenario:
        assert engine.stats().num_adapter_evictions > 0


def test_each_adapter_alone_equals_peft(adapter_cases):
    adapted = adapter_cases("llama")
    engine = _adapted_engine(adapted, max_loras=1)
    for i in range(0, len(adapted.prompts), 6):
        _check(_generate(engine, [adapted.prompts[i]], [adapted.owners[i]]), [adapted.references[i]])


def test_equal_prompts_of_different_adapters_share_no_blocks(adapter_cases):
    adapted = adapter_cases("llama")
    engine = _adapted_engine(adapted)
    for _ in range(2):
        _check(_generate(engine, adapted.prompts, adapted.owners), adapted.references)
    assert engine.stats().prefix_cache_hits > 0


@pytest.mark.parametrize(("caching", "ahead"), [(True, False), (False, True)])
def test_everything_at_once(adapter_cases, caching, ahead, monkeypatch):
    """Adapters, forks, priorities, swapping, preemption and aborts, in random order: what ends is right."""
    adapted, rng = adapter_cases("llama"), random.Random(8)
    monkeypatch.setattr(SwapCosts, "is_worthwhile", lambda *_: rng.random() < 0.7)
    engine = _adapted_engine(
        adapted,
        num_blocks=MAX_MODEL_LEN // 8 + 8,
        max_loras=2,
        enable_prefix_caching=caching,
        async_scheduling=ahead,
        swap_space=0.001,
        max_num_batched_tokens=64,
        scheduling_policy="priority",
    )
    jobs: list[int] = []
    outputs: dict[int, list[int]] = {}
    num_ended = 0
    while len(jobs) < 150 or engine.has_work:
        for _ in range(rng.randint(0, 2) if len(jobs) < 150 and len(outputs) < 24 else 0):
            leader = rng.choice(list(outputs)) if outputs and rng.random() < 0.4 else None
            job = rng.randrange(len(adapted.prompts)) if leader is None else jobs[leader]
            request = SequenceRequest(len(jobs), adapted.prompts[job], {"temperature": 0.0, "max_tokens": NUM_TOKENS})
            request = dataclasses.replace(request, adapter_digest=adapted.owners[job], parent_id=leader)
            engine.add(dataclasses.replace(request, priority=rng.choice([0, 0, 0, 1, -1])))
            outputs[request.id] = []
            jobs.append(job)
        if outputs and rng.random() < 0.05:
            engine.abort([aborted := rng.choice(list(outputs))])
            del outputs[aborted]
        engine.read_pending_adapters()
        for result in engine.step().results:
            outputs[result.id] += result.token_ids
            if result.finish_reason is not None:
                assert outputs.pop(result.id) == adapted.references[jobs[result.id]].token_ids
                num_ended += 1
        engine.check_integrity()
    stats = engine.stats()
    assert num_ended > 100 and stats.num_used_blocks == stats.num_used_host_blocks == 0
    assert min(stats.num_swapped_in_blocks, stats.num_block_copies, stats.num_adapter_evictions) > 10
