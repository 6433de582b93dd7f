# SPDX-License-Identifier: Apache-2.0
"""Engines with pipeline stages, on one node and on several, generate the tokens of engines with one."""

import dataclasses

import pytest
from msgspec.structs import replace
from safetensors.torch import load_file, save_file
from support.thread_nodes import start_engine
from support.tiny_checkpoints import BASE, CHECKPOINTS, VOCAB, make_adapter, write_checkpoint

from quire_engine import SamplingParams
from quire_engine.core.engine import Engine
from quire_engine.kv_cache.swap_policy import SwapCosts
from quire_spec.engine.config import EngineConfig
from quire_spec.engine.speculative_config import SpeculativeConfig
from quire_spec.errors import ConfigError, QuireError
from quire_spec.protocol.messages import SequenceRequest

# Chunked prefill beside decoding sequences, preemptions, swaps and prefix cache hits.
SMALL = {"block_size": 8, "max_num_seqs": 12, "max_num_batched_tokens": 40, "max_model_len": 128, "swap_space": 0.0005}


@pytest.fixture(scope="module")
def make_folder(tmp_path_factory):
    def make(name):
        kind, overrides = CHECKPOINTS[name]
        return write_checkpoint(tmp_path_factory.mktemp(name), kind(**(BASE | {"num_hidden_layers": 4} | overrides)), 1)

    return make


def _config(folder, **changes):
    config = EngineConfig(model=str(folder), dtype="float32", kv_cache_memory_bytes=400_000, **SMALL)
    config = dataclasses.replace(config, **changes)
    config.validate()
    return config


def _generate(engine, digests=(None,), **params):
    """Return the tokens of requests with common prefixes, which arrive in turn."""
    params = SamplingParams.from_mapping({"temperature": 0.0, "max_tokens": 18, "logprobs": 2} | params)
    prompts = [[*range(i % 2, 30 * (i % 3)), *(7 * i + j * j % 31 for j in range(3 + i))] for i in range(10)]
    waiting = [
        SequenceRequest(i, [t % VOCAB for t in prompt], replace(params), adapter_digest=digests[i % len(digests)])
        for i, prompt in enumerate(prompts)
    ]
    tokens = {request.id: [] for request in waiting}
    while waiting or engine.has_work:
        for request in waiting[:4]:
            engine.add(request)
        del waiting[:4]
        engine.read_pending_adapters()
        for result in engine.step().results:
            assert not result.error, result.error
            tokens[result.id] += result.token_ids
        engine.check_integrity()
    return tokens


@pytest.mark.parametrize(
    ("name", "nodes", "pp", "tp", "changes"),
    [
        ("llama", 3, 3, 2, {"swap_space": 0.0}),
        ("qwen3", 2, 2, 1, {"kv_cache_dtype": "int8_per_token_head"}),
        ("gemma2", 1, 2, 1, {}),
        ("mixtral", 1, 2, 2, {"speculative_config": SpeculativeConfig("ngram", 3)}),
    ],
)
def test_stages_generate_the_tokens_of_one_stage(make_folder, tmp_path, name, nodes, pp, tp, changes, monkeypatch):
    monkeypatch.setattr(SwapCosts, "is_worthwhile", lambda *_: True)
    config = _config(folder := make_folder(name), **changes)
    alone = Engine.from_config(config)
    expected = _generate(alone)
    # As few blocks as the smallest stage has.
    ranks = {"pipeline_parallel_size": pp, "tensor_parallel_size": tp, "kv_cache_memory_bytes": 150_000 // tp}
    with start_engine(_config(folder, **changes, **ranks), nodes, tmp_path) as engine:
        assert _generate(engine) == expected == _generate(engine)
        assert engine.memory.pipeline_parallel_size == pp
        assert engine.memory.weights_bytes < 0.8 * alone.memory.weights_bytes
        stats = engine.stats()
        assert stats.prefix_cache_hits > 0
        assert stats.num_preemptions > 0 or name != "llama"


def test_adapters_and_constraints_with_stages(make_folder, tmp_path):
    """On one node and two. One adapter changes layers of both stages, embedding and norms, one only the last layer."""
    folder = make_folder("llama")
    whole = {"use_dora": True, "modules_to_save": ["embed_tokens", "lm_head", "norm", "input_layernorm"]}
    last = {"r": 4, "layers_to_transform": [3], "target_modules": ["q_proj", "down_proj"]}
    paths = [make_adapter(folder, tmp_path / str(i), i, **config) for i, config in enumerate((whole, last))]
    lora = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8, "lora_modules_to_save": True}
    outputs = []
    for stages, nodes in ((1, 1), (2, 1), (2, 2)):
        with start_engine(_config(folder, pipeline_parallel_size=stages, **lora), nodes, tmp_path) as engine:
            for i, path in enumerate(paths):
                engine.add_adapter(f"d{i}", path, engine.read_adapter(path), slot_pinned=False)
            outputs.append(_generate(engine, ("d0", "d1", None)))
            beams = SamplingParams.from_mapping({"use_beam_search": True, "n": 2, "temperature": 0.0, "max_tokens": 6})
            engine.add(SequenceRequest(50, [5, 6, 7], beams))
            allowed = SamplingParams.from_mapping(
                {"temperature": 0.0, "max_tokens": 6, "allowed_token_ids": [3, 4, 9], "prompt_logprobs": 1}
            )
            engine.add(SequenceRequest(60, [5, 6, 7], allowed))
            while engine.has_work:
                outputs[-1] |= {(r.id, len(r.token_ids)): r.token_ids for r in engine.step().results}
    # Files of adapters are on another node only while it reads them.
    assert not [*tmp_path.glob("rank-adapters*/*")]
    assert outputs[0] == outputs[1] == outputs[2]
    assert outputs[0][0] != outputs[0][3] or outputs[0][1] != outputs[0][4]


@pytest.mark.parametrize("nodes", [1, 2])
def test_an_adapter_that_one_stage_cannot_load_is_loaded_on_none(make_folder, tmp_path, nodes):
    folder = make_folder("llama")
    broken, good = (make_adapter(folder, tmp_path / name, 1) for name in ("broken", "good"))
    tensors = load_file(broken / "adapter_model.safetensors")
    (name,) = (name for name in tensors if "layers.3.self_attn.q_proj.lora_A" in name)
    save_file(tensors | {name: tensors[name][:, 1:].contiguous()}, broken / "adapter_model.safetensors")
    lora = {"enable_lora": True, "max_loras": 1, "max_lora_rank": 8}
    with start_engine(_config(folder, pipeline_parallel_size=2, **lora), nodes, tmp_path) as engine:
        with pytest.raises(QuireError, match=r"layers\.3\.self_attn\.q_proj"):
            engine.read_adapter(broken)
        with pytest.raises(QuireError, match=f"{tmp_path}/none"):
            engine.read_adapter(tmp_path / "none")
        engine.add_adapter("good", good, engine.read_adapter(good), slot_pinned=False)
        assert all(_generate(engine, ("good",), max_tokens=3).values())


def test_what_stages_cannot_do_is_refused_by_name(make_folder):
    folder = make_folder("opt")
    with pytest.raises(ConfigError, match=r"pipeline_parallel_size: 2 is not supported for this model: .* positions"):
        Engine.from_config(_config(folder, pipeline_parallel_size=2))
    drafts = SpeculativeConfig("draft_model", 3, str(folder))
    refused = {"async_scheduling": True, "speculative_config": drafts, "pipeline_parallel_size": 99}
    refused |= {"nnodes": 3, "rank_key_file": None}
    for field, value in refused.items():
        changes = {"pipeline_parallel_size": 2, "kv_offloading_size": 1.0} | {field: value}
        changes |= {"nnodes": 2} if field == "rank_key_file" else {}
        with pytest.raises(ConfigError, match=f"^{field}.* (pipeline_parallel_size|nnodes)|^pipeline_parallel_size"):
            _config(folder, **changes)
    for field in ("master_addr", "rank_key_file"):
        with pytest.raises(ConfigError, match=f"^{field}: has no effect with nnodes 1, got 'x'"):
            _config(folder, pipeline_parallel_size=2, **{field: "x"})
