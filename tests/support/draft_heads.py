# SPDX-License-Identifier: Apache-2.0
"""EAGLE-3 and Medusa heads with random weights for the tiny Llama of tiny_checkpoints.py."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from support.tiny_checkpoints import VOCAB

AUX_LAYERS, DRAFT_VOCAB, HIDDEN, HEADS, KV_HEADS, MLP, EPS = [0, 1, 1], 200, 64, 4, 2, 112, 1e-6


def random_eagle3_head() -> dict[str, torch.Tensor]:
    """Return the tensors of a head in SafeAILab's layout."""
    generator = torch.Generator().manual_seed(0)

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=generator) * 0.3

    layer = {
        "hidden_norm": normal(HIDDEN) + 1,
        "input_layernorm": normal(HIDDEN) + 1,
        "post_attention_layernorm": normal(HIDDEN) + 1,
        "self_attn.q_proj": normal(HIDDEN, 2 * HIDDEN),
        "self_attn.k_proj": normal(HIDDEN // 2, 2 * HIDDEN),
        "self_attn.v_proj": normal(HIDDEN // 2, 2 * HIDDEN),
        "self_attn.o_proj": normal(HIDDEN, HIDDEN),
        "mlp.gate_proj": normal(MLP, HIDDEN),
        "mlp.up_proj": normal(MLP, HIDDEN),
        "mlp.down_proj": normal(HIDDEN, MLP),
    }
    head = {"fc": normal(HIDDEN, 3 * HIDDEN), "norm": normal(HIDDEN) + 1, "lm_head": normal(DRAFT_VOCAB, HIDDEN)}
    named = head | {f"midlayer.{name}": tensor for name, tensor in layer.items()}
    tokens = torch.randperm(VOCAB, generator=generator)[:DRAFT_VOCAB].sort().values
    return {f"{name}.weight": tensor for name, tensor in named.items()} | {
        "d2t": tokens - torch.arange(DRAFT_VOCAB),
        "t2d": torch.zeros(VOCAB, dtype=torch.bool).index_fill(0, tokens, True),
    }


def random_aux_norms(flag: str) -> dict[str, torch.Tensor]:
    """Return the additional tensors of a head whose config has this flag of speculators, with their names."""
    generator = torch.Generator().manual_seed(3)
    sizes = {"norm_before_fc": {"input_norm": 3 * HIDDEN}, "fc_norm": {f"fc_norm.{i}": HIDDEN for i in range(3)}}
    return {f"{name}.weight": torch.rand(size, generator=generator) + 0.5 for name, size in sizes.get(flag, {}).items()}


def save_eagle3_head(folder: Path, tensors: dict[str, torch.Tensor], layout: str, **flags: bool) -> None:
    """Save a head in the layout "safeailab", "speculators", or "whole", which is the first without draft_vocab_size."""
    layer = {"hidden_size": HIDDEN, "intermediate_size": MLP, "num_attention_heads": HEADS, "vocab_size": VOCAB}
    layer |= {"num_key_value_heads": KV_HEADS, "max_position_embeddings": 512, "rms_norm_eps": EPS}
    layer |= {"model_type": "llama", "num_hidden_layers": 1}
    ids = {"eagle_aux_hidden_state_layer_ids": AUX_LAYERS}
    if layout != "speculators":
        config = layer | {"architectures": ["LlamaForCausalLMEagle3"], "eagle_config": ids}
    else:
        config = {"speculators_model_type": "eagle3", "transformer_layer_config": layer, **ids}
        config |= {"norm_before_residual": True}
        tensors = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in tensors.items()}
    size = {} if layout == "whole" else {"draft_vocab_size": DRAFT_VOCAB}
    (folder / "config.json").write_text(json.dumps(config | size | flags))
    save_file(tensors, folder / "model.safetensors")


def save_medusa_heads(folder: Path) -> dict[str, torch.Tensor]:
    """Save four heads; return their tensors, with the names of FasterDecoding/Medusa."""
    generator = torch.Generator().manual_seed(1)
    tensors = {f"{i}.1.weight": torch.randn(VOCAB, HIDDEN, generator=generator) for i in range(4)}
    tensors |= {f"{i}.0.linear.weight": torch.randn(HIDDEN, HIDDEN, generator=generator) * 0.3 for i in range(4)}
    tensors |= {f"{i}.0.linear.bias": torch.randn(HIDDEN, generator=generator) for i in range(4)}
    save_file({f"medusa_head.{name}": tensor for name, tensor in tensors.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"medusa_num_heads": 4, "medusa_num_layers": 1}))
    return tensors
