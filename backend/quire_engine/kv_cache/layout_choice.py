# SPDX-License-Identifier: Apache-2.0
"""Choice of an engine's KV layout: decides whether layers with a sliding window get separate blocks."""

import logging

from quire_spec.engine.config import EngineConfig
from quire_spec.errors import ConfigError
from quire_spec.model.attention import state_config
from quire_spec.model.attention.state_config import UNSUPPORTED_SWAP
from quire_spec.model.kv_layout import UNSUPPORTED_LAYOUT, KVLayout
from quire_spec.model.model_config import ModelConfig

logger = logging.getLogger(__name__)


def choose_layout(config: EngineConfig, shape: ModelConfig) -> KVLayout:
    """Return the layout for a whole model; it is the same in the engine core and on all ranks."""
    max_model_len, is_staged = config.max_model_len or shape.max_length, config.pipeline_parallel_size > 1
    return KVLayout.from_model(shape, max_model_len, config.has_drafter, is_staged)


def check_kv_offloading(config: EngineConfig, shape: ModelConfig) -> None:
    """Raise ConfigError if the settings keep KV blocks in host memory, in a folder or in other pods, and the model does
    not support it."""
    if config.kv_offloading_size and choose_layout(config, shape).num_groups > 1:
        raise ConfigError(f"kv_offloading_size: {UNSUPPORTED_LAYOUT}; remove it")


def check_attention(config: EngineConfig, shape: ModelConfig) -> None:
    """Raise ConfigError if attention within chunks is not possible with these blocks."""
    for size in filter(None, shape.attention_chunk_sizes):
        if size % config.block_size:
            raise ConfigError(
                f"block_size: {config.block_size} does not divide attention_chunk_size {size} of config.json; use a "
                "divisor"
            )


def num_host_states(config: EngineConfig, state_bytes: int) -> int:
    """Return how many snapshots of states of a rank fit in its part of `kv_offloading_size`; 0 if layers have no
    states. `state_bytes` is the size of one.

    Raises:
        ConfigError: not even one fits.
    """
    if not state_bytes or not config.kv_offloading_size:
        return 0
    size = int(_host_cache_gib(config) * 2**30)
    if not (num_states := state_config.num_host_states(size, state_bytes)):
        raise ConfigError(
            f"kv_offloading_size: {config.kv_offloading_size} GiB: half of it is for states, of which one has "
            f"{state_bytes} bytes on each rank; raise it"
        )
    return num_states


def _host_cache_gib(config: EngineConfig) -> float:
    """The part of `kv_offloading_size` of a rank, in GiB."""
    return config.kv_offloading_size / (config.ranks_per_core * config.data_parallel_size)


def num_host_blocks(
    config: EngineConfig, shape: ModelConfig, layout: KVLayout, block_bytes: int, state_bytes: int
) -> int:
    """Return how many blocks of a rank fit in its parts of `swap_space` and `kv_offloading_size` together, beside
    `state_bytes` bytes for states. It is 0 if the layout has several groups, because these are not swapped, and for an
    encoder. If layers have states, `swap_space` has no effect."""
    gib = _host_cache_gib(config)
    if not block_bytes:
        return 0
    if shape.states is not None and config.swap_space:
        logger.warning("swap_space: %s; set swap_space to 0", UNSUPPORTED_SWAP)
    else:
        gib += config.swap_space
    num_blocks = (int(gib * 2**30) - state_bytes) // block_bytes
    if layout.num_groups > 1 and num_blocks:
        logger.warning(
            "swap_space: only some layers of this model have a sliding window, so its blocks cannot be swapped; "
            "set swap_space to 0"
        )
        return 0
    return num_blocks
