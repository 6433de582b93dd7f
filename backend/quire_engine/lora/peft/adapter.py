# SPDX-License-Identifier: Apache-2.0
"""Reader of PEFT adapter folders: returns a fully checked HostAdapter, or raises an error that states why the folder is
rejected.

A feature that the engine would apply differently from PEFT is rejected, never ignored. Adapters are untrusted: names,
shapes and sizes are checked before a tensor is read, and nothing in the folder is executed.
"""

import math
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType

import torch
from safetensors import SafetensorError
from torch import Tensor

from quire_engine.lora.peft.adapter_shard import shard_pair, shard_transform
from quire_engine.lora.peft.adapter_tensors import WEIGHTS_FILE, AdapterTensors
from quire_engine.lora.peft.base_weights import read_saved_module, read_trained_tokens, read_transform
from quire_engine.lora.peft.config import CONFIG_FILE, PeftConfig
from quire_engine.lora.peft.lora_module import NO_LAYER, LoRAModule, lora_modules, module_sizes
from quire_engine.lora.peft.tensor_check import check_finite, check_tensor
from quire_engine.weights.conversion_report import CONVERT_COMMAND
from quire_engine.weights.loader import CheckpointTensors, equals_checkpoint
from quire_engine.weights.pickle_conversion import ADAPTER_PICKLE_NAME
from quire_engine.weights.safetensors_reader import SafetensorsReader, open_safetensors
from quire_engine.weights.score_head import ScoreHead
from quire_kernels import RowTransform
from quire_spec.errors import InvalidArgument
from quire_spec.model.memory_sizing import lora_bytes
from quire_spec.model.model_config import ModelConfig
from quire_spec.model.parallel.tensor_parallel import TensorParallelShard
from quire_spec.model.pooler_config import MAX_LABELS

# Maximum size of the file's header in bytes. The header contains names, shapes and metadata.
_MAX_HEADER_BYTES = 8 << 20
_MAX_TENSORS_PER_MODULE = 32
"""Two are used. A file can also contain tensors of parts of the model that Quire does not serve."""
MAX_ROW_NORM = 100.0
"""Maximum root mean square of the norms of the rows of B @ A, with the scale. The rows of a model's weights have norms
near 1, because they keep the size of activations. An update that is a hundred times as large replaces the model."""


@dataclass(frozen=True, slots=True)
class HostAdapter:
    """An adapter in host memory, in the same form as in its files. `ModelRunner.read_adapter` packs it for the
    slots."""

    rank: int
    """The largest LoRA rank among the adapter's modules."""
    pairs: Mapping[tuple[int, str], tuple[Tensor, Tensor]]
    """Maps (layer, target) to A [rank, in_features] and B [out_features, rank], with the scale folded into B. The layer
    of embed_tokens and lm_head is NO_LAYER. For a projection of experts, both have a first dimension of num_experts."""
    transforms: Mapping[tuple[int, str], RowTransform] = field(default_factory=dict)
    """Maps some keys of `pairs` to scales and addends of the base product, [2, out_features]. Maps (NO_LAYER, path) of
    some norms to their weight and bias, [2, size]."""
    invocation_tokens: tuple[int, ...] = ()
    """The tokens from which the adapter applies; if there are none, it applies to all tokens."""
    not_combinable: str = ""
    """The field of adapter_config.json for which it cannot be part of a sum; empty if it can."""
    score: ScoreHead | None = None
    """The head of a classifier; None if the adapter does not change that of the checkpoint."""

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors."""
        matrices = sum(a.nbytes + b.nbytes for a, b in self.pairs.values())
        score = 0 if self.score is None else self.score.num_bytes
        return matrices + score + sum(transform.nbytes for transform in self.transforms.values())


def read_adapter(
    folder: Path,
    shape: ModelConfig,
    max_rank: int,
    dtype: torch.dtype,
    shard: TensorParallelShard | None = None,
    checkpoint: Path | None = None,
    has_experts: bool = False,
    has_vocab_modules: bool = False,
    has_heads: bool = False,
    reads_images: bool = False,
    norms: Mapping[str, int] = MappingProxyType({}),
) -> HostAdapter:
    """Read and check an adapter folder. The scales are folded into B before conversion to `dtype`.

    Args:
        shard: the tensor-parallel rank whose part is returned; None returns the whole adapter. Every rank checks the
            whole adapter, so that all ranks report the same error.
        checkpoint: folder of the base model. If an adapter changes the embedding, PEFT also saves the embedding itself,
            which must equal the checkpoint's embedding. The norms of DoRA and the biases of the base model are those
            of the checkpoint.
        has_experts: whether the slots have memory for experts.
        has_vocab_modules: whether the slots have memory for a whole embedding and a whole output projection.
        has_heads: whether the engine classifies, so that an adapter can have the head of a classifier.
        reads_images: whether the engine runs the vision tower, which adapters cannot change.
        norms: sizes of the model's norms by path.

    Raises:
        InvalidArgument: the folder contains no adapter for this model, or the adapter cannot be served.
    """
    try:
        config = PeftConfig.load(folder / CONFIG_FILE)
        path = _find_weights(folder)
        _check_size(path, shape, max_rank)
        with open_safetensors(path) as file:
            names = AdapterTensors.from_names(file.keys(), shape, config, norms)
            if names.experts and not has_experts:
                raise InvalidArgument(
                    f"the adapter changes experts ({next(iter(names.experts)).name}), but the adapter slots have no "
                    "memory for them; set lora_experts (spec.lora.experts of an LLMService) to true"
                )
            if names.vision is not None and reads_images:
                raise InvalidArgument(
                    f"tensor {names.vision!r} changes the vision tower, which adapters cannot change; train the "
                    "adapter on the language model only, or start the server with language_model_only"
                )
            if "weight" in names.score and not has_heads:
                raise InvalidArgument(
                    f"tensor {names.score['weight']!r} is the head of a classifier, and this engine does not classify; "
                    "set convert to classify (spec.engine.convert of an LLMService)"
                )
            if names.saved_modules and not has_vocab_modules:
                raise InvalidArgument(
                    f"modules_to_save contains {next(iter(names.saved_modules)).path}, but the adapter slots have no "
                    "memory for it; set lora_modules_to_save (spec.lora.modulesToSave of an LLMService) to true"
                )
            return _read_tensors(file, names, config, shape, max_rank, dtype, shard, checkpoint, norms)
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
    max_bytes = lora_bytes(shape, max_rank, torch.float32.itemsize, has_experts=True) + _MAX_HEADER_BYTES
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
    # Gate, up and down of each expert can have tensors of their own.
    num_modules = sum(max(1, 3 * module.num_experts) for module in lora_modules(shape).values())
    max_tensors = _MAX_TENSORS_PER_MODULE * num_modules
    if num_tensors > max_tensors:
        raise InvalidArgument(
            f"{WEIGHTS_FILE} has {num_tensors} tensors, but an adapter of this model can have at most {max_tensors}; "
            "check that the adapter is for this model"
        )


def _read_tensors(
    file: SafetensorsReader,
    names: AdapterTensors,
    config: PeftConfig,
    shape: ModelConfig,
    max_rank: int,
    dtype: torch.dtype,
    shard: TensorParallelShard | None,
    checkpoint: Path | None,
    norms: Mapping[str, int],
) -> HostAdapter:
    _check_invocation(config, names, shape)
    sizes = module_sizes(shape)
    _check_shapes(file, names, config, sizes, max_rank)
    for name, module in names.base_copies.items():
        _check_base_copy(file, name, module, shape, checkpoint)
    has_base = checkpoint is not None and bool(names.extras or names.token_rows or names.saved_modules)
    base = CheckpointTensors(checkpoint, shape.quantization) if has_base and checkpoint is not None else None
    pairs: dict[tuple[int, str], tuple[Tensor, Tensor]] = {}
    transforms: dict[tuple[int, str], RowTransform] = {}
    for module in dict.fromkeys((*names.pairs, *names.extras)):
        d_in, d_out = sizes[module.layer, module.path]
        if (pair := names.pairs.get(module)) is not None:
            a, b, labels = file.get_tensor(pair["A"]), file.get_tensor(pair["B"]).float(), (pair["A"], pair["B"])
            b *= config.scale(_pattern_name(module, config))
        else:  # only the bias was trained
            a, b, labels = torch.zeros(1, d_in), torch.zeros(d_out, 1), (module.name, module.name)
        a = a.to(dtype)
        if (extras := names.extras.get(module)) is not None:
            transform = read_transform(file, extras, module, config, base, module.weight_name(shape), a, b)
            b *= 1 + transform[0, :, None]
            transform = transform.to(dtype)
            check_finite(f"magnitude or bias of {module.name} contains", transform, dtype)
            transforms[module.key] = transform if shard is None else shard_transform(transform, module, shard)
        rounded_b = b.to(dtype)
        for label, matrix in zip(labels, (a, rounded_b), strict=True):
            check_finite(f"{label} contains", matrix, dtype)
        _check_norm(module, a, b)
        b = rounded_b
        pairs[module.key] = (a, b) if shard is None else shard_pair(a, b, module, shard)
    for module, tensors in names.experts.items():
        a, b = tensors.read(file, module, config)
        a, rounded_b = a.to(dtype), b.to(dtype)
        for matrix in (a, rounded_b):
            check_finite(f"tensors of {module.name} contain", matrix, dtype)
        _check_norm(module, a, b)
        b = rounded_b
        pairs[module.key] = (a, b) if shard is None else shard_pair(a, b, module, shard)
    for module, a, b in read_trained_tokens(file, names.token_rows, config, shape, base, max_rank):
        if module.key in pairs:
            raise InvalidArgument(f"trainable_token_indices is not supported if {module.path} is adapted, too")
        a, b = a.to(dtype), b.to(dtype)
        for matrix in (a, b):
            check_finite(f"trained rows of {module.path} contain", matrix, dtype)
        pairs[module.key] = (a, b) if shard is None else shard_pair(a, b, module, shard)
    transforms |= {
        (NO_LAYER, path): _read_norm(file, tensors, norms[path], dtype) for path, tensors in names.saved_norms.items()
    }
    # These pairs have a higher rank, but they are not LoRA matrices of the file.
    rank = max(a.shape[-2] for a, _ in pairs.values())
    for module, name in names.saved_modules.items():
        if module.key in pairs:
            raise InvalidArgument(f"modules_to_save is not supported for {module.path}, because it is adapted, too")
        a, b = read_saved_module(file, name, module, shape, base)
        delta = a.t() if module.path == "embed_tokens" else b
        _check_row_norm(module.name, torch.linalg.vector_norm(delta).item() / math.sqrt(len(delta)))
        a, b = a.to(dtype), b.to(dtype)
        for matrix in (a, b):
            check_finite(f"{name} contains", matrix, dtype)
        pairs[module.key] = (a, b) if shard is None else shard_pair(a, b, module, shard)
    score = _read_score(file, names.score, config, shape, checkpoint)
    return HostAdapter(rank, pairs, transforms, config.invocation_tokens, config.not_combinable, score)


def _read_score(
    file: SafetensorsReader, names: Mapping[str, str], config: PeftConfig, shape: ModelConfig, checkpoint: Path | None
) -> ScoreHead | None:
    """Return the head of a classifier: that of the checkpoint, with the parts that the adapter replaces or changes."""

    def read(part: str, *size: int) -> Tensor:
        check_tensor(file, names[part], size)
        tensor = file.get_tensor(names[part]).float()
        check_finite(f"{names[part]} contains", tensor, torch.float32)
        return tensor

    size, has_own = shape.embedding_size, "weight" in names
    if not names or (not shape.num_labels and not has_own):
        return None  # the layer after the first token is not part of an embedding
    num_labels = shape.num_labels
    if has_own:
        num_labels = min(max(next(iter(file.get_slice(names["weight"]).get_shape()), 1), 1), MAX_LABELS)
    if shape.encoder is None:
        return ScoreHead(read("weight", num_labels, size), read("bias", num_labels) if "bias" in names else None)
    assert checkpoint is not None
    head = ScoreHead.load(checkpoint, shape)
    if has_own:
        if "bias" not in names:
            raise InvalidArgument(f"tensor {names['weight']!r} exists, but the bias of this layer is missing")
        head = replace(head, weight=read("weight", num_labels, size), bias=read("bias", num_labels))
    if "dense.weight" in names:
        head = replace(head, dense=read("dense.weight", size, size))
    if "dense.bias" in names:
        head = replace(head, dense_bias=read("dense.bias", size))
    if {"dense.A", "dense.B"} & names.keys():
        if not {"dense.A", "dense.B"} <= names.keys() or config.use_dora:
            raise InvalidArgument("the layer before the head needs lora_A and lora_B, without use_dora")
        if head.dense is None:
            raise InvalidArgument(f"tensor {min(names.values())!r}: this model has no layer before its head")
        name = shape.encoder.score.dense
        rank = config.rank(name)
        update = config.scale(name) * read("dense.B", size, rank) @ read("dense.A", rank, size)
        _check_row_norm(name, torch.linalg.vector_norm(update).item() / math.sqrt(size))
        head = replace(head, dense=head.dense + update)
    return head


def _read_norm(file: SafetensorsReader, names: Mapping[str, str], size: int, dtype: torch.dtype) -> Tensor:
    """Return the weight and the bias of a norm, [2, size]."""
    parts = torch.zeros(2, size, dtype=dtype)
    for index, kind in enumerate(("weight", "bias")):
        if (name := names.get(kind)) is not None:
            check_tensor(file, name, (size,))
            parts[index] = file.get_tensor(name).to(dtype)
            check_finite(f"{name} contains", parts[index], dtype)
    return parts


def _check_invocation(config: PeftConfig, names: AdapterTensors, shape: ModelConfig) -> None:
    """Reject an invocation that no prompt can contain, and an adapter that also changes the tokens before it."""
    unknown = [token for token in config.invocation_tokens if token >= shape.vocab_size]
    if unknown:
        raise InvalidArgument(
            f"alora_invocation_tokens: {unknown[0]} is not a token of this model, which has {shape.vocab_size} tokens; "
            "check that the adapter is for this model"
        )
    if config.invocation_tokens and any(module.path == "embed_tokens" for module in names.pairs):
        raise InvalidArgument("alora_invocation_tokens is not supported together with an adapted embed_tokens")
    if config.invocation_tokens and any(module.path.endswith(".kv_b_proj") for module in names.pairs):
        raise InvalidArgument(
            "alora_invocation_tokens is not supported together with an adapted kv_b_proj, which would also change the "
            "keys of the tokens before the invocation; train it without kv_b_proj"
        )


def _check_shapes(
    file: SafetensorsReader,
    names: AdapterTensors,
    config: PeftConfig,
    sizes: Mapping[tuple[int, str], tuple[int, int]],
    max_rank: int,
) -> None:
    """Reject ranks above `max_rank` and wrong shapes, before a tensor is read. `sizes` are (in_features, out_features)
    by the path of the module."""
    ranks = {module: config.rank(_pattern_name(module, config)) for module in names.pairs}
    ranks |= {module: tensors.rank(module, config) for module, tensors in names.experts.items()}
    for rank in ranks.values():
        if rank > max_rank:
            raise InvalidArgument(
                f"rank {rank} exceeds max_lora_rank {max_rank}; raise it (spec.lora.maxRank or maxLoadedRanks of an "
                f"LLMService) or train with a smaller rank{' (gate and up are fused)' if rank == 2 * config.r else ''}"
            )
    for module, pair in names.pairs.items():
        d_in, d_out = sizes[module.layer, module.path]
        check_tensor(file, pair["A"], (ranks[module], d_in))
        check_tensor(file, pair["B"], (d_out, ranks[module]))
    for module, tensors in names.experts.items():
        tensors.check(file, module, config, sizes[module.layer, module.path])
    for module, extras in names.extras.items():
        for name in extras.values():
            check_tensor(file, name, sizes[module.layer, module.path][1:])


def _pattern_name(module: LoRAModule, config: PeftConfig) -> str:
    """Return the path against which PEFT matches the keys of rank_pattern and alpha_pattern."""
    return module.parameter if config.targets_parameter(module.parameter) else module.name


def _check_norm(module: LoRAModule, a: Tensor, b: Tensor) -> None:
    """Reject an update that is far larger than the weights of any model. `b` contains the scale. Of experts, the one
    with the largest update counts."""
    a = a.float()
    # The squared norm of B @ A, without the product itself.
    squared_norm = ((a @ a.mT) * (b.mT @ b)).sum((-2, -1)).max().item()
    # The matrices are finite, so NaN means that their products overflowed.
    _check_row_norm(
        module.name, math.inf if math.isnan(squared_norm) else math.sqrt(max(squared_norm, 0.0) / b.shape[-2])
    )


def _check_row_norm(name: str, row_norm: float) -> None:
    if row_norm > MAX_ROW_NORM:
        raise InvalidArgument(
            f"Diverged: the rows of the update of {name} have the norm {row_norm:.4g}, and at most "
            f"{MAX_ROW_NORM:g} is allowed; check lora_alpha, and that the training did not diverge"
        )


def _check_base_copy(
    file: SafetensorsReader, name: str, module: LoRAModule, shape: ModelConfig, checkpoint: Path | None
) -> None:
    """Reject a copy of a base weight if it was resized or trained, because it then differs from the base model."""
    check_tensor(file, name, (shape.vocab_size, shape.embedding_size))
    checkpoint_name = module.weight_name(shape)
    if checkpoint is None or not equals_checkpoint(checkpoint, checkpoint_name, file.get_tensor(name)):
        raise InvalidArgument(
            f"{name} differs from the base model's {checkpoint_name}: rows were trained or added, but this engine "
            "supports only LoRA matrices for this weight (PEFT: save_embedding_layers=False omits the weight)"
        )
