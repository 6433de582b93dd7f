# SPDX-License-Identifier: Apache-2.0
"""In what the pods of a service differ, so that they cannot read KV blocks from each other. Pure."""

from collections.abc import Mapping, Sequence
from typing import Any

from quire_operator.controller.status.observed_state import PodState

FIXES = {
    "version": "run the same image in all pods (spec.runtime.image)",
    "block_size": "set spec.engine.blockSize",
    "kv_dtype": "set spec.engine.kvCacheDtype and spec.engine.dtype",
    "parallel": "set spec.engine.tensorParallelSize",
    "model": "set a fixed revision in spec.model.source, and set spec.engine.dtype and spec.engine.quantization",
    "rows": "set spec.engine.dtype, and run all pods on nodes of one kind (spec.gpu.product, spec.gpu.nodeSelector)",
    "row_bytes": "set spec.engine.kvCacheDtype and spec.engine.dtype, and run the same image in all pods",
}  # fmt: skip
"""For each field of kv_wire.RowLayout, what makes it equal in all pods."""


def find_differences(pods: Sequence[PodState], previous: Sequence[str]) -> list[str]:
    """Return the sorted names of the fields in which pods differ, a part of FIXES.

    A pod reports the differences that it has seen since it started. If a pod does not report its status, the names in
    `previous` are kept. Otherwise, a failed visit to a pod would remove a name, and the next one would find it again.
    """
    alive = [pod for pod in pods if pod.alive]
    found = {name for pod in alive if pod.report for name in pod.report.kv_differences}
    if any(pod.report is None for pod in alive):
        found.update(previous)
    return sorted(found & FIXES.keys())


def differences_of(status: Mapping[str, Any]) -> list[str]:
    """Return status.kvTransfer.differences. It is empty if the status does not have the field."""
    return list((status.get("kvTransfer") or {}).get("differences") or ())


def describe(name: str) -> str:
    """Return the consequence of a difference, and its fix."""
    return (
        f"pods of the service differ in {name} of their KV blocks, so that they compute blocks again instead of "
        f"reading them from each other; a rollout can cause this until it ends, otherwise {FIXES[name]}"
    )
