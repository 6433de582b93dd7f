# SPDX-License-Identifier: Apache-2.0
"""`python -m quire_engine compile`: a folder of compiled GPU kernels, which an image can contain. Needs no GPU."""

import re
from collections.abc import Sequence
from pathlib import Path

from quire_spec.errors import InvalidArgument
from quire_spec.model.model_config import ModelConfig


def compile_kernels(models: Sequence[Path], capability: str, into: Path) -> int:
    """Compile the kernels of bfloat16 models into a folder and mark it as complete.

    Args:
        models: folders with a config.json; empty: the shape of Llama-3.1-8B.
        capability: compute capability of the GPU, such as "9.0".
        into: new or existing folder.

    Returns:
        Number of kernels.

    Raises:
        InvalidArgument: Triton is missing, or the capability is not one.
        ConfigError: a model's config.json cannot be read.
    """
    match = re.fullmatch(r"(\d{1,2})\.(\d)", capability)
    if match is None or int(match[1]) < 8:
        raise InvalidArgument(
            f"--capability: {capability!r} is not a compute capability from 8.0 on; use 9.0 for Hopper"
        )
    version = int(match[1]), int(match[2])
    try:
        from quire_kernels.gpu import compilation
    except ImportError as error:
        raise InvalidArgument(f"compile: Triton cannot be imported ({error}); install triton") from error
    configs = [ModelConfig.load(folder) for folder in models]
    shapes = [
        compilation.KernelShape(
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            vocab_size=config.vocab_size,
            activation=config.activation,
            window=window,
            softcap=config.attention_softcap,
        )
        for config in configs
        for window in set(config.sliding_windows)
    ]
    return compilation.fill_cache(shapes or [compilation.LLAMA_3_1_8B], version, into)
