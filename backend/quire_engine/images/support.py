# SPDX-License-Identifier: Apache-2.0
"""Decides whether an engine reads images. The text process and the core decide the same."""

from importlib.util import find_spec
from pathlib import Path

from quire_spec.engine.config import EngineConfig
from quire_spec.model.model_config import ModelConfig

PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json")
"""Files of a checkpoint, one of which describes how images are resized and normalized."""
_PACKAGES = ("PIL", "transformers")


def why_no_images(config: EngineConfig, shape: ModelConfig, folder: Path) -> str | None:
    """Return why an engine with the checkpoint in `folder` reads no images, and what to do; None if it reads them."""
    if shape.images is None:
        return "this model does not read images; send text parts only, or use another model"
    if config.language_model_only:
        return "the server runs only the language model; start it without language_model_only"
    if not config.max_images:
        return "limit_mm_per_prompt allows none; raise its value of image"
    if config.pipeline_parallel_size > 1:
        return "not possible with pipeline_parallel_size above 1; start the server without it"
    if (speculative := config.speculative_config) is not None and speculative.has_drafter:
        method = f"speculative_config.method {speculative.method}"
        return f"not possible with {method}, whose drafter reads no images; use suffix or ngram"
    if not any((folder / name).is_file() for name in PROCESSOR_FILES):
        return f"the checkpoint has no {PROCESSOR_FILES[0]}; add it to the folder of the model"
    if missing := [name for name in _PACKAGES if find_spec(name) is None]:
        return f"the server lacks {' and '.join(missing)}; install quire-llm[images] on it"
    return None
