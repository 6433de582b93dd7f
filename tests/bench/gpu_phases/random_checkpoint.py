# SPDX-License-Identifier: Apache-2.0
"""A checkpoint of random weights in a given shape, one file per layer, made on the device."""

import json
from pathlib import Path
from typing import Any

import random_adapters
import torch
from card import Card
from safetensors.torch import save_file


def write_checkpoint(card: Card, shape: dict[str, Any], folder: Path) -> None:
    """Write a Llama. Norms are 1, and square linears keep the deviation of their inputs, so the deviation of the logits
    is 1, and greedy outputs do not repeat one token."""
    hidden, vocab = shape["hidden_size"], shape["vocab_size"]
    dtype = getattr(torch, shape["torch_dtype"])
    torch.manual_seed(0)

    def drawn(*size: int) -> torch.Tensor:
        return (torch.randn(size, dtype=dtype, device=card.device) * hidden**-0.5).cpu()

    norm, where = torch.ones(hidden, dtype=dtype), {}
    folder.mkdir()
    for layer in range(-1, shape["num_hidden_layers"]):
        if layer < 0:
            tensors = {"model.embed_tokens.weight": drawn(vocab, hidden), "lm_head.weight": drawn(vocab, hidden)}
            tensors["model.norm.weight"] = norm
        else:
            linears = random_adapters.linear_shapes(shape).items()
            tensors = {f"model.layers.{layer}.{path}.weight": drawn(d_out, d_in) for path, (d_in, d_out) in linears}
            for name in ("input_layernorm", "post_attention_layernorm"):
                tensors[f"model.layers.{layer}.{name}.weight"] = norm.clone()
        file = f"model-{layer + 1:05}.safetensors"
        save_file(tensors, folder / file)
        where |= dict.fromkeys(tensors, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))
    (folder / "config.json").write_text(json.dumps(shape))
