# SPDX-License-Identifier: Apache-2.0
"""Collective operations of the tensor-parallel ranks: all-reduce, gather and broadcast.

The communicator uses process groups of torch.distributed, gloo on CPUs and NCCL on GPUs. The groups are created
directly and are not torch's global group, because a process can have several engines. All ranks must make the same
calls in the same order; `worker_group.py` makes the ranks compute the same steps.
"""

import os
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from quire_engine.distributed.rendezvous import Rendezvous
from quire_spec.model.parallel.tensor_parallel import TensorParallelShard

TIMEOUT_S = 30.0
"""Time limit of one collective operation. All ranks start an operation within milliseconds of each other, unless a rank
hangs."""
_STORE_FILE_TIMEOUT = timedelta(milliseconds=100)
"""If the file of torch's store was deleted, torch waits this long for the file. The default of torch is 5 minutes."""


class Communicator:
    """This rank's connection to the other ranks. Call `connect` before any other method."""

    def __init__(
        self, shard: TensorParallelShard, rendezvous: Callable[[], Rendezvous], timeout_s: float = TIMEOUT_S
    ) -> None:
        """Store the parameters; no connection is made.

        Args:
            shard: this rank's part of the model.
            rendezvous: waits until all ranks have loaded their weights, which can take minutes. It then returns
                where they meet.
            timeout_s: maximum duration of every call.
        """
        self.shard = shard
        self._rendezvous = rendezvous
        self._timeout_s = timeout_s
        self._device = torch.device("cpu")
        self._process_group: Any = None
        self._is_aborted = False
        self._abort_thread: threading.Thread | None = None

    def connect(self, device: torch.device) -> None:
        """Connect to the other ranks; the tensors of all ranks are on devices of this type.

        Raises:
            RuntimeError: a rank did not connect within the time limit. All other methods can raise this error too.
        """
        self._device = device
        stage = self.shard.model_config.stage
        name = f"stage-{0 if stage is None else stage.index}"
        timeout = timedelta(seconds=self._timeout_s)
        place = self._rendezvous()
        self._process_group = create_process_group(place, name, self.shard.rank, self.shard.size, device, timeout)

    def abort(self, step_lock: threading.Lock) -> None:
        """Abort operations that wait for a lost rank. Safe to call from any thread; returns at once.

        A step holds `step_lock` while it uses the process group. After an abort, NCCL blocks every caller until the
        last captured CUDA graph is destroyed, which may never happen.
        """
        process_group, self._is_aborted = None if self._is_aborted else self._process_group, True
        if process_group is not None and self._device.type == "cuda":
            self._abort_thread = threading.Thread(
                target=self._abort_process_group, args=(process_group, step_lock), name="nccl-abort", daemon=True
            )
            self._abort_thread.start()

    def wait_for_abort(self, timeout_s: float) -> None:
        """Wait until an abort has ended; call this after the graphs were released. Without this call, the process ends
        with SIGABRT if the aborting thread returns from NCCL while the interpreter ends."""
        if self._abort_thread is not None:
            self._abort_thread.join(timeout_s)

    def _abort_process_group(self, process_group: Any, step_lock: threading.Lock) -> None:
        # A step is normally launched within milliseconds. If the launch hangs instead, it waits for the operation that
        # is aborted below.
        if step_lock.acquire(timeout=self._timeout_s):
            step_lock.release()
        process_group.abort()

    def all_reduce(self, x: Tensor) -> Tensor:
        """Sum the ranks' tensors in place; every rank gets the same result."""
        self._process_group.allreduce([x]).wait()
        return x

    def gather(self, x: Tensor) -> Tensor:
        """Concatenate the tensors [num_rows, width] of all ranks.

        Return [num_rows, size * width] on rank 0, and x on the other ranks.
        """
        options = dist.GatherOptions()
        options.rootRank = 0
        x = x.contiguous()
        parts = [torch.empty_like(x) for _ in range(self.shard.size)] if self.shard.rank == 0 else []
        self._process_group.gather([parts] if parts else [], [x], options).wait()
        return torch.cat(parts, dim=-1) if parts else x

    def broadcast(self, x: Tensor) -> Tensor:
        """Copy rank 0's tensor into the tensors of the other ranks."""
        options = dist.BroadcastOptions()
        options.rootRank = 0
        self._process_group.broadcast([x], options).wait()
        return x

    def all_reduce_min(self, value: int) -> int:
        """Return the minimum of the ranks' values."""
        return all_reduce_min(self._process_group, value, self._device)


def create_process_group(
    place: Rendezvous, name: str, rank: int, size: int, device: torch.device, timeout: timedelta
) -> Any:
    """Connect the ranks that give the same `name` at the same place, and return their process group. `timeout` is the
    time limit of its operations.

    Raises:
        RuntimeError: a rank did not connect.
    """
    store = place.open_store(name, size)
    if device.type == "cuda":
        # Without this setting, a thread of torch polls the store to find out whether it must write a debug dump.
        os.environ["TORCH_NCCL_DUMP_ON_TIMEOUT"] = "0"
    backend: Any = dist.ProcessGroupNCCL if device.type == "cuda" else dist.ProcessGroupGloo
    options = backend.Options() if device.type == "cuda" else backend._Options()
    options._timeout = timeout
    if device.type == "cpu":
        # By default, gloo would listen at the address of the host name, which other machines can reach.
        options._devices = [backend.create_device(hostname=place.address)]
    process_group = backend(store, rank, size, options)
    # The first operation makes NCCL create its channels. It runs here, so that memory profiling includes the channels.
    all_reduce_min(process_group, 0, device)
    # The file is deleted afterwards. But after a failure, a thread of torch waits for this file in order to write to
    # it, and the process cannot exit before that thread ends. So the wait must be short.
    store.set_timeout(_STORE_FILE_TIMEOUT)
    return process_group


def all_reduce_min(process_group: Any, value: int, device: torch.device) -> int:
    """Return the minimum of the ranks' values. All ranks of the group must call it."""
    options = dist.AllreduceOptions()
    options.reduceOp = dist.ReduceOp(dist.ReduceOp.MIN)
    tensor = torch.tensor([value], device=device)
    process_group.allreduce([tensor], options).wait()
    return int(tensor.item())
