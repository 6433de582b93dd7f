# SPDX-License-Identifier: Apache-2.0
"""The connections of one rank to the other ranks of a core: to those of its pipeline stage, and to the other stages."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

from quire_engine.distributed.communicator import TIMEOUT_S, Communicator
from quire_engine.distributed.pipeline_link import PipelineLink
from quire_engine.distributed.rendezvous import Rendezvous
from quire_spec.engine.config import EngineConfig
from quire_spec.model.model_config import ModelConfig
from quire_spec.model.parallel.pipeline_parallel import split_stages
from quire_spec.model.parallel.tensor_parallel import TensorParallelShard


@dataclass(frozen=True, slots=True)
class RankLinks:
    """Connections of a rank. The ranks of stage 0 have the lowest numbers."""

    shape: ModelConfig
    """Configuration of the layers of this rank's stage, before they are divided between tensor-parallel ranks."""
    rank: int = 0
    """Number of the rank among those of all stages."""
    communicator: Communicator | None = None
    """Connects the tensor-parallel ranks of the stage; None if there is one."""
    pipeline: PipelineLink | None = None
    """Connects the stages; None if there is one."""

    @classmethod
    def of_rank(
        cls,
        config: EngineConfig,
        shape: ModelConfig,
        rank: int,
        rendezvous: Callable[[], Rendezvous],
        timeout_s: float = TIMEOUT_S,
    ) -> Self:
        """Return the connections of rank number `rank`, which are made later.

        Args:
            config: configuration of the engine.
            shape: configuration of the whole model.
            rank: number of the rank among those of all stages.
            rendezvous: see Communicator; called once.
            timeout_s: time limit of collective operations within a stage.
        """
        size, num_stages = config.tensor_parallel_size, config.pipeline_parallel_size
        rendezvous = functools.cache(rendezvous)
        stage, tp_rank = divmod(rank, size)
        stage_shape = split_stages(shape, num_stages, config.quantization)[stage]
        shard = TensorParallelShard(stage_shape, tp_rank, size)
        return cls(
            stage_shape,
            rank,
            Communicator(shard, rendezvous, timeout_s) if size > 1 else None,
            PipelineLink(stage_shape, num_stages, tp_rank, rendezvous) if num_stages > 1 else None,
        )

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, which schedules and samples."""
        return (self.communicator is None or self.communicator.shard.rank == 0) and (
            self.pipeline is None or self.pipeline.is_first
        )
