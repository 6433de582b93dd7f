# SPDX-License-Identifier: Apache-2.0
"""Reads whole tensors of safetensors files with Model Streamer, whose threads read ahead while tensors are copied.

Source: Run:ai Model Streamer (NVIDIA), package runai-model-streamer. It is an optional extra of Quire: `streamer`.
"""

import importlib.util
import logging
from collections.abc import Iterator, Mapping
from pathlib import Path

from torch import Tensor

from quire_spec.documents.remote_weights import RemoteWeights
from quire_spec.errors import ConfigError

logger = logging.getLogger(__name__)


def can_stream(folder: Path, load_format: str, num_ranks: int) -> bool:
    """Return whether the weights of the model in `folder` are read with Model Streamer. If `load_format` selects it
    and it cannot be used, the reason is logged.

    Each rank of a tensor-parallel model reads only its part of each tensor, and Model Streamer reads whole tensors.
    There is no other reader for weights in a bucket.
    """
    if RemoteWeights.find(folder) is not None:
        if num_ranks > 1:
            logger.warning("each of the %d ranks reads all weights from the bucket", num_ranks)
        return True
    if load_format != "runai_streamer":
        return False
    reason = ""
    if importlib.util.find_spec("runai_model_streamer") is None:
        reason = "runai-model-streamer is not installed; pip install 'quire-llm[streamer]'"
    elif num_ranks > 1:
        reason = "with several ranks, it would read each tensor once for each rank"
    if reason:
        logger.warning("load_format %s is not used, the weights are read as safetensors: %s", load_format, reason)
    return not reason


def stream_tensors(file_by_tensor: Mapping[str, Path]) -> Iterator[tuple[str, Tensor]]:
    """Return tensors, by name, in the order in which they are read. The caller can keep them.

    Raises:
        ConfigError: a file could not be read.
    """
    from runai_model_streamer import SafetensorsStreamer

    paths = sorted({str(path) for path in file_by_tensor.values()})
    try:
        with SafetensorsStreamer() as streamer:
            streamer.stream_files(paths, tensor_names=set(file_by_tensor))
            yield from streamer.get_tensors()
    except (OSError, RuntimeError, ValueError) as error:
        folder = Path(paths[0]).parent
        raise ConfigError(f"{folder}: Model Streamer failed: {error}; set load_format to safetensors") from error
