# SPDX-License-Identifier: Apache-2.0
"""Fake store whose blocks are copies of the cells of a TokenEchoRunner, or of its states, and whose transfers end when
the test says."""

import random
from collections.abc import Callable, Sequence
from typing import ClassVar

from support.fake_runner import Cell, TokenEchoRunner


class FakeStore:
    """A KVStore. A read can end early, as if the file of a block were wrong."""

    seconds_per_block = 0.0
    errors: ClassVar[dict[str, int]] = {}

    def __init__(self, runner: TokenEchoRunner, first_state: int | None = None) -> None:
        """Hold blocks, or states if `first_state` is the number of the first state in host memory."""
        self._runner = runner
        self._first_state = first_state
        self.blocks: dict[bytes, list[Cell | None]] = {}
        self._transfers: list[Callable[[], None]] = []
        self._rng = random.Random(0)
        self.miss_ratio = 0.0

    def contains(self, keys: Sequence[bytes]) -> int:
        return next((i for i, key in enumerate(keys) if key not in self.blocks), len(keys))

    def read(
        self,
        keys: Sequence[bytes],
        rows: Sequence[int],
        on_done: Callable[[int], None],
        is_wanted: Callable[[], bool] = lambda: True,
    ) -> None:
        def transfer() -> None:
            num_read = 0
            for key, row in zip(keys, rows, strict=True):
                # The row is overwritten in every case.
                self._set(row, [None] * self._runner.block_size)
                if key not in self.blocks or self._rng.random() < self.miss_ratio:
                    self.blocks.pop(key, None)
                    break
                self._set(row, list(self.blocks[key]))
                num_read += 1
            on_done(num_read)

        self._transfers.append(transfer)

    def write(self, keys: Sequence[bytes], rows: Sequence[int], on_done: Callable[[int], None]) -> None:
        def transfer() -> None:
            for key, row in zip(keys, rows, strict=True):
                self.blocks[key] = self._get(row)
            on_done(len(keys))

        self._transfers.append(transfer)

    def _get(self, row: int) -> list[Cell | None]:
        if self._first_state is None:
            return list(self._runner.host_cells[row])
        return list(self._runner.states[row + self._first_state])

    def _set(self, row: int, cells: list[Cell | None]) -> None:
        if self._first_state is None:
            self._runner.host_cells[row] = cells
        else:
            self._runner.states[row + self._first_state] = cells  # type: ignore[assignment]

    def complete(self, num: int = 1 << 30) -> int:
        """End the first transfers; return how many there were."""
        transfers, self._transfers = self._transfers[:num], self._transfers[num:]
        for transfer in transfers:
            transfer()
        return len(transfers)
