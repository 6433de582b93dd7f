# SPDX-License-Identifier: Apache-2.0
"""Cost model for swapping: whether to keep KV blocks of a preempted sequence in host memory or to compute them again.

Pure arithmetic. The runner measures the costs when it starts; the block manager uses them."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SwapCosts:
    """Capacity and measured costs of host memory for this device, this model and this host."""

    num_host_blocks: int = 0
    seconds_per_block: float = 0.0
    """Seconds to copy one block to host memory and back."""
    seconds_per_token: float = 0.0
    """Seconds to compute one token of a prompt in a full step. The extra time for long contexts is ignored."""

    def is_worthwhile(self, num_blocks: int, num_tokens: int) -> bool:
        """Return whether copying `num_blocks` out and back is cheaper than computing `num_tokens` again."""
        return num_blocks * self.seconds_per_block < num_tokens * self.seconds_per_token
