# SPDX-License-Identifier: Apache-2.0
"""Decodes and resizes images, in worker processes that may die (image_worker.py). The request processor uses it."""

import asyncio
import base64
import hashlib
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from quire_engine.images.processor import ProcessedImage
from quire_engine.ipc.worker_pool import WorkerDied, WorkerPool, WorkersBusy, WorkerTimeout
from quire_spec.dataclass_json import to_json
from quire_spec.errors import InvalidArgument, Unavailable, error_from_code
from quire_spec.model.images.image_config import ImageConfig
from quire_spec.protocol.messages import ImageTensor

CPU_LIMIT_S = 20.0
"""Processing an image may take this number of seconds of CPU time. A photo of 12 million pixels takes about 1 s."""
QUEUE_TIMEOUT_S = 30.0
CACHE_BYTES = 128 * 2**20
"""Maximum size of the tensors of recent images. A conversation contains an image again in each of its requests."""


class ImageReader:
    """The image processor of one checkpoint."""

    def __init__(self, folder: Path, images: ImageConfig, cpu_limit_s: float = CPU_LIMIT_S) -> None:
        self._cpu_limit_s = cpu_limit_s
        config = {"folder": str(folder), "images": to_json(images)}
        self._workers = WorkerPool("quire_engine.text.images.image_worker", config, cpu_limit_s, QUEUE_TIMEOUT_S)
        self._cache: OrderedDict[bytes, ProcessedImage] = OrderedDict()
        self._num_cached_bytes = 0

    def start(self) -> None:
        """Start the workers in the background; do nothing if they already run."""
        self._workers.start()

    async def aclose(self) -> None:
        """End the workers."""
        await self._workers.aclose()

    async def read(self, files: Sequence[bytes]) -> list[ProcessedImage]:
        """Return the images of a request.

        Raises:
            InvalidArgument: an image is invalid, or takes too much time.
            Unavailable: no worker is free, or the machine is busy.
        """
        return await asyncio.gather(*(self._read(data, f"images[{i}]") for i, data in enumerate(files)))

    async def _read(self, data: bytes, name: str) -> ProcessedImage:
        key = hashlib.sha256(data).digest()
        if key in self._cache:
            self._cache.move_to_end(key)
            return self._cache[key]
        message = {"data": base64.b64encode(data).decode()}
        try:
            answer = await self._workers.ask(message)
        except WorkersBusy:
            raise Unavailable(f"{name}: the server is too busy to read the image; try again") from None
        except WorkerTimeout:
            raise InvalidArgument(
                f"{name}: takes more than {self._cpu_limit_s:g} s of CPU time; send a smaller image"
            ) from None
        except WorkerDied:
            raise Unavailable(f"{name}: the process that reads the image ended; try again") from None
        if "error" in answer:
            raise error_from_code(answer["error_code"], f"{name}: {answer['error']}")
        image = await asyncio.get_running_loop().run_in_executor(None, _decode, answer)
        self._keep(key, image)
        return image

    def _keep(self, key: bytes, image: ProcessedImage) -> None:
        if key in self._cache:
            return
        self._cache[key] = image
        self._num_cached_bytes += _num_bytes(image)
        while self._num_cached_bytes > CACHE_BYTES:
            _, dropped = self._cache.popitem(last=False)
            self._num_cached_bytes -= _num_bytes(dropped)


def _decode(answer: dict[str, Any]) -> ProcessedImage:
    tensors = {
        name: ImageTensor(tensor["dtype"], tensor["shape"], base64.b64decode(tensor["data"]))
        for name, tensor in answer["tensors"].items()
    }
    rows, columns = answer["grid"]
    digest = bytes.fromhex(answer["digest"])
    return ProcessedImage(answer["num_tokens"], (rows, columns), digest, tensors, answer["line_length"])


def _num_bytes(image: ProcessedImage) -> int:
    return sum(len(tensor.data) for tensor in image.tensors.values())
