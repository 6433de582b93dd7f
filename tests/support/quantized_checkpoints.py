# SPDX-License-Identifier: Apache-2.0
"""The quantized checkpoints that `hack/quantized_checkpoints.py` wrote, and the same weights not quantized."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from quire_engine.distributed.communicator import Communicator
from quire_engine.kv_cache.device_cache import KVCache
from quire_engine.models.base import CausalLM
from quire_engine.models.forward_batch import build_forward_batch
from quire_engine.models.layers.linear import ParamFactory
from quire_engine.models.registry import get_model_class
from quire_engine.sequence import Sequence
from quire_engine.step.input import build_step_input
from quire_engine.step.plan import ScheduledSpan
from quire_engine.weights.loader import load_weights
from quire_engine.weights.quantized.quantized_tensors import QuantizedTensors
from quire_engine.weights.tensor_files import TensorFiles
from quire_spec.engine.sampling_params import SamplingParams
from quire_spec.model.model_config import ModelConfig

FOLDER = Path(__file__).parents[1] / "engine/weights/quantized/checkpoints"
QUANTIZED_LLAMAS = sorted(path.parent.name for path in FOLDER.glob("*/config.json") if path.parent.name != "mxfp4")
CPU = torch.device("cpu")
VOCAB = 128
NUM_TOKENS = 200
NUM_EXPERTS = 4
_ROLES = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}


def open_checkpoint(folder: Path) -> QuantizedTensors:
    """Return the quantized tensors of the checkpoint in `folder`."""
    return QuantizedTensors(TensorFiles(folder), ModelConfig.load(folder).quantization)


def quantized_mixture(name: str, into: Path) -> Path:
    """Return the folder of a mixture whose experts the writer of a format quantized: gpt-oss in mxfp4, or a Mixtral,
    written below `into`, whose experts are the MLP of the quantized Llama; gate and up are exchanged in every other
    one."""
    if name == "mxfp4":
        return FOLDER / "mxfp4"
    tensors, folder = load_file(FOLDER / name / "model.safetensors"), into / name
    config = json.loads((FOLDER / name / "config.json").read_text())
    prefix = "model.layers.0.mlp."
    mlp = {key.removeprefix(prefix): tensors.pop(key) for key in list(tensors) if key.startswith(prefix)}
    experts = "model.layers.0.block_sparse_moe."
    tensors[f"{experts}gate.weight"] = torch.randn(NUM_EXPERTS, 64, generator=torch.Generator().manual_seed(0))
    for expert in range(NUM_EXPERTS):
        for matrix, role in _ROLES.items():
            source = {"gate_proj": "up_proj", "up_proj": "gate_proj"}.get(role, role) if expert % 2 else role
            for key, tensor in mlp.items():
                if key.startswith(f"{source}."):
                    tensors[f"{experts}experts.{expert}.{matrix}.{key.removeprefix(f'{source}.')}"] = tensor.clone()
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    config |= {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral"}
    config |= {"num_local_experts": NUM_EXPERTS, "num_experts_per_tok": 2}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def write_dequantized(folder: Path, into: Path) -> Path:
    """Write the dequantized float32 weights of a checkpoint in `folder`, which the tests of the formats compare with
    those of the writers, as a checkpoint for transformers."""
    shape = ModelConfig.load(folder)
    model = get_model_class(shape.architecture)(shape, ParamFactory(torch.float32, CPU))
    load_weights(folder, model.tensors(), checkpoint=open_checkpoint(folder))
    into.mkdir(parents=True, exist_ok=True)
    save_file({name: tensor.clone() for name, tensor in model.tensors()}, into / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    (into / "config.json").write_text(json.dumps(config | {"dtype": "float32"}))
    return into


def load_model(
    folder: Path, dtype: torch.dtype, communicator: Communicator | None = None, quantization: str | None = None
) -> CausalLM:
    """Return a packed model, whose weights stay quantized where there are kernels."""
    shape = ModelConfig.load(folder)
    checkpoint = None if shape.quantization is None else open_checkpoint(folder)
    local = shape if communicator is None else communicator.shard.local_config
    factory = ParamFactory(dtype, CPU, communicator, quantization, checkpoint)
    model = get_model_class(shape.architecture)(local, factory)
    load_weights(folder, model.tensors(), tied_to=shape.tied_embedding_name, checkpoint=checkpoint)
    model.pack()
    return model


@torch.inference_mode()
def logits_of(model: CausalLM) -> Tensor:
    """Return the logits [NUM_TOKENS, vocab_size] of random tokens as float32."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, min(VOCAB, model.shape.vocab_size), (NUM_TOKENS,), generator=generator).tolist()
    sequence = Sequence(0, tokens, SamplingParams(prompt_logprobs=0), seed=0, max_output_tokens=1)
    sequence.block_table = list(range(-(-NUM_TOKENS // 16)))
    kv = KVCache(model.shape, len(sequence.block_table), 16, model.embed_tokens.dtype, CPU)
    batch = build_forward_batch(build_step_input([ScheduledSpan(sequence, 0, NUM_TOKENS, None)], 16, None), kv, CPU)
    return model.compute_logits(model.forward_layers(batch, kv), batch).float()
