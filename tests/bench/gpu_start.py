# SPDX-License-Identifier: Apache-2.0
"""How soon a core serves whose weights are in the page cache: a real core process and a whole checkpoint, started with
nothing compiled, and again with what the first start compiled."""

import contextlib
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import gpu_engine as engines
from card import Card
from gpu_vllm import write_checkpoint

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "tests"))

from core_traffic import CoreRequest, send_requests  # noqa: E402
from measure import WrongOutput  # noqa: E402
from support.engine_processes import EngineProcesses  # noqa: E402

TIMEOUT_S = 240.0
STARTS = {"first start, nothing compiled": None, "second start": 20.0}
"""And seconds that each may take; None: nothing is promised."""
_BUFFER_BYTES = 1 << 24


def rows(card: Card, free_bytes: int) -> Iterator[dict[str, Any]]:
    """Of each start: seconds until requests are taken; `free_bytes`: of the card, before anything was put there.

    Raises:
        WrongOutput: what is generated after one start is not what is generated after the other.
    """
    with tempfile.TemporaryDirectory(prefix="quire-start-") as name:
        model = Path(name, "model")
        write_checkpoint(card, engines.LLAMA_8B if card.is_gpu else engines.TINY, model)
        num_bytes = _read(model)
        config = engines.settings(card) | {"model": str(model), "device": card.device.type}
        config |= {} if card.is_gpu else {"kv_cache_memory_bytes": 1 << 20}
        paths = os.pathsep.join(str(ROOT / folder) for folder in ("backend", "kernels"))
        env = {"PYTHONPATH": paths, "TRITON_CACHE_DIR": str(Path(name, "compiled"))}
        said: list[list[int]] = []
        for what, bar in STARTS.items():
            card.wait_free(free_bytes)
            with contextlib.ExitStack() as stack:
                pod = stack.enter_context(EngineProcesses(Path(name, what.partition(" ")[0]), None, **config))
                stack.enter_context(mock.patch.dict(os.environ, env))
                start = time.perf_counter()
                pod.start("core", timeout_s=TIMEOUT_S)
                seconds = time.perf_counter() - start
                [answer] = send_requests(pod, [CoreRequest(0.0, "check", None, list(range(3, 12)), 16)])
                said.append(answer.token_ids)
                log = pod.log("core").splitlines()
            if said[-1] != said[0]:
                raise WrongOutput(f"after the {what}: {said[-1]}, and before {said[0]}")
            yield {"what": what, "seconds": seconds, "bar": bar, "weights_bytes": num_bytes, "log": log}


def _read(folder: Path) -> int:
    """Have all files in the page cache; bytes of the weights."""
    num_bytes, buffer = 0, memoryview(bytearray(_BUFFER_BYTES))
    for path in folder.glob("*.safetensors"):
        with path.open("rb", buffering=0) as file:
            while read := file.readinto(buffer):
                num_bytes += read
    return num_bytes
