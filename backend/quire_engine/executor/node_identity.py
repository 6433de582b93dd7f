# SPDX-License-Identifier: Apache-2.0
"""What a node claims about itself when a group of nodes forms (rank_wire.Node). Torch-free."""

import json
from dataclasses import replace
from importlib.metadata import version

from quire_engine.weights.checkpoint import Checkpoint
from quire_spec.engine.config import EngineConfig
from quire_spec.protocol.rank_wire import Node

OWN_FIELDS = frozenset(
    ("model", "revision", "download_dir", "chat_template", "generation_config", "master_addr", "rank_key_file")
)
"""Fields of EngineConfig that may differ between nodes. The fingerprint stands for the model; the first node alone
renders templates. Of `kv_transfer`, only the port must be equal."""


def node_identity(config: EngineConfig, checkpoint: Checkpoint, node_rank: int, generation: int = 0) -> Node:
    """Return the claims of a node. `generation` is that of the last group of which it was part."""
    config = replace(config, max_model_len=config.max_model_len or checkpoint.shape.max_length)
    fields = {name: value for name, value in config.to_json().items() if name not in OWN_FIELDS}
    if config.kv_transfer is not None:
        fields["kv_transfer"] = {"port": config.kv_transfer.port}
    return Node(node_rank, generation, version("quire-llm"), checkpoint.fingerprint, json.dumps(fields, sort_keys=True))
