# SPDX-License-Identifier: Apache-2.0
"""Outbox: events of one frontend on their way out, joined while they wait, and bounded. No I/O.

Events of one request are merged, so that what is sent grows with the text only. A frontend that stays behind is given
up, so that its memory is bounded and nobody else waits for it.
"""

from quire_spec.protocol.messages import OutputDelta, merge_deltas

MAX_PENDING_BYTES = 128 * 2**20
"""Of a connection, as Python keeps them. 256 streams of 50 tokens/s fill it in 25 s; a live frontend reads it in 1."""

MAX_PENDING_STREAM_BYTES = 4 * 2**20
"""Of one request that is streamed: 10,000 tokens, or 600 with 20 log probabilities each (200 s and 11 s of 50
tokens/s). No reader is so late; one that is was told of a thousand tokens and took none."""

MAX_BATCH_BYTES = 16 * 2**20
"""Events are split over messages of about this size: far below what a frame may hold, as JSON is smaller."""

# Rough sizes of the Python objects.
_DELTA_BYTES = 400
_TOKEN_ID_BYTES = 36
_LOGPROB_BYTES = 330


class OutputDeltaBuffer:
    """Waiting events, at most one per output of a request; a request's final one after its others."""

    def __init__(self) -> None:
        self._pending: dict[int, dict[int, _PendingOutput]] = {}
        """By request, then by output."""
        self._num_bytes = 0
        self._max_merged_bytes = 0

    def append(self, delta: OutputDelta) -> None:
        """Append an event, or merge it into the one of its request that waits."""
        num_bytes = _estimate_bytes(delta)
        self._num_bytes += num_bytes
        outputs = self._pending.setdefault(delta.id, {})
        if (pending_output := outputs.get(delta.index)) is None:
            outputs[delta.index] = _PendingOutput(delta, num_bytes)
        else:
            pending_output.merge(delta, num_bytes)
            self._max_merged_bytes = max(self._max_merged_bytes, pending_output.num_bytes)
            if delta.final:
                outputs[delta.index] = outputs.pop(delta.index)

    @property
    def overflow_reason(self) -> str | None:
        """What makes the waiting bytes too many, in a sentence; None while they are bearable.

        A single event is never too large for its request: one final answer may be as long as the model's context.
        """
        if self._max_merged_bytes > MAX_PENDING_STREAM_BYTES:
            return f"{self._max_merged_bytes} bytes of one request wait; at most {MAX_PENDING_STREAM_BYTES} may"
        if self._num_bytes > MAX_PENDING_BYTES and len(self._pending) > 1:
            return f"{self._num_bytes} bytes wait; at most {MAX_PENDING_BYTES} may"
        return None

    def drain(self) -> list[list[OutputDelta]]:
        """Hand out everything, in messages of about MAX_EVENTS_BYTES."""
        pending_outputs = [pending_output for outputs in self._pending.values() for pending_output in outputs.values()]
        self._pending, self._num_bytes, self._max_merged_bytes = {}, 0, 0
        batches: list[list[OutputDelta]] = []
        num_bytes = MAX_BATCH_BYTES
        for waiting in pending_outputs:
            if num_bytes >= MAX_BATCH_BYTES:
                batches.append([])
                num_bytes = 0
            batches[-1].append(merge_deltas(waiting.deltas))
            num_bytes += waiting.num_bytes
        return batches


class _PendingOutput:
    """The events of one output, joined when they are handed out: joining at each would be quadratic."""

    __slots__ = ("deltas", "num_bytes")

    def __init__(self, delta: OutputDelta, num_bytes: int) -> None:
        self.deltas = [delta]
        self.num_bytes = num_bytes

    def merge(self, delta: OutputDelta, num_bytes: int) -> None:
        self.deltas.append(delta)
        self.num_bytes += num_bytes


def _estimate_bytes(delta: OutputDelta) -> int:
    num_logprobs = sum(len(position or ()) for position in (*(delta.logprobs or ()), *(delta.prompt_logprobs or ())))
    return _DELTA_BYTES + len(delta.text) + _TOKEN_ID_BYTES * len(delta.token_ids) + _LOGPROB_BYTES * num_logprobs
