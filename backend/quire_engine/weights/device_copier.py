# SPDX-License-Identifier: Apache-2.0
"""Copies the chunks of a checkpoint to parameters. On a GPU, several threads copy through pinned memory.

If a thread copies from pageable memory to a GPU, the driver copies the data through its own small buffer, and the
thread waits. Here, each thread has two pinned buffers. It reads a chunk into one of them while the device copies the
other. `weights/loader.py` is the caller.
"""

import queue
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeAlias

import torch
from torch import Tensor

from quire_kernels import pinned_empty

NUM_THREADS = 4
"""Number of threads. It is estimated that one thread reads about 5 GB/s of mapped pages. This is less than a quarter of
the rate of a PCIe 5.0 bus.
"""
BUFFER_BYTES = 16 << 20
"""Size of a pinned buffer in bytes. Each thread has two of them."""

CopyFunction: TypeAlias = Callable[[Tensor, Callable[[], Tensor]], None]
"""A function that copies a chunk to a parameter. Its arguments are the destination and a function that reads the chunk
and returns it as a tensor. The function can copy at once, or later. In both cases, it writes the values into the
destination. The two tensors can differ only in their dtypes."""


class _CopyStream:
    """Two pinned buffers and a CUDA stream. Only one thread uses them at a time."""

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
        """Read a chunk into a pinned buffer, and queue the copy from this buffer to `destination`."""
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
    # A reader that is faster than the device would otherwise keep the whole model in host memory.
    places = threading.Semaphore(4 * NUM_THREADS)

    def copy(destination: Tensor, read: Callable[[], Tensor]) -> None:
        copy_stream = free_streams.get()
        try:
            copy_stream.copy(destination, read)
        finally:
            free_streams.put(copy_stream)
            places.release()

    def submit(destination: Tensor, read: Callable[[], Tensor]) -> None:
        places.acquire()
        futures.append(pool.submit(copy, destination, read))

    with ThreadPoolExecutor(NUM_THREADS, "weights") as pool:
        try:
            yield submit
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
