# SPDX-License-Identifier: Apache-2.0
"""Assigns each sequence a row of the block tables on the device. CUDA graphs read these tables. Torch-free."""

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field

from quire_engine import sequence as engine_sequence
from quire_engine.sequence import BlockId
from quire_engine.step.plan import ScheduledSpan


@dataclass(slots=True)
class _DeviceRow:
    """Describes which part of a sequence's block table is on the device."""

    row: int
    table: list[BlockId] = field(default_factory=list)
    """The sequence's own block table. It is not a copy. The sequence appends to the same list, and replaces it with a
    new list after each preemption."""
    num_sent: int = 0
    """Number of blocks at the start of the table that were already sent to the device."""


class DeviceBlockTables:
    """Assigns rows of the device's block tables to sequences, and finds the entries that must be sent to the device.
    Pure bookkeeping."""

    def __init__(self, num_rows: int) -> None:
        """`num_rows` must be at least the maximum number of sequences in a step."""
        self._num_rows = num_rows
        self._free_rows = list(range(num_rows - 1, -1, -1))
        self._device_rows: weakref.WeakKeyDictionary[engine_sequence.Sequence, _DeviceRow] = weakref.WeakKeyDictionary()

    def assign_rows(self, spans: Sequence[ScheduledSpan]) -> tuple[list[int], list[tuple[int, int, int]]]:
        """Return the row of each span's sequence, and the (row, column, block) entries that must be written before the
        step."""
        rows: list[int] = []
        entries: list[tuple[int, int, int]] = []
        for span in spans:
            device_row = self._device_rows.get(span.sequence) or self._assign_row(span.sequence, spans)
            table = span.sequence.block_table
            if device_row.table is not table:
                device_row.table, device_row.num_sent = table, 0
            new_columns = range(device_row.num_sent, len(table))
            entries += [(device_row.row, column, table[column]) for column in new_columns]
            device_row.num_sent = len(table)
            rows.append(device_row.row)
        return rows, entries

    def _assign_row(self, sequence: engine_sequence.Sequence, spans: Sequence[ScheduledSpan]) -> _DeviceRow:
        if not self._free_rows:
            # Reuse the rows of sequences that are not in this step, because they are finished or wait.
            running = {span.sequence for span in spans}
            running_rows = {s: device_row for s, device_row in self._device_rows.items() if s in running}
            used_rows = {resident.row for resident in running_rows.values()}
            self._free_rows = [row for row in range(self._num_rows - 1, -1, -1) if row not in used_rows]
            self._device_rows = weakref.WeakKeyDictionary(running_rows)
        resident = self._device_rows[sequence] = _DeviceRow(self._free_rows.pop())
        return resident
