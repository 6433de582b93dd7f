# SPDX-License-Identifier: Apache-2.0
"""Model classes by the architecture name in a checkpoint's config.json.

A new architecture needs three things: a row in `quire_spec/model/architectures.py`; in the module that the row names, a
class of the architecture's name, or an alias below; and a row in `tests/support/tiny_checkpoints.py`, so that the tests
compare it with transformers and peft.
"""

import importlib

from quire_engine.models.base import CausalLM
from quire_spec.model.architectures import ARCHITECTURES

_ALIASES = {
    **dict.fromkeys(("MistralForCausalLM", "Qwen2ForCausalLM", "SmolLM3ForCausalLM"), "LlamaForCausalLM"),
    "Gemma3ForConditionalGeneration": "Gemma3ForCausalLM",
    "Mistral3ForConditionalGeneration": "Ministral3ForCausalLM",
}
"""Architectures whose language model differs from another one only in its configuration: sliding windows, biases on q,
k and v, layers without rope. Other parts of the model, such as image encoders, are not served.
"""


def get_model_class(architecture: str) -> type[CausalLM]:
    """Return the model class of an architecture, one of `ARCHITECTURES`."""
    module = importlib.import_module(f"quire_engine.models.{ARCHITECTURES[architecture].module}")
    model_cls: type[CausalLM] = getattr(module, _ALIASES.get(architecture, architecture))
    return model_cls
