# SPDX-License-Identifier: Apache-2.0
"""Writes checkpoints of transformers as GGUF files, with the writer and the names of ggml's package `gguf`.

The changes of the tensors are those of convert_hf_to_gguf.py of llama.cpp.
"""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Type
from safetensors.torch import load_file, save_file
from support.tiny_checkpoints import BASE, write_checkpoint
from tokenizers import pre_tokenizers
from torch import Tensor
from transformers import LlamaConfig, MixtralConfig, PreTrainedConfig, Qwen2MoeConfig, Qwen3MoeConfig

from quire_spec.model.model_config import ModelConfig

ARCHITECTURES = {
    "llama": gguf.MODEL_ARCH.LLAMA,
    "qwen2": gguf.MODEL_ARCH.QWEN2,
    "qwen3": gguf.MODEL_ARCH.QWEN3,
    "gemma": gguf.MODEL_ARCH.GEMMA,
    "gemma2": gguf.MODEL_ARCH.GEMMA2,
    "gemma3_text": gguf.MODEL_ARCH.GEMMA3,
    "qwen2_moe": gguf.MODEL_ARCH.QWEN2MOE,
    "qwen3_moe": gguf.MODEL_ARCH.QWEN3MOE,
    "mixtral": gguf.MODEL_ARCH.LLAMA,
}
_EXPERT = re.compile(r"(.+\.experts\.)(\d+)\.(\w+\.weight)")


def random_blocks(kind: Type, shape: tuple[int, ...], generator: np.random.Generator) -> np.ndarray:
    """Return random bytes of a quantized type [..., bytes of a row]; the float16 scales are small numbers."""
    block, num_bytes = gguf.GGML_QUANT_SIZES[kind]
    data = generator.integers(0, 256, (*shape[:-1], shape[-1] // block, num_bytes), dtype=np.uint8)
    halves = {Type.Q6_K: (208,), Type.Q4_K: (0, 2), Type.Q5_K: (0, 2)}.get(kind, (0,))
    for offset in halves:
        scales = (generator.random(data.shape[:-1]) * (5e-5 if kind == Type.Q6_K else 2e-4)).astype(np.float16)
        data[..., offset : offset + 2] = scales[..., None].view(np.uint8)
    return data.reshape(*shape[:-1], -1)


def write_gguf(
    folder: Path,
    path: Path,
    kinds: dict[str, Type] | None = None,
    metadata: dict[str, Any] | None = None,
    dequantized: Path | None = None,
) -> Path:
    """Write the checkpoint in `folder` as a GGUF file.

    Args:
        folder: folder of a checkpoint, with one file of weights.
        path: the file.
        kinds: types of matrices, by a part of their names in GGUF; the first that matches is used. Other tensors are
            float32. Types that `gguf` cannot quantize to get random numbers.
        metadata: further entries of strings, integers and lists.
        dequantized: folder for a copy of the checkpoint with the weights that `gguf` dequantizes.
    """
    shape, kinds = ModelConfig.load(folder), kinds or {}
    config = json.loads((folder / "config.json").read_text())
    kind = ARCHITECTURES[config["model_type"]]
    name, generator = gguf.MODEL_ARCH_NAMES[kind], np.random.default_rng(0)
    writer = gguf.GGUFWriter(path, name)
    writer.add_name("tiny")
    writer.add_block_count(shape.num_layers)
    writer.add_embedding_length(shape.hidden_size)
    writer.add_feed_forward_length(shape.intermediate_size)
    writer.add_head_count(shape.num_heads)
    writer.add_head_count_kv(shape.num_kv_heads)
    writer.add_key_length(shape.head_dim)
    writer.add_value_length(shape.head_dim)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(shape.vocab_size)
    rope = config.get("rope_parameters", {})
    theta = rope.get("full_attention", rope).get("rope_theta", config.get("rope_theta", 10000.0))
    writer.add_rope_freq_base(theta)
    if name.startswith("gemma") and config.get("sliding_window"):
        writer.add_sliding_window(config["sliding_window"])
    for key, value in (metadata or {}).items():
        if isinstance(value, list):
            writer.add_array(key, value)
        elif isinstance(value, bool):
            writer.add_bool(key, value)
        else:
            add = {str: writer.add_string, float: writer.add_float32, int: writer.add_uint32}[type(value)]
            add(key, value)
    if shape.moe is not None:
        writer.add_expert_count(shape.moe.num_experts)
        writer.add_expert_used_count(shape.moe.top_k)
    names, read = gguf.get_tensor_name_map(kind, shape.num_layers), {}
    for key, tensor in _stack_experts(load_file(folder / "model.safetensors")).items():
        if key == "lm_head.weight" and shape.tie_word_embeddings:
            continue
        # The name that convert_hf_to_gguf.py gives to the experts of Mixtral together.
        name_of_all = re.sub(r"model\.(.*)block_sparse_moe\.experts", r"\1feed_forward.experts", key)
        target = names.get_name(name_of_all, try_suffixes=(".weight", ".bias"))
        assert target is not None, key
        values = tensor.float().squeeze().numpy()
        heads = {"q": shape.num_heads, "k": shape.num_kv_heads}.get(key.split("_proj")[0][-1:])
        is_permuted = name == "llama" and "self_attn" in key and heads is not None
        if is_permuted:
            values = values.reshape(heads, 2, -1, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape)
        if name.startswith("gemma") and key.endswith("norm.weight"):
            values = values + 1
        # llama.cpp quantizes neither vectors nor routers.
        is_float = values.ndim < 2 or "ffn_gate_inp" in target
        quantized = Type.F32 if is_float else next((kinds[part] for part in kinds if part in target), Type.F32)
        if quantized in (Type.Q8_0, Type.Q4_0, Type.F16, Type.BF16):
            data = gguf.quantize(values, quantized)
        elif quantized == Type.F32:
            data = np.ascontiguousarray(values)
        else:
            data = random_blocks(quantized, values.shape, generator)
        writer.add_tensor(target, data, raw_dtype=quantized)
        values = gguf.dequantize(data, quantized)
        if is_permuted:
            values = values.reshape(heads, -1, 2, *values.shape[1:]).swapaxes(1, 2)
        if name.startswith("gemma") and key.endswith("norm.weight"):
            values = values - 1
        read[key] = torch.from_numpy(values.reshape(tensor.shape).copy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    if dequantized is not None:
        shutil.copytree(folder, dequantized)
        save_file(_unstack_experts(read), dequantized / "model.safetensors", {"format": "pt"})
    return path


def _stack_experts(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Replace the tensors of single experts with one for all of them, as in GGUF."""
    stacked: dict[str, Any] = {}
    for key, tensor in tensors.items():
        if match := _EXPERT.fullmatch(key):
            stacked.setdefault(match[1] + match[3], {})[int(match[2])] = tensor
        else:
            stacked[key] = tensor
    return {
        key: torch.stack([value[i] for i in range(len(value))]) if isinstance(value, dict) else value
        for key, value in stacked.items()
    }


def _unstack_experts(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Undo `_stack_experts`."""
    single: dict[str, Tensor] = {}
    for key, tensor in tensors.items():
        path, found, rest = key.partition(".experts.")
        parts = (
            {f"{path}.experts.{i}.{rest}": part.clone() for i, part in enumerate(tensor)} if found else {key: tensor}
        )
        single |= parts
    return single


K_TYPES = {
    "attn_q": Type.Q4_K,
    "attn_k": Type.Q4_K,
    "attn_v": Type.Q4_K,
    "attn_output": Type.Q6_K,
    "ffn_down": Type.Q6_K,
    "ffn_gate": Type.Q5_K,
    "ffn_up": Type.Q5_K,
    "token_embd": Type.Q6_K,
    "output.": Type.Q6_K,
}
"""As in a file of Q4_K_M, with Q5_K in one place."""
OTHER_TYPES = {"attn_v": Type.Q4_0, "attn": Type.Q8_0, "ffn": Type.Q4_0, "token_embd": Type.F16, "output.": Type.Q8_0}
"""q, k and v have different types."""


def write_quantized_llama(folder: Path, kinds: dict[str, Type]) -> Path:
    """Write a random Llama whose sizes are multiples of the blocks of all types, and return its GGUF file."""
    sizes = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64, "vocab_size": 128, "initializer_range": 0.05}
    checkpoint = write_checkpoint(folder / "original", LlamaConfig(**BASE | sizes), 0)
    (folder / "gguf").mkdir()
    return write_gguf(checkpoint, folder / "gguf/m.gguf", kinds, tokenizer_metadata())


MIXTURES: dict[str, tuple[type[PreTrainedConfig], dict[str, Any]]] = {
    "qwen3moe": (Qwen3MoeConfig, {"num_experts": 4, "moe_intermediate_size": 256, "norm_topk_prob": True}),
    "qwen2moe": (
        Qwen2MoeConfig,
        {"num_experts": 4, "moe_intermediate_size": 256, "shared_expert_intermediate_size": 512},
    ),
    "mixtral": (MixtralConfig, {"num_local_experts": 4, "sliding_window": None}),
}


def write_quantized_mixture(folder: Path, name: str, kinds: dict[str, Type]) -> Path:
    """Write a random mixture of MIXTURES, and return its GGUF file. The folder `dequantized` contains the checkpoint
    with the weights that `gguf` dequantizes."""
    config, sizes = MIXTURES[name]
    common = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64, "vocab_size": 128, "num_experts_per_tok": 2}
    common |= {"initializer_range": 0.05}
    checkpoint = write_checkpoint(folder / "original", config(**BASE | common | sizes), 0)
    return write_gguf(checkpoint, folder / "m.gguf", kinds, tokenizer_metadata(), folder / "dequantized")


def tokenizer_metadata() -> dict[str, Any]:
    """Return the metadata of a byte-level tokenizer with the 128 tokens of ASCII and one merge."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())[:125]
    names = {"model": "gpt2", "pre": "qwen2", "tokens": ["<s>", "</s>", *alphabet, "th"], "merges": ["t h"]}
    values = {"token_type": [3, 3, *[1] * 126], "bos_token_id": 0, "eos_token_id": 1, "add_bos_token": True}
    return {f"tokenizer.ggml.{name}": value for name, value in (names | values).items()}
