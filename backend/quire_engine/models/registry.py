# SPDX-License-Identifier: Apache-2.0
"""Finds the model class for the architecture name in a checkpoint's config.json.

A new architecture needs a row in `quire_spec/model/architectures.py`, and a class with the architecture's name in the
module that the row names, or an alias below. The architecture also needs a row in `tests/support/tiny_checkpoints.py`,
so that the tests compare it with transformers and peft.
"""

import importlib

from quire_engine.models.base import CausalLM
from quire_spec.model.architectures import ARCHITECTURES

_ALIASES = {
    **dict.fromkeys(("MistralForCausalLM", "Qwen2ForCausalLM", "SmolLM3ForCausalLM"), "LlamaForCausalLM"),
    "Gemma3ForConditionalGeneration": "Gemma3ForCausalLM",
    "Mistral3ForConditionalGeneration": "Ministral3ForCausalLM",
}
"""Architectures that differ from another architecture only in configuration: sliding windows, biases on q, k and v,
layers without rope. Other parts of the model, such as image encoders, are not served.
"""


def get_model_class(architecture: str) -> type[CausalLM]:
    """Return the model class of an architecture, which must be in `ARCHITECTURES`."""
    module = importlib.import_module(f"quire_engine.models.{ARCHITECTURES[architecture].module}")
    model_cls: type[CausalLM] = getattr(module, _ALIASES.get(architecture, architecture))
    return model_cls
