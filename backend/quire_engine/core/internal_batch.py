# SPDX-License-Identifier: Apache-2.0
"""A batch of sequences that the core itself runs, to check an adapter. The engine loop runs it."""

from concurrent.futures import Future

from quire_spec.errors import error_from_code
from quire_spec.protocol.messages import SequenceDelta, SequenceRequest


class InternalBatch:
    """Sequences of the core itself. They run in the same steps as those of the clients, but no client sees them."""

    def __init__(self, requests: list[SequenceRequest]) -> None:
        """The ids of `requests` must be negative, and differ from those of other unfinished batches."""
        self.requests = requests
        self.future: Future[dict[int, list[SequenceDelta]]] = Future()
        # The compute thread sets the result after a caller has left, too.
        self.future.set_running_or_notify_cancel()
        """The deltas of each sequence, by its id. The error of the first sequence that fails."""
        self._deltas: dict[int, list[SequenceDelta]] = {request.id: [] for request in requests}
        self._open_ids = set(self._deltas)

    @property
    def ids(self) -> list[int]:
        """Ids of all sequences."""
        return list(self._deltas)

    def on_result(self, delta: SequenceDelta) -> bool:
        """Called for each delta; returns whether no further one is needed."""
        self._deltas[delta.id].append(delta)
        if delta.finish_reason or delta.error_code:
            self._open_ids.discard(delta.id)
        if delta.error_code is not None:
            self.future.set_exception(error_from_code(delta.error_code, delta.error))
            return True
        if not self._open_ids:
            self.future.set_result(self._deltas)
        return not self._open_ids
