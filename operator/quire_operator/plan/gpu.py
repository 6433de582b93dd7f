# SPDX-License-Identifier: Apache-2.0
"""GPU products and their memory. The memory is set in the spec, in the labels of a node, or in the table of products.

NVIDIA's GPU feature discovery sets the node labels. This module does not read the nodes itself; cli/plan.py and the
controller do this.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Self

from quire_operator.api.pod_spec import GpuSpec
from quire_operator.api.quantity import to_bytes
from quire_operator.api.schema_messages import closest_match
from quire_operator.plan.device_memory import MIB
from quire_operator.plan.errors import Unplannable, UnplannableReason

GPU_RESOURCE = "nvidia.com/gpu"
PRODUCT_LABEL = f"{GPU_RESOURCE}.product"
_MIG_RESOURCES = "nvidia.com/mig-"

Labels = Mapping[str, str]
"""Labels of a node."""


class MemorySource(StrEnum):
    """Source of the memory size of a GPU."""

    SPEC = "Spec"
    NODE_LABELS = "NodeLabels"
    PRODUCT_TABLE = "ProductTable"


@dataclass(frozen=True, slots=True)
class GpuInfo:
    """One GPU product."""

    product: str
    """Value of the node label nvidia.com/gpu.product; empty if only the memory is known."""
    memory_mib: int
    """Total memory that the driver (NVML) reports; CUDA reports less memory."""
    memory_source: MemorySource
    compute_capability: tuple[int, int] | None = None
    """CUDA compute capability; None if unknown."""
    gpus_per_node: int | None = None
    """Number of GPUs on a node; None if unknown. All GPUs of a replica must be on the same node."""
    larger_products: tuple[str, ...] = ()
    """Products that have more memory and on which the same pods can also run."""

    @property
    def visible_bytes(self) -> int:
        """Estimate of the memory that CUDA reports. It is memory_mib minus 640 MiB or minus 1.1 %; the larger reduction
        counts.

        These are the memory labels of some products and the memory that CUDA reports for them:

        - L4: The label is 23034 MiB, and CUDA reports 22.03 GiB.
        - A10G: The label is 23028 MiB, and CUDA reports 22.06 GiB.
        - A100 with 40 GB: The label is 40960 MiB, and CUDA reports 39.4 to 39.6 GiB.
        - A100 with 80 GB: The label is 81920 MiB, and CUDA reports 79.14 to 79.25 GiB.
        - H100: The label is 81559 MiB, and CUDA reports 79.1 GiB.
        - H200: The label is 143771 MiB, and CUDA reports 139.7 to 139.8 GiB.

        For each of these products, the estimate is lower than the value that CUDA reports.
        """
        label = self.memory_mib * MIB
        return max(label - max(640 * MIB, label * 11 // 1000), MIB)

    @property
    def name(self) -> str:
        """Name for messages."""
        return self.product or f"GPU of {self.memory_mib} MiB"

    @classmethod
    def from_product(cls, product: str) -> Self | None:
        """Return the GPU from the table of products, or None if the table does not contain it."""
        if product not in PRODUCTS:
            return None
        memory, compute_capability = PRODUCTS[product]
        return cls(product, memory, MemorySource.PRODUCT_TABLE, compute_capability)

    @classmethod
    def from_labels(cls, labels: Labels, resource: str = GPU_RESOURCE) -> Self | None:
        """Return the GPU of a node from the node's labels; None if the labels do not describe a GPU.

        A MIG resource has its own labels, for example nvidia.com/mig-3g.40gb.memory.

        Raises:
            Unplannable: pods share the node's GPUs through time-slicing or MPS. Neither of them partitions the memory.
        """
        prefix = resource if resource.startswith(_MIG_RESOURCES) else GPU_RESOURCE
        product, memory = labels.get(f"{prefix}.product"), _int_label(labels, f"{prefix}.memory")
        if not product or memory is None:
            return None
        if (num_sharing := _int_label(labels, f"{prefix}.replicas") or 1) > 1:
            raise Unplannable(
                UnplannableReason.SHARED_GPU,
                f"spec.gpu.product: nodes with {product} share each GPU among {num_sharing} pods "
                "but do not partition its memory; use whole GPUs or MIG slices, or set spec.gpu.memory to "
                "the memory that one pod can use",
            )
        major, minor = (_int_label(labels, f"{GPU_RESOURCE}.compute.{part}") for part in ("major", "minor"))
        compute_capability = None if major is None or minor is None else (major, minor)
        return cls(product, memory, MemorySource.NODE_LABELS, compute_capability, _int_label(labels, f"{prefix}.count"))


def resolve_gpu(gpu_spec: GpuSpec | None, nodes: Iterable[Labels] = (), product: str | None = None) -> GpuInfo:
    """Return the GPU to plan for: the smallest GPU on which the pods can run.

    `nodes` are the labels of the cluster's nodes. `product` is an option of the command line and overrides the spec.
    The memory in spec.gpu.memory takes precedence over node labels and the table of products.

    Raises:
        Unplannable: the memory of the GPU is unknown, or pods share the nodes' GPUs.
    """
    name = product or (gpu_spec.product if gpu_spec else None)
    if gpu_spec and gpu_spec.memory and not product:
        table_gpu = GpuInfo.from_product(name) if name else None
        mib = to_bytes(gpu_spec.memory) // MIB
        return GpuInfo(name or "", mib, MemorySource.SPEC, table_gpu.compute_capability if table_gpu else None)
    resource = gpu_spec.resourceName if gpu_spec else GPU_RESOURCE
    if node_gpu := _smallest_on_nodes(nodes, name, gpu_spec.nodeSelector if gpu_spec else {}, resource):
        return node_gpu
    if resource.startswith(_MIG_RESOURCES):
        raise Unplannable(
            UnplannableReason.GPU_UNKNOWN,
            f"spec.gpu.resourceName: the memory of {resource!r} is unknown, because no node has the label "
            f"{resource}.memory; set spec.gpu.memory",
        )
    if name and (table_gpu := GpuInfo.from_product(name)):
        return table_gpu
    raise _unknown_gpu_error(name)


def _int_label(labels: Labels, name: str) -> int | None:
    """Return the number in a label. Users can edit labels, so the result is None if the label is not a number."""
    text = labels.get(name, "")
    return int(text) if text.isdecimal() else None


def _smallest_on_nodes(nodes: Iterable[Labels], product: str | None, selector: Labels, resource: str) -> GpuInfo | None:
    matching_nodes = [n for n in nodes if selector.items() <= n.items() and product in (None, n.get(PRODUCT_LABEL))]
    gpus = {gpu for labels in matching_nodes if (gpu := GpuInfo.from_labels(labels, resource))}
    if not gpus:
        return None
    smallest, *larger = sorted(gpus, key=lambda gpu: (gpu.memory_mib, gpu.product, -(gpu.gpus_per_node or 0)))
    larger_products = tuple(sorted({gpu.product for gpu in larger} - {smallest.product}))
    return replace(smallest, larger_products=larger_products)


def _unknown_gpu_error(product: str | None) -> Unplannable:
    if product is None:
        return Unplannable(
            UnplannableReason.GPU_UNKNOWN,
            f"spec.gpu: the GPU is unknown, because no node has the label {PRODUCT_LABEL}; set spec.gpu.product, such "
            "as NVIDIA-L4, or spec.gpu.memory, such as 23034Mi",
        )
    suggestions = [name for name in PRODUCTS if product.lower() in name.lower()]
    if not suggestions and (closest := closest_match(product, list(PRODUCTS))):
        suggestions = [closest]
    guess = f"did you mean {' or '.join(suggestions)}? " if suggestions else ""
    return Unplannable(
        UnplannableReason.GPU_UNKNOWN,
        f"spec.gpu.product: {product!r} is neither on a node nor in the table of products; {guess}Copy the value from "
        "kubectl get nodes -L nvidia.com/gpu.product, or also set spec.gpu.memory",
    )


PRODUCTS: Mapping[str, tuple[int, tuple[int, int]]] = {
    "Tesla-T4": (15360, (7, 5)),
    "NVIDIA-A10": (23028, (8, 6)),
    "NVIDIA-A10G": (23028, (8, 6)),
    "NVIDIA-L4": (23034, (8, 9)),
    "NVIDIA-GeForce-RTX-4090": (24564, (8, 9)),
    "NVIDIA-A30": (24576, (8, 0)),
    "NVIDIA-GeForce-RTX-3090": (24576, (8, 6)),
    "NVIDIA-GeForce-RTX-5090": (32607, (12, 0)),
    "NVIDIA-A100-PCIE-40GB": (40960, (8, 0)),
    "NVIDIA-A100-SXM4-40GB": (40960, (8, 0)),
    "NVIDIA-A40": (46068, (8, 6)),
    "NVIDIA-L40": (46068, (8, 9)),
    "NVIDIA-L40S": (46068, (8, 9)),
    "NVIDIA-RTX-6000-Ada-Generation": (49140, (8, 9)),
    "NVIDIA-RTX-A6000": (49140, (8, 6)),
    "NVIDIA-H100-80GB-HBM3": (81559, (9, 0)),
    "NVIDIA-H100-PCIe": (81559, (9, 0)),
    "NVIDIA-A100-80GB-PCIe": (81920, (8, 0)),
    "NVIDIA-A100-SXM4-80GB": (81920, (8, 0)),
    "NVIDIA-H100-NVL": (95830, (9, 0)),
    "NVIDIA-H200": (143771, (9, 0)),
    "NVIDIA-B200": (183359, (10, 0)),
}
"""Maps each product label to the memory of the product and its compute capability. The memory is in MiB, as in the
memory label. The products are sorted by memory. If a node has labels, they take precedence over this table."""
