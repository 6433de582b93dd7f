# SPDX-License-Identifier: Apache-2.0
"""Choice of the KV layout of an engine: which combinations keep layers with a window in blocks of their own."""

import logging

from quire_spec.engine.config import EngineConfig
from quire_spec.model.kv_layout import KVLayout
from quire_spec.model.model_config import ModelConfig

logger = logging.getLogger(__name__)


def choose_layout(config: EngineConfig, shape: ModelConfig) -> KVLayout:
    """Return the layout for a model, the same in the engine core and on all ranks.

    With a draft model, blocks belong to all layers: its cache has the same block table, and it may have no window.
    """
    if config.speculative_config is not None and config.speculative_config.model:
        return KVLayout.uniform(shape.num_layers)
    return KVLayout.from_model(shape, config.max_model_len or shape.max_position_embeddings)


def num_host_blocks(config: EngineConfig, layout: KVLayout, block_bytes: int) -> int:
    """Return how many blocks `swap_space` contains; 0 with several groups, whose blocks are not swapped."""
    num_blocks = int(config.swap_space * 2**30) // block_bytes
    if layout.num_groups > 1 and num_blocks:
        logger.warning("swap_space: models with and without sliding windows in their layers do not swap; set it to 0")
        return 0
    return num_blocks
