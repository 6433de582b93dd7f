# SPDX-License-Identifier: Apache-2.0
"""Checks a new sequence against the limits of the engine, and a fork against its parent."""

from collections.abc import Mapping

from quire_engine.sequence import Sequence
from quire_spec.engine.config import EngineConfig
from quire_spec.errors import InvalidArgument


def check_request(sequence: Sequence, config: EngineConfig, max_model_len: int) -> None:
    """Raise InvalidArgument if a sequence is too long."""
    num_tokens = sequence.num_tokens
    if num_tokens >= max_model_len + (sequence.pooling is not None):
        raise InvalidArgument(
            f"prompt: {num_tokens} tokens leave no room for output, max_model_len is {max_model_len}; "
            "shorten the prompt"
        )
    if not config.enable_chunked_prefill and num_tokens > config.max_num_batched_tokens:
        raise InvalidArgument(
            f"prompt: {num_tokens} tokens exceed max_num_batched_tokens {config.max_num_batched_tokens}, and "
            "enable_chunked_prefill is off; shorten the prompt"
        )


def find_parent(fork: Sequence, sequences: Mapping[int, Sequence]) -> Sequence | None:
    """Return the unfinished sequence with which `fork` shares its prompt; None if there is none."""
    if fork.parent_id is None or (parent := sequences.get(fork.parent_id)) is None:
        if any(not image.tensors for image in fork.images):
            raise InvalidArgument(f"parent_id: sequence {fork.parent_id}, which has the images, has ended; try again")
        return None
    fork.images = parent.images
    for name in ("prompt_token_ids", "adapter_digest", "cache_salt"):
        if getattr(fork, name) != getattr(parent, name):
            raise InvalidArgument(
                f"parent_id: sequence {parent.id} has a different {name}; prompt, adapter and salt must be equal"
            )
    return parent
