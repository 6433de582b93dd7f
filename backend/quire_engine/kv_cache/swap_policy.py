# SPDX-License-Identifier: Apache-2.0
"""SwapSpace: host memory for the blocks of preempted sequences, and when it is worth its cost. Arithmetic only."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SwapCosts:
    """What a runner has, and what it measured when it started: this device, this model and this host's memory."""

    num_host_blocks: int = 0
    seconds_per_block: float = 0.0
    """Seconds to move one block out and in again."""
    seconds_per_token: float = 0.0
    """Seconds to compute one token of a prompt in a full step. Long contexts take longer, which is not counted."""

    def is_worthwhile(self, num_blocks: int, num_tokens: int) -> bool:
        """Whether to move `num_blocks` out and in is cheaper than to compute `num_tokens` again."""
        return num_blocks * self.seconds_per_block < num_tokens * self.seconds_per_token
