# SPDX-License-Identifier: Apache-2.0
"""The core process: loads the engine, logs the memory it uses, and serves its clients. Started by `python -m
quire_engine.core`.

    text process --SequenceRequest, AbortSequences--> CoreServer --queue--> EngineLoop -> Engine
                 <-----------StepResult-------------             <---------

CoreServer passes every sequence to the GrammarQueue. A sequence without a grammar enters the queue of the EngineLoop at
once. A sequence with a grammar enters it when the grammar is compiled. The main thread serves the sockets, and the
compute thread runs the engine. The process listens only when the engine is ready.
"""

import asyncio
import gc
import logging
from pathlib import Path

from quire_engine.core.compute_thread import ComputeThread
from quire_engine.core.engine import Engine
from quire_engine.core.server import CoreServer
from quire_engine.ipc import process
from quire_engine.kv_cache.layout_choice import choose_layout
from quire_engine.kv_events.publisher import KVEventPublisher
from quire_spec.constants import core_index, process_socket
from quire_spec.model import memory_sizing
from quire_spec.model.capabilities import DTYPE_BYTES, KV_SCALE_BYTES
from quire_spec.model.parallel.pipeline_parallel import split_stages
from quire_spec.model.parallel.tensor_parallel import TensorParallelShard

logger = logging.getLogger(__name__)
_GIB = 2**30


def main(args: process.ProcessArgs) -> None:
    """Load the engine, then serve requests."""
    socket_path = args.socket_path(process_socket(args.name))
    events_config = args.config.kv_events_config
    # The ports are opened before the model is loaded, so that an error about them comes early.
    publisher = None
    if events_config is not None and events_config.is_enabled:
        publisher = KVEventPublisher(events_config, args.served_name, core_index(args.name))
    compute_thread = ComputeThread()
    engine = compute_thread.run_sync(lambda: Engine.from_config(args.config, progress=True, on_lost=_on_engine_lost))
    log_memory(engine)
    # The objects of the model live as long as the process. Freezing excludes them from garbage collections, which would
    # otherwise traverse them in the middle of a step.
    gc.collect()
    gc.freeze()
    if publisher is not None:
        publisher.start(choose_layout(engine.config, engine.shape), engine.config.block_size)
    asyncio.run(_serve(engine, compute_thread, socket_path, publisher))


def log_memory(engine: Engine) -> None:
    """Log the planned and the measured memory of rank 0."""
    memory, config = engine.memory, engine.config
    stage = split_stages(engine.shape, config.pipeline_parallel_size, config.quantization)[0]
    shape = TensorParallelShard(stage, 0, config.tensor_parallel_size).local_config
    layout = choose_layout(config, engine.shape)
    if stage.stage is not None:
        layout = layout.for_stage(range(stage.num_layers))
    element_bytes = DTYPE_BYTES[memory.dtype]
    kv_element_bytes = element_bytes if config.kv_cache_dtype == "auto" else 1
    weights = memory_sizing.weights_bytes(stage, element_bytes) // config.tensor_parallel_size
    lora = memory_sizing.lora_bytes(shape, config.num_lora_pages(engine.shape), element_bytes, config.lora_experts)
    kv = memory.num_blocks * memory_sizing.kv_block_bytes(
        shape,
        memory.block_size,
        kv_element_bytes,
        KV_SCALE_BYTES.get(config.kv_cache_dtype, 0),
        layout.num_layers,
    )
    for part, planned_bytes, measured_bytes in (
        ("weights", weights, memory.weights_bytes),
        ("lora", lora, memory.lora_bytes),
        ("kv", kv, memory.kv_bytes),
    ):
        logger.info(
            "memory part=%s planned_gib=%.3f measured_gib=%.3f", part, planned_bytes / _GIB, measured_bytes / _GIB
        )
    logger.info(
        "kv cache num_blocks=%d block_size=%d tokens=%d max_model_len=%d device=%s dtype=%s",
        memory.num_blocks,
        memory.block_size,
        memory.kv_tokens,
        engine.max_model_len,
        memory.device,
        memory.dtype,
    )


def _on_engine_lost(reason: str) -> None:
    """End the process at once, even if no step is running. The supervisor restarts the process."""
    logger.error("engine lost: ending this process reason=%s", reason)
    process.exit_now(process.EXIT_SOFTWARE)


async def _serve(
    engine: Engine, compute_thread: ComputeThread, socket_path: Path, publisher: KVEventPublisher | None
) -> None:
    process.install_exit_handlers(asyncio.get_running_loop())
    await CoreServer(engine, compute_thread, publisher).run(socket_path)
