# SPDX-License-Identifier: Apache-2.0
"""A small engine with KV tiers, requests that use them, and a process that is killed in the middle of a copy."""

import os
import random
import signal
import sys
from pathlib import Path
from typing import Any

from quire_engine.core.engine import Engine
from quire_engine.kv_cache.host_swap import HostSwap
from quire_engine.kv_cache.swap_policy import SwapCosts
from quire_engine.kv_transfer import folder_store
from quire_spec.engine.config import EngineConfig
from quire_spec.engine.sampling_params import SamplingParams
from quire_spec.model.memory_sizing import kv_block_bytes
from quire_spec.model.model_config import ModelConfig
from quire_spec.protocol.messages import SequenceRequest

VOCAB = 320


def tiered_config(folder: Path, num_blocks: int = 14, num_host_blocks: int = 0, **fields: Any) -> EngineConfig:
    """Return a configuration with this number of blocks of 8 tokens in the KV cache and in host memory."""
    block_bytes = kv_block_bytes(ModelConfig.load(folder), 8, 4)
    size = fields.get("tensor_parallel_size", 1)
    memory = {
        "kv_cache_memory_bytes": num_blocks * block_bytes // size,
        "kv_offloading_size": num_host_blocks * block_bytes / 2**30,
    }
    base = {"model": str(folder), "dtype": "float32", "max_model_len": 96, "block_size": 8}
    return EngineConfig.from_json(base | {"max_num_batched_tokens": 32, "max_num_seqs": 8} | memory | fields)


def serve_prompts(engine: Engine, num_rounds: int = 3) -> dict[int, list[int]]:
    """Run rounds of greedy requests with few prefixes, some of them at the same time, and return their tokens."""
    rng, outputs = random.Random(1), dict[int, list[int]]()
    prefixes = [[rng.randrange(VOCAB) for _ in range(56)] for _ in range(4)]
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    for number in range(num_rounds * 2 * len(prefixes)):
        prompt = prefixes[number // 2 % len(prefixes)] + [rng.randrange(VOCAB) for _ in range(number % 3)]
        engine.add(SequenceRequest(number, prompt, params, None, None, []))
        outputs[number] = []
        for _ in range(rng.choice([6, 16, 40])):
            _step(engine, outputs)
    while engine.has_work:
        _step(engine, outputs)
    return outputs


def _step(engine: Engine, outputs: dict[int, list[int]]) -> None:
    for result in engine.step().results:
        assert not result.error, result.error
        outputs[result.id] += result.token_ids
    engine.check_integrity()


def main() -> None:
    """Serve until the process kills itself in the middle of a copy.

    Arguments: the checkpoint, the folder of the blocks, the place (file or host), and the number of the copy.
    """
    checkpoint, folder, place, number = sys.argv[1:]
    SwapCosts.is_worthwhile = lambda *_: True  # type: ignore[method-assign]
    engine = Engine.from_config(tiered_config(Path(checkpoint), num_host_blocks=30, kv_offloading_folder=folder))
    left = int(number)

    def is_last() -> bool:
        nonlocal left
        left -= 1
        return left < 0

    def half_writev(file: int, buffers: Any, writev: Any = os.writev) -> int:
        if is_last():
            half = b"".join(buffers)
            os.write(file, half[: len(half) // 2])
            os.kill(os.getpid(), signal.SIGKILL)
        return int(writev(file, buffers))

    def half_copy(self: HostSwap, outs: Any, ins: Any, copy: Any = HostSwap.copy) -> None:
        copy(self, outs, ins)
        if outs and is_last():
            block = self.buffers(outs[0].host_block)[0]
            block[len(block) // 2 :] = bytes(len(block) - len(block) // 2)
            os.kill(os.getpid(), signal.SIGKILL)

    if place == "file":
        folder_store.os.writev = half_writev  # type: ignore[assignment]
    else:
        HostSwap.copy = half_copy  # type: ignore[method-assign]
    while True:
        serve_prompts(engine)
