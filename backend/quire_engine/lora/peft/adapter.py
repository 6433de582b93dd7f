# SPDX-License-Identifier: Apache-2.0
"""Reader of PEFT adapter folders: returns a fully checked HostAdapter, or raises an error that states why the folder is
rejected.

A feature that the engine would apply differently from PEFT is rejected, never ignored. Adapters are untrusted: names,
shapes and sizes are checked before a tensor is read, and nothing in the folder is executed.
"""

import logging
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from quire_engine.lora.peft.config import PeftConfig
from quire_engine.weights.loader import equals_checkpoint
from quire_engine.weights.safetensors_reader import DTYPES, SafetensorsReader, open_safetensors
from quire_spec.errors import InvalidArgument
from quire_spec.model.memory_sizing import linear_sizes, lora_slot_bytes, vocab_module_sizes
from quire_spec.model.model_config import ModelConfig
from quire_spec.model.tensor_parallel import TensorParallelShard

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"

# Maximum size of the file's header in bytes. The header contains names, shapes and metadata.
_MAX_HEADER_BYTES = 8 << 20
_MAX_TENSORS_PER_MODULE = 32
"""Two are used. A file can also contain tensors of parts of the model that Quire does not serve."""
_TENSOR_NAME = re.compile(
    r"base_model\.model\.(?P<module>[\w.]{1,200}?)\."
    r"(lora_(?P<half>[AB])\.weight|lora_embedding_(?P<embedding_half>[AB])|(?P<base>(base_layer\.)?weight))"
)
# Modules of a model that reads images, beside its language model. They cannot change an output for a text.
_OTHER_PART = re.compile(r"base_model\.model\.(model\.)?(vision_tower|multi_modal_projector)\.")
logger = logging.getLogger(__name__)
NO_LAYER = -1
"""Layer number that stands for modules outside the layers: the embedding and the output projection."""


@dataclass(frozen=True, slots=True)
class HostAdapter:
    """An adapter in host memory, in the same form as in its files. `ModelRunner.read_adapter` packs it for the
    slots."""

    rank: int
    """The largest LoRA rank among the adapter's modules."""
    pairs: Mapping[tuple[int, str], tuple[Tensor, Tensor]]
    """Maps (layer, target) to A [rank, in_features] and B [out_features, rank], with the scale folded into B. The layer
    of embed_tokens and lm_head is NO_LAYER."""

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(a.nbytes + b.nbytes for a, b in self.pairs.values())


def read_adapter(
    folder: Path,
    shape: ModelConfig,
    max_rank: int,
    dtype: torch.dtype,
    shard: TensorParallelShard | None = None,
    checkpoint: Path | None = None,
) -> HostAdapter:
    """Read and check an adapter folder. The scales are folded into B before conversion to `dtype`.

    Args:
        shard: the tensor-parallel rank whose part is returned; None returns the whole adapter. Every rank checks the
            whole adapter, so that all ranks report the same error.
        checkpoint: folder of the base model. If an adapter changes the embedding, PEFT also saves the embedding itself,
            which must equal the checkpoint's embedding.

    Raises:
        InvalidArgument: the folder contains no adapter for this model, or the adapter cannot be served.
    """
    try:
        config = PeftConfig.load(folder / CONFIG_FILE)
        path = _find_weights(folder)
        _check_size(path, shape, max_rank)
        with open_safetensors(path) as file:
            return _read_tensors(file, config, shape, max_rank, dtype, shard, checkpoint)
    except SafetensorError as error:
        raise InvalidArgument(f"adapter {str(folder)!r}: {WEIGHTS_FILE} is not a safetensors file: {error}") from error
    except OSError as error:
        raise InvalidArgument(f"adapter {str(folder)!r} cannot be read: {error}") from error
    except InvalidArgument as error:
        raise InvalidArgument(f"adapter {str(folder)!r}: {error}") from error


def _find_weights(folder: Path) -> Path:
    path = folder / WEIGHTS_FILE
    if path.is_file():
        return path
    if (folder / "adapter_model.bin").exists():
        raise InvalidArgument(
            "adapter_model.bin is not supported, because reading it can run code; "
            "save the adapter with safe_serialization"
        )
    raise InvalidArgument(f"{WEIGHTS_FILE} is missing")


def _check_size(path: Path, shape: ModelConfig, max_rank: int) -> None:
    """Reject a file or a header that is too large for an adapter of this engine, before the header is parsed.

    The parser holds the interpreter lock, which the steps need, for 2 ms per thousand tensors.
    """
    size = path.stat().st_size
    max_bytes = lora_slot_bytes(shape, max_rank, torch.float32.itemsize) + _MAX_HEADER_BYTES
    # PEFT can also save the embedding and the output projection of the base model.
    max_bytes += 2 * shape.vocab_size * shape.embedding_size * torch.float32.itemsize
    if size > max_bytes:
        raise InvalidArgument(
            f"{WEIGHTS_FILE} has {size} bytes, but an adapter of rank {max_rank} for all linear layers of this model "
            f"has at most {max_bytes}; check that the adapter is for this model, or raise max_lora_rank"
        )
    with path.open("rb") as file:
        header_bytes = int.from_bytes(file.read(8), "little")
        if header_bytes > min(size, _MAX_HEADER_BYTES):
            raise InvalidArgument(
                f"{WEIGHTS_FILE} declares a header of {header_bytes} bytes in a file of {size} bytes; "
                f"a header can have at most {_MAX_HEADER_BYTES} bytes"
            )
        num_tensors = file.read(header_bytes).count(b'"data_offsets"')
    max_tensors = _MAX_TENSORS_PER_MODULE * len(_lora_modules(shape))
    if num_tensors > max_tensors:
        raise InvalidArgument(
            f"{WEIGHTS_FILE} has {num_tensors} tensors, but an adapter of this model can have at most {max_tensors}; "
            "check that the adapter is for this model"
        )


def _read_tensors(
    file: SafetensorsReader,
    config: PeftConfig,
    shape: ModelConfig,
    max_rank: int,
    dtype: torch.dtype,
    shard: TensorParallelShard | None,
    checkpoint: Path | None,
) -> HostAdapter:
    ab_pairs, base_copies = _ab_pairs(file.keys(), shape)
    _check_tied_embeddings(ab_pairs, config, shape)
    _check_targets(ab_pairs, config, shape)
    sizes = linear_sizes(shape) | vocab_module_sizes(shape)
    for module, names in ab_pairs.items():
        d_in, d_out = sizes[module.path]
        if (rank := config.rank(module.name)) > max_rank:
            raise InvalidArgument(
                f"rank {rank} exceeds max_lora_rank {max_rank}; raise it (spec.lora.maxRank of an LLMService) or "
                "train with a smaller rank"
            )
        _check_tensor(file, names["A"], (rank, d_in))
        _check_tensor(file, names["B"], (d_out, rank))
    for name, module in base_copies.items():
        _check_base_copy(file, name, module, shape, checkpoint)
    pairs = {}
    for module, names in ab_pairs.items():
        a = file.get_tensor(names["A"]).to(dtype)
        b = (file.get_tensor(names["B"]).to(torch.float32) * config.scale(module.name)).to(dtype)
        for name, tensor in ((names["A"], a), (names["B"], b)):
            # aminmax takes one pass, and both results are NaN if any element is NaN. torch.isfinite takes sixty times
            # as long.
            if not all(map(math.isfinite, torch.aminmax(tensor))):
                raise InvalidArgument(f"{name} contains NaN or infinity, or overflows {dtype} after scaling")
        pairs[module.layer, module.target] = (a, b) if shard is None else _shard_pair(a, b, module.path, shard)
    return HostAdapter(max(a.shape[0] for a, _ in pairs.values()), pairs)


def _shard_pair(a: Tensor, b: Tensor, path: str, shard: TensorParallelShard) -> tuple[Tensor, Tensor]:
    """Return the parts of A [rank, in_features] and B [out_features, rank] that a tensor-parallel rank needs.

    The results are copies, so that the full tensors are freed.
    """
    if path == "embed_tokens":
        return _vocab_shard_rows(a.t(), shard).t(), b
    if path == "lm_head":
        return a, _vocab_shard_rows(b, shard)
    (input_columns,) = shard.input_ranges(path)
    return a[:, input_columns.start : input_columns.stop].clone(), torch.cat(
        [b[r.start : r.stop] for r in shard.output_ranges(path)]
    )


def _vocab_shard_rows(rows: Tensor, shard: TensorParallelShard) -> Tensor:
    """Return the rows of the tokens that belong to a tensor-parallel rank's part of the vocabulary. The padding rows of
    the last rank are 0."""
    token_range = shard.vocab_range
    shard_rows = rows.new_zeros(shard.vocab_rows_per_rank, rows.shape[1])
    shard_rows[: len(token_range)] = rows[token_range.start : token_range.stop]
    return shard_rows


@dataclass(frozen=True, slots=True)
class _LoRAModule:
    """A linear layer that adapters can change, or the embedding."""

    name: str
    """Path of the module in the model; the keys of rank_pattern are matched against it."""
    layer: int
    path: str
    """Path of the module in its layer; for a module outside the layers, its name."""

    @property
    def target(self) -> str:
        """Name in target_modules."""
        return self.path.rpartition(".")[2]


def _lora_modules(shape: ModelConfig) -> dict[str, _LoRAModule]:
    """Return all modules that adapters can change, by name."""
    layer_modules = (
        _LoRAModule(f"{shape.architecture_info.layers_path}.{layer}.{path}", layer, path)
        for layer in range(shape.num_layers)
        for path in shape.layer_linears(layer)
    )
    parent = shape.architecture_info.layers_path.removesuffix("layers")
    outer_modules = (
        _LoRAModule(f"{parent}embed_tokens", NO_LAYER, "embed_tokens"),
        _LoRAModule("lm_head", NO_LAYER, "lm_head"),
    )
    return {module.name: module for module in (*layer_modules, *outer_modules)}


def _ab_pairs(keys: list[str], shape: ModelConfig) -> tuple[dict[_LoRAModule, dict[str, str]], dict[str, _LoRAModule]]:
    """Return the tensor names of A and B for each adapted module.

    Also return the names of tensors that are copies of base weights, each with its module.

    Raises:
        InvalidArgument: a tensor is unexpected, A or B of a pair is missing, or the file contains no pair.
    """
    modules = _lora_modules(shape)
    ab_pairs: dict[_LoRAModule, dict[str, str]] = {}
    base_copies: dict[str, _LoRAModule] = {}
    is_part = bool(shape.architecture_info.text_types)
    if is_part and (other_parts := [key for key in keys if _OTHER_PART.match(key)]):
        logger.info(
            "adapter tensors outside the language model ignored, first of %d: %s", len(other_parts), min(other_parts)
        )
        keys = sorted(set(keys) - set(other_parts))
    for tensor_name in sorted(keys):
        match = _TENSOR_NAME.fullmatch(tensor_name)
        name = match["module"] if match else ""
        # Adapters from before transformers 4.52 have the first of these prefixes. PEFT maps it in the same way.
        module = modules.get(re.sub(r"^language_model\.model\.", "model.language_model.", name) if is_part else name)
        if match is None or module is None:
            raise InvalidArgument(_unexpected_tensor_error(tensor_name, shape))
        if match["base"] and module.layer == NO_LAYER:
            base_copies[tensor_name] = module
            continue
        matrix = match["embedding_half" if module.path == "embed_tokens" else "half"]
        if matrix is None:
            raise InvalidArgument(_unexpected_tensor_error(tensor_name, shape))
        ab_pairs.setdefault(module, {})[matrix] = tensor_name
    if not ab_pairs:
        raise InvalidArgument(f"{WEIGHTS_FILE} contains no LoRA tensor")
    for names in ab_pairs.values():
        if len(names) == 1:
            (matrix, tensor_name), counterpart = next(iter(names.items())), {"A": "B", "B": "A"}
            raise InvalidArgument(f"tensor {tensor_name!r} exists, but its lora_{counterpart[matrix]} is missing")
    return ab_pairs, base_copies


def _unexpected_tensor_error(tensor_name: str, shape: ModelConfig) -> str:
    """Return the error message for a tensor that is not a LoRA matrix of this model."""
    layers = shape.architecture_info.layers_path
    layer_match = re.match(rf"base_model\.model\.{re.escape(layers)}\.(\d{{1,5}})\.", tensor_name)
    if layer_match and int(layer_match[1]) >= shape.num_layers:
        return (
            f"tensor {tensor_name[:200]!r}: the model has only {shape.num_layers} layers; "
            "check that the adapter is for this model"
        )
    if layer_match and shape.has_experts(layer := int(layer_match[1])):
        paths = ", ".join(shape.layer_linears(layer))
        return (
            f"tensor {tensor_name[:200]!r}: layer {layer} is a mixture of experts, and an adapter can change "
            f"only its linear layers {paths}; train the adapter without experts and router"
        )
    if tensor_name.endswith(".bias"):
        return f"tensor {tensor_name[:200]!r}: biases were trained; train the adapter with bias 'none'"
    paths = ", ".join(shape.architecture_info.linears)
    return (
        f"tensor {tensor_name[:200]!r} is not a LoRA matrix of a linear layer; the linear layers of "
        f"{shape.architecture} are {paths}, and their matrices are named "
        f"base_model.model.{layers}.N.PATH.lora_A|B.weight; lm_head and embed_tokens can be adapted too"
    )


def _check_targets(ab_pairs: Mapping[_LoRAModule, Any], config: PeftConfig, shape: ModelConfig) -> None:
    """Reject a file whose tensors do not match the modules in its config: the file is truncated or belongs to another
    adapter.
    """
    for module in ab_pairs:
        if (field := config.target_modules.excluding_field(module.name)) is not None:
            raise InvalidArgument(
                f"the file has tensors for {module.name}, which {field} excludes; "
                "use the config and the weights of the same adapter"
            )
    for module in _lora_modules(shape).values():
        if module.target in config.target_modules.names_in_every_layer and module not in ab_pairs:
            location = "the file" if module.layer == NO_LAYER else f"layer {module.layer}"
            raise InvalidArgument(f"target_modules contains {module.target}, but {location} has no tensors for it")


def _check_tied_embeddings(ab_pairs: Mapping[_LoRAModule, Any], config: PeftConfig, shape: ModelConfig) -> None:
    outer_targets = [module.target for module in ab_pairs if module.layer == NO_LAYER]
    if config.ensure_weight_tying and shape.tie_word_embeddings and outer_targets:
        raise InvalidArgument(
            f"ensure_weight_tying True is not supported if {outer_targets[0]} is adapted, because embedding and "
            "output projection would share one adapter; train the adapter without ensure_weight_tying"
        )


def _check_base_copy(
    file: SafetensorsReader, name: str, module: _LoRAModule, shape: ModelConfig, checkpoint: Path | None
) -> None:
    """Reject a copy of a base weight if it was resized or trained, because it then differs from the base model."""
    _check_tensor(file, name, (shape.vocab_size, shape.embedding_size))
    checkpoint_name = f"{module.name}.weight"
    if checkpoint_name == "lm_head.weight" and shape.tied_embedding_name is not None:
        checkpoint_name = shape.tied_embedding_name
    if checkpoint is None or not equals_checkpoint(checkpoint, checkpoint_name, file.get_tensor(name)):
        raise InvalidArgument(
            f"{name} differs from the base model's {checkpoint_name}: rows were trained or added, but this engine "
            "supports only LoRA matrices for this weight (PEFT: save_embedding_layers=False omits the weight)"
        )


def _check_tensor(file: SafetensorsReader, name: str, expected_shape: tuple[int, int]) -> None:
    tensor = file.get_slice(name)
    shape, dtype = tuple(tensor.get_shape()), tensor.get_dtype()
    if dtype not in DTYPES:
        raise InvalidArgument(f"tensor {name!r} is {dtype}; supported are {', '.join(DTYPES)}")
    if shape != expected_shape:
        raise InvalidArgument(f"tensor {name!r} has shape {shape}; config and model require {expected_shape}")
