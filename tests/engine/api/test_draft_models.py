# SPDX-License-Identifier: Apache-2.0
"""Drafts of a draft model and of an EAGLE-3 head: the same outputs, in fewer steps where the drafts are right."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from support.draft_heads import (
    AUX_LAYERS,
    EPS,
    HEADS,
    HIDDEN,
    KV_HEADS,
    random_aux_norms,
    random_eagle3_head,
    save_eagle3_head,
    save_medusa_heads,
)
from support.tiny_checkpoints import BASE, VOCAB, write_checkpoint
from torch.nn import functional
from transformers import LlamaConfig

from quire_engine import LLM, SamplingParams
from quire_engine.kv_cache.swap_policy import SwapCosts
from quire_engine.speculation.model_proposer import ModelProposer
from quire_spec.errors import ConfigError

PROMPTS = ["abcabcab", "once upon a time once upon, it was a long prompt", "xyzzy", "once upon a time"]
VARIANTS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "sampled": {"temperature": 0.9, "seed": 7, "repetition_penalty": 1.1, "logprobs": 1, "n": 2},
    "bad words": {"temperature": 0.9, "seed": 8, "bad_words": ["a", "b"]},
}


@pytest.mark.parametrize(("adapter", "swap_space"), [(None, 0), ("a", 0), (None, 0.001)])
def test_a_draft_model_changes_no_output(
    models: Any, adapter: str | None, swap_space: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The draft model is the model itself. So all its drafts are right without an adapter, after chunks of prompts,
    preemptions, swaps and prefix hits as well: its keys are those that the model would compute."""
    monkeypatch.setattr(SwapCosts, "is_worthwhile", lambda *_: True)
    speculation = {"method": "draft_model", "num_speculative_tokens": 3, "model": str(models.model)}
    settings = {"max_num_batched_tokens": 24, "max_num_seqs": 20, "block_size": 8, "swap_space": swap_space}
    blocks = 28 * 8 * 2 * 2 * 2 * 16 * 4  # about half of what the sequences need, so that some are preempted
    plain = models.load(**settings, kv_cache_memory_bytes=blocks)
    llm = models.load(**settings, kv_cache_memory_bytes=2 * blocks, speculative_config=speculation)
    assert plain.engine.stats().num_blocks == llm.engine.stats().num_blocks
    planner = llm.engine._scheduler.draft_planner
    planner._policy.draft_length = lambda *_: 3
    for name, variant in VARIANTS.items():
        params = SamplingParams(**({"max_tokens": 30} | variant))
        outputs = [
            [
                list(output.token_ids)
                for request in engine.generate(PROMPTS, params, lora_request=models.lora(adapter), use_tqdm=False)
                for output in request.outputs
            ]
            for engine in (plain, llm)
        ]
        assert outputs[0] == outputs[1], name
        llm.engine.check_integrity()
        if name == "greedy" and adapter is None:
            assert planner.counts.num_accepted_tokens == planner.counts.num_draft_tokens > 0
            assert llm.engine.stats().num_steps < 0.5 * plain.engine.stats().num_steps
    assert llm.engine.stats().num_preemptions and plain.engine.stats().num_preemptions
    assert bool(llm.engine.stats().num_swapped_in_blocks) == bool(swap_space)


@pytest.mark.parametrize("layout", ["safeailab", "speculators", "whole"])
@pytest.mark.parametrize("has_embedding", [False, True])
def test_eagle3_proposes_what_a_plain_computation_proposes(
    models: Any, tmp_path: Path, layout: str, has_embedding: bool
) -> None:
    tensors = random_eagle3_head()
    generator = torch.Generator().manual_seed(2)
    if layout == "whole":
        # All tokens of the model, so there is no d2t.
        del tensors["d2t"], tensors["t2d"]
        tensors["lm_head.weight"] = torch.randn(VOCAB, HIDDEN, generator=generator)
    if has_embedding:
        name = "model.embed_tokens.weight" if layout == "whole" else "embed_tokens.weight"
        tensors[name] = torch.randn(VOCAB, HIDDEN, generator=generator)
    save_eagle3_head(tmp_path, tensors, layout)
    speculation = {"method": "eagle3", "num_speculative_tokens": 3, "model": str(tmp_path)}
    seen = _check_outputs_and_record(models, speculation)
    for tokens, draft in seen:
        assert draft == _reference_draft(models.references[None], tensors, tokens, len(draft), layout)


@pytest.mark.parametrize("flag", ["norm_before_fc", "fc_norm", "norm_output"])
def test_eagle3_heads_with_more_norms(models: Any, tmp_path: Path, flag: str) -> None:
    tensors = random_eagle3_head() | random_aux_norms(flag)
    save_eagle3_head(tmp_path, tensors, "speculators", **{flag: True})
    speculation = {"method": "eagle3", "num_speculative_tokens": 3, "model": str(tmp_path)}
    seen = _check_outputs_and_record(models, speculation)
    expected = [
        [
            _reference_draft(models.references[None], tensors, tokens, len(draft), "speculators", each)
            for tokens, draft in seen
        ]
        for each in (flag, "")
    ]
    assert [draft for _, draft in seen] == expected[0] != expected[1]


def test_an_embedding_that_equals_the_models_takes_no_memory(models: Any, tmp_path: Path) -> None:
    sizes = []
    for embedding in ({}, {"embed_tokens.weight": models.references[None].get_input_embeddings().weight.detach()}):
        save_eagle3_head(tmp_path, random_eagle3_head() | embedding, "safeailab")
        speculation = {"method": "eagle3", "num_speculative_tokens": 3, "model": str(tmp_path)}
        sizes.append(models.load(speculative_config=speculation).engine.memory.weights_bytes)
    assert sizes[0] == sizes[1]


@torch.inference_mode()
def _reference_draft(
    target: Any, tensors: dict[str, torch.Tensor], tokens: list[int], num_tokens: int, layout: str, flag: str = ""
) -> list[int]:
    """Compute the draft after `tokens` with plain torch: all positions at once, again for each draft token."""
    ids = torch.tensor([tokens])
    states = target(input_ids=ids[:, :-1], output_hidden_states=True).hidden_states
    parts = [states[layer][0] for layer in AUX_LAYERS]
    if flag == "fc_norm":
        parts = [_norm(part, tensors[f"fc_norm.{i}.weight"]) for i, part in enumerate(parts)]
    aux = torch.cat(parts, dim=-1)
    if flag == "norm_before_fc":
        aux = _norm(aux, tensors["input_norm.weight"])
    hidden = functional.linear(aux, tensors["fc.weight"])
    own = next((tensor for name, tensor in tensors.items() if name.endswith("embed_tokens.weight")), None)
    table = target.get_input_embeddings().weight if own is None else own
    embeddings = table[ids[0, 1:]]
    draft: list[int] = []
    for _ in range(num_tokens):
        out = _reference_layer(tensors, embeddings, hidden, layout)
        normalized = _norm(out[-1:], tensors["norm.weight"])
        logits = functional.linear(normalized[0], tensors["lm_head.weight"])
        token = int(logits.argmax())
        draft.append(token + (int(tensors["d2t"][token]) if "d2t" in tensors else 0))
        hidden = torch.cat((hidden, normalized if flag == "norm_output" else out[-1:]))
        embeddings = torch.cat((embeddings, table[draft[-1:]]))
    return draft


def _reference_layer(tensors: dict[str, torch.Tensor], x: torch.Tensor, hidden: torch.Tensor, layout: str) -> Any:
    weights = {name.removeprefix("midlayer.").removesuffix(".weight"): t for name, t in tensors.items()}
    normalized = _norm(hidden, weights["hidden_norm"])
    residual = normalized if layout == "speculators" else hidden
    attention_input = torch.cat((_norm(x, weights["input_layernorm"]), normalized), dim=-1)
    dim = HIDDEN // HEADS
    q, k, v = (
        functional.linear(attention_input, weights[f"self_attn.{n}_proj"]).unflatten(-1, (-1, dim)).transpose(0, 1)
        for n in "qkv"
    )
    angles = torch.arange(len(x))[:, None] * 10_000.0 ** (-torch.arange(0, dim, 2) / dim)
    cos, sin = torch.cat((angles, angles), -1).cos(), torch.cat((angles, angles), -1).sin()
    q, k = (y * cos + torch.cat((-y[..., dim // 2 :], y[..., : dim // 2]), -1) * sin for y in (q, k))
    k, v = (y.repeat_interleave(HEADS // KV_HEADS, 0) for y in (k, v))
    attended = functional.scaled_dot_product_attention(q[None], k[None], v[None], is_causal=True)[0]
    residual = residual + functional.linear(attended.transpose(0, 1).flatten(1), weights["self_attn.o_proj"])
    y = _norm(residual, weights["post_attention_layernorm"])
    gated = functional.silu(functional.linear(y, weights["mlp.gate_proj"])) * functional.linear(
        y, weights["mlp.up_proj"]
    )
    return residual + functional.linear(gated, weights["mlp.down_proj"])


def _norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return functional.rms_norm(x, (x.shape[-1],), weight, EPS)


def test_medusa_heads_propose_what_a_plain_computation_proposes(models: Any, tmp_path: Path) -> None:
    tensors = save_medusa_heads(tmp_path)
    speculation = {"method": "medusa", "num_speculative_tokens": 3, "model": str(tmp_path)}
    seen = _check_outputs_and_record(models, speculation)
    target = models.references[None]
    with torch.inference_mode():
        for tokens, draft in seen:
            hidden = target.model(torch.tensor([tokens[:-1]])).last_hidden_state[0, -1]
            expected = []
            for i in range(len(draft)):
                block = functional.linear(hidden, tensors[f"{i}.0.linear.weight"], tensors[f"{i}.0.linear.bias"])
                logits = functional.linear(hidden + functional.silu(block), tensors[f"{i}.1.weight"])
                expected.append(int(logits.argmax()))
            assert draft == expected
    with pytest.raises(ConfigError, match="num_speculative_tokens: must be at most medusa_num_heads 4, got 5"):
        models.load(speculative_config=speculation | {"num_speculative_tokens": 5})


def _check_outputs_and_record(models: Any, speculation: dict[str, Any]) -> list[tuple[list[int], list[int]]]:
    """Check that greedy outputs are those without drafts; return the tokens before each draft, and the draft."""
    llm = models.load(max_num_batched_tokens=24, max_num_seqs=20, block_size=8, speculative_config=speculation)
    planner = llm.engine._scheduler.draft_planner
    planner._policy.draft_length = lambda *_: 3
    seen: list[tuple[list[int], list[int]]] = []
    store = ModelProposer.store

    def record(sequence: Any, draft: Any) -> None:
        store(planner._proposer, sequence, draft)
        seen.append((sequence.tokens(0, sequence.num_tokens), list(draft)))

    planner._proposer.store = record
    params = SamplingParams(temperature=0.0, max_tokens=16)
    outputs = llm.generate(PROMPTS, params, use_tqdm=False)
    assert [list(r.outputs[0].token_ids) for r in outputs] == models.tokens(PROMPTS, params)
    assert len(seen) > 40
    return seen


def test_the_shipped_head_proposes_well() -> None:
    """Prompts that the head's training did not see; greedy tokens equal those without drafts."""
    folder = Path(__file__).parents[3] / "examples/models"
    speculation = {"method": "eagle3", "num_speculative_tokens": 3, "model": str(folder / "tiny-eagle3")}
    prompts = ["Once upon a time there was a shy fox", "Question: Can I change my order?\nAnswer:"]
    params = SamplingParams(temperature=0.0, max_tokens=60)
    outputs, steps = [], []
    for settings in ({}, {"speculative_config": speculation}):
        llm = LLM(model=folder / "tiny", dtype="float32", kv_cache_memory_bytes=2**25, **settings)
        requests = [llm.generate(prompt, params, use_tqdm=False)[0] for prompt in prompts]
        outputs.append([list(request.outputs[0].token_ids) for request in requests])
        steps.append(llm.engine.stats().num_steps)
    assert outputs[0] == outputs[1]
    assert steps[0] > 1.8 * steps[1]


def test_errors_name_field_and_fix(models: Any, tmp_path: Path) -> None:
    other = write_checkpoint(tmp_path / "other", LlamaConfig(**(BASE | {"vocab_size": VOCAB - 1})), 0)
    speculation = {"method": "draft_model", "num_speculative_tokens": 3, "model": str(other)}
    with pytest.raises(ConfigError, match=f"speculative_config.model: the draft model has vocab_size {VOCAB - 1}, but"):
        models.load(speculative_config=speculation)
    with pytest.raises(ConfigError, match=r"speculative_config.model: folder '/nowhere' does not exist"):
        models.load(speculative_config=speculation | {"model": "/nowhere"})
    head = {"method": "eagle3", "num_speculative_tokens": 3, "model": str(tmp_path)}
    save_eagle3_head(tmp_path, random_eagle3_head(), "speculators", norm_before_fc=True, fc_norm=True)
    with pytest.raises(ConfigError, match=r"speculative_config.model: .*fc_norm: must be false if norm_before_fc"):
        models.load(speculative_config=head)
    for flag, name in (("norm_before_fc", "input_norm.weight"), ("fc_norm", "fc_norm.0.weight")):
        save_eagle3_head(tmp_path, random_eagle3_head(), "speculators", **{flag: True})
        with pytest.raises(ConfigError, match=f"not an EAGLE-3 head: {name}.* missing"):
            models.load(speculative_config=head)
    for layout, key, value in (
        ("safeailab", "hidden_size", 128),
        ("safeailab", "vocab_size", VOCAB - 1),
        ("speculators", "norm_output", 1),
        ("safeailab", "eagle_aux_hidden_state_layer_ids", [0, 9]),
    ):
        save_eagle3_head(tmp_path, random_eagle3_head(), layout)
        config = json.loads((tmp_path / "config.json").read_text())
        (tmp_path / "config.json").write_text(json.dumps(config | {key: value}))
        with pytest.raises(ConfigError, match=f"speculative_config.model: .*{key}"):
            models.load(speculative_config=head)
    save_eagle3_head(tmp_path, random_eagle3_head() | {"embed_tokens.weight": torch.zeros(VOCAB, 32)}, "safeailab")
    with pytest.raises(ConfigError, match=rf"embed_tokens.weight has shape \({VOCAB}, 32\); the model implies"):
        models.load(speculative_config=head)
    save_eagle3_head(tmp_path, {n: t for n, t in random_eagle3_head().items() if n != "fc.weight"}, "safeailab")
    with pytest.raises(ConfigError, match=r"speculative_config.model: not an EAGLE-3 head: fc.weight is missing"):
        models.load(speculative_config=speculation | {"method": "eagle3", "model": str(tmp_path)})
