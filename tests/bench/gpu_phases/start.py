# SPDX-License-Identifier: Apache-2.0
"""Time until a core process serves whose weights are in the page cache: with nothing compiled, and again with the
kernels that the first start compiled."""

import contextlib
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

from core_traffic import CoreRequest, send_requests
from measure import WrongOutput
from support.engine_processes import EngineProcesses

from gpu_phases.process import Context
from gpu_phases.random_checkpoint import write_checkpoint
from gpu_phases.random_engine import LLAMA_8B, TINY, settings
from gpu_phases.store import Row

TIMEOUT_S = 120.0
STARTS = ("first start, nothing compiled", "second start")
_BUFFER_BYTES = 1 << 24


def rows(context: Context) -> Iterator[Row]:
    """Seconds of each start until requests are accepted.

    Raises:
        WrongOutput: the tokens after one start differ from the tokens after the other.
    """
    card = context.card
    with tempfile.TemporaryDirectory(prefix="quire-start-") as name:
        model = Path(name, "model")
        write_checkpoint(card, LLAMA_8B if card.is_full else TINY, model)
        num_bytes = _read(model)
        config = settings(card) | {"model": str(model), "device": card.device.type}
        config |= {} if card.is_full else {"kv_cache_memory_bytes": 1 << 20}
        env = {"TRITON_CACHE_DIR": str(Path(name, "compiled"))}
        said: list[list[int]] = []
        for what in STARTS:
            card.wait_free()
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
            row = {"what": f"{what}, {num_bytes / 1e9:.1f} GB", "value": seconds, "unit": "s", "log": log}
            yield row | ({"key": "start"} if what == STARTS[1] else {})


def _read(folder: Path) -> int:
    """Read all weights into the page cache; return their bytes."""
    num_bytes, buffer = 0, memoryview(bytearray(_BUFFER_BYTES))
    for path in folder.glob("*.safetensors"):
        with path.open("rb", buffering=0) as file:
            while read := file.readinto(buffer):
                num_bytes += read
    return num_bytes
