# SPDX-License-Identifier: Apache-2.0
"""Reader of PEFT adapter folders: returns a fully checked HostAdapter, or raises an error that states why the folder is
rejected.

A feature that the engine would apply differently from PEFT is rejected, never ignored. Adapters are untrusted: names,
shapes and sizes are checked before a tensor is read, and nothing in the folder is executed.
"""

import logging
import math
import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from quire_engine.lora.peft.config import PeftConfig
from quire_engine.weights.loader import CheckpointTensors, equals_checkpoint
from quire_engine.weights.param_shard import TensorSource
from quire_engine.weights.pickle_conversion import ADAPTER_PICKLE_NAME
from quire_engine.weights.safetensors_reader import DTYPES, SafetensorsReader, open_safetensors
from quire_engine.weights.tensor_files import CONVERT_COMMAND
from quire_kernels import RowTransform
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
    r"(lora_(?P<half>[AB])\.weight|lora_embedding_(?P<embedding_half>[AB])|(?P<base>(base_layer\.)?weight)"
    r"|(?P<magnitude>lora_magnitude_vector)|(?P<lora_bias>lora_B\.bias)|(?P<bias>(base_layer\.)?bias)"
    r"|(?P<tokens>token_adapter\.trainable_tokens_delta))"
)
# Rows of a weight that are read at a time to compute their norms.
_NORM_ELEMENTS = 1 << 22
# Modules of a model that reads images, beside its language model. They cannot change an output for a text.
_OTHER_PART = re.compile(r"base_model\.model\.(model\.)?(vision_tower|multi_modal_projector)\.")
_EXTRAS = ("magnitude", "lora_bias", "bias")
"""Groups of _TENSOR_NAME with tensors that change a module beside A and B."""
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
    transforms: Mapping[tuple[int, str], RowTransform] = field(default_factory=dict)
    """Maps some keys of `pairs` to scales and addends of the base product, [2, out_features]."""

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors."""
        matrices = sum(a.nbytes + b.nbytes for a, b in self.pairs.values())
        return matrices + sum(transform.nbytes for transform in self.transforms.values())


def read_adapter(
    folder: Path,
    shape: ModelConfig,
    max_rank: int,
    dtype: torch.dtype,
    shard: TensorParallelShard | None = None,
    checkpoint: Path | None = None,
    has_transforms: bool = True,
) -> HostAdapter:
    """Read and check an adapter folder. The scales are folded into B before conversion to `dtype`.

    Args:
        shard: the tensor-parallel rank whose part is returned; None returns the whole adapter. Every rank checks the
            whole adapter, so that all ranks report the same error.
        checkpoint: folder of the base model. If an adapter changes the embedding, PEFT also saves the embedding itself,
            which must equal the checkpoint's embedding. The norms of DoRA and the biases of the base model are those
            of the checkpoint.
        has_transforms: whether the device can transform base products.

    Raises:
        InvalidArgument: the folder contains no adapter for this model, or the adapter cannot be served.
    """
    try:
        config = PeftConfig.load(folder / CONFIG_FILE)
        path = _find_weights(folder)
        _check_size(path, shape, max_rank)
        with open_safetensors(path) as file:
            adapter = _read_tensors(file, config, shape, max_rank, dtype, shard, checkpoint)
        if adapter.transforms and not has_transforms:
            field = next(
                name for name in ("use_dora", "lora_bias", "bias") if getattr(config, name) not in (False, "none")
            )
            raise InvalidArgument(f"{field} is supported only on a CPU (device cpu), not on a GPU")
        return adapter
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
    if (folder / ADAPTER_PICKLE_NAME).exists():
        raise InvalidArgument(
            f"{ADAPTER_PICKLE_NAME} can run code when it is loaded; convert it with: "
            f"{CONVERT_COMMAND} {shlex.quote(str(folder))} --into {shlex.quote(f'{folder}-safetensors')}"
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
    ab_pairs, base_copies, extras, token_rows = _ab_pairs(file.keys(), shape, config)
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
    for module, extra_names in extras.items():
        for name in extra_names.values():
            _check_tensor(file, name, sizes[module.path][1:])
    for name, module in base_copies.items():
        _check_base_copy(file, name, module, shape, checkpoint)
    has_base = checkpoint is not None and bool(extras or token_rows)
    base = CheckpointTensors(checkpoint, shape.quantization) if has_base and checkpoint is not None else None
    pairs, transforms = {}, {}
    for module in dict.fromkeys((*ab_pairs, *extras)):
        if module in ab_pairs:
            a_name, b_name = ab_pairs[module]["A"], ab_pairs[module]["B"]
            a, b = file.get_tensor(a_name).to(dtype), file.get_tensor(b_name).to(torch.float32)
            b *= config.scale(module.name)
        else:  # only the bias was trained
            a_name = b_name = module.name
            d_in, d_out = sizes[module.path]
            a, b = torch.zeros(1, d_in, dtype=dtype), torch.zeros(d_out, 1)
        key, transform = (module.layer, module.target), None
        if module in extras:
            weight_name = _weight_name(module, shape)
            transform = _read_transform(file, extras[module], module, config, base, weight_name, a, b)
            b *= 1 + transform[0, :, None]
            transform = transform.to(dtype)
        b = b.to(dtype)
        for name, tensor in ((f"magnitude or bias of {module.name}", transform), (a_name, a), (b_name, b)):
            # aminmax takes one pass, and both results are NaN if any element is NaN. torch.isfinite takes sixty times
            # as long.
            if tensor is not None and not all(map(math.isfinite, torch.aminmax(tensor))):
                raise InvalidArgument(f"{name} contains NaN or infinity, or overflows {dtype} after scaling")
        pairs[key] = (a, b) if shard is None else _shard_pair(a, b, module.path, shard)
        if transform is not None:
            transforms[key] = transform if shard is None else _shard_transform(transform, module.path, shard)
    for module, a, b in _token_pairs(file, token_rows, config, shape, base, max_rank):
        key, a, b = (module.layer, module.target), a.to(dtype), b.to(dtype)
        if key in pairs:
            raise InvalidArgument(f"trainable_token_indices is not supported if {module.path} is adapted, too")
        if not all(map(math.isfinite, (*torch.aminmax(a), *torch.aminmax(b)))):
            raise InvalidArgument(f"trained rows of {module.path} contain NaN or infinity, or overflow {dtype}")
        pairs[key] = (a, b) if shard is None else _shard_pair(a, b, module.path, shard)
    return HostAdapter(max(a.shape[0] for a, _ in pairs.values()), pairs, transforms)


def _token_pairs(
    file: SafetensorsReader,
    token_rows: "Mapping[_LoRAModule, str]",
    config: PeftConfig,
    shape: ModelConfig,
    base: CheckpointTensors | None,
    max_rank: int,
) -> "Iterator[tuple[_LoRAModule, Tensor, Tensor]]":
    """Yield A and B, float32, for each module whose rows of some tokens were trained: the differences between new and
    old rows are a LoRA adapter whose rank is the number of these tokens.

    `token_rows` maps modules to the names of their new rows in the file. As in PEFT, an output projection that is tied
    to the embedding has the new rows of the embedding, unless it has rows of its own.
    """
    field = "trainable_token_indices"
    modules = {module.path: module for module in _lora_modules(shape).values() if module.layer == NO_LAYER}
    if missing := sorted(config.token_indices.keys() ^ {module.path for module in token_rows}):
        raise InvalidArgument(f"{field}: config and file must have rows of the same modules; check {missing[0]}")
    for module, name in token_rows.items():
        tokens, width = config.token_indices[module.path], shape.embedding_size
        if len(tokens) > max_rank or max(tokens) >= shape.vocab_size:
            raise InvalidArgument(
                f"{field}: {len(tokens)} tokens up to {max(tokens)} are not supported; at most max_lora_rank "
                f"{max_rank} tokens of the vocabulary of {shape.vocab_size} can be trained"
            )
        _check_tensor(file, name, (len(tokens), width))
        weight = _base_tensor(base, _weight_name(module, shape), (shape.vocab_size, width))
        old = torch.cat([weight.read(0, range(i, i + 1), range(width), torch.float32).float() for i in tokens])
        delta = file.get_tensor(name).float() - old
        one_hot = torch.zeros(len(tokens), shape.vocab_size)
        one_hot[range(len(tokens)), list(tokens)] = 1
        is_shared = module.path == "embed_tokens" and shape.tie_word_embeddings and len(token_rows) == 1
        for path in ("embed_tokens", "lm_head") if is_shared else (module.path,):
            yield modules[path], *((one_hot, delta.t()) if path == "embed_tokens" else (delta, one_hot.t()))


def _read_transform(
    file: SafetensorsReader,
    names: Mapping[str, str],
    module: "_LoRAModule",
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


def _shard_transform(transform: RowTransform, path: str, shard: TensorParallelShard) -> RowTransform:
    """Return the part of a transform that a tensor-parallel rank needs. If the ranks add up their outputs, only the
    first one adds the addends."""
    if path == "lm_head":
        return _vocab_shard_rows(transform.t(), shard).t().contiguous()
    part = torch.cat([transform[:, r.start : r.stop] for r in shard.output_ranges(path)], dim=1)
    if shard.rank and shard.needs_all_reduce(path):
        part[1] = 0
    return part


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


def _ab_pairs(
    keys: list[str], shape: ModelConfig, config: PeftConfig
) -> tuple[
    dict[_LoRAModule, dict[str, str]],
    dict[str, _LoRAModule],
    dict[_LoRAModule, dict[str, str]],
    dict[_LoRAModule, str],
]:
    """Return the tensor names of A and B for each adapted module.

    Also return the names of tensors that are copies of base weights, each with its module, and for some modules the
    names of the other tensors that change them: magnitude, lora_bias and bias. Last, return the names of the rows of
    trained tokens, for the embedding and the output projection.

    Raises:
        InvalidArgument: a tensor is unexpected, A or B of a pair is missing, or the file contains no pair.
    """
    modules = _lora_modules(shape)
    ab_pairs: dict[_LoRAModule, dict[str, str]] = {}
    extras: dict[_LoRAModule, dict[str, str]] = {}
    token_rows: dict[_LoRAModule, str] = {}
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
        if match["tokens"] and module.layer == NO_LAYER:
            token_rows[module] = tensor_name
            continue
        if (extra := next((kind for kind in _EXTRAS if match[kind]), None)) is not None:
            extras.setdefault(module, {})[extra] = tensor_name
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
    _check_extras(ab_pairs, extras, config)
    return ab_pairs, base_copies, extras, token_rows


def _check_extras(
    ab_pairs: Mapping[_LoRAModule, Any], extras: Mapping[_LoRAModule, Mapping[str, str]], config: PeftConfig
) -> None:
    """Reject magnitudes and biases that contradict the config."""
    for kind, option in (("magnitude", "use_dora"), ("lora_bias", "lora_bias")):
        is_set, modules = getattr(config, option), {module for module, names in extras.items() if kind in names}
        if modules and not is_set:
            name = min(extras[module][kind] for module in modules)
            raise InvalidArgument(f"tensor {name!r} exists, but {option} is not set in {CONFIG_FILE}")
        if any(module.path == "embed_tokens" for module in modules):
            raise InvalidArgument(f"{option} True is not supported if embed_tokens is adapted")
        if is_set and (missing := sorted(module.name for module in set(ab_pairs) - modules)):
            raise InvalidArgument(f"{option} is True, but the file has no such tensor for {missing[0]}")
        if alone := sorted(extras[module][kind] for module in modules - set(ab_pairs)):
            raise InvalidArgument(f"tensor {alone[0]!r} exists, but lora_A and lora_B are missing")
    trained = {module.name: names["bias"] for module, names in extras.items() if "bias" in names}
    allowed = {"all": set(trained), "lora_only": {module.name for module in ab_pairs}}.get(config.bias, set())
    if wrong := sorted(set(trained) - allowed):
        raise InvalidArgument(
            f"tensor {trained[wrong[0]]!r}: biases were trained, but bias is {config.bias!r} in {CONFIG_FILE}"
        )


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
        return (
            f"tensor {tensor_name[:200]!r}: bias of a module that is not a linear layer; train the adapter with bias "
            "'lora_only' or 'none'"
        )
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


def _weight_name(module: _LoRAModule, shape: ModelConfig) -> str:
    """Return the name of a module's weight in the checkpoint."""
    return (module.path == "lm_head" and shape.tied_embedding_name) or f"{module.name}.weight"


def _check_base_copy(
    file: SafetensorsReader, name: str, module: _LoRAModule, shape: ModelConfig, checkpoint: Path | None
) -> None:
    """Reject a copy of a base weight if it was resized or trained, because it then differs from the base model."""
    _check_tensor(file, name, (shape.vocab_size, shape.embedding_size))
    checkpoint_name = _weight_name(module, shape)
    if checkpoint is None or not equals_checkpoint(checkpoint, checkpoint_name, file.get_tensor(name)):
        raise InvalidArgument(
            f"{name} differs from the base model's {checkpoint_name}: rows were trained or added, but this engine "
            "supports only LoRA matrices for this weight (PEFT: save_embedding_layers=False omits the weight)"
        )


def _check_tensor(file: SafetensorsReader, name: str, expected_shape: tuple[int, ...]) -> None:
    tensor = file.get_slice(name)
    shape, dtype = tuple(tensor.get_shape()), tensor.get_dtype()
    if dtype not in DTYPES:
        raise InvalidArgument(f"tensor {name!r} is {dtype}; supported are {', '.join(DTYPES)}")
    if shape != expected_shape:
        raise InvalidArgument(f"tensor {name!r} has shape {shape}; config and model require {expected_shape}")
