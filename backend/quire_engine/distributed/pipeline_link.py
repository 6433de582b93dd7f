# SPDX-License-Identifier: Apache-2.0
"""Connection of a rank to the same rank of the other pipeline stages: hidden states go from stage to stage.

    stage 0 --hidden states of all tokens--> stage 1 --...--> last stage
            <--hidden states of the rows that need logits----

The link uses process groups of torch.distributed, as communicator.py does. There is one group for each direction: with
NCCL, the operations of a group run in order, so stage 0 could not send a step while it waits for an earlier one. No
operation has a time limit of its own, because a stage can wait for the steps of all stages before it; worker_group.py
detects ranks that ended or hang, and their sockets then close. NCCL was not run.
"""

from collections import deque
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from quire_engine.distributed.communicator import all_reduce_min, create_process_group
from quire_engine.distributed.rendezvous import Rendezvous
from quire_spec.model.model_config import ModelConfig

_TIMEOUT = timedelta(hours=24)


class PipelineLink:
    """This rank's connection to the other stages. Call `connect` before any other method."""

    def __init__(self, shape: ModelConfig, num_stages: int, rank: int, rendezvous: Callable[[], Rendezvous]) -> None:
        """Store the parameters; no connection is made.

        Args:
            shape: configuration of this stage.
            num_stages: number of stages.
            rank: tensor-parallel rank; the link connects the ranks of all stages that have this number.
            rendezvous: see Communicator.
        """
        assert shape.stage is not None
        self.stage, self.num_stages = shape.stage.index, num_stages
        self._rank, self._rendezvous = rank, rendezvous
        self._hidden_size = shape.hidden_size
        self._device, self._dtype = torch.device("cpu"), torch.float32
        self._forward_group: Any = None
        self._return_group: Any = None
        self._sent: deque[tuple[Any, Tensor]] = deque()

    @property
    def is_first(self) -> bool:
        """Whether this is stage 0, which computes logits."""
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        """Whether this stage has the last layers."""
        return self.stage == self.num_stages - 1

    def connect(self, device: torch.device, dtype: torch.dtype) -> None:
        """Connect to the other stages; the tensors of all stages are on devices of this type and have this dtype.

        Raises:
            RuntimeError: a stage did not connect. All other methods raise this error if a stage has ended.
        """
        self._device, self._dtype = device, dtype
        self._forward_group, self._return_group = (
            create_process_group(
                self._rendezvous(), f"{name}-{self._rank}", self.stage, self.num_stages, device, _TIMEOUT
            )
            for name in ("forward", "return")
        )

    def send(self, hidden: Tensor) -> None:
        """Send hidden states [num_rows, hidden_size] to the next stage, or from the last stage to stage 0. Does not
        wait until they are received. The tensor must not change afterwards."""
        while len(self._sent) > self.num_stages:
            # Stage 0 never has more steps in flight than there are stages, so this one was received.
            self._sent.popleft()[0].wait()
        group = self._return_group if self.is_last else self._forward_group
        hidden = hidden.contiguous()
        self._sent.append((group.send([hidden], (self.stage + 1) % self.num_stages, 0), hidden))

    def receive(self, num_rows: int) -> Tensor:
        """Wait for the next hidden states [num_rows, hidden_size] of the stage before, or on stage 0, of the last
        stage."""
        hidden = torch.empty(num_rows, self._hidden_size, dtype=self._dtype, device=self._device)
        group = self._return_group if self.is_first else self._forward_group
        group.recv([hidden], (self.stage - 1) % self.num_stages, 0).wait()
        return hidden

    def all_reduce_min(self, value: int) -> int:
        """Return the minimum of the stages' values."""
        return all_reduce_min(self._forward_group, value, self._device)
