# SPDX-License-Identifier: Apache-2.0
"""The executor behind an engine: one runner on this process's device, or that and a group of ranks beside it."""

import weakref
from collections.abc import Callable
from pathlib import Path

from quire_engine.group import Group
from quire_engine.member import Ends, Member, RankProcess
from quire_engine.ranks import TIMEOUT_S
from quire_engine.runner import TorchRunner
from quire_engine.work import max_elements
from quire_spec.config import EngineConfig
from quire_spec.errors import ConfigError
from quire_spec.shape import ModelShape
from quire_spec.shard import Shard


def open_runner(
    config: EngineConfig,
    shape: ModelShape,
    folder: Path,
    *,
    progress: bool = False,
    on_lost: Callable[[str], None] | None = None,
    start: Callable[[Ends], Member] = RankProcess,
    timeout_s: float = TIMEOUT_S,
) -> TorchRunner:
    """The runner that a configuration asks for, with the ranks beside it; raises as TorchRunner. See Engine.from_config
    for `on_lost`, Group for `start` and Ranks for `timeout_s`."""
    if config.tensor_parallel_size == 1:
        return TorchRunner(config, shape, folder, progress=progress)
    Shard(shape, 0, config.tensor_parallel_size).check()
    if config.enable_lora:
        raise ConfigError("tensor_parallel_size: adapters are not shared between devices yet; unset enable_lora")
    group = Group(config, shape, folder, start, on_lost, timeout_s)
    try:
        runner = TorchRunner(config, shape, folder, ranks=group.ranks, group=group, progress=progress)
        blocks_per_seq = -(-runner.memory.max_model_len // config.block_size)
        num_moves = 2 * runner.swap_space.num_blocks
        group.open(max_elements(config.max_num_seqs, config.max_num_batched_tokens, blocks_per_seq, num_moves))
    except Exception as error:
        group.close()
        raise group.refusal(error) from error
    weakref.finalize(runner, group.close)
    return runner
