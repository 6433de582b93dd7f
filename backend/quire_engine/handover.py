# SPDX-License-Identifier: Apache-2.0
"""Handover: what a step chose, on its way to the next step, which takes it on the device, and to the host.

The runner owns it, for steps that are begun before the last one's tokens are known here. On a GPU, tokens go to pinned
memory on a stream of their own, so that no step waits for their copy; that has never run on a GPU.
"""

from collections.abc import Callable
from collections.abc import Sequence as Sequences

import torch
from torch import Tensor

from quire_engine.request import PENDING, Sequence
from quire_engine.step import Span
from quire_kernels import on_device


class Handover:
    """The tokens that the step begun last chose, one for each of some sequences."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._rows: dict[Sequence, int] = {}
        self._tokens: Tensor | None = None
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    def fill(self, token_ids: Tensor, spans: Sequences[Span]) -> None:
        """Put tokens where the host did not know them.

        Args:
            token_ids: of the spans in order, int64 on the device, and perhaps others behind them; written to.
            spans: of the step after the one that chose them. A token that is not known is the only one of its span.
        """
        places, rows, end = [], [], 0
        for span in spans:
            output = span.sequence.output_token_ids
            if span.length == 1 and output and output[-1] == PENDING:
                places.append(end)
                rows.append(self._rows[span.sequence])
            end += span.length
        if places:
            assert self._tokens is not None
            where = on_device(torch.tensor([places, rows]), self._device)
            token_ids.index_copy_(0, where[0], self._tokens[where[1]])

    def take(
        self, sequences: Sequences[Sequence], tokens: Tensor, others: Sequences[Tensor] = ()
    ) -> Callable[[], list[Tensor]]:
        """Keep what a step chose, [len(sequences)] int64 on the device, and begin its copy to the host.

        Returns what waits until the step is over, and returns tokens and `others` on the host.
        """
        self._rows = {sequence: row for row, sequence in enumerate(sequences)}
        self._tokens = tokens
        if self._stream is None:
            return lambda: [tokens, *others]
        copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
        found: list[Tensor] = []
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            for tensor in (tokens, *others):
                found.append(torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True))
                found[-1].copy_(tensor, non_blocking=True)
                # Its memory is not given to a later step before it is copied.
                tensor.record_stream(self._stream)
            copied.record()

        def wait() -> list[Tensor]:
            copied.synchronize()
            return found

        return wait
