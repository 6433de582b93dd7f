# SPDX-License-Identifier: Apache-2.0
"""Waits for the transfers of a FolderStore, or of those of a group of nodes."""

import threading

from quire_engine.kv_transfer import group_folder
from quire_engine.kv_transfer.folder_store import _NUM_READERS, FolderStore
from quire_engine.kv_transfer.group_folder import GroupFolder


def drain(store: FolderStore | GroupFolder) -> None:
    """Wait until all transfers that have begun, and those before this call, are done."""
    queues = [(store._readers, _NUM_READERS), (store._writer, 1)]
    if isinstance(store, GroupFolder):
        drain(store._own)
        # A write is in the second queue when it has left the first one.
        queues = [(store._readers, group_folder._NUM_READERS), (store._writer, 1), (store._written, 1)]
    for threads, num_threads in queues:
        barrier = threading.Barrier(num_threads + 1)
        for _ in range(num_threads):
            threads.submit(lambda barrier=barrier: barrier.wait(60))  # type: ignore[misc]
        barrier.wait(60)
