# SPDX-License-Identifier: Apache-2.0
"""Execution on several ranks: the model runner of rank 0, together with the workers of the other tensor-parallel ranks
and pipeline stages.

runner_factory.py starts it if there are several ranks.
"""

import os
import socket
import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Self

from quire_engine.distributed.communicator import TIMEOUT_S
from quire_engine.distributed.other_nodes import OtherNodes
from quire_engine.distributed.worker_group import WorkerGroup
from quire_engine.distributed.worker_handle import WorkerChannels, WorkerHandle, WorkerProcess
from quire_engine.executor.node_identity import node_identity
from quire_engine.executor.rank_rows import RankRows
from quire_engine.kv_cache.layout_choice import choose_layout
from quire_engine.kv_cache.row_file import RowFile
from quire_engine.kv_cache.state_cache import HostStateRows
from quire_engine.lora.adapter_info import AdapterInfo
from quire_engine.lora.adapter_source import AdapterSource, weighted_folders
from quire_engine.step.input import max_elements
from quire_engine.step.plan import SlotLoad, SpanOutput, StepPlan
from quire_engine.weights.checkpoint import Checkpoint
from quire_engine.worker.adapter_store import StoredAdapter
from quire_engine.worker.interface import ModelRunner
from quire_engine.worker.model_runner import DeviceModelRunner
from quire_spec.constants import AdapterDigest
from quire_spec.engine.config import EngineConfig
from quire_spec.errors import ConfigError, QuireError
from quire_spec.model.model_config import ModelConfig
from quire_spec.model.parallel import pipeline_parallel
from quire_spec.model.parallel.tensor_parallel import TensorParallelShard
from quire_spec.net.addresses import ANY_ADDRESS, POD_IP_VARIABLE

_ABORT_TIMEOUT_S = 5.0
"""When the process exits, it waits at most this many seconds for an abort that is still running. An abort takes
milliseconds."""


@dataclass(frozen=True, slots=True, weakref_slot=True)
class ShardedAdapter:
    """An adapter in host memory: the shard of rank 0, and the key by which the workers find their shards."""

    local_shard: StoredAdapter
    key: int
    """Key by which the workers find their shards, unique in this engine."""
    num_pages: int
    """Number of pages that it needs in a slot of the rank that needs most."""


class MultiRankRunner(ModelRunner):
    """Model runner of all ranks: runs each operation on rank 0 and forwards it to the workers."""

    def __init__(self, local_runner: DeviceModelRunner, worker_group: WorkerGroup) -> None:
        """`worker_group` must be serving."""
        self._local_runner = local_runner
        self._worker_group = worker_group
        self._key_counter = count()
        self._adapter_by_digest: dict[AdapterDigest, ShardedAdapter] = {}
        self.swap_costs, rows = local_runner.swap_costs, local_runner.host_rows
        # Without a file, no store uses the rows.
        self.host_rows = None if rows is None or rows.file is None else RankRows(rows, worker_group)
        states, self.host_state_rows = local_runner.host_state_rows, None
        if self.host_rows is not None and isinstance(states, HostStateRows):
            self.host_state_rows = RankRows(states, worker_group)
        self.memory = local_runner.memory
        # Only rank 0 has a vision tower.
        self.background_image_encoder = local_runner.background_image_encoder

    @classmethod
    def start(
        cls,
        config: EngineConfig,
        shape: ModelConfig,
        folder: Path,
        *,
        progress: bool = False,
        on_lost: Callable[[str], None] | None = None,
        start_worker: Callable[[WorkerChannels], WorkerHandle] = WorkerProcess,
        timeout_s: float = TIMEOUT_S,
        row_file: RowFile | None = None,
    ) -> Self:
        """Start the workers of the other ranks, and return the runner. The arguments and errors are the same as for
        `create_runner`. `row_file` will contain the rows of host memory of all ranks, if a store uses them."""
        TensorParallelShard(shape, 0, config.tensor_parallel_size).validate()
        pipeline_parallel.check(shape, config.pipeline_parallel_size)
        # The layers of a stage alone may have another limit.
        config = replace(config, max_model_len=config.max_model_len or shape.max_length)
        nodes = None
        if config.nnodes > 1:
            own = node_identity(config, Checkpoint.load(folder, config.model_impl), 0)
            nodes = OtherNodes(config, own, _rank_host(config, os.environ))
        path = None if row_file is None else row_file.path
        worker_group = WorkerGroup(config, shape, folder, start_worker, on_lost, timeout_s, nodes=nodes, row_file=path)
        try:
            local_runner = DeviceModelRunner(
                config,
                shape,
                folder,
                links=worker_group.links,
                worker_group=worker_group,
                progress=progress,
                row_file=row_file,
            )
            blocks_per_seq = -(-local_runner.memory.max_model_len // config.block_size)
            num_moves = 2 * local_runner.swap_costs.num_host_blocks
            worker_group.start_serving(
                max_elements(
                    config.max_num_seqs,
                    config.max_num_batched_tokens,
                    blocks_per_seq,
                    num_moves,
                    choose_layout(config, shape).num_groups,
                )
            )
        except Exception as error:
            worker_group.close()
            raise worker_group.startup_error(error) from error
        runner = cls(local_runner, worker_group)
        weakref.finalize(runner, _close, local_runner, worker_group)
        return runner

    def read_adapter(self, source: AdapterSource) -> ShardedAdapter:
        """Read an adapter on all ranks at the same time; see ModelRunner."""
        key = next(self._key_counter)
        folders = weighted_folders(source)
        try:
            self._worker_group.send_adapter(key, [folder.path for folder in folders])
            calls = [(str(folder.path), folder.weight) for folder in folders]
            call_id = self._worker_group.start_call("read_adapter", key=key, folders=calls)
            try:
                local_shard = self._local_runner.read_adapter(source)
            except Exception:
                # The error of this rank counts, because it names the folder of the source.
                with suppress(QuireError):
                    self._worker_group.wait_call(call_id)
                raise
            num_pages = self._worker_group.wait_call(call_id)
        except Exception:
            self._worker_group.notify("discard_adapter", key=key)
            raise
        adapter = ShardedAdapter(local_shard, key, max(local_shard.info.num_pages, *num_pages))
        # When this object is garbage-collected, the workers discard their shards. By then, every load of the adapter
        # has started long ago. Nothing is discarded at exit, because all ranks end anyway.
        weakref.finalize(adapter, self._worker_group.notify, "discard_adapter", key=key).atexit = False
        return adapter

    def adapter_info(self, packed_adapter: object) -> AdapterInfo:
        """See ModelRunner. The size is that of the shard on this rank."""
        assert isinstance(packed_adapter, ShardedAdapter)
        return replace(packed_adapter.local_shard.info, num_pages=packed_adapter.num_pages)

    def store_adapter(self, adapter_digest: AdapterDigest, packed_adapter: object) -> None:
        """See ModelRunner."""
        assert isinstance(packed_adapter, ShardedAdapter)
        self._adapter_by_digest[adapter_digest] = packed_adapter
        self._local_runner.store_adapter(adapter_digest, packed_adapter.local_shard)

    def discard_adapter(self, adapter_digest: AdapterDigest) -> None:
        """See ModelRunner."""
        self._adapter_by_digest.pop(adapter_digest, None)
        self._local_runner.discard_adapter(adapter_digest)

    def zero_kv_cache(self) -> None:
        """See ModelRunner."""
        self._local_runner.zero_kv_cache()

    def load_adapter_slot(self, slot_load: SlotLoad) -> Callable[[], None]:
        """Return a function that fills a slot on all ranks; see ModelRunner."""
        copy_local = self._local_runner.load_adapter_slot(slot_load)
        adapter = self._adapter_by_digest[slot_load.adapter_digest]

        def copy_to_slot() -> None:
            place = {"slot": slot_load.adapter_slot, "first_page": slot_load.first_page}
            call_id = self._worker_group.start_call("copy_to_slot", key=adapter.key, **place)
            try:
                copy_local()
            finally:
                self._worker_group.wait_call(call_id)

        return copy_to_slot

    def execute(self, plan: StepPlan) -> list[SpanOutput]:
        """See ModelRunner."""
        if self.memory.pipeline_parallel_size > 1:
            return self.execute_async(plan)()
        return self._local_runner.execute(plan)

    def execute_async(self, plan: StepPlan) -> Callable[[], list[SpanOutput]]:
        """See ModelRunner."""
        get_outputs = self._local_runner.execute_async(plan)
        return lambda: self._worker_group.wait_result(get_outputs)

    def sample_tokens(self) -> None:
        """See ModelRunner."""
        self._local_runner.sample_tokens()


def _rank_host(config: EngineConfig, environment: Mapping[str, str]) -> str:
    """Return the address on which rank 0 listens for the other nodes: the one that they know, that of the pod, or
    all.

    Raises:
        ConfigError: master_addr is not known here.
    """
    if config.master_addr is None:
        return environment.get(POD_IP_VARIABLE) or ANY_ADDRESS
    try:
        return str(socket.getaddrinfo(config.master_addr, None, type=socket.SOCK_STREAM)[0][4][0])
    except OSError as error:
        raise ConfigError(f"master_addr: {config.master_addr!r}: {error}") from error


def _close(runner: DeviceModelRunner, worker_group: WorkerGroup) -> None:
    worker_group.close()
    # The graphs must be released first: the process group cannot be destroyed while CUDA graphs still use it.
    runner.close()
    if worker_group.links.communicator is not None:
        worker_group.links.communicator.wait_for_abort(_ABORT_TIMEOUT_S)
