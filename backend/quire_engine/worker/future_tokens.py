# SPDX-License-Identifier: Apache-2.0
"""Handover: what a step chose, on its way to the next step, which takes it on the device, and to the host.

The runner owns it, for steps that are begun before the last one's tokens are known here. On a GPU, tokens go to pinned
memory on a stream of their own, so that no step waits for their copy; that has run on an emulated GPU only.

Of ranks that share the layers, the first one chooses the tokens. The others get them from its device when a step needs
them: all take part in that, so what says that a step does is in its work.
"""

from collections.abc import Callable
from collections.abc import Sequence as Sequences
from typing import TypeAlias

import torch
from torch import Tensor

from quire_engine.distributed.communicator import Communicator
from quire_engine.sequence import Sequence
from quire_engine.step.plan import ScheduledSpan
from quire_kernels import to_device_async

DeviceWait: TypeAlias = Callable[[Callable[[], bool]], None]
"""Waits until what it is given says that something is done."""


class FutureTokens:
    """The tokens that the step begun last chose, one for each of some sequences."""

    def __init__(
        self, device: torch.device, communicator: Communicator | None = None, device_wait: DeviceWait | None = None
    ) -> None:
        """`ranks`: those that share the layers; `until` waits for the device, None: however long that takes."""
        self._device = device
        self._communicator = communicator
        self._device_wait = device_wait
        self._rows: dict[Sequence, int] = {}
        self._tokens: Tensor | None = None
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    def resolve(self, token_ids: Tensor, spans: Sequences[ScheduledSpan] | None) -> None:
        """Put tokens where the host did not know them; for a step that has some.

        Args:
            token_ids: of the spans in order, int64 on the device, and perhaps others behind them; written to.
            spans: of the step after the one that chose them; None on another rank than the first.
        """
        if spans is not None:
            self._write_tokens(token_ids, spans)
        if self._communicator is not None:
            self._communicator.broadcast(token_ids)

    def _write_tokens(self, token_ids: Tensor, spans: Sequences[ScheduledSpan]) -> None:
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
        self, sequences: Sequences[Sequence], tokens: Tensor, extra_tensors: Sequences[Tensor] = ()
    ) -> Callable[[], list[Tensor]]:
        """Keep what a step chose, [len(sequences)] int64 on the device, and begin its copy to the host.

        Returns what waits until the step is over, and returns tokens and `others` on the host.
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
                # Its memory is not given to a later step before it is copied.
                tensor.record_stream(self._stream)
            copy_done.record()

        def wait() -> list[Tensor]:
            if self._device_wait is not None:
                self._device_wait(copy_done.query)
            copy_done.synchronize()
            return host_tensors

        return wait
