# SPDX-License-Identifier: Apache-2.0
"""Mistral: Llama with a sliding window, which the shape says."""

from quire_engine.models.llama import LlamaForCausalLM


class MistralForCausalLM(LlamaForCausalLM):
    """Token ids to logits; see LlamaForCausalLM."""
