# SPDX-License-Identifier: Apache-2.0
"""Tells how far a download is, in the log and on a port, for as long as it lasts.

Counts what is on the disk and knows nothing of protocols. Nothing here can make the download fail.
"""

import asyncio
import contextlib
import logging
import os
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path

from aiohttp import web

from quire_sources.blocking import run_in_daemon_thread
from quire_spec.dataclass_json import to_json
from quire_spec.documents.download_progress import PROGRESS_PATH, DownloadProgress, format_bytes
from quire_spec.net.addresses import ANY_ADDRESS, listen_address

logger = logging.getLogger(__name__)

SAMPLE_INTERVAL_S = 2.0
"""Between two looks at the disk, which cost a stat for each file."""
LOG_INTERVAL_S = 10.0
"""Between two lines of the log."""
_RATE_WINDOW_S = 30.0
"""That the rate is of: long enough for a line that comes in bursts."""
_SHUTDOWN_TIMEOUT_S = 1.0
"""For answers under way, at the end."""


class ProgressMeter:
    """Measures one download: bytes that are in its folder, of how many, and how fast they come."""

    def __init__(self, folder: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._folder, self._clock = folder, clock
        self._sizes: dict[str, int] = {}
        self._weights: Sequence[str] = ()
        self._index_bytes: int | None = None
        self._samples: deque[tuple[float, int]] = deque()

    def set_weights(self, names: Sequence[str], index_bytes: int | None = None) -> None:
        """The files of weights, and how many bytes the index says that their tensors have, if it does."""
        self._weights, self._index_bytes = names, index_bytes

    def set_size(self, name: str, size: int) -> None:
        """The size of a whole file, as soon as somebody knows it."""
        self._sizes[name] = size

    async def sample(self) -> None:
        """Look at the disk; what cannot be read leaves the last reading."""
        with contextlib.suppress(OSError):
            num_bytes = await run_in_daemon_thread(_folder_bytes, self._folder)
            now = self._clock()
            self._samples.append((now, num_bytes))
            while now - self._samples[0][0] > _RATE_WINDOW_S:
                self._samples.popleft()

    @property
    def progress(self) -> DownloadProgress:
        """By the last sample."""
        if not self._samples:
            return DownloadProgress(0, self._total_bytes())
        (start_time, start_bytes), (end_time, end_bytes) = self._samples[0], self._samples[-1]
        # A file of another version or with a wrong digest is dropped: then nothing was gained.
        rate = max(int((end_bytes - start_bytes) / (end_time - start_time)), 0) if end_time > start_time else None
        return DownloadProgress(end_bytes, self._total_bytes(), rate)

    def _total_bytes(self) -> int | None:
        known_bytes = sum(self._sizes.values())
        if self._weights and all(name in self._sizes for name in self._weights):
            return known_bytes
        if self._index_bytes is None:
            return None
        # Without headers, which are a thousandth of it; exact once every file was begun.
        weights = sum(self._sizes.get(name, 0) for name in self._weights)
        return known_bytes - weights + max(self._index_bytes, weights)


@contextlib.asynccontextmanager
async def report_progress(meter: ProgressMeter, port: int | None) -> AsyncIterator[None]:
    """Tell of `meter` while the context lasts: in the log, and on `port` to whoever asks. None: nobody can."""
    sampling_task = asyncio.create_task(_sample_and_log(meter))
    try:
        async with _serve_progress(meter, port):
            yield
    finally:
        sampling_task.cancel()
        (result,) = await asyncio.gather(sampling_task, return_exceptions=True)
        if isinstance(result, Exception):
            logger.warning("progress was no longer told error=%r", result)


async def _sample_and_log(meter: ProgressMeter) -> None:
    last_log = time.monotonic()
    while True:
        await meter.sample()
        if time.monotonic() - last_log >= LOG_INTERVAL_S:
            last_log = time.monotonic()
            logger.info("download goes on %s", _format_progress(meter.progress))
        await asyncio.sleep(SAMPLE_INTERVAL_S)


def _format_progress(progress: DownloadProgress) -> str:
    parts = [f"done={format_bytes(progress.bytes)!r}"]
    if progress.total is not None:
        parts += [f"total={format_bytes(progress.total)!r}", f"percent={progress.percent}"]
    if progress.bytes_per_s is not None:
        parts.append(f"rate='{format_bytes(progress.bytes_per_s)}/s'")
    if progress.eta_s is not None:
        parts.append(f"left_s={progress.eta_s}")
    return " ".join(parts)


@contextlib.asynccontextmanager
async def _serve_progress(meter: ProgressMeter, port: int | None) -> AsyncIterator[None]:
    if port is None:
        yield
        return

    async def answer(request: web.Request) -> web.Response:
        return web.json_response(to_json(meter.progress))

    app = web.Application()
    app.router.add_get(PROGRESS_PATH, answer)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=_SHUTDOWN_TIMEOUT_S)
    try:
        await runner.setup()
        await web.TCPSite(runner, listen_address(ANY_ADDRESS, os.environ), port).start()
    except (OSError, OverflowError) as error:
        logger.warning("nobody can ask how far the download is port=%d error=%s", port, error)
    try:
        yield
    finally:
        await runner.cleanup()


def _folder_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir())
