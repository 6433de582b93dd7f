# SPDX-License-Identifier: Apache-2.0
"""Virtual clock: orders the sequences of several clients, so that each client gets an equal share of the prompt tokens.

Each sequence gets a start tag when it arrives, and the scheduler starts sequences in the order of their tags. The
sequences of one client get tags that lie as far apart as their prompts are long. A client that has no other sequence
gets the current virtual time, so it waits behind no queue of another client. The virtual time advances whenever a
sequence starts, so no sequence is overtaken forever.

Source: P. Goyal, H. Vin, H. Cheng, "Start-time Fair Queuing", SIGCOMM 1996.
"""

from quire_engine.sequence import Sequence


class VirtualClock:
    """The virtual time, in prompt tokens per client."""

    def __init__(self) -> None:
        self._now = 0.0
        self._next_tags: dict[str, float] = {}
        """For each client that has unfinished sequences: the tag of its next sequence if the clock stood still."""

    def tag(self, sequence: Sequence) -> float:
        """Return the start tag of a new sequence."""
        tag = max(self._now, self._next_tags.get(sequence.client, 0.0))
        self._next_tags[sequence.client] = tag + _cost(sequence)
        return tag

    def advance(self, sequence: Sequence, num_clients: int) -> None:
        """Record that a sequence starts, while `num_clients` clients have unfinished sequences."""
        self._now = max(self._now + _cost(sequence) / num_clients, sequence.sort_key[1])

    def forget(self, client: str) -> None:
        """Called when a client has no unfinished sequence."""
        self._next_tags.pop(client, None)


def _cost(sequence: Sequence) -> int:
    """Return the number of prompt tokens; a fork shares the prompt of its parent, and counts as one token."""
    return 1 if sequence.parent_id is not None else len(sequence.prompt_token_ids)
