# SPDX-License-Identifier: Apache-2.0
"""Qwen2 and Qwen2.5: Llama with biases on q, k and v, and with sliding windows in some layers, as the shape says."""

from quire_engine.models.llama import LlamaForCausalLM


class Qwen2ForCausalLM(LlamaForCausalLM):
    """Token ids to logits; see LlamaForCausalLM."""
