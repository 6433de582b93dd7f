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

from quire_engine.ranks import Ranks
from quire_engine.request import Sequence
from quire_engine.step import Span
from quire_kernels import to_device_async

Until: TypeAlias = Callable[[Callable[[], bool]], None]
"""Waits until what it is given says that something is done."""


class Handover:
    """The tokens that the step begun last chose, one for each of some sequences."""

    def __init__(self, device: torch.device, ranks: Ranks | None = None, until: Until | None = None) -> None:
        """`ranks`: those that share the layers; `until` waits for the device, None: however long that takes."""
        self._device = device
        self._ranks = ranks
        self._until = until
        self._rows: dict[Sequence, int] = {}
        self._tokens: Tensor | None = None
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    def fill(self, token_ids: Tensor, spans: Sequences[Span] | None) -> None:
        """Put tokens where the host did not know them; for a step that has some.

        Args:
            token_ids: of the spans in order, int64 on the device, and perhaps others behind them; written to.
            spans: of the step after the one that chose them; None on another rank than the first.
        """
        if spans is not None:
            self._fill(token_ids, spans)
        if self._ranks is not None:
            self._ranks.share(token_ids)

    def _fill(self, token_ids: Tensor, spans: Sequences[Span]) -> None:
        places, rows, end = [], [], 0
        for span in spans:
            if span.pending:
                places.append(end)
                rows.append(self._rows[span.sequence])
            end += span.length
        assert self._tokens is not None
        where = to_device_async(torch.tensor([places, rows]), self._device)
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
            if self._until is not None:
                self._until(copied.query)
            copied.synchronize()
            return found

        return wait
