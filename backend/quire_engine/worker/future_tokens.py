# SPDX-License-Identifier: Apache-2.0
"""Sampled tokens that are still on the device.

The next step reads them there, so it can be launched before the host has them. The host gets a copy later. The model
runner owns these tokens. On a GPU, they are copied to pinned memory in a separate stream. As a result, no step waits
for the copy.

With tensor parallelism, rank 0 samples the tokens. It broadcasts them when a step needs them. All ranks must take part
in the broadcast. Therefore, the input of a step contains the flag `awaits_tokens`, which announces the broadcast.
"""

from collections import abc
from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor

from quire_engine.distributed.communicator import Communicator
from quire_engine.sequence import Sequence
from quire_engine.step.plan import ScheduledSpan
from quire_kernels import to_device_async

DeviceWait: TypeAlias = Callable[[Callable[[], bool]], None]
"""A function that waits: it calls its argument repeatedly until the argument returns True."""


class FutureTokens:
    """The tokens that the most recently launched step sampled. There is one for each sequence that got a token."""

    def __init__(
        self, device: torch.device, communicator: Communicator | None = None, device_wait: DeviceWait | None = None
    ) -> None:
        """Store the parameters.

        Args:
            device: device of the tokens.
            communicator: connects the tensor-parallel ranks; None if there is one rank.
            device_wait: waits for the device with a time limit; None if there is no time limit.
        """
        self._device = device
        self._communicator = communicator
        self._device_wait = device_wait
        self._rows: dict[Sequence, int] = {}
        self._tokens: Tensor | None = None
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    def resolve(self, token_ids: Tensor, spans: abc.Sequence[ScheduledSpan] | None) -> None:
        """Replace the placeholder tokens of a step with the tokens that the previous step sampled.

        Args:
            token_ids: tokens of all spans in order, int64 on the device, possibly with padding at the end; modified in
                place.
            spans: spans of the step that reads the tokens; None on ranks other than 0.
        """
        if spans is not None:
            self._write_tokens(token_ids, spans)
        if self._communicator is not None:
            self._communicator.broadcast(token_ids)

    def _write_tokens(self, token_ids: Tensor, spans: abc.Sequence[ScheduledSpan]) -> None:
        token_indices, rows, end = [], [], 0
        for span in spans:
            if span.awaits_token:
                token_indices.append(end)
                rows.append(self._rows[span.sequence])
            end += span.length
        assert self._tokens is not None
        index = to_device_async(torch.tensor([token_indices, rows]), self._device)
        token_ids.index_copy_(0, index[0], self._tokens[index[1]])

    def store(
        self, sequences: abc.Sequence[Sequence], tokens: Tensor, extra_tensors: abc.Sequence[Tensor] = ()
    ) -> Callable[[], list[Tensor]]:
        """Keep the tokens that a step sampled, and start to copy them to the host.

        Args:
            sequences: the sequences for which the step sampled a token, in the order of `tokens`.
            tokens: [len(sequences)] int64 on the device.
            extra_tensors: copied together with the tokens.

        Returns:
            A function that waits for the step and returns host copies of the tokens, then of `extra_tensors`.
        """
        self._rows = {sequence: row for row, sequence in enumerate(sequences)}
        self._tokens = tokens
        if self._stream is None:
            return lambda: [tokens, *extra_tensors]
        copy_done = torch.cuda.Event()  # type: ignore[no-untyped-call]
        host_tensors: list[Tensor] = []
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            for tensor in (tokens, *extra_tensors):
                host_tensors.append(torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True))
                host_tensors[-1].copy_(tensor, non_blocking=True)
                # Prevents the allocator from reusing the memory for a later step before the copy is complete.
                tensor.record_stream(self._stream)
            copy_done.record()

        def wait() -> list[Tensor]:
            if self._device_wait is not None:
                self._device_wait(copy_done.query)
            copy_done.synchronize()
            return host_tensors

        return wait
