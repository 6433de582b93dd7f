# SPDX-License-Identifier: Apache-2.0
"""Finds the model class for the architecture name in a checkpoint's config.json.

To add an architecture, add a row to `quire_spec/model/architectures.py`. The row contains the name of a module. In this
module, define a class that has the architecture's name; if an existing class can be used, add an alias below instead.
Then add a row to `tests/support/tiny_checkpoints.py`, so that the tests compare the architecture with transformers and
peft.
"""

import importlib

from quire_engine.models.base import CausalLM
from quire_spec.model.architectures import ARCHITECTURES
from quire_spec.model.encoders.table import ENCODERS

_ALIASES = {
    **dict.fromkeys(("MistralForCausalLM", "Qwen2ForCausalLM", "SmolLM3ForCausalLM"), "LlamaForCausalLM"),
    **dict.fromkeys(("MixtralForCausalLM", "Qwen2MoeForCausalLM"), "LlamaForCausalLM"),
    "Qwen3MoeForCausalLM": "Qwen3ForCausalLM",
    **dict.fromkeys(("SeedOssForCausalLM", "InternLM3ForCausalLM"), "LlamaForCausalLM"),
    **dict.fromkeys(("Qwen2VLForConditionalGeneration", "Qwen2_5_VLForConditionalGeneration"), "LlamaForCausalLM"),
    "Olmo3ForCausalLM": "Olmo2ForCausalLM",
    "Qwen3VLForConditionalGeneration": "Qwen3ForCausalLM",
    **dict.fromkeys(("DeepseekV2ForCausalLM", "Glm4MoeLiteForCausalLM"), "DeepseekV3ForCausalLM"),
    **dict.fromkeys(("Kimi_K25ForConditionalGeneration", "Mistral4ForCausalLM"), "DeepseekV3ForCausalLM"),
    "Mistral4ForConditionalGeneration": "DeepseekV3ForCausalLM",
    "Gemma3ForConditionalGeneration": "Gemma3ForCausalLM",
    "Llama4ForConditionalGeneration": "Llama4ForCausalLM",
    **dict.fromkeys(
        ("Gemma4ForConditionalGeneration", "Gemma4UnifiedForCausalLM", "Gemma4UnifiedForConditionalGeneration"),
        "Gemma4ForCausalLM",
    ),
    "Mistral3ForConditionalGeneration": "Ministral3ForCausalLM",
    **dict.fromkeys(
        ("Qwen3_5ForConditionalGeneration", "Qwen3_5MoeForCausalLM", "Qwen3_5MoeForConditionalGeneration"),
        "Qwen3_5ForCausalLM",
    ),
    "Lfm2MoeForCausalLM": "Lfm2ForCausalLM",
}
"""Maps an architecture to the name of the class that it uses.

These architectures differ from the architecture of that class only in their configuration, for example in sliding
windows, in biases on q, k and v, or in layers without rope. Their vision towers are in models/vision; other parts are
not served.
"""


def get_model_class(architecture: str, model_impl: str = "quire") -> type[CausalLM]:
    """Return the model class of an architecture, which must be in the table of `model_impl`; see ModelConfig."""
    if model_impl == "transformers":
        # transformers is imported only for models that need it, because this takes seconds.
        return importlib.import_module("quire_engine.models.transformers.causal_lm").TransformersForCausalLM  # type: ignore[no-any-return]
    row = ENCODERS.get(architecture) or ARCHITECTURES[architecture]
    module = importlib.import_module(f"quire_engine.models.{row.module}")
    model_cls: type[CausalLM] = getattr(module, _ALIASES.get(architecture, architecture))
    return model_cls
