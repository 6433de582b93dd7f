# SPDX-License-Identifier: Apache-2.0
"""The executor behind an engine: one runner on this process's device, or that and a group of ranks beside it."""

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from quire_engine.distributed.communicator import TIMEOUT_S
from quire_engine.distributed.worker_group import WorkerGroup
from quire_engine.distributed.worker_handle import WorkerChannels, WorkerHandle, WorkerProcess
from quire_engine.step.input import max_elements
from quire_engine.step.plan import SlotLoad, SpanOutput, StepPlan
from quire_engine.worker.interface import ModelRunner
from quire_engine.worker.model_runner import DeviceModelRunner
from quire_spec.engine.config import EngineConfig
from quire_spec.model.model_config import ModelConfig
from quire_spec.model.tensor_parallel import TensorParallelShard


@dataclass(frozen=True, slots=True, weakref_slot=True)
class ShardedAdapter:
    """An adapter in host memory: rank 0's part here, the others' parts there."""

    local_shard: object
    key: int
    """What the other ranks know theirs by."""


class TensorParallelRunner(ModelRunner):
    """Rank 0's runner, with what the other ranks have to do of everything."""

    def __init__(self, local_runner: DeviceModelRunner, worker_group: WorkerGroup) -> None:
        """The group is open."""
        self._local_runner = local_runner
        self._worker_group = worker_group
        self._key_counter = count()
        self._adapters_by_digest: dict[str, ShardedAdapter] = {}
        self.swap_costs = local_runner.swap_costs
        self.memory = local_runner.memory

    def read_adapter(self, path: Path) -> ShardedAdapter:
        """Read an adapter's folder, all ranks at the same time; see step.Runner."""
        key = next(self._key_counter)
        call_id = self._worker_group.start_call("read", key=key, path=str(path))
        try:
            try:
                local_shard = self._local_runner.read_adapter(path)
            finally:
                self._worker_group.wait_call(call_id)
        except Exception:
            self._worker_group.notify("forget", key=key)
            raise
        adapter = ShardedAdapter(local_shard, key)
        # Theirs goes when nobody here has ours: a step that loads it has then long begun.
        # At this process's end, all ranks end.
        weakref.finalize(adapter, self._worker_group.notify, "forget", key=key).atexit = False
        return adapter

    def host_bytes(self, packed_adapter: object) -> int:
        """Bytes on this rank; see step.Runner."""
        assert isinstance(packed_adapter, ShardedAdapter)
        return self._local_runner.host_bytes(packed_adapter.local_shard)

    def store_adapter(self, adapter_digest: str, packed_adapter: object) -> None:
        """Keep an adapter in host memory; see step.Runner."""
        assert isinstance(packed_adapter, ShardedAdapter)
        self._adapters_by_digest[adapter_digest] = packed_adapter
        self._local_runner.store_adapter(adapter_digest, packed_adapter.local_shard)

    def discard_adapter(self, adapter_digest: str) -> None:
        """Forget the host copy of an adapter; see step.Runner."""
        self._adapters_by_digest.pop(adapter_digest, None)
        self._local_runner.discard_adapter(adapter_digest)

    def load_adapter_slot(self, slot_load: SlotLoad) -> Callable[[], None]:
        """The work of filling a slot on all ranks; see step.Runner."""
        copy_local, adapter = (
            self._local_runner.load_adapter_slot(slot_load),
            self._adapters_by_digest[slot_load.adapter_digest],
        )

        def copy_to_slot() -> None:
            call_id = self._worker_group.start_call("fill", key=adapter.key, slot=slot_load.adapter_slot)
            try:
                copy_local()
            finally:
                self._worker_group.wait_call(call_id)

        return copy_to_slot

    def execute(self, plan: StepPlan) -> list[SpanOutput]:
        """Run a step; see step.Runner."""
        return self._local_runner.execute(plan)

    def execute_async(self, plan: StepPlan) -> Callable[[], list[SpanOutput]]:
        """Have a step run after those begun before; see step.Runner."""
        get_outputs = self._local_runner.execute_async(plan)
        return lambda: self._worker_group.wait_result(get_outputs)


def create_runner(
    config: EngineConfig,
    shape: ModelConfig,
    folder: Path,
    *,
    progress: bool = False,
    on_lost: Callable[[str], None] | None = None,
    start_worker: Callable[[WorkerChannels], WorkerHandle] = WorkerProcess,
    timeout_s: float = TIMEOUT_S,
) -> "DeviceModelRunner | TensorParallelRunner":
    """The runner that a configuration asks for, with the ranks beside it; raises as TorchRunner. See Engine.from_config
    for `on_lost`, Group for `start` and Ranks for `timeout_s`."""
    if config.tensor_parallel_size == 1:
        return DeviceModelRunner(config, shape, folder, progress=progress)
    TensorParallelShard(shape, 0, config.tensor_parallel_size).validate()
    worker_group = WorkerGroup(config, shape, folder, start_worker, on_lost, timeout_s)
    try:
        runner = DeviceModelRunner(
            config, shape, folder, communicator=worker_group.communicator, worker_group=worker_group, progress=progress
        )
        blocks_per_seq = -(-runner.memory.max_model_len // config.block_size)
        num_moves = 2 * runner.swap_costs.num_host_blocks
        worker_group.start_serving(
            max_elements(config.max_num_seqs, config.max_num_batched_tokens, blocks_per_seq, num_moves)
        )
    except Exception as error:
        worker_group.close()
        raise worker_group.startup_error(error) from error
    tensor_parallel_runner = TensorParallelRunner(runner, worker_group)
    weakref.finalize(tensor_parallel_runner, _close, runner, worker_group)
    return tensor_parallel_runner


def _close(runner: DeviceModelRunner, worker_group: WorkerGroup) -> None:
    worker_group.close()
    # In time: the last thing that goes with a runner is its connection to the ranks, whose end waits for these.
    runner.close()
