# SPDX-License-Identifier: Apache-2.0
"""Choice of an engine's KV layout: decides whether layers with a sliding window get separate blocks."""

import logging

from quire_spec.engine.config import EngineConfig
from quire_spec.errors import ConfigError
from quire_spec.model.attention.state_config import UNSUPPORTED_TIERS
from quire_spec.model.kv_layout import UNSUPPORTED_LAYOUT, KVLayout
from quire_spec.model.model_config import ModelConfig

logger = logging.getLogger(__name__)


def choose_layout(config: EngineConfig, shape: ModelConfig) -> KVLayout:
    """Return the layout for a whole model; it is the same in the engine core and on all ranks."""
    max_model_len, is_staged = config.max_model_len or shape.max_length, config.pipeline_parallel_size > 1
    return KVLayout.from_model(shape, max_model_len, config.has_drafter, is_staged)


def check_kv_offloading(config: EngineConfig, shape: ModelConfig) -> None:
    """Raise ConfigError if `kv_offloading_size` is set, but the blocks of this model cannot be cached in host
    memory."""
    if config.kv_offloading_size and shape.states is not None:
        raise ConfigError(f"kv_offloading_size: {UNSUPPORTED_TIERS}; remove it")
    if config.kv_offloading_size and choose_layout(config, shape).num_groups > 1:
        raise ConfigError(f"kv_offloading_size: {UNSUPPORTED_LAYOUT}; remove it")


def check_attention(config: EngineConfig, shape: ModelConfig) -> None:
    """Raise ConfigError if the device has no kernels for the attention of this model, or not with these blocks."""
    if shape.cpu_only_reason and config.device == "cuda":
        raise ConfigError(f"device: {shape.cpu_only_reason}; set device to cpu")
    for size in filter(None, shape.attention_chunk_sizes):
        if size % config.block_size:
            raise ConfigError(
                f"block_size: {config.block_size} does not divide attention_chunk_size {size} of config.json; use a "
                "divisor"
            )


def num_host_blocks(config: EngineConfig, shape: ModelConfig, layout: KVLayout, block_bytes: int) -> int:
    """Return how many blocks of a rank fit in its parts of `swap_space` and `kv_offloading_size` together; 0 if the
    layout has several groups or if layers have states, because these are not swapped, and for an encoder."""
    gib = config.swap_space + config.kv_offloading_size / (config.ranks_per_core * config.data_parallel_size)
    if not block_bytes:
        return 0
    num_blocks = int(gib * 2**30) // block_bytes
    if shape.states is not None and num_blocks:
        logger.warning("swap_space: %s; set swap_space to 0", UNSUPPORTED_TIERS)
        return 0
    if layout.num_groups > 1 and num_blocks:
        logger.warning(
            "swap_space: only some layers of this model have a sliding window, so its blocks cannot be swapped; "
            "set swap_space to 0"
        )
        return 0
    return num_blocks
