# SPDX-License-Identifier: Apache-2.0
"""Model definitions by the architecture that a checkpoint's config.json names.

A family is one file with its class, a line here, a line in quire_spec.capability.ARCHITECTURES and a row in the
parity tests.
"""

from quire_engine.models.llama import LlamaForCausalLM
from quire_engine.models.qwen2 import Qwen2ForCausalLM

MODELS: dict[str, type[LlamaForCausalLM]] = {
    "LlamaForCausalLM": LlamaForCausalLM,
    "Qwen2ForCausalLM": Qwen2ForCausalLM,
}
"""Architecture to class."""
