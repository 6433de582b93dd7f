# SPDX-License-Identifier: Apache-2.0
"""Ranks: what the processes that share a model's layers do together: add up, gather, hand on, agree on a number.

torch.distributed's process groups, gloo on CPUs and NCCL on GPUs, made directly and not as torch's global one: a
process may have several engines. All ranks must come to the same calls in the same order; that they compute the same
step is the group's business (group.py). On GPUs this has never been run, on emulated ones it has (make emulated).
"""

import os
import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from quire_spec.model.tensor_parallel import TensorParallelShard

TIMEOUT_S = 30.0
"""How long a rank waits for the others in one call: they come to it within milliseconds of each other, or one hangs."""
_STORE_FILE_TIMEOUT = timedelta(milliseconds=100)
"""How long torch looks for a store's file that is gone; its own default is 5 minutes."""
_LOOPBACK = "127.0.0.1"


class Communicator:
    """This rank among the others. Nothing of it may be called before `connect`."""

    def __init__(
        self, shard: TensorParallelShard, rendezvous: Callable[[], Path], timeout_s: float = TIMEOUT_S
    ) -> None:
        """`meet` blocks until all ranks have loaded their weights, which may take them long; it returns the path of a
        file to find each other by, the same for all, which is not there yet."""
        self.shard = shard
        self._rendezvous = rendezvous
        self._timeout_s = timeout_s
        self._device = torch.device("cpu")
        self._process_group: Any = None
        self._is_aborted = False

    def connect(self, device: torch.device) -> None:
        """Meet the other ranks; all have tensors on a device of this kind.

        Raises:
            RuntimeError: they do not come, in time. So does every other call.
        """
        self._device = device
        rank, size, rendezvous_file = self.shard.rank, self.shard.size, self._rendezvous()
        store = dist.FileStore(str(rendezvous_file), size)  # type: ignore[attr-defined]
        if device.type == "cuda":
            # A thread of torch's would look into the store now and then, whether to write a dump.
            os.environ["TORCH_NCCL_DUMP_ON_TIMEOUT"] = "0"
        backend: Any = dist.ProcessGroupNCCL if self._device.type == "cuda" else dist.ProcessGroupGloo
        options = backend.Options() if self._device.type == "cuda" else backend._Options()
        options._timeout = timedelta(seconds=self._timeout_s)
        if self._device.type == "cpu":
            # By default the address is the one that the machine's name has, where anybody might connect.
            options._devices = [backend.create_device(hostname=_LOOPBACK)]
        self._process_group = backend(store, rank, size, options)
        # NCCL's channels are made here, and measured with the memory, not in the first step that needs them.
        self.broadcast(torch.zeros(1, device=device))
        # Its file is gone from here on. Where something failed, a thread of torch's still writes to it, and the process
        # does not end before that thread.
        store.set_timeout(_STORE_FILE_TIMEOUT)

    def abort(self, step_lock: threading.Lock) -> None:
        """Have what a device waits for in vain end, when another rank is gone. From any thread; returns at once.

        `in_use`: held while a step uses this; NCCL, once it has been told, lets nobody in until the last captured step
        is gone, which may be never.
        """
        process_group, self._is_aborted = None if self._is_aborted else self._process_group, True
        if process_group is not None and self._device.type == "cuda":
            threading.Thread(
                target=self._abort_process_group, args=(process_group, step_lock), name="abandon", daemon=True
            ).start()

    def _abort_process_group(self, process_group: Any, step_lock: threading.Lock) -> None:
        # Beginning a step takes milliseconds; if it hangs, then for what is ended here.
        if step_lock.acquire(timeout=self._timeout_s):
            step_lock.release()
        process_group.abort()

    def all_reduce(self, x: Tensor) -> Tensor:
        """Add up the ranks' tensors, in place; every rank gets the same."""
        self._process_group.allreduce([x]).wait()
        return x

    def gather(self, x: Tensor) -> Tensor:
        """[num_rows, width] of each rank side by side, [num_rows, size * width], at rank 0; elsewhere, x."""
        options = dist.GatherOptions()
        options.rootRank = 0
        x = x.contiguous()
        parts = [torch.empty_like(x) for _ in range(self.shard.size)] if self.shard.rank == 0 else []
        self._process_group.gather([parts] if parts else [], [x], options).wait()
        return torch.cat(parts, dim=-1) if parts else x

    def broadcast(self, x: Tensor) -> Tensor:
        """Rank 0's tensor, written to the others'."""
        options = dist.BroadcastOptions()
        options.rootRank = 0
        self._process_group.broadcast([x], options).wait()
        return x

    def all_reduce_min(self, value: int) -> int:
        """The least of the ranks' numbers."""
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp(dist.ReduceOp.MIN)
        tensor = torch.tensor([value], device=self._device)
        self._process_group.allreduce([tensor], options).wait()
        return int(tensor.item())
