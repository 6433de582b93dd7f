# SPDX-License-Identifier: Apache-2.0
"""Model definitions by the architecture that a checkpoint's config.json names.

A family is one file here, with a class of the architecture's name; its row in quire_spec/model/architectures.py, which
names that
file; and a row in tests/support/tiny_checkpoints.py, which holds it to transformers and peft.
"""

import importlib

from quire_engine.models.base import CausalLM
from quire_spec.model.architectures import ARCHITECTURES


def get_model_class(architecture: str) -> type[CausalLM]:
    """The class that defines the models of an architecture, one of `FAMILIES`."""
    module = importlib.import_module(f"quire_engine.models.{ARCHITECTURES[architecture].module}")
    model_cls: type[CausalLM] = getattr(module, architecture)
    return model_cls
