# SPDX-License-Identifier: Apache-2.0
"""Reads default sampling parameters from the generation_config.json of a checkpoint, for `LLM` and the OpenAI API."""

from pathlib import Path

from quire_spec.dataclass_json import read_json_object
from quire_spec.engine.sampling_params import SamplingParams
from quire_spec.errors import ConfigError, InvalidArgument

_SAMPLING_FIELDS_BY_HF_NAME = {
    "repetition_penalty": "repetition_penalty",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "max_new_tokens": "max_tokens",
}
"""Maps names of generation_config.json to names of sampling parameters."""


def load_default_sampling_params(folder: Path, source: str = "auto") -> SamplingParams:
    """Return the default sampling parameters that generation_config.json contains.

    `source` is EngineConfig.generation_config, with the same meaning as in vLLM. If it is auto, the file is read from
    the checkpoint `folder`.

    Raises:
        ConfigError: the file is invalid, a value is out of range, or the folder `source` has no
            generation_config.json.
    """
    if source == "vllm":
        return SamplingParams()
    path = (folder if source == "auto" else Path(source).expanduser()) / "generation_config.json"
    if source != "auto" and not path.exists():
        raise ConfigError(f"generation_config: {str(path)!r} does not exist; give auto, vllm, or another folder")
    config = read_json_object(path) if path.exists() else {}
    values = {
        field_name: config[hf_name]
        for hf_name, field_name in _SAMPLING_FIELDS_BY_HF_NAME.items()
        if config.get(hf_name) is not None
    }
    try:
        return SamplingParams.checked(**values)
    except InvalidArgument as error:
        raise ConfigError(f"{path}: {error}") from error
