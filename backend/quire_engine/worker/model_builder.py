# SPDX-License-Identifier: Apache-2.0
"""Builds the model of a runner without loading its weights.

It determines the dtype and the quantization, and checks that there is enough free memory before it allocates the
weights.
"""

import logging
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from quire_engine.distributed.communicator import Communicator
from quire_engine.models.base import CausalLM
from quire_engine.models.layers.linear import ParamFactory
from quire_engine.models.registry import get_model_class
from quire_engine.weights.quantized.quantized_tensors import QuantizedTensors
from quire_engine.weights.tensor_files import TensorFiles
from quire_engine.worker.device import check_free_memory, resolve_dtype, warn_of_slow_quantization
from quire_spec.engine.config import EngineConfig
from quire_spec.errors import ConfigError
from quire_spec.model.model_config import ModelConfig
from quire_spec.model.quantization import resolve_quantization

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class BuiltModel:
    """A model whose weights are allocated but not loaded."""

    model: CausalLM
    factory: ParamFactory
    """Allocates parameters that have the model's dtype and are on the model's device. Adapters and draft models also
    use it."""
    checkpoint: QuantizedTensors | None
    """The tensors of a quantized checkpoint. None if the weights are not quantized."""


def build_model(
    config: EngineConfig, shape: ModelConfig, folder: Path, communicator: Communicator | None, device: torch.device
) -> BuiltModel:
    """Build the model in `folder`. If there are several ranks, build only this rank's shard.

    `shape` is the configuration of the whole model, or of a pipeline stage.

    Raises:
        ConfigError: dtype or quantization do not fit the checkpoint or the device, or the weights do not fit into free
            memory.
    """
    dtype = resolve_dtype(config, shape.dtype)
    quantization = resolve_quantization(config.quantization, shape.quantization)
    warn_of_slow_quantization(quantization, dtype, device)
    factory = ParamFactory(dtype, device, communicator, quantization)
    local_shape = shape if communicator is None else communicator.shard.local_config
    if shape.quantization is not None and shape.quantization.drops_fp4_inputs:
        logger.info("inputs of 4 bits are not supported; only the weights are quantized")
    checkpoint = None if shape.quantization is None else QuantizedTensors(TensorFiles(folder), shape.quantization)
    quantized_bytes = None if checkpoint is None else checkpoint.files.num_bytes
    file_bytes = 0 if shape.is_native else _local_bytes(TensorFiles(folder))
    check_free_memory(config, local_shape, factory.dtype, device, quantized_bytes, file_bytes)
    model = get_model_class(shape.architecture, shape.model_impl)(local_shape, replace(factory, checkpoint=checkpoint))
    return BuiltModel(model, factory, checkpoint)


def _local_bytes(files: TensorFiles) -> int:
    """Return the bytes of files that transformers can read."""
    if files.bucket is not None:
        raise ConfigError(
            "load_format: the classes of transformers read weights only from a folder, but the weights of this model "
            "are in a bucket; set load_format to safetensors"
        )
    return files.num_bytes
