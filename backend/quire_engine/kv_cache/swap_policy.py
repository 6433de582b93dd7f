# SPDX-License-Identifier: Apache-2.0
"""Cost model for swapping: whether to keep KV blocks of a preempted sequence in host memory or to compute them again.

Pure arithmetic. The runner measures the costs when it starts; the block manager uses them."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SwapCosts:
    """Capacity of host memory, and the costs of swapping and computing as measured on this device with this model."""

    num_host_blocks: int = 0
    seconds_per_block: float = 0.0
    """Seconds to copy one block to host memory and back."""
    seconds_per_token: float = 0.0
    """Seconds to compute one prompt token when the step is full. The extra time for long contexts is ignored."""

    def is_worthwhile(self, num_blocks: int, num_tokens: int) -> bool:
        """Return whether it is faster to copy `num_blocks` out and back than to compute `num_tokens` again."""
        return num_blocks * self.seconds_per_block < num_tokens * self.seconds_per_token
