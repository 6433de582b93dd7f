# SPDX-License-Identifier: Apache-2.0
"""Outbox: events of one frontend on their way out, joined while they wait, and bounded. No I/O.

Events of one request are merged, so that what is sent grows with the text only. A frontend that stays behind is given
up, so that its memory is bounded and nobody else waits for it.
"""

from quire_spec.protocol.messages import OutputDelta, merge_deltas

MAX_WAITING_BYTES = 128 * 2**20
"""Of a connection, as Python keeps them. 256 streams of 50 tokens/s fill it in 25 s; a live frontend reads it in 1."""

MAX_WAITING_STREAM_BYTES = 4 * 2**20
"""Of one request that is streamed: 10,000 tokens, or 600 with 20 log probabilities each (200 s and 11 s of 50
tokens/s). No reader is so late; one that is was told of a thousand tokens and took none."""

MAX_EVENTS_BYTES = 16 * 2**20
"""Events are split over messages of about this size: far below what a frame may hold, as JSON is smaller."""

# Rough sizes of the Python objects.
_EVENT_BYTES = 400
_TOKEN_ID_BYTES = 36
_LOGPROB_BYTES = 330


class Outbox:
    """Waiting events, at most one per output of a request; a request's final one after its others."""

    def __init__(self) -> None:
        self._waiting: dict[int, dict[int, _Waiting]] = {}
        """By request, then by output."""
        self._num_bytes = 0
        self._largest_merged = 0

    def add(self, event: OutputDelta) -> None:
        """Append an event, or merge it into the one of its request that waits."""
        size = _size(event)
        self._num_bytes += size
        outputs = self._waiting.setdefault(event.id, {})
        if (waiting := outputs.get(event.index)) is None:
            outputs[event.index] = _Waiting(event, size)
        else:
            waiting.merge(event, size)
            self._largest_merged = max(self._largest_merged, waiting.num_bytes)
            if event.final:
                outputs[event.index] = outputs.pop(event.index)

    @property
    def excess(self) -> str | None:
        """What makes the waiting bytes too many, in a sentence; None while they are bearable.

        A single event is never too large for its request: one final answer may be as long as the model's context.
        """
        if self._largest_merged > MAX_WAITING_STREAM_BYTES:
            return f"{self._largest_merged} bytes of one request wait; at most {MAX_WAITING_STREAM_BYTES} may"
        if self._num_bytes > MAX_WAITING_BYTES and len(self._waiting) > 1:
            return f"{self._num_bytes} bytes wait; at most {MAX_WAITING_BYTES} may"
        return None

    def take(self) -> list[list[OutputDelta]]:
        """Hand out everything, in messages of about MAX_EVENTS_BYTES."""
        taken = [waiting for outputs in self._waiting.values() for waiting in outputs.values()]
        self._waiting, self._num_bytes, self._largest_merged = {}, 0, 0
        batches: list[list[OutputDelta]] = []
        num_bytes = MAX_EVENTS_BYTES
        for waiting in taken:
            if num_bytes >= MAX_EVENTS_BYTES:
                batches.append([])
                num_bytes = 0
            batches[-1].append(merge_deltas(waiting.events))
            num_bytes += waiting.num_bytes
        return batches


class _Waiting:
    """The events of one output, joined when they are handed out: joining at each would be quadratic."""

    __slots__ = ("events", "num_bytes")

    def __init__(self, event: OutputDelta, num_bytes: int) -> None:
        self.events = [event]
        self.num_bytes = num_bytes

    def merge(self, event: OutputDelta, num_bytes: int) -> None:
        self.events.append(event)
        self.num_bytes += num_bytes


def _size(event: OutputDelta) -> int:
    entries = sum(len(position or ()) for position in (*(event.logprobs or ()), *(event.prompt_logprobs or ())))
    return _EVENT_BYTES + len(event.text) + _TOKEN_ID_BYTES * len(event.token_ids) + _LOGPROB_BYTES * entries
