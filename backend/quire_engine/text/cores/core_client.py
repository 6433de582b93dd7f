# SPDX-License-Identifier: Apache-2.0
"""Client of the engine core: the text process's connection to the core.

This module handles only messages. The `CoreListener` handles the results that they contain, and the loss of the core.
"""

import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Protocol

from quire_spec.documents.pod_status import CoreState
from quire_spec.errors import QuireError
from quire_spec.protocol.client import Client
from quire_spec.protocol.connection import Connection
from quire_spec.protocol.messages import (
    AbortSequences,
    Hello,
    Message,
    SchedulerStats,
    SequenceDelta,
    SequenceRequest,
    StepResult,
)


class CoreListener(Protocol):
    """Receives the events of the connection to the core. The result coalescer is the listener, and passes the events
    on to the request manager.
    """

    def on_core_connected(self) -> None:
        """Called when the core is connected."""

    def on_core_lost(self) -> None:
        """Called when the connection to the core has closed."""

    def on_step(self, step: StepResult) -> None:
        """Called for the results of each step."""


class CoreClient(Client):
    """The connection to the core. While it is not connected, messages are dropped.

    This never loses a request, because `on_core_lost` has already ended the requests to which the dropped messages
    belong.
    """

    def __init__(self, path: Path, served_name: str, peer_name: str = "the engine core") -> None:
        super().__init__(path, Hello("text", served_name, os.getpid()), peer_name, (StepResult,))
        self.listener: CoreListener | None = None
        """It must be set before `run`."""
        self._stats = SchedulerStats()

    def states(self) -> dict[str, CoreState]:
        """Return the states of several cores; there are none."""
        return {}

    def submit(self, requests: Sequence[SequenceRequest], sequence_ids: Iterable[int], rank: int | None) -> None:
        """Send the sequences of a request to the core. Raises InvalidArgument if a message cannot be encoded."""
        for request in requests:
            self.send(request)

    def abort(self, sequence_ids: Iterable[int]) -> None:
        """Stop sequences."""
        self.send(AbortSequences(list(sequence_ids)))

    def on_connected(self, connection: Connection) -> None:
        """Called when the connection is open."""
        super().on_connected(connection)
        assert self.listener is not None
        self.listener.on_core_connected()

    def on_message(self, connection: Connection, message: Message) -> None:
        """Called for each message of the core."""
        if isinstance(message, StepResult):
            assert self.listener is not None
            self._stats = message.stats
            self.listener.on_step(message)
        else:
            super().on_message(connection, message)

    def on_request_failed(self, request_id: int, error: QuireError) -> None:
        """Called when the core did not accept a sequence, or when its results cannot be decoded."""
        assert self.listener is not None
        # If the results cannot be decoded, the core still runs the sequence.
        self.abort([request_id])
        self.listener.on_step(StepResult([SequenceDelta.from_error(request_id, error)], [], self._stats))

    def on_closed(self, connection: Connection) -> None:
        """Called when the connection closes."""
        super().on_closed(connection)
        assert self.listener is not None
        self.listener.on_core_lost()
