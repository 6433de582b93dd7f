# SPDX-License-Identifier: Apache-2.0
"""Random checkpoints of every architecture, with config.json in random dialects and random adapters.

Logits must equal those of transformers and peft. The tables in tests/support vary one property at a time; these tests
vary many together.
"""

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from support.tiny_checkpoints import CHECKPOINTS, load_adapted_oracle, load_oracle, make_adapter, write_checkpoint

from quire_engine import LLM, LoRARequest, SamplingParams

FAMILIES = [
    *("llama", "mistral", "qwen2", "qwen3", "opt", "phi3", "gemma2"),
    *("gemma3", "glm4", "granite", "ministral3", "smollm3", "qwen3_moe"),
]
SIMILAR = ["gemma", "olmo2", "seed_oss", "ernie4_5", "glm", "starcoder2", "nemotron", "arcee"]
"""Families whose configs are read as those of others."""
WINDOWED = ("mistral", "qwen2", "qwen3", "gemma2", "gemma3")
OWN_HEADS = ("llama", "mistral", "qwen3", "gemma2", "gemma3", "ministral3", "gemma", "seed_oss", "ernie4_5", "arcee")
GEMMAS = ("gemma2", "gemma3")
PARTIAL = ("phi3", "glm4", "glm", "nemotron")
NUM_TOKENS = 5
MAX_LENGTH = 96
# For logits up to 100 and four layers; 1e-4 is typical.
MAX_LOGPROB_ERROR = 2e-3


def _rope(draw: random.Random, family: str, head_dim: int) -> dict[str, Any]:
    share = draw.choice([0.5, 1.0]) if family in PARTIAL else 1.0
    kinds = ["default", "longrope"]
    kinds += [] if family == "phi3" else ["linear", "dynamic", "yarn", "llama3", "longrope"]
    if family == "ministral3":
        kinds = ["yarn", "llama3"]
    kind, trained = draw.choice(kinds), {"original_max_position_embeddings": draw.choice([20, 48])}
    pairs = int(head_dim * share) // 2
    numbers: dict[str, dict[str, Any]] = {
        "default": {},
        "linear": {"factor": draw.choice([0.5, 4.0])},
        "dynamic": {"factor": 2.0},
        "yarn": {"factor": 8.0, "beta_fast": draw.choice([8, 32.0]), "truncate": draw.random() < 0.5, **trained},
        "llama3": {"factor": 8, "low_freq_factor": 1.0, "high_freq_factor": 4.0, **trained},
        "longrope": {
            "short_factor": [draw.uniform(1, 1.5) for _ in range(pairs)],
            "long_factor": [draw.uniform(1, 12) for _ in range(pairs)],
            **({} if family == "phi3" else trained),
        },
    }
    rope = {"rope_type": kind, "rope_theta": draw.choice([500.0, 10000]), **numbers[kind]}
    if family == "ministral3":
        rope["llama_4_scaling_beta"] = draw.choice([0.1, 0.5])
    if family == "gemma3":
        return {"full_attention": rope, "sliding_attention": {"rope_type": "default", "rope_theta": 700.0}}
    return rope | ({"partial_rotary_factor": share} if family in PARTIAL else {})


def _config(draw: random.Random, family: str) -> dict[str, Any]:
    heads, head_dim, layers = draw.choice([2, 3, 4]), draw.choice([8, 12, 20]), draw.choice([2, 3])
    hidden = heads * head_dim
    activation = draw.choice(["silu", "relu", "gelu", "gelu_new", "gelu_pytorch_tanh"])
    config: dict[str, Any] = {
        "vocab_size": draw.choice([67, 130]),
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "max_position_embeddings": MAX_LENGTH,
        "initializer_range": 0.2,
        "pad_token_id": None,
        "eos_token_id": draw.choice([None, 2, [2, 5]]),
        "tie_word_embeddings": draw.random() < 0.5,
    }
    if family == "opt":
        flags = ("do_layer_norm_before", "_remove_final_layer_norm", "enable_bias", "layer_norm_elementwise_affine")
        width = draw.choice([None, 12])
        return (
            config
            | {"ffn_dim": 50, "activation_function": activation, "word_embed_proj_dim": width}
            | {flag: draw.random() < 0.5 for flag in flags}
        )
    config |= {
        "num_key_value_heads": draw.choice([n for n in range(1, heads + 1) if heads % n == 0]),
        "intermediate_size": draw.choice([19, 48]),
        "rms_norm_eps": draw.choice([1e-6, 1e-3]),
        "hidden_activation" if family in GEMMAS else "hidden_act": activation,
        "attention_bias": draw.random() < 0.5,
        "mlp_bias": draw.random() < 0.5,
        "query_pre_attn_scalar": draw.choice([7, 64]),
        "attn_logit_softcapping": draw.choice([None, 4.0]),
        "final_logit_softcapping": draw.choice([None, 20.0]),
        "use_sliding_window": draw.random() < 0.7,
        "max_window_layers": draw.choice([0, 1]),
    }
    if family in ("glm4", "glm", "nemotron"):
        config["head_dim"] = head_dim  # its halves are even
    if family == "granite":
        keys = ("attention_multiplier", "embedding_multiplier", "residual_multiplier", "logits_scaling")
        config |= {key: draw.choice([0.3, 1, 2.5]) for key in keys}
    if family == "smollm3":
        config |= {"no_rope_layer_interval": draw.choice([1, 2]), "sliding_window": draw.choice([None, 16])}
    if family == "qwen3_moe":
        config |= {"num_experts": draw.choice([2, 5]), "num_experts_per_tok": draw.choice([1, 2])}
        config |= {"moe_intermediate_size": draw.choice([8, 25]), "norm_topk_prob": draw.random() < 0.5}
        config |= {"mlp_only_layers": draw.choice([None, [0]])}
    if family in OWN_HEADS:
        config["head_dim"] = head_dim = draw.choice([6, 10, 16])
    if family in (*WINDOWED, "phi3"):
        config["sliding_window"] = draw.choice([3, 16])
    if family in WINDOWED and draw.random() < 0.5 and config["use_sliding_window"]:
        config["layer_types"] = [draw.choice(["full_attention", "sliding_attention"]) for _ in range(layers)]
    config["rope_parameters"] = _rope(draw, family, head_dim)
    if family == "phi3":
        config["original_max_position_embeddings"] = draw.choice([20, 48])
    return config


def _change_dialect(draw: random.Random, path: Path) -> None:
    """Rewrite config.json as earlier versions of transformers wrote it, without keys that have a default."""
    config = json.loads(path.read_text())
    if "rope_parameters" not in config:
        pass  # OPT
    elif draw.random() < 0.6:
        rope = config.pop("rope_parameters")
        if "sliding_attention" in rope:
            config["rope_local_base_freq"] = rope["sliding_attention"]["rope_theta"]
            rope = rope["full_attention"]
        for key in ("rope_theta", "partial_rotary_factor"):
            if key in rope:
                config[key] = rope.pop(key)
        kind = rope.pop("rope_type")
        config["rope_scaling"] = None if kind == "default" else rope | {draw.choice(["type", "rope_type"]): kind}
    else:
        config["rope_scaling"] = {}
    defaults = {
        "tie_word_embeddings": path.parent.name in ("opt", *GEMMAS, "smollm3", "gemma", "ernie4_5", "starcoder2"),
        "attention_bias": path.parent.name in ("glm4", "glm", "seed_oss"),
        "mlp_bias": False,
    }
    for key, value in defaults.items():
        if config.get(key) is value and draw.random() < 0.5:
            del config[key]
    path.write_text(json.dumps(config))


def _adapter(draw: random.Random, family: str) -> dict[str, Any]:
    names = {
        "opt": ["q_proj", "out_proj", "fc1", "fc2"],
        "phi3": ["qkv_proj", "gate_up_proj", "down_proj"],
        **{key: ["q_proj", "v_proj", "o_proj", "gate_up_proj", "down_proj"] for key in ("glm4", "glm")},
        **{key: ["q_proj", "v_proj", "o_proj", "up_proj", "down_proj"] for key in ("nemotron", "arcee")},
        "starcoder2": ["q_proj", "v_proj", "o_proj", "c_fc", "c_proj"],
        "qwen3_moe": ["q_proj", "k_proj", "v_proj", "o_proj"],
    }.get(family, ["q_proj", "v_proj", "o_proj", "up_proj", "down_proj"])
    some = draw.sample(names, 2)
    expression, path = rf".*\.({'|'.join(some)})", f"1.{'fc1' if family == 'opt' else 'self_attn.' + names[0]}"
    config: dict[str, Any] = {
        "r": draw.choice([1, 3, 8]),
        "lora_alpha": draw.choice([2, 5, -3]),
        "use_rslora": draw.random() < 0.5,
        "target_modules": draw.choice([[*names], [*some, "embed_tokens", "lm_head"], expression, [path, some[0]]]),
        "rank_pattern": {draw.choice([some[0], r"layers\.1\..*", rf"({'|'.join(some)})"]): draw.choice([2, 5])},
        "alpha_pattern": {draw.choice(["lm_head", r"\w+_proj", some[1], "^model.layers.0"]): 4},
    }
    if isinstance(config["target_modules"], list):
        config |= draw.choice([{}, {"layers_to_transform": [1]}, {"exclude_modules": rf".*\.0\..*{some[0]}"}])
    return config


@torch.inference_mode()
def _expected(oracle: Any, tokens: list[int], num_prompt: int) -> torch.Tensor:
    """Log probabilities after each token; after those of the output, of all before it alone: longrope looks at the
    length."""
    ids = torch.tensor([tokens])
    rows = [oracle(input_ids=ids[:, :num_prompt]).logits[0]]
    rows += [oracle(input_ids=ids[:, :end]).logits[0, -1:] for end in range(num_prompt + 1, len(tokens) + 1)]
    return torch.cat(rows).log_softmax(-1)


@pytest.mark.filterwarnings("ignore:The following (rank|alpha)_pattern keys did not match:RuntimeWarning")
@pytest.mark.parametrize(
    ("family", "seed"),
    [*((family, seed) for family in FAMILIES for seed in range(2)), *((family, 1) for family in SIMILAR)],
)
def test_logits_equal_transformers_and_peft(family: str, seed: int, tmp_path: Path) -> None:
    draw = random.Random(f"{family} {seed}")
    kind, values = CHECKPOINTS[family][0], _config(draw, family)
    folder = write_checkpoint(tmp_path / family, kind(**values), seed)
    _change_dialect(draw, folder / "config.json")
    paths = [make_adapter(folder, tmp_path / f"a{i}", seed, **_adapter(draw, family)) for i in range(2)]
    oracles = [load_oracle(folder), *(load_adapted_oracle(folder, path) for path in paths)]
    loras = [None, *(LoRARequest(path.name, i, str(path)) for i, path in enumerate(paths, 1))]
    llm = LLM(
        folder,
        dtype="float32",
        max_logprobs=-1,
        enable_lora=True,
        max_lora_rank=8,
        block_size=draw.choice([8, 16]),
        max_num_seqs=4,
        max_num_batched_tokens=draw.choice([16, 64]),
        kv_cache_memory_bytes=2**23,
    )
    vocab, lengths = values["vocab_size"], (1, 18, draw.randint(20, 60))
    oracle_indices = [0, *(i for i in range(3) for _ in lengths)]
    prompts = [[draw.randrange(vocab) for _ in range(n)] for n in (MAX_LENGTH - NUM_TOKENS, *lengths * 3)]
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, logprobs=-1, prompt_logprobs=-1, ignore_eos=True)
    outputs = llm.generate(prompts, params, use_tqdm=False, lora_request=[loras[i] for i in oracle_indices])
    for i, prompt, output in zip(oracle_indices, prompts, outputs, strict=True):
        tokens, entries = output.outputs[0].token_ids, output.outputs[0].logprobs
        assert output.prompt_logprobs is not None and entries is not None
        logprobs = torch.tensor(
            [
                [row[token].logprob for token in range(vocab)]
                for row in (*output.prompt_logprobs[1:], *entries)
                if row is not None
            ]
        )
        expected = _expected(oracles[i], prompt + tokens, len(prompt))[: len(logprobs)]
        assert (logprobs - expected).abs().max() < MAX_LOGPROB_ERROR
