# SPDX-License-Identifier: Apache-2.0
"""Host memory and shared memory of a pod, and the time that it can take to start.

The constants are based on measurements with `quire serve -f examples/llmservice.yaml` on two cores, with Python 3.11.
The proportional set sizes of the processes were 22 MiB for a stub, 54 MiB for the supervisor, 31 MiB for the text
process, 34 MiB for the server, 235 MiB for the core process with a model of 2.8 million parameters, 21 MiB for an
OpenAI front, 16 MiB for a template renderer, and 20 MiB for a grammar checker. Users can add adapters without a
restart, so the plan has memory for the maximum number of stubs.
"""

import math
from dataclasses import astuple, dataclass

from quire_operator.api.engine_spec import KVCacheOffloadingSpec
from quire_operator.api.quantity import to_bytes
from quire_operator.plan import device_memory, limits
from quire_operator.plan.device_memory import GIB, MIB, round_up_mib
from quire_operator.plan.errors import Unplannable, UnplannableReason
from quire_operator.plan.inputs import PlannerInputs
from quire_spec import constants

_STUB = 24 * MIB
_STUB_SHM = MIB
_PROMPTS_SHM = 64 * MIB
"""Shared memory for requests and responses between the server and its stubs."""
_PROCESSES_CPU = GIB
"""Memory of the pod's processes on a CPU: supervisor, server, text process with a large vocabulary, and core process.
Memory of the model is not included."""
_PROCESSES_FURTHER_CPU = 256 * MIB
"""Memory of each additional rank or core on a CPU. It does not include the model. In a measurement, a rank
needed 200 MiB."""
_PROCESSES_GPU = 8 * GIB
"""Estimated host memory of the processes of a pod with a GPU. It includes CUDA libraries, pinned buffers, and the
memory that is needed while the weights are loaded."""
_PROCESSES_FURTHER_GPU = 2 * GIB

_OPENAI_FRONT = 64 * MIB
"""Memory of an OpenAI front. Without requests, a front needed 21 MiB in a measurement. The rest is for connections (20
kB each) and for the bodies of requests."""
_TEMPLATE_RENDERERS = 64 * MIB
"""Memory of two template renderers. Without requests, they needed 32 MiB in a measurement. The rest is for long
conversations."""
_GRAMMARS = 384 * MIB
"""Memory for structured outputs. Two grammar checkers needed 40 MiB without requests in a measurement. The text process
has a cache of at most 64 MiB, and the core process has a cache of at most 256 MiB."""
_IMAGES = 2 * GIB
"""Memory for images. Two processes that decode and resize images needed 350 MiB each without requests, and 790 MiB with
a photo of 12 million pixels, in a measurement. The text process has a cache of at most 128 MiB."""
_KV_PEER = 64 * MIB
"""Memory of the process that sends KV blocks to other pods. It maps the memory of kvCacheOffloading, which is counted
there. Without connections, it needed 29 MiB in a measurement."""
_GRAMMAR_CACHE = 256 * MIB
"""Cache of compiled grammars of each additional core."""

_NETWORK_BYTES_S = 200_000_000
_VOLUME_BYTES_S = 100_000_000
"""Speed of a slow volume: a network file system over 1 Gbit/s, or a cloud's file system for several nodes. The kubelet
kills a pod that needs more time, and the next container reads the weights from the beginning."""
_KV_VOLUME_PERCENT = 125
"""Size limit of an emptyDir, in percent of the size of the files. Before old files are removed, the folder can grow by
an eighth. The kubelet would evict a pod whose emptyDir is larger than its limit."""
_START_S = 60
_GRAPHS_S = 120


@dataclass(frozen=True, slots=True)
class HostCosts:
    """Host memory of a pod, in bytes."""

    processes: int
    stubs: int
    lora_copies: int
    """Memory of the copies of adapters that the engine keeps in host memory."""
    shared_memory: int
    """Memory that files in /dev/shm use; it is part of the pod's memory."""
    swap: int = 0
    """Memory for KV blocks of preempted requests."""
    kv_offloading: int = 0
    """Memory that caches KV blocks."""

    @property
    def total(self) -> int:
        """Sum of all costs."""
        return sum(astuple(self))

    @property
    def rounded_total(self) -> int:
        """Sum of all costs. Each cost is rounded up to whole MiB before it is added, because a plan contains only whole
        MiB."""
        return sum(map(round_up_mib, astuple(self)))


def shared_memory(num_gpus: int) -> int:
    """Return the default size of /dev/shm: 1 GiB for each GPU, at least 1 GiB. Kubernetes' default of 64 MB is too
    small."""
    return max(1, num_gpus) * GIB


def start_seconds(model_bytes: int, downloads: bool, gpu: bool) -> int:
    """Return the maximum number of seconds until a pod is ready.

    This is the time to read the weights from a slow volume at 0.1 GB/s, and twice the expected time of everything else:
    0.2 GB/s from the network, if the pod downloads the model, and two minutes for CUDA graphs.
    """
    download = model_bytes / _NETWORK_BYTES_S if downloads else 0
    return math.ceil(model_bytes / _VOLUME_BYTES_S) + 2 * math.ceil(_START_S + download + (_GRAPHS_S if gpu else 0))


def host_costs(inputs: PlannerInputs, num_gpus: int) -> HostCosts:
    """Return the host memory of a pod with `num_gpus` GPUs; 0 means a CPU. Memory of the model is not included."""
    num_ranks = 1 if inputs.gpu is not None else inputs.num_ranks(inputs.engine.tensorParallelSize or 1)
    processes = _PROCESSES_GPU + (num_gpus - 1) * _PROCESSES_FURTHER_GPU
    if num_gpus == 0:
        processes = _PROCESSES_CPU + (num_ranks - 1) * _PROCESSES_FURTHER_CPU
    processes += _GRAMMARS
    if inputs.num_openai_fronts:
        processes += inputs.num_openai_fronts * _OPENAI_FRONT + _TEMPLATE_RENDERERS
    if inputs.model.shape.images is not None and not inputs.engine.languageModelOnly:
        processes += _IMAGES
    if inputs.transfers_kv:
        processes += _KV_PEER
    stubs = 1 + (constants.MAX_EXPOSED_ADAPTERS if inputs.lora.maxLoaded else 0)
    shm = shared_memory(num_gpus) if inputs.shared_memory is None else inputs.shared_memory
    if num_gpus <= 1:
        # NCCL between GPUs can fill /dev/shm; stubs alone do not.
        shm = min(shm, stubs * _STUB_SHM + _PROMPTS_SHM)
    swap = to_bytes(inputs.engine.swapSpace or "0") * max(num_ranks, num_gpus)
    processes += (inputs.num_cores - 1) * _GRAMMAR_CACHE
    offloading = inputs.engine.kvCacheOffloading
    kv_offloading = 0 if offloading is None else to_bytes(offloading.memory)
    lora_copies = inputs.num_cores * _lora_copy_bytes(inputs)
    return HostCosts(processes, stubs * _STUB, lora_copies, shm, swap, kv_offloading)


def check_kv_tiers(inputs: PlannerInputs, num_gpus: int) -> None:
    """Check that spec.runtime.memory and the nodes have room for the KV blocks that a pod with GPUs keeps in host
    memory and on the disk of its node. On a CPU, the memory is part of what a candidate needs.

    Raises:
        Unplannable: they have not. The kubelet would kill the pod, or no node could run it.
    """
    offloading, limit, node = inputs.engine.kvCacheOffloading, inputs.memory_limit, inputs.node
    if offloading is None or inputs.gpu is None:
        return
    field, problem = "spec.engine.kvCacheOffloading", ""
    required = host_costs(inputs, num_gpus).rounded_total
    volume = kv_volume_bytes(offloading)
    if limit is not None and required > limit:
        problem = (
            f"{field}.memory: {offloading.memory}: the pod needs {required // MIB}Mi of host memory, but "
            f"spec.runtime.memory is {limit // MIB}Mi; lower it, or raise spec.runtime.memory to at least "
            f"{required // MIB}Mi"
        )
    elif node.memory is not None and (limit or required) > node.memory:
        problem = (
            f"{field}.memory: {offloading.memory}: the pod requests {(limit or required) // MIB}Mi of host memory, but "
            f"the largest node with {inputs.gpu.name} has {node.memory // MIB}Mi; lower it, or set spec.gpu.memory if "
            "larger nodes will come"
        )
    elif node.ephemeral_storage is not None and volume > node.ephemeral_storage:
        problem = (
            f"{field}.secondary[0].size: {offloading.secondary[0].size}: the pod requests {volume // MIB}Mi of "
            f"ephemeral storage, but the largest node with {inputs.gpu.name} has {node.ephemeral_storage // MIB}Mi; "
            "lower it, or use a claim"
        )
    if problem:
        raise Unplannable(UnplannableReason.DOES_NOT_FIT, problem)


def check_disk(inputs: PlannerInputs) -> None:
    """Check that a node has room for the adapters that pods find by name.

    Raises:
        Unplannable: it has not, and no node could run the pod.
    """
    needed, present = ephemeral_bytes(inputs.engine.kvCacheOffloading, inputs.adapter_disk_bytes), inputs.node
    if inputs.adapter_disk_bytes and present.ephemeral_storage is not None and needed > present.ephemeral_storage:
        raise Unplannable(
            UnplannableReason.DOES_NOT_FIT,
            f"spec.adapterSources: the limits are {inputs.adapter_disk_bytes // MIB}Mi in total, and the pod requests "
            f"{needed // MIB}Mi of ephemeral storage, but the largest node has {present.ephemeral_storage // MIB}Mi; "
            "lower limit.size",
        )


def ephemeral_bytes(offloading: KVCacheOffloadingSpec | None, adapter_bytes: int) -> int:
    """Return the ephemeral storage that a pod requests in bytes, which are whole MiB: for KV blocks, and for adapters
    that are found by name."""
    return (0 if offloading is None else kv_volume_bytes(offloading)) + round_up_mib(adapter_bytes)


def kv_volume_bytes(offloading: KVCacheOffloadingSpec) -> int:
    """Return the size limit of the emptyDir for KV blocks in bytes, which are whole MiB; 0 if there is none."""
    tier = next(iter(offloading.secondary), None)
    if tier is None or tier.folder.emptyDir is None:
        return 0
    return round_up_mib(to_bytes(tier.size) * _KV_VOLUME_PERCENT // 100)


def _lora_copy_bytes(inputs: PlannerInputs) -> int:
    """Return the maximum number of bytes that copies of adapters need in host memory."""
    lora = inputs.lora
    if not lora.maxLoaded:
        return 0
    bound = None if lora.maxCachedMemory is None else to_bytes(lora.maxCachedMemory)
    if bound is not None and lora.maxCached is None:
        return bound
    num = 4 * lora.maxLoaded if lora.maxCached is None else lora.maxCached
    slots = lora.maxLoaded, lora.total_rank
    # The engine divides by the slots last, so that copies of all slots fit.
    largest = -(
        -num * device_memory.lora_bytes(inputs.model.shape, *slots, lora, limits.element_bytes(inputs)) // slots[0]
    )
    return largest if bound is None else min(bound, largest)
