# SPDX-License-Identifier: Apache-2.0
"""Waits for the transfers of a FolderStore."""

import threading

from quire_engine.kv_transfer.folder_store import _NUM_READERS, FolderStore


def drain(store: FolderStore) -> None:
    """Wait until all transfers that have begun, and those before this call, are done."""
    for threads, num_threads in ((store._readers, _NUM_READERS), (store._writer, 1)):
        barrier = threading.Barrier(num_threads + 1)
        for _ in range(num_threads):
            threads.submit(lambda barrier=barrier: barrier.wait(60))  # type: ignore[misc]
        barrier.wait(60)
