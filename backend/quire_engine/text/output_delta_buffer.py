# SPDX-License-Identifier: Apache-2.0
"""Bounded buffer of the output deltas that wait to be sent to one frontend. No I/O.

Merges the deltas of a request, so that the number of messages does not grow while deltas wait. If the frontend does
not read, the buffer reports an overflow. The connection is then closed, which limits the memory and protects other
frontends.
"""

from quire_spec.protocol.messages import OutputDelta, merge_deltas
from quire_spec.protocol.parsed_output import Event, ToolCallStart

MAX_PENDING_BYTES = 128 * 2**20
"""Limit for the deltas that wait for one connection, in bytes of Python objects. If a frontend does not read, 256
streams of 50 tokens/s reach this limit in 25 s. A healthy frontend reads the same amount in 1 s.
"""

MAX_PENDING_STREAM_BYTES = 4 * 2**20
"""Limit for the deltas that wait for one streamed request, in bytes. It is enough for 10,000 tokens, which take 200 s
at 50 tokens/s. If each token has 20 log probabilities, it is enough for 600 tokens, which take 12 s. A healthy reader
never falls this far behind.
"""

MAX_BATCH_BYTES = 16 * 2**20
"""Approximate size of one message. MessagePack is smaller than the Python objects, so a message is far below the limit
of a frame.
"""

# Approximate sizes of the Python objects.
_DELTA_BYTES = 400
_TOKEN_ID_BYTES = 36
_LOGPROB_BYTES = 200
_EVENT_BYTES = 200


class OutputDeltaBuffer:
    """The deltas that wait. For each output of a request, at most one delta is sent at a time. The final delta of a
    request comes last."""

    def __init__(self) -> None:
        self._pending: dict[int, dict[int, _PendingOutput]] = {}
        """Maps the id of a request to its waiting outputs, which are stored by their index."""
        self._num_bytes = 0
        self._max_merged_bytes = 0

    def append(self, delta: OutputDelta) -> None:
        """Add a delta. If deltas of the same output already wait, they will be sent as one merged delta."""
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
        """Description of the limit that the waiting deltas exceed; None if they are within all limits.

        A single unmerged delta is always accepted, because a final answer can be as long as the model's context.
        """
        if self._max_merged_bytes > MAX_PENDING_STREAM_BYTES:
            return (
                f"{self._max_merged_bytes} unsent bytes of one request exceed the limit of {MAX_PENDING_STREAM_BYTES}"
            )
        if self._num_bytes > MAX_PENDING_BYTES and len(self._pending) > 1:
            return f"{self._num_bytes} unsent bytes exceed the limit of {MAX_PENDING_BYTES}"
        return None

    def pop_batches(self) -> list[list[OutputDelta]]:
        """Remove and return all deltas, in batches of about MAX_BATCH_BYTES."""
        pending_outputs = [pending_output for outputs in self._pending.values() for pending_output in outputs.values()]
        self._pending, self._num_bytes, self._max_merged_bytes = {}, 0, 0
        batches: list[list[OutputDelta]] = []
        num_bytes = MAX_BATCH_BYTES
        for pending_output in pending_outputs:
            if num_bytes >= MAX_BATCH_BYTES:
                batches.append([])
                num_bytes = 0
            batches[-1].append(merge_deltas(pending_output.deltas))
            num_bytes += pending_output.num_bytes
        return batches


class _PendingOutput:
    """The deltas of one output. `pop_batches` merges them. If they were merged on each append, this would take
    quadratic time."""

    __slots__ = ("deltas", "num_bytes")

    def __init__(self, delta: OutputDelta, num_bytes: int) -> None:
        self.deltas = [delta]
        self.num_bytes = num_bytes

    def merge(self, delta: OutputDelta, num_bytes: int) -> None:
        self.deltas.append(delta)
        self.num_bytes += num_bytes


def _estimate_bytes(delta: OutputDelta) -> int:
    num_logprobs = sum(len(position or ()) for position in (*(delta.logprobs or ()), *(delta.prompt_logprobs or ())))
    num_event_bytes = sum(_EVENT_BYTES + _text_length(event) for event in delta.parsed or ())
    num_token_bytes = _TOKEN_ID_BYTES * len(delta.token_ids) + _LOGPROB_BYTES * num_logprobs
    return _DELTA_BYTES + len(delta.text) + num_event_bytes + num_token_bytes


def _text_length(event: Event) -> int:
    return len(event.name) if isinstance(event, ToolCallStart) else len(event.text)
