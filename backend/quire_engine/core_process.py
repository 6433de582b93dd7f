# SPDX-License-Identifier: Apache-2.0
"""The engine core: `python -m quire_engine.core_process`. Loads the engine, says what it took, and serves it.

    text process --Generate, Abort--> CoreServer --queue--> CoreLoop -> Engine
                 <----StepResult-----            <---------

Two threads: sockets in the main one, the engine in the other. It listens only when the engine is ready to run.
"""

import asyncio
import gc
import logging
from pathlib import Path

from quire_engine import process
from quire_engine.core_server import CoreServer
from quire_engine.engine import Engine
from quire_engine.step_thread import StepThread
from quire_spec.constants import CORE_SOCKET
from quire_spec.model import memory_sizing
from quire_spec.model.capabilities import DTYPE_BYTES
from quire_spec.model.tensor_parallel import TensorParallelShard

_log = logging.getLogger("quire.core")
_GIB = 2**30


def main(args: process.Arguments) -> None:
    """Load, then serve."""
    path = args.socket(CORE_SOCKET)
    steps = StepThread()
    engine = steps.do(lambda: Engine.from_config(args.config, on_lost=_lost))
    log_memory(engine)
    # The model's objects live as long as the process: no collection needs to look at them again, in the middle of a
    # step.
    gc.collect()
    gc.freeze()
    asyncio.run(_serve(engine, steps, path))


def log_memory(engine: Engine) -> None:
    """Log what the planner's arithmetic says of a rank's memory beside what the engine measured."""
    memory, config = engine.memory, engine.config
    shape = TensorParallelShard(engine.shape, 0, config.tensor_parallel_size).local_config
    element = DTYPE_BYTES[memory.dtype]
    slots = (
        config.max_loras * memory_sizing.lora_slot_bytes(shape, config.max_lora_rank, element)
        if config.enable_lora
        else 0
    )
    kv_element = element if config.kv_cache_dtype == "auto" else 1
    planned = {
        "weights": (
            memory_sizing.weights_bytes(engine.shape, element) // config.tensor_parallel_size,
            memory.weights_bytes,
        ),
        "lora": (slots, memory.lora_bytes),
        "kv": (memory.num_blocks * memory_sizing.kv_block_bytes(shape, memory.block_size, kv_element), memory.kv_bytes),
    }
    for part, (plan, measured) in planned.items():
        _log.info("memory part=%s planned_gib=%.3f measured_gib=%.3f", part, plan / _GIB, measured / _GIB)
    _log.info(
        "kv cache num_blocks=%d block_size=%d tokens=%d max_model_len=%d device=%s dtype=%s",
        *(memory.num_blocks, memory.block_size, memory.num_blocks * memory.block_size),
        *(engine.max_model_len, memory.device, memory.dtype),
    )


def _lost(why: str) -> None:
    """At once, also when no step runs that would notice: the supervisor starts all again."""
    _log.error("engine lost: ending this process why=%s", why)
    process.leave(process.EXIT_DEFECT)


async def _serve(engine: Engine, steps: StepThread, path: Path) -> None:
    process.watch_loop(asyncio.get_running_loop())
    await CoreServer(engine, steps).run(path)


if __name__ == "__main__":
    process.run("quire_engine.core_process", main)
