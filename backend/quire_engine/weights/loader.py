# SPDX-License-Identifier: Apache-2.0
"""Loads the weights of a checkpoint into parameters.

The weights are read slice by slice from one or more safetensors files. Several tensors of a checkpoint can be merged
into one parameter.
"""

import functools
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor
from tqdm import tqdm

from quire_engine.weights import device_copier
from quire_engine.weights.device_copier import CopyFunction
from quire_engine.weights.model_streamer import stream_tensors
from quire_engine.weights.param_shard import LoadTarget, ParamShard, TensorSource, read_rows, unsharded
from quire_engine.weights.quantized.quantized_tensors import QuantizedTensors
from quire_engine.weights.quantized.stacked_experts import EXPERT, stacked_name
from quire_engine.weights.tensor_files import TensorFiles
from quire_spec.errors import ConfigError
from quire_spec.model.quantization import QuantizationScheme

FLOAT_DTYPES = ("F64", "F32", "BF16", "F16")

# Tensors are read in chunks of this many bytes, which limits the memory that the conversion needs. It is the size of a
# pinned buffer.
_CHUNK_BYTES = device_copier.BUFFER_BYTES
_LM_HEAD_NAME = "lm_head.weight"
_MISSING_HINT = "config.json does not match this checkpoint, or the checkpoint is incomplete"
# Names of tensors that are not loaded. Old checkpoints contain rope frequencies and masks, but the engine computes them
# from config.json. The parts of a model for images are loaded elsewhere, and so are those for the prediction of further
# tokens. The parts for sound are not used.
_UNUSED_TENSORS = re.compile(
    r"\w+\.layers\.\d+\.(self_attn|attention)\.(rotary_emb\.inv_freq|bias|masked_bias)"
    r"|model\.mtp_.*|mtp\..*|(model\.)?(vision_tower|vision_model|multi_modal_projector|mm_projector|visual)\..*"
    r"|(model\.)?(vision_embedder|embed_vision|audio_tower|embed_audio)\..*"
)


def load_weights(
    folder: Path,
    tensors: Iterable[tuple[str, LoadTarget]],
    *,
    tied_to: str | None = None,
    progress: bool = False,
    checkpoint: QuantizedTensors | None = None,
    stream: bool = False,
    unused_prefixes: tuple[str, ...] = (),
    is_part: bool = False,
) -> None:
    """Fill parameters from the checkpoint in `folder`, and convert the values to each parameter's dtype and device.

    Args:
        folder: folder of the checkpoint.
        tensors: names of tensors in the checkpoint, each with the parameter or shard that the tensor fills.
        tied_to: the name of the embedding, if the output projection has the same weight. If the checkpoint contains a
            second copy of this weight, the copy is not loaded.
        progress: show a progress bar on stderr.
        checkpoint: quantized tensors of the checkpoint; None if it has none. If its method `find` has returned a tensor
            before, the caller loads this tensor, and it is not reported as unexpected.
        stream: read the tensors that are not quantized with Model Streamer. Those in a bucket are always read with it.
        unused_prefixes: tensors whose names begin with these prefixes are not loaded.
        is_part: other tensors of the checkpoint are expected.

    Raises:
        ConfigError: a file or a tensor is missing, a tensor is unexpected or has the wrong shape or dtype, or `tied_to`
            is set but the output projection differs from the embedding.
    """
    quantized = QuantizedTensors(TensorFiles(folder), None) if checkpoint is None else checkpoint
    files = quantized.files
    unused_prefixes = tuple(files.name_in_file(prefix) for prefix in unused_prefixes)
    targets = {files.name_in_file(name): unsharded(target) for name, target in tensors}
    lm_head_name = files.name_in_file(_LM_HEAD_NAME)
    sources: dict[str, TensorSource] = {
        name: tensor for name in targets if (tensor := quantized.find(name)) is not None
    }
    stacked = _find_stacked_experts(files, {name: each for name, each in targets.items() if name not in sources})
    sources |= stacked
    if tied_to and lm_head_name not in files and quantized.find(lm_head_name) is not None:
        raise ConfigError(
            f"{folder}: {lm_head_name} is quantized, but config.json ties it to {tied_to}; set tie_word_embeddings to "
            "false in config.json"
        )
    names = {
        name
        for name in files.file_by_tensor
        if name in targets or not (is_part or _UNUSED_TENSORS.fullmatch(name) or name.startswith(unused_prefixes))
    } - ({lm_head_name} if tied_to else set())
    names -= {tensor.name for tensor in stacked.values()}
    if missing := sorted(set(targets) - names - set(sources)):
        hint = quantized.describe_missing_config() or f"; {_MISSING_HINT}"
        raise ConfigError(f"{folder}: {summarize_names(missing)} missing{hint}")
    if unexpected := sorted(name for name in names - set(targets) if not quantized.is_known(name)):
        hint = quantized.describe_missing_config() or "; config.json does not match this checkpoint"
        raise ConfigError(f"{folder}: {summarize_names(unexpected)} unexpected{hint}")
    total = sum(t.nbytes for t in targets.values())
    device = next((target.tensor.device for target in targets.values()), torch.device("cpu"))
    with (
        tqdm(total=total, unit="B", unit_scale=True, desc="weights", disable=not progress) as bar,
        device_copier.open_copier(device) as copy,
    ):
        for name, source in _iter_sources(files, targets, sources, stream):
            _copy_shard(source, targets[name], copy)
            bar.update(targets[name].nbytes)
    if tied_to and lm_head_name in files and not _equal_in_checkpoint(files, files.name_in_file(tied_to), lm_head_name):
        raise ConfigError(
            f"{folder}: {lm_head_name} differs from {tied_to}, but config.json ties them; set tie_word_embeddings "
            "to false in config.json"
        )
    if files.bucket is not None:
        files.bucket.check_unchanged()


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """Return all tensors of a small checkpoint; raises ConfigError if it cannot be read."""
    files = TensorFiles(folder)
    return {name: files.get_slice(name)[:] for name in files.file_by_tensor}


def read_tensor(folder: Path, name: str) -> Tensor:
    """Return one tensor of a checkpoint; raises ConfigError if the tensor cannot be read or does not exist."""
    files = TensorFiles(folder)
    if (key := files.name_in_file(name)) not in files:
        raise ConfigError(f"{folder}: {key} missing; {_MISSING_HINT}")
    tensor: Tensor = files.get_slice(key)[...]
    return tensor


class CheckpointTensors:
    """Tensors of a checkpoint by their names in the model. Quantized tensors are dequantized."""

    def __init__(self, folder: Path, scheme: QuantizationScheme | None) -> None:
        """`scheme` describes the quantized tensors of the checkpoint; None if it has none.

        Raises:
            ConfigError: the checkpoint cannot be read.
        """
        self._quantized = QuantizedTensors(TensorFiles(folder), scheme)

    def find(self, name: str) -> TensorSource | None:
        """Return a tensor, or None if the checkpoint does not contain it; raises ConfigError if it is wrong."""
        files = self._quantized.files
        key = files.name_in_file(name)
        return self._quantized.find(key) or (_FloatTensor(files, key) if key in files else None)


def equals_checkpoint(folder: Path, name: str, tensor: Tensor) -> bool:
    """Return whether a tensor is equal to the checkpoint's tensor `name`.

    Before the comparison, both tensors are converted to the narrower of their two dtypes.

    Raises:
        ConfigError: the checkpoint cannot be read, or does not contain the tensor.
    """
    checkpoint_tensor = read_tensor(folder, name)
    if checkpoint_tensor.shape != tensor.shape:
        return False
    narrow_dtype = min(checkpoint_tensor.dtype, tensor.dtype, key=lambda dtype: dtype.itemsize)
    return torch.equal(checkpoint_tensor.to(narrow_dtype), tensor.to(narrow_dtype))


def _iter_sources(
    files: TensorFiles, targets: Mapping[str, ParamShard], quantized: Mapping[str, TensorSource], stream: bool
) -> Iterator[tuple[str, TensorSource]]:
    """Return the source of each target, after a check of its shape."""
    floats = {name: _FloatTensor(files, name) for name in targets if name not in quantized}
    for name, target in targets.items():
        if (shape := (quantized.get(name) or floats[name]).shape) != target.checkpoint_shape:
            raise ConfigError(
                f"{files.folder}: {name} has shape {shape}; config.json implies {target.checkpoint_shape}"
            )
    yield from quantized.items()
    file_by_tensor = {name: files.file_by_tensor[name] for name in floats}
    streamed: Iterable[tuple[str, Tensor]] = ()
    if floats and files.bucket is not None:
        streamed = files.bucket.stream_tensors({path.name for path in file_by_tensor.values()}, floats.keys())
    elif floats and stream:
        streamed = stream_tensors(file_by_tensor)
    for name, tensor in streamed:
        if name in floats:
            yield name, floats.pop(name).with_values(tensor)
    yield from floats.items()


def _find_stacked_experts(files: TensorFiles, targets: Mapping[str, ParamShard]) -> dict[str, "_StackedExpertTensor"]:
    """Return the sources of those projections of experts that the checkpoint stores in one tensor for all experts."""
    found = {}
    for name, target in targets.items():
        match = EXPERT.fullmatch(name)
        if match is None or name in files:
            continue
        projection = match["projection"]
        if (stacked := stacked_name(match)) in files:
            is_transposed = target.is_stacked_transposed
            found[name] = _StackedExpertTensor(files, stacked, int(match["expert"]), projection, is_transposed)
    return found


class _StackedExpertTensor:
    """A projection of one expert, in a tensor [num_experts, out_features, in_features] of all experts, or transposed
    [num_experts, in_features, out_features]. In the tensor of gate and up, the features of gate come first."""

    def __init__(self, files: TensorFiles, name: str, expert: int, projection: str, is_transposed: bool) -> None:
        self.name = name
        self._tensor, self._expert, self._is_transposed = _FloatTensor(files, name), expert, is_transposed
        _, *sizes = self._tensor.shape
        rows, columns = reversed(sizes) if is_transposed else sizes
        half = rows if projection == "down_proj" else rows // 2
        self.shape = half, columns
        self._first_row = half if projection == "up_proj" else 0

    def read(self, expert: int, rows: range, columns: range, dtype: torch.dtype) -> Tensor:
        """See TensorSource.read."""
        rows = range(rows.start + self._first_row, rows.stop + self._first_row)
        if self._is_transposed:
            return self._tensor.read(self._expert, columns, rows, dtype).T
        return self._tensor.read(self._expert, rows, columns, dtype)


class _FloatTensor:
    """A tensor of a checkpoint. It is not quantized."""

    def __init__(self, files: TensorFiles, name: str) -> None:
        self._slice: Any = files.get_slice(name)
        self.shape: tuple[int, ...] = tuple(self._slice.get_shape())
        if (dtype := self._slice.get_dtype()) not in FLOAT_DTYPES:
            raise ConfigError(
                f"{files.file_by_tensor[name]}: {name} has dtype {dtype}, but this dtype is supported only for "
                "linear layers that quantization_config in config.json describes"
            )

    def with_values(self, values: Tensor) -> Self:
        """Return this tensor, whose values have been read already."""
        self._slice = values
        return self

    def read(self, expert: int, rows: range, columns: range, dtype: torch.dtype) -> Tensor:
        """Return `rows` and `columns` of a matrix, the elements `rows` of a vector, or the only element of a scalar.

        If the tensor contains several matrices, `expert` is the index of the matrix.
        """
        if not self.shape:
            scalar: Tensor = self._slice[...]
            return scalar.view(1)
        if len(self.shape) == 3 and self.shape[1] == 1:  # the weight of a convolution of each feature by itself
            weight: Tensor = self._slice[rows.start : rows.stop, 0, columns.start : columns.stop]
            return weight
        if len(self.shape) == 4:  # [1, 1, num_heads, 1], to be multiplied with [1, num_tokens, num_heads, head_dim]
            numbers: Tensor = self._slice[0, 0, rows.start : rows.stop, 0]
            return numbers
        index: tuple[int | slice, ...] = (slice(rows.start, rows.stop), slice(columns.start, columns.stop))
        values: Tensor = self._slice[(expert, *index)[-len(self.shape) :] if len(self.shape) > 1 else index[0]]
        return values


def _equal_in_checkpoint(files: TensorFiles, name: str, other_name: str) -> bool:
    """Return whether two matrices of a checkpoint are equal. They are compared chunk by chunk."""
    tensor_slice, other_slice = files.get_slice(name), files.get_slice(other_name)
    if tensor_slice.get_shape() != other_slice.get_shape():
        return False
    rows, columns = tensor_slice.get_shape()
    size = max(1, _CHUNK_BYTES // (8 * columns))
    return all(
        torch.equal(tensor_slice[i : i + size].float(), other_slice[i : i + size].float()) for i in range(0, rows, size)
    )


def _copy_shard(source: TensorSource, target: ParamShard, copy: CopyFunction) -> None:
    """Copy a shard to its parameter. Only the rows and columns of the shard are read from the file."""
    for expert, part, rows in target.chunks(_CHUNK_BYTES):
        copy(part, functools.partial(read_rows, source, target, expert, rows))


def summarize_names(names: list[str]) -> str:
    """Return the names and a verb for an error message, such as "a, b, c and 4 more are"."""
    listed = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    return f"{listed} {'is' if len(names) == 1 else 'are'}"
