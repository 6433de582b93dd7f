# SPDX-License-Identifier: Apache-2.0
"""Which node of a group this machine is, and where the first node is: from the command line, pod.json, or the variables
that LeaderWorkerSet sets."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

from quire_spec.engine.config import EngineConfig
from quire_spec.errors import ConfigError

RANK_VARIABLE, LEADER_VARIABLE, SIZE_VARIABLE = "LWS_WORKER_INDEX", "LWS_LEADER_ADDRESS", "LWS_GROUP_SIZE"


@dataclass(frozen=True, slots=True)
class GroupMember:
    """A node other than the first."""

    node_rank: int
    leader: str
    """Name or address of the first node."""

    @classmethod
    def find(
        cls, config: EngineConfig, node_rank: int | None, master_addr: str | None, environment: Mapping[str, str]
    ) -> Self:
        """Return which node this is. The options come first, then the fields, then the variables.

        Raises:
            ConfigError: a value is missing or does not fit the configuration.
        """
        if config.nnodes == 1:
            raise ConfigError("engine.nnodes: is 1, so there is no other node; set the number of nodes")
        size = environment.get(SIZE_VARIABLE)
        if size is not None and size != str(config.nnodes):
            raise ConfigError(f"engine.nnodes: is {config.nnodes}, but {SIZE_VARIABLE} is {size!r}; use one number")
        if node_rank is None:
            index = environment.get(RANK_VARIABLE, "")
            if not index.isdecimal():
                raise ConfigError(
                    f"--node-rank: missing, and {RANK_VARIABLE} is {index!r}; give the number of this node"
                )
            node_rank = int(index)
        if not 0 < node_rank < config.nnodes:
            raise ConfigError(
                f"--node-rank: must be from 1 to {config.nnodes - 1}, one less than nnodes, got {node_rank}; node 0 "
                "runs python -m quire_server"
            )
        leader = master_addr or config.master_addr or environment.get(LEADER_VARIABLE)
        if not leader:
            raise ConfigError(
                f"--master-addr: missing, and so is {LEADER_VARIABLE}; give the address of the first node"
            )
        return cls(node_rank, leader)
