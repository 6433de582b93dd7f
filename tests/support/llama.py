# SPDX-License-Identifier: Apache-2.0
"""A tiny random Llama with a byte-level tokenizer, and adapters of it: as users have them, made in a moment."""

import warnings
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from support.tokenizer import byte_level, save_tokenizer
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM


def make_llama(folder: Path, seed: int = 0, tokenizer: bool = True, max_positions: int = 2048) -> Path:
    """Write the checkpoint into `folder`, float32, 384 tokens, none of which ends an output."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=384,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=max_positions,
        bos_token_id=0,
        eos_token_id=None,
        initializer_range=0.3,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    if tokenizer:
        save_tokenizer(byte_level(), folder)
    return folder


def make_llama_adapter(model: Path, folder: Path, seed: int) -> Path:
    """A random PEFT adapter that changes the output."""
    torch.manual_seed(seed)
    config = LoraConfig(r=8, lora_alpha=64, target_modules=["q_proj", "v_proj", "down_proj"], init_lora_weights=False)
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    with warnings.catch_warnings():
        # peft asks transformers for an attribute that transformers has deprecated.
        warnings.simplefilter("ignore", FutureWarning)
        get_peft_model(base, config).save_pretrained(folder)
    return folder


def greedy_output(folder: Path, prompt: list[int], max_tokens: int) -> list[int]:
    """What transformers generates, without sampling."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = torch.tensor([prompt])
    output = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_tokens, do_sample=False)
    return output[0, len(prompt) :].tolist()
