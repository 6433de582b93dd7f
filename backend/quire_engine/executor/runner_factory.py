# SPDX-License-Identifier: Apache-2.0
"""Factory of model runners: chooses the runner of one device, or the runner of several ranks.

The engine core calls it. vLLM makes this choice in `Executor.get_class`.
"""

from collections.abc import Callable
from pathlib import Path

from quire_engine.distributed.communicator import TIMEOUT_S
from quire_engine.distributed.worker_handle import WorkerChannels, WorkerHandle, WorkerProcess
from quire_engine.executor.multi_rank import MultiRankRunner
from quire_engine.kv_cache.row_file import RowFile
from quire_engine.worker.model_runner import DeviceModelRunner
from quire_spec.engine.config import EngineConfig
from quire_spec.model.model_config import ModelConfig


def create_runner(
    config: EngineConfig,
    shape: ModelConfig,
    folder: Path,
    *,
    progress: bool = False,
    on_lost: Callable[[str], None] | None = None,
    start_worker: Callable[[WorkerChannels], WorkerHandle] = WorkerProcess,
    timeout_s: float = TIMEOUT_S,
) -> DeviceModelRunner | MultiRankRunner:
    """Create the runner for a configuration, and start the workers of the other ranks. Raises the errors of
    DeviceModelRunner.

    Args:
        config: configuration of the engine.
        shape: configuration of the whole model.
        folder: folder of the checkpoint.
        progress: show a progress bar while the weights are loaded.
        on_lost: called with the reason when a worker has ended unexpectedly.
        start_worker: starts one worker; tests replace it.
        timeout_s: maximum duration of every collective operation; see Communicator.
    """
    # The rows of several ranks are always in a file, in which a store finds all parts of a row.
    has_file = config.kv_transfer is not None or (config.shares_blocks and config.ranks_per_core > 1)
    row_file = RowFile.create() if has_file else None
    if config.ranks_per_core == 1:
        return DeviceModelRunner(config, shape, folder, progress=progress, row_file=row_file)
    return MultiRankRunner.start(
        config,
        shape,
        folder,
        progress=progress,
        on_lost=on_lost,
        start_worker=start_worker,
        timeout_s=timeout_s,
        row_file=row_file,
    )
