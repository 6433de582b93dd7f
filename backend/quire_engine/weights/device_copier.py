# SPDX-License-Identifier: Apache-2.0
"""Copies the chunks of a checkpoint to parameters. On a GPU, several threads copy through pinned memory.

A copy from pageable memory to a GPU passes through a small buffer of the driver and blocks its thread. Here each
thread reads a chunk into one pinned buffer while the device copies another buffer. `weights/loader.py` is the caller.
"""

import queue
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeAlias

import torch
from torch import Tensor

from quire_kernels import pinned_empty

NUM_THREADS = 4
"""Number of threads. One thread reads about 5 GB/s of mapped pages, less than a quarter of a PCIe 5.0 bus
(estimated).
"""
BUFFER_BYTES = 16 << 20
"""Bytes of a pinned buffer; each thread has two."""

CopyFunction: TypeAlias = Callable[[Tensor, Callable[[], Tensor]], None]
"""Function with two arguments, a tensor and a function that returns a tensor. It copies the returned tensor to the
first argument, at once or later. The two tensors can differ only in their dtypes."""


class _CopyStream:
    """Two pinned buffers and a stream, used by one thread at a time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        # The stream of the caller may still be writing to parameters.
        self.stream.wait_stream(torch.cuda.current_stream(device))
        self._buffers: list[Tensor | None] = [None, None]
        self._copied = [torch.cuda.Event(), torch.cuda.Event()]  # type: ignore[no-untyped-call]
        self._next = 0

    @torch.inference_mode()
    def copy(self, destination: Tensor, read: Callable[[], Tensor]) -> None:
        """Read into a pinned buffer and queue the copy of the buffer to `destination`."""
        self._next = 1 - self._next
        # An event that was never recorded is complete.
        self._copied[self._next].synchronize()
        buffer = self._buffers[self._next]
        if buffer is None or buffer.nbytes < destination.nbytes:
            buffer = self._buffers[self._next] = pinned_empty((max(destination.nbytes, BUFFER_BYTES),), torch.uint8)
        host = buffer[: destination.nbytes].view(destination.dtype).view(destination.shape)
        host.copy_(read())
        with torch.cuda.stream(self.stream):
            destination.copy_(host, non_blocking=True)
            self._copied[self._next].record(self.stream)


@contextmanager
def open_copier(device: torch.device) -> Iterator[CopyFunction]:
    """Yield a function that copies chunks to parameters on `device`. All copies are complete when the context ends.

    Raises:
        Exception: a chunk could not be read; this is the error of the first such chunk.
    """
    if device.type != "cuda":
        yield _copy_now
        return
    free_streams: queue.SimpleQueue[_CopyStream] = queue.SimpleQueue()
    all_streams = [_CopyStream(device) for _ in range(NUM_THREADS)]
    for copy_stream in all_streams:
        free_streams.put(copy_stream)
    futures: list[Future[None]] = []

    def copy(destination: Tensor, read: Callable[[], Tensor]) -> None:
        copy_stream = free_streams.get()
        try:
            copy_stream.copy(destination, read)
        finally:
            free_streams.put(copy_stream)

    with ThreadPoolExecutor(NUM_THREADS, "weights") as pool:
        try:
            yield lambda destination, read: futures.append(pool.submit(copy, destination, read))
            for future in futures:
                future.result()
        finally:
            pool.shutdown(cancel_futures=True)
            for copy_stream in all_streams:
                torch.cuda.current_stream(device).wait_stream(copy_stream.stream)
                # The buffers are unpinned after this, so the device must not read them any more.
                copy_stream.stream.synchronize()


@torch.inference_mode()
def _copy_now(destination: Tensor, read: Callable[[], Tensor]) -> None:
    destination.copy_(read())
