# SPDX-License-Identifier: Apache-2.0
"""What the engine knows about an adapter besides its weights."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class AdapterInfo:
    """Size and properties of an adapter that was read."""

    num_bytes: int = 0
    """Size of its host copy."""
    rank: int = 0
    """The largest LoRA rank among its modules."""
    invocation_tokens: tuple[int, ...] = ()
    """The tokens from which it applies (aLoRA). If there are none, it applies to all tokens."""
