# SPDX-License-Identifier: Apache-2.0
"""With compiled CPU kernels in bfloat16, a request's tokens and log probabilities do not depend on what else is served.

Requests run alone first. Then they run in batches, under other conditions each time, and every bit must be the same.
"""

import dataclasses
import functools
import random
import zlib
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from support.requirements_of_machine import requires_native_kernels
from support.tiny_checkpoints import BASE, CHECKPOINTS, VOCAB, make_adapter, write_checkpoint

from quire_engine.core.engine import Engine
from quire_engine.kv_cache.swap_policy import SwapCosts
from quire_spec.engine.config import EngineConfig
from quire_spec.engine.sampling_params import SamplingParams
from quire_spec.engine.speculative_config import SpeculativeConfig
from quire_spec.model.batch_invariance import variance_reason
from quire_spec.model.memory_sizing import kv_block_bytes
from quire_spec.model.model_config import ModelConfig
from quire_spec.protocol.messages import SequenceRequest

pytestmark = requires_native_kernels

MAX_MODEL_LEN = 320
NUM_TOKENS, MAX_TOKENS = 3, 28
INVOCATION = 7
"""The token from which one of the adapters applies."""
NUM_REQUESTS, NUM_LONG = 64, 8
"""The first requests are long."""
# Sizes for which compiled kernels exist, in place of those that the checkpoints have for other tests. Windows are
# shorter than a chunk of keys in csrc/attention.cpp, or longer.
SIZES = {
    "head_dim": 32,
    "intermediate_size": 128,
    "moe_intermediate_size": 64,
    "word_embed_proj_dim": 32,
}
WEIGHTS: dict[str, dict[str, Any]] = {
    "bfloat16": {},
    "int8": {"quantization": "int8"},
    "int4": {"quantization": "int4"},
    "fp8": {"quantization": "fp8"},
    "int8 KV": {"kv_cache_dtype": "int8_per_token_head"},
}
# A checkpoint of each family. Layers have windows where the family has them.
FAMILIES = [
    *("llama", "mistral", "qwen2-windows", "qwen3-windows", "qwen3_moe-mixed", "mixtral", "gpt_oss", "opt"),
    *("phi3", "gemma2", "gemma3", "glm4", "granite", "ministral3", "smollm3"),
]
ODD_VOCABULARIES = ("mistral", "gemma3", "granite")
CASES = [(name, list(WEIGHTS)[i % len(WEIGHTS)]) for i, name in enumerate(FAMILIES)]
CASES += [("mistral", "bfloat16"), ("mistral", "int8 KV")]
DRAFTS = SpeculativeConfig("ngram", 3, prompt_lookup_min=1, prompt_lookup_max=2)


class Condition(NamedTuple):
    """Something else than one request at a time."""

    fields: dict[str, Any]
    share: float = 1.0
    """Share of the remaining requests that arrives in each step."""
    num_requests: int = NUM_REQUESTS
    runs: int = 1
    threads: int = 1


CONDITIONS = {
    "one batch": Condition({"max_num_batched_tokens": 16384}, threads=2),
    "chunks, then the prefix cache": Condition(
        {"max_num_batched_tokens": 80, "enable_prefix_caching": True}, share=0.2, num_requests=40, runs=2
    ),
    "preempted": Condition({"num_blocks": 26, "scheduling_policy": "priority"}, share=0.05, num_requests=24),
    "swapped": Condition(
        {"num_blocks": 26, "scheduling_policy": "priority", "swap_space": 0.01}, share=0.05, num_requests=24
    ),
    "speculation": Condition({"speculative_config": DRAFTS, "max_num_seqs": 3}, num_requests=NUM_LONG),
}
Output = list[tuple[int, list[list[float]]]]
"""A token and the entries of its log probabilities, for each position."""


@dataclasses.dataclass(frozen=True)
class Request:
    prompt: list[int]
    adapter: str | None
    params: dict[str, Any]


def _requests(draw: random.Random, adapters: list[str | None]) -> list[Request]:
    """Prompts of 1 to 300 tokens that repeat themselves and share beginnings; half of the requests are greedy."""
    stems = [[draw.randrange(VOCAB) for _ in range(200)] for _ in range(3)]
    requests = []
    for i in range(NUM_REQUESTS):
        length = draw.randint(1, 20) if i % 3 else draw.randint(20, 290)
        prompt = draw.choice(stems)[: draw.randint(0, length)]
        words = [[draw.randrange(VOCAB) for _ in range(4)] for _ in range(3)]
        while len(prompt) < length:
            prompt = prompt + draw.choice(words) + [INVOCATION] * (draw.random() < 0.1)
        params: dict[str, Any] = {"temperature": i % 2 * 0.8, "seed": i, "ignore_eos": True}
        params |= {"logprobs": draw.choice([0, 5, 20]), "top_p": draw.choice([1.0, 0.9])}
        params["max_tokens"] = MAX_TOKENS if i < NUM_LONG else NUM_TOKENS
        requests.append(Request(prompt[:length], draw.choice(adapters), params))
    return requests


def _engine(folder: Path, adapters: dict[str, Path], num_blocks: int | None = None, **fields: Any) -> Engine:
    config = EngineConfig(
        model=str(folder),
        dtype="bfloat16",
        max_model_len=MAX_MODEL_LEN,
        enable_lora=True,
        max_loras=7,
        lora_experts=True,
        lora_modules_to_save=True,
        enable_prefix_caching=False,
        kv_cache_memory_bytes=1 << 24,
    )
    config = dataclasses.replace(config, **fields)
    if num_blocks is not None:
        element_bytes, scale_bytes = (2, 0) if config.kv_cache_dtype == "auto" else (1, 4)
        size = kv_block_bytes(ModelConfig.load(folder), config.block_size, element_bytes, scale_bytes)
        config = dataclasses.replace(config, kv_cache_memory_bytes=num_blocks * size)
    config.validate()
    engine = Engine.from_config(config)
    for name, path in adapters.items():
        engine.add_adapter(name, path, engine.read_adapter(path))
    return engine


def _run(engine: Engine, requests: dict[int, Request], share: float = 1.0) -> dict[int, Output]:
    """Return the outputs by request. In each step, a share of the remaining requests arrives."""
    outputs: dict[int, Output] = {i: [] for i in requests}
    waiting = list(requests)
    while waiting or engine.has_work:
        for i in waiting[: max(1, int(share * len(waiting)))]:
            request = requests[i]
            params = SamplingParams.from_mapping(request.params)
            engine.add(SequenceRequest(i, request.prompt, params, request.adapter, priority=-i))
            waiting.remove(i)
        for digest, path in engine.pop_adapter_reads():
            engine.add_adapter(digest, path, engine.read_adapter(path))
        for result in engine.step().results:
            assert result.error == ""
            outputs[result.id] += zip(result.token_ids, result.logprobs, strict=True)
    return outputs


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """Return a function from a name in CHECKPOINTS to a checkpoint with SIZES, and its adapters."""

    @functools.cache
    def make(name: str) -> tuple[Path, dict[str, Path]]:
        folder = tmp_path_factory.mktemp(name)
        kind, overrides = CHECKPOINTS[name]
        values = BASE | {"intermediate_size": 128} | overrides
        if is_odd := name in ODD_VOCABULARIES:
            values["vocab_size"] = VOCAB + 3
        config = kind(**{key: SIZES.get(key, value) for key, value in values.items()})
        write_checkpoint(folder / "model", config, seed=1)
        attention = ["q_proj", "k_proj", "v_proj", "o_proj"]
        targets = {
            "opt": ["q_proj", "out_proj", "fc1"],
            "phi": ["qkv_proj", "down_proj"],
        }.get(name[:3], attention)
        adapters = {
            kind: make_adapter(folder / "model", folder / kind, target_modules=targets, **options)
            for kind, options in {
                "lora": {"r": 4},
                "dora": {"r": 16, "use_dora": True},
                "alora": {"r": 8, "alora_invocation_tokens": [INVOCATION]},
            }.items()
        }
        if config.model_type in ("qwen3_moe", "mixtral", "gpt_oss"):
            router = "router.weight" if config.model_type == "gpt_oss" else "gate.weight"
            experts = ["experts.gate_up_proj", "experts.down_proj"]
            for kind, rank, parameters in (("experts", 3, experts), ("router", 16, [experts[1], router])):
                options = {"r": rank, "target_modules": [], "target_parameters": parameters}
                adapters[kind] = make_adapter(folder / "model", folder / kind, **options)
        adapters["vocabulary"] = make_adapter(
            folder / "model", folder / "vocabulary", target_modules=["embed_tokens", "lm_head"][: 2 - is_odd]
        )
        modules = ["norm", "embed_tokens", "lm_head"][: 3 - is_odd]
        options = {"target_modules": targets[:1], "modules_to_save": modules}
        adapters["whole modules"] = make_adapter(folder / "model", folder / "whole modules", **options)
        return folder / "model", adapters

    return make


@pytest.mark.parametrize(("name", "weights"), CASES)
def test_outputs_are_those_of_the_request_alone(checkpoint, name, weights, monkeypatch):
    monkeypatch.setattr(SwapCosts, "is_worthwhile", lambda *_: True)
    folder, adapters = checkpoint(name)
    assert variance_reason(ModelConfig.load(folder), "cpu", "bfloat16") is None
    requests = dict(enumerate(_requests(random.Random(zlib.crc32(name.encode())), [None, *adapters])))
    engine, alone = _engine(folder, adapters, **WEIGHTS[weights]), dict[int, Output]()
    torch.set_num_threads(1)
    for i in requests:
        alone |= _run(engine, {i: requests[i]})
    stats = {}
    for condition, (fields, share, num_requests, runs, threads) in CONDITIONS.items():
        engine = _engine(folder, adapters, **WEIGHTS[weights], **fields)
        torch.set_num_threads(threads)
        for _ in range(runs):
            outputs = _run(engine, {i: requests[i] for i in range(num_requests)}, share)
            assert [i for i in outputs if outputs[i] != alone[i]] == [], condition
        torch.set_num_threads(1)
        stats[condition] = engine.stats()
    assert stats["chunks, then the prefix cache"].prefix_cache_hits
    assert stats["preempted"].num_preemptions and stats["swapped"].num_preemptions
    assert stats["speculation"].num_draft_tokens
    # Layers with windows free blocks, and the rest of a sequence is computed again.
    if name == "llama":
        assert stats["swapped"].num_swapped_in_blocks
