# SPDX-License-Identifier: Apache-2.0
"""Changes of an adapter that depend on weights of the base model: DoRA, biases, rows of trained tokens, and a whole
embedding or output projection."""

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from quire_engine.lora.peft.config import PeftConfig
from quire_engine.lora.peft.lora_module import NO_LAYER, LoRAModule, lora_modules
from quire_engine.lora.peft.tensor_check import check_tensor
from quire_engine.weights.loader import CheckpointTensors
from quire_engine.weights.param_shard import TensorSource
from quire_engine.weights.safetensors_reader import SafetensorsReader
from quire_kernels import RowTransform
from quire_spec.errors import InvalidArgument
from quire_spec.model.model_config import ModelConfig

_NORM_ELEMENTS = 1 << 22
"""Elements of a weight that are read at a time to compute the norms of its rows."""


def read_transform(
    file: SafetensorsReader,
    names: Mapping[str, str],
    module: LoRAModule,
    config: PeftConfig,
    base: CheckpointTensors | None,
    weight_name: str,
    a: Tensor,
    b: Tensor,
) -> RowTransform:
    """Return the scales and addends [2, out_features] of a module's base product, float32.

    Args:
        names: names of the module's magnitudes and biases in the file.
        base: tensors of the base model.
        weight_name: name of the module's weight in the base model.
        a: matrix A [rank, in_features].
        b: matrix B [out_features, rank] with the scale of the adapter, float32.
    """
    transform = torch.zeros(2, len(b))
    if (name := names.get("magnitude")) is not None:
        weight = _base_tensor(base, weight_name, (len(b), a.shape[1]))
        transform[0] = file.get_tensor(name).float() / _row_norms(weight, a.float(), b) - 1
    if (name := names.get("lora_bias")) is not None:
        transform[1] += file.get_tensor(name).float() * config.scale(module.name)
    if (name := names.get("bias")) is not None:
        bias = _base_tensor(base, f"{module.name}.bias", (len(b),))
        transform[1] += file.get_tensor(name).float() - bias.read(0, range(len(b)), range(1), torch.float32).float()
    return transform


def read_trained_tokens(
    file: SafetensorsReader,
    token_rows: Mapping[LoRAModule, str],
    config: PeftConfig,
    shape: ModelConfig,
    base: CheckpointTensors | None,
    max_rank: int,
) -> Iterator[tuple[LoRAModule, Tensor, Tensor]]:
    """Yield A and B, float32, for each module whose rows of some tokens were trained: the differences between new and
    old rows are a LoRA adapter whose rank is the number of these tokens.

    `token_rows` maps modules to the names of their new rows in the file. As in PEFT, an output projection that is tied
    to the embedding has the new rows of the embedding, unless it has rows of its own.
    """
    field = "trainable_token_indices"
    modules = {module.path: module for module in lora_modules(shape).values() if module.layer == NO_LAYER}
    if missing := sorted(config.token_indices.keys() ^ {module.path for module in token_rows}):
        raise InvalidArgument(f"{field}: config and file must have rows of the same modules; check {missing[0]}")
    for module, name in token_rows.items():
        tokens, width = config.token_indices[module.path], shape.embedding_size
        if len(tokens) > max_rank or max(tokens) >= shape.vocab_size:
            raise InvalidArgument(
                f"{field}: {len(tokens)} tokens up to {max(tokens)} are not supported; at most max_lora_rank "
                f"{max_rank} tokens of the vocabulary of {shape.vocab_size} can be trained"
            )
        check_tensor(file, name, (len(tokens), width))
        weight = _base_tensor(base, module.weight_name(shape), (shape.vocab_size, width))
        old = torch.cat([weight.read(0, range(i, i + 1), range(width), torch.float32).float() for i in tokens])
        delta = file.get_tensor(name).float() - old
        one_hot = torch.zeros(len(tokens), shape.vocab_size)
        one_hot[range(len(tokens)), list(tokens)] = 1
        is_shared = module.path == "embed_tokens" and shape.tie_word_embeddings and len(token_rows) == 1
        for path in ("embed_tokens", "lm_head") if is_shared else (module.path,):
            yield modules[path], *((one_hot, delta.t()) if path == "embed_tokens" else (delta, one_hot.t()))


def read_saved_module(
    file: SafetensorsReader, name: str, module: LoRAModule, shape: ModelConfig, base: CheckpointTensors | None
) -> tuple[Tensor, Tensor]:
    """Return A and B, float32, of an embedding or an output projection that was trained as a whole: the difference
    between its weight and that of the base model is a LoRA adapter whose rank is the size of the embedding.

    `name` is the name of the weight in the file.
    """
    size = shape.vocab_size, shape.embedding_size
    actual = tuple(file.get_slice(name).get_shape())
    if actual != size and actual[1:] == size[1:]:
        raise InvalidArgument(
            f"modules_to_save: {module.path} has {actual[0]} rows, but the base model has {size[0]}; an adapter cannot "
            "add tokens. Train it with the base model's vocabulary, or merge it into the model and serve the result"
        )
    check_tensor(file, name, size)
    weight = _base_tensor(base, module.weight_name(shape), size)
    delta = file.get_tensor(name).float() - weight.read(0, range(size[0]), range(size[1]), torch.float32).float()
    identity = torch.eye(size[1])
    return (delta.t(), identity) if module.path == "embed_tokens" else (identity, delta)


def _base_tensor(base: CheckpointTensors | None, name: str, expected_shape: tuple[int, ...]) -> TensorSource:
    tensor = None if base is None else base.find(name)
    if tensor is None or tensor.shape != expected_shape:
        raise InvalidArgument(f"the base model has no {name} of shape {expected_shape}, which the adapter changes")
    return tensor


def _row_norms(weight: TensorSource, a: Tensor, b: Tensor) -> Tensor:
    """Return the norms of the rows of W + B A, [out_features] float32."""
    d_out, d_in = weight.shape
    size = max(1, _NORM_ELEMENTS // d_in)
    norms = []
    for start in range(0, d_out, size):
        rows = range(start, min(start + size, d_out))
        base = weight.read(0, rows, range(d_in), torch.float32).float()
        norms.append(torch.linalg.vector_norm(base.addmm(b[rows.start : rows.stop], a), dim=1))
    return torch.cat(norms)
