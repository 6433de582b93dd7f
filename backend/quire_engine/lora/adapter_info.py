# SPDX-License-Identifier: Apache-2.0
"""What the engine knows about an adapter besides its weights."""

from collections.abc import Sequence
from dataclasses import dataclass

from quire_spec.errors import InvalidArgument


@dataclass(frozen=True, slots=True)
class AdapterInfo:
    """Size and properties of an adapter that was read."""

    num_bytes: int = 0
    """Size of its host copy."""
    rank: int = 0
    """The largest LoRA rank among its modules."""
    invocation_tokens: tuple[int, ...] = ()
    """The tokens from which it applies (aLoRA). If there are none, it applies to all tokens."""
    not_combinable: str = ""
    """The field of adapter_config.json for which it cannot be part of a sum; empty if it can."""
    num_pages: int = 0
    """Number of pages that it needs in a slot."""


def combined_info(infos: Sequence[AdapterInfo], max_rank: int) -> AdapterInfo:
    """Return what is known about a sum of adapters before it is read. Its sizes are upper bounds.

    Raises:
        InvalidArgument: the adapters cannot be added.
    """
    for info in infos:
        check_combinable(info.not_combinable)
    rank, invocations = sum(info.rank for info in infos), {info.invocation_tokens for info in infos}
    if len(invocations) > 1:
        raise InvalidArgument("adapters with different alora_invocation_tokens cannot be added; use one of them alone")
    if rank > max_rank:
        raise InvalidArgument(
            f"the sum of the adapters' ranks is {rank}, but max_lora_rank is {max_rank}; raise it (spec.lora.maxRank "
            "or maxLoadedRanks of an LLMService), or add fewer adapters"
        )
    # A page is one rank of all modules, and an odd rank is padded.
    num_pages = min(sum(info.num_pages for info in infos), rank + rank % 2)
    return AdapterInfo(sum(info.num_bytes for info in infos), rank, invocations.pop(), num_pages=num_pages)


def check_combinable(not_combinable: str) -> None:
    """Raise InvalidArgument if an adapter cannot be part of a sum because of the field `not_combinable`."""
    if not_combinable:
        raise InvalidArgument(f"an adapter with {not_combinable} cannot be added to others; use it alone, by its name")
