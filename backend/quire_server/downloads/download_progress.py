# SPDX-License-Identifier: Apache-2.0
"""Reports the progress of a model download in the log or on the terminal, and on an HTTP port.

The module counts bytes on disk and does not depend on protocols. An error in this module never makes the download fail.
Called by model_download.
"""

import asyncio
import contextlib
import logging
import os
import sys
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path

from aiohttp import web
from tqdm import tqdm
from tqdm.contrib.logging import logging_redirect_tqdm

from quire_sources.readers.blocking import run_in_daemon_thread
from quire_spec.dataclass_json import to_json
from quire_spec.documents.download_progress import PROGRESS_PATH, DownloadProgress, format_bytes
from quire_spec.net.addresses import ANY_ADDRESS, listen_address

logger = logging.getLogger(__name__)

SAMPLE_INTERVAL_S = 2.0
"""Number of seconds between samples of the disk. To take a sample, stat is called for each file."""
LOG_INTERVAL_S = 10.0
"""Seconds between log lines."""
_RATE_WINDOW_S = 30.0
"""Number of seconds over which the rate is averaged. This is long enough for a connection whose rate varies."""
_SHUTDOWN_TIMEOUT_S = 1.0
"""When the download ends, wait at most this many seconds for open requests."""


class ProgressMeter:
    """Measures one download: bytes in its folder, expected bytes, and rate."""

    def __init__(self, folder: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._folder, self._clock = folder, clock
        self._sizes: dict[str, int] = {}
        self._weights: Sequence[str] = ()
        self._index_bytes: int | None = None
        self._samples: deque[tuple[float, int]] = deque()

    def set_weights(self, names: Sequence[str], index_bytes: int | None = None) -> None:
        """Set the names of the weight files. `index_bytes` is the size of the tensors in these files, if the index file
        contains this size."""
        self._weights, self._index_bytes = names, index_bytes

    def set_size(self, name: str, size: int) -> None:
        """Set the size that a file will have when it is complete. Call this as soon as the size is known."""
        self._sizes[name] = size

    async def sample(self) -> None:
        """Sample the disk. If this fails, the last sample is kept."""
        with contextlib.suppress(OSError):
            num_bytes = await run_in_daemon_thread(_folder_bytes, self._folder)
            now = self._clock()
            self._samples.append((now, num_bytes))
            while now - self._samples[0][0] > _RATE_WINDOW_S:
                self._samples.popleft()

    @property
    def progress(self) -> DownloadProgress:
        """Progress at the last sample."""
        if not self._samples:
            return DownloadProgress(0, self._total_bytes())
        (start_time, start_bytes), (end_time, end_bytes) = self._samples[0], self._samples[-1]
        # The difference is negative after a file with a new version or a wrong digest was discarded.
        rate = max(int((end_bytes - start_bytes) / (end_time - start_time)), 0) if end_time > start_time else None
        return DownloadProgress(end_bytes, self._total_bytes(), rate)

    def _total_bytes(self) -> int | None:
        known_bytes = sum(self._sizes.values())
        if self._weights and all(name in self._sizes for name in self._weights):
            return known_bytes
        if self._index_bytes is None:
            return None
        # The size in the index does not include the headers of the files, which are about 0.1 % of it. The total is
        # exact as soon as every file has been opened.
        weights = sum(self._sizes.get(name, 0) for name in self._weights)
        return known_bytes - weights + max(self._index_bytes, weights)


@contextlib.asynccontextmanager
async def report_progress(meter: ProgressMeter, port: int | None) -> AsyncIterator[None]:
    """Report the progress of `meter` on `port` and in the log, or as a bar on a terminal, until the context ends.

    If `port` is None, no port is opened.
    """
    sampling_task = asyncio.create_task(_sample_and_log(meter))
    try:
        with logging_redirect_tqdm() if sys.stderr.isatty() else contextlib.nullcontext():
            async with _serve_progress(meter, port):
                yield
    finally:
        sampling_task.cancel()
        (result,) = await asyncio.gather(sampling_task, return_exceptions=True)
        if isinstance(result, Exception):
            logger.warning("progress reports stopped error=%r", result)


async def _sample_and_log(meter: ProgressMeter) -> None:
    last_log = time.monotonic()
    # On a terminal, a bar replaces the lines of the log.
    with tqdm(unit="B", unit_scale=True, unit_divisor=1024, desc="model", disable=None, leave=False) as bar:
        while True:
            await meter.sample()
            if not bar.disable:
                bar.total, bar.n = meter.progress.total, meter.progress.bytes
                bar.refresh()
            elif time.monotonic() - last_log >= LOG_INTERVAL_S:
                last_log = time.monotonic()
                logger.info("download progress %s", _format_progress(meter.progress))
            await asyncio.sleep(SAMPLE_INTERVAL_S)


def _format_progress(progress: DownloadProgress) -> str:
    parts = [f"done={format_bytes(progress.bytes)!r}"]
    if progress.total is not None:
        parts += [f"total={format_bytes(progress.total)!r}", f"percent={progress.percent}"]
    if progress.bytes_per_s is not None:
        parts.append(f"rate='{format_bytes(progress.bytes_per_s)}/s'")
    if progress.eta_s is not None:
        parts.append(f"eta_s={progress.eta_s}")
    return " ".join(parts)


@contextlib.asynccontextmanager
async def _serve_progress(meter: ProgressMeter, port: int | None) -> AsyncIterator[None]:
    if port is None:
        yield
        return

    async def respond(request: web.Request) -> web.Response:
        return web.json_response(to_json(meter.progress))

    app = web.Application()
    app.router.add_get(PROGRESS_PATH, respond)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=_SHUTDOWN_TIMEOUT_S)
    try:
        await runner.setup()
        await web.TCPSite(runner, listen_address(ANY_ADDRESS, os.environ), port).start()
    except (OSError, OverflowError) as error:
        logger.warning("progress port cannot be opened port=%d error=%s", port, error)
    try:
        yield
    finally:
        await runner.cleanup()


def _folder_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir())
