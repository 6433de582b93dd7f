# SPDX-License-Identifier: Apache-2.0
"""Measured time to read a block of a store. Pure arithmetic, used by the threads that read and by the scheduler."""

import time
from collections import deque

_NUM_READS = 3
"""Number of the latest reads that count."""
_MEASUREMENT_S = 10.0
"""The measured time counts for this number of seconds. After that, one more read measures again."""


class ReadTime:
    """The shortest time of the latest reads. Other programs can only make a read longer, and one long read must not
    keep the sequences of the next seconds from a fast store."""

    def __init__(self) -> None:
        self._seconds = deque[float](maxlen=_NUM_READS)
        self._measured_at = 0.0

    def add(self, seconds: float) -> None:
        """Add the seconds that the read of one block took."""
        self._seconds.append(seconds)
        self._measured_at = time.monotonic()

    @property
    def seconds_per_block(self) -> float:
        """Seconds to read one block; 0 before the third read, and if the last one was long ago."""
        if len(self._seconds) < _NUM_READS or time.monotonic() > self._measured_at + _MEASUREMENT_S:
            return 0.0
        return min(self._seconds)
