# SPDX-License-Identifier: Apache-2.0
"""What a node claims about itself when a group of nodes forms (rank_wire.Node). Torch-free."""

import json
from dataclasses import replace
from importlib.metadata import version

from quire_engine.weights.checkpoint import Checkpoint
from quire_spec.engine.config import EngineConfig
from quire_spec.protocol.rank_wire import Node

OWN_FIELDS = frozenset(
    (
        "model",
        "revision",
        "download_dir",
        "chat_template",
        "generation_config",
        "master_addr",
        "rank_key_file",
        "kv_offloading_folder_size",
    )
)
"""Fields of EngineConfig that may differ between nodes. The fingerprint stands for the model; the first node alone
renders templates. Of `kv_transfer`, only the port must be equal, and of `kv_offloading_folder` only whether it is
set."""


def node_identity(config: EngineConfig, checkpoint: Checkpoint, node_rank: int, generation: int = 0) -> Node:
    """Return the claims of a node. `generation` is that of the last group of which it was part."""
    config = replace(config, max_model_len=config.max_model_len or checkpoint.shape.max_length)
    fields = {name: value for name, value in config.to_json().items() if name not in OWN_FIELDS}
    if config.kv_transfer is not None:
        fields["kv_transfer"] = {"port": config.kv_transfer.port}
    fields["kv_offloading_folder"] = config.kv_offloading_folder is not None
    return Node(node_rank, generation, version("quire-llm"), checkpoint.fingerprint, json.dumps(fields, sort_keys=True))
