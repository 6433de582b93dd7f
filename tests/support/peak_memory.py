# SPDX-License-Identifier: Apache-2.0
"""Peak bytes of live tensors, counted when torch creates them. Temporary memory inside an operation is not counted."""

from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class PeakTensorBytes(TorchDispatchMode):
    """Bytes of tensors that were created in this mode and are alive, and their peak."""

    def __init__(self) -> None:
        super().__init__()
        self._storages: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        inputs = {storage._cdata for storage in _storages((args, kwargs))}
        result = func(*args, **(kwargs or {}))
        for storage in _storages(result):
            if storage._cdata not in inputs:
                self._storages[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self._storages = {k: v for k, v in self._storages.items() if not v[0].expired()}
        self.peak_bytes = max(self.peak_bytes, sum(num_bytes for _, num_bytes in self._storages.values()))
        return result


def _storages(tree: Any) -> list[torch.UntypedStorage]:
    leaves = (leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor))
    return [leaf.untyped_storage() for leaf in leaves if not leaf.is_mkldnn]
