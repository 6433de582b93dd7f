# SPDX-License-Identifier: Apache-2.0
"""Stands in for the cores of a request manager: records the messages that they would get."""

from collections.abc import Iterable, Sequence

from quire_spec.protocol.messages import AbortSequences, Message, SequenceRequest


class RecordingCores:
    """Records messages in the list `sent`."""

    def __init__(self, sent: list[Message]) -> None:
        self.sent = sent

    def submit(self, requests: Sequence[SequenceRequest], sequence_ids: Iterable[int], rank: int | None) -> None:
        self.sent += requests

    def abort(self, sequence_ids: Iterable[int]) -> None:
        self.sent.append(AbortSequences(list(sequence_ids)))
