# SPDX-License-Identifier: Apache-2.0
"""The quantized checkpoints that `hack/quantized_checkpoints.py` wrote, and the same weights not quantized."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from quire_engine.models.layers.linear import ParamFactory
from quire_engine.models.registry import get_model_class
from quire_engine.weights.loader import load_weights
from quire_engine.weights.quantized.quantized_tensors import QuantizedTensors
from quire_engine.weights.tensor_files import TensorFiles
from quire_spec.model.model_config import ModelConfig

FOLDER = Path(__file__).parents[1] / "engine/weights/quantized/checkpoints"
QUANTIZED_LLAMAS = sorted(path.parent.name for path in FOLDER.glob("*/config.json") if path.parent.name != "mxfp4")
VOCAB = 128


def open_checkpoint(folder: Path) -> QuantizedTensors:
    """Return the quantized tensors of the checkpoint in `folder`."""
    return QuantizedTensors(TensorFiles(folder), ModelConfig.load(folder).quantization)


def write_dequantized(folder: Path, into: Path) -> Path:
    """Write the dequantized float32 weights of a checkpoint in `folder`, which the tests of the formats compare with
    those of the writers, as a checkpoint for transformers."""
    shape = ModelConfig.load(folder)
    model = get_model_class(shape.architecture)(shape, ParamFactory(torch.float32, torch.device("cpu")))
    load_weights(folder, model.tensors(), checkpoint=open_checkpoint(folder))
    into.mkdir(parents=True, exist_ok=True)
    save_file({name: tensor.clone() for name, tensor in model.tensors()}, into / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    (into / "config.json").write_text(json.dumps(config | {"dtype": "float32"}))
    return into
