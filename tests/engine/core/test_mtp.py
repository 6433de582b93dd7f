# SPDX-License-Identifier: Apache-2.0
"""Drafts of the layers that predict further tokens: those of transformers' modules, and the same outputs."""

import functools
import json
import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.mtp_heads import MTPReference
from support.tiny_checkpoints import VOCAB, make_adapter, make_checkpoint

from quire_engine.core.engine import Engine
from quire_engine.speculation.draft_policy import DraftPolicy
from quire_engine.speculation.model_proposer import ModelProposer
from quire_spec.engine.config import EngineConfig
from quire_spec.engine.sampling_params import SamplingParams
from quire_spec.engine.speculative_config import SpeculativeConfig
from quire_spec.errors import ConfigError
from quire_spec.protocol.messages import SequenceRequest

NUM_TOKENS = 16
FAMILIES = ["qwen3_5", "qwen3_next", "qwen3_5_moe-vision", "glm4_moe", "deepseek_v3"]
SCENARIOS: dict[str, dict[str, Any]] = {
    "in chunks": {"max_num_batched_tokens": 24},
    "preempted": {"kv_cache_memory_bytes": 2**16, "enable_prefix_caching": False},
    "two ranks": {"tensor_parallel_size": 2},
}


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return a function from a family to a reference with prompts and outputs. Its MTP layer is trained on some of
    them."""

    @functools.cache
    def make(name: str) -> SimpleNamespace:
        reference, rng = MTPReference(tmp_path_factory.mktemp(name), name), random.Random(3)
        stem = [rng.randrange(VOCAB) for _ in range(12)]
        prompts = [stem[: i % 3 * 6] + [rng.randrange(VOCAB) for _ in range(20 - i % 3 * 6)] for i in range(9)]
        ids = torch.tensor(prompts)
        with torch.inference_mode():
            for _ in range(NUM_TOKENS):
                ids = torch.cat((ids, reference.oracle(ids).logits[:, -1:].argmax(-1)), dim=1)
        reference.train(ids[:6].tolist(), 50)
        reference.save()
        return SimpleNamespace(reference=reference, prompts=prompts, outputs=ids[:, 20:].tolist())

    return make


def _engine(folder: Any, **changes: Any) -> Engine:
    settings = {"max_model_len": 64, "max_num_seqs": 24, "block_size": 8, "kv_cache_memory_bytes": 2**22}
    settings |= {"speculative_config": SpeculativeConfig("mtp", 3)} | changes
    return Engine.from_config(EngineConfig(model=str(folder), dtype="float32", **settings))


def _generate(engine: Engine, prompts: list[list[int]], adapter_digest: str | None = None) -> list[list[int]]:
    params = SamplingParams.from_mapping({"temperature": 0.0, "max_tokens": NUM_TOKENS, "ignore_eos": True})
    outputs: list[list[int]] = [[] for _ in prompts]
    for i, prompt in enumerate(prompts):
        engine.add(SequenceRequest(i, prompt, params, adapter_digest))
    while engine.has_work:
        for result in engine.step().results:
            outputs[result.id] += result.token_ids
        engine.check_integrity()
    return outputs


@pytest.mark.parametrize(
    ("name", "scenario"),
    [(name, "in chunks") for name in FAMILIES] + [("qwen3_5", each) for each in SCENARIOS if each != "in chunks"],
)
def test_drafts_are_those_of_transformers(cases: Any, name: str, scenario: str) -> None:
    case = cases(name)
    engine = _engine(case.reference.folder, **SCENARIOS[scenario])
    planner, seen = engine._scheduler.draft_planner, []
    # On this device, the policy gives drafts to steps of any size.
    planner._policy = DraftPolicy("cuda", 3)
    planner._policy.draft_length = lambda *_: 3

    def record(sequence: Any, draft: Any) -> None:
        ModelProposer.store(planner._proposer, sequence, draft)
        seen.append((sequence.tokens(0, sequence.num_tokens), list(draft)))

    planner._proposer.store = record
    assert _generate(engine, case.prompts) == case.outputs
    assert bool(engine.stats().num_preemptions) == (scenario == "preempted")
    for tokens, draft in seen:
        assert draft == case.reference.draft(tokens, len(draft))
    counts = planner.counts
    assert counts.num_draft_tokens > counts.num_accepted_tokens > 20


@pytest.mark.parametrize("changes", [{"quantization": "int8"}, {"enable_lora": True, "max_lora_rank": 8}], ids=str)
def test_outputs_are_those_without_drafts(cases: Any, tmp_path: Any, changes: Any) -> None:
    case, outputs = cases("qwen3_5"), []
    adapter = make_adapter(case.reference.folder, tmp_path) if "enable_lora" in changes else None
    for speculative in (None, SpeculativeConfig("mtp", 3)):
        engine = _engine(case.reference.folder, speculative_config=speculative, **changes)
        if adapter is not None:
            engine.add_adapter("a", adapter, engine.read_adapter(adapter))
        if (planner := engine._scheduler.draft_planner) is not None:
            planner._policy = DraftPolicy("cuda", 3)
        outputs.append(_generate(engine, case.prompts, None if adapter is None else "a"))
    assert outputs[0] == outputs[1]
    assert planner is not None and planner.counts.num_draft_tokens > 0
    # The layer was not trained for the adapter.
    assert planner.counts.num_accepted_tokens > 0 or adapter is not None


def test_what_has_no_mtp_layer_is_refused(tmp_path: Any) -> None:
    folder = make_checkpoint(tmp_path, "qwen3_5")
    for number, message in ((1, "mtp.fc.weight, .* are missing"), (0, "0 layers that predict further tokens")):
        config = json.loads((folder / "config.json").read_text()) | {"mtp_num_hidden_layers": number}
        (folder / "config.json").write_text(json.dumps(config))
        with pytest.raises(ConfigError, match=message):
            _engine(folder)
    with pytest.raises(ConfigError, match="mtp: the model has the architecture 'LlamaForCausalLM'"):
        _engine(make_checkpoint(tmp_path / "llama", "llama"))
