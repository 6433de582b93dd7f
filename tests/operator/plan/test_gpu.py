# SPDX-License-Identifier: Apache-2.0
"""Choice of the GPU to plan for: spec, then node labels, then the table of products."""

import dataclasses

import pytest
from support.planning import (
    H100,
    L4,
    T4,
    llm_service,
    planner_inputs,
)

from quire_operator.plan import planner
from quire_operator.plan.errors import Unplannable, UnplannableReason
from quire_operator.plan.gpu import GpuInfo, MemorySource, resolve_gpu
from quire_operator.plan.plan import FitReason


def labels(product=L4, memory="23034", **more):
    return {"nvidia.com/gpu.product": product, "nvidia.com/gpu.memory": memory, **more}


def gpu_spec(text):
    return llm_service(f"gpu: {text}").spec.gpu


def test_spec_overrides_node_labels_and_node_labels_override_the_table():
    nodes = [labels(memory="23000", **{"nvidia.com/gpu.compute.major": "8", "nvidia.com/gpu.compute.minor": "9"}), {}]
    gpu = resolve_gpu(gpu_spec(f"{{product: {L4}}}"), nodes)
    assert gpu == GpuInfo(L4, 23000, MemorySource.NODE_LABELS, (8, 9))
    assert resolve_gpu(gpu_spec(f"{{product: {L4}, memory: 20Gi}}"), nodes) == GpuInfo(
        L4, 20480, MemorySource.SPEC, (8, 9)
    )
    assert resolve_gpu(gpu_spec(f"{{product: {L4}}}")) == GpuInfo.from_product(L4)
    assert resolve_gpu(None, [], T4).memory_mib == 15360


def test_smallest_of_several_products_is_used():
    nodes = [labels(), labels(H100, "81559"), labels("NVIDIA-A100-SXM4-40GB", "40960", zone="b")]
    gpu = resolve_gpu(None, nodes)
    assert (gpu.product, gpu.larger_products) == (L4, ("NVIDIA-A100-SXM4-40GB", H100))
    assert resolve_gpu(gpu_spec("{nodeSelector: {zone: b}}"), nodes).product == "NVIDIA-A100-SXM4-40GB"
    plan = planner.make_plan(
        dataclasses.replace(planner_inputs("8b", L4), gpu=dataclasses.replace(gpu, memory_mib=81559))
    )
    assert plan.fit is FitReason.HETEROGENEOUS_POOL
    assert H100 in plan.advice


def test_mig_memory_and_gpus_per_node():
    mig = {"nvidia.com/mig-3g.40gb.product": "NVIDIA-H100-MIG-3g.40gb", "nvidia.com/mig-3g.40gb.memory": "40448"}
    nodes = [labels(H100, "81559", **mig, **{"nvidia.com/gpu.count": "2"})]
    slice_ = gpu_spec("{resourceName: nvidia.com/mig-3g.40gb}")
    assert (resolve_gpu(slice_, nodes).memory_mib, resolve_gpu(slice_, nodes).gpus_per_node) == (40448, None)
    with pytest.raises(Unplannable, match=r"the memory of 'nvidia.com/mig-3g.40gb' is unknown"):
        resolve_gpu(gpu_spec(f"{{product: {H100}, resourceName: nvidia.com/mig-3g.40gb}}"))
    gpu = resolve_gpu(None, nodes)
    assert (gpu.memory_mib, gpu.gpus_per_node) == (81559, 2)
    inputs = dataclasses.replace(planner_inputs("70b", H100, "lora: {maxLoaded: 0}\ngpu: {count: 8}"), gpu=gpu)
    assert planner.make_plan(inputs).tensorParallelSize.value == 2
    requested = dataclasses.replace(inputs, engine=dataclasses.replace(inputs.engine, tensorParallelSize=4))
    with pytest.raises(Unplannable, match="4: nodes with NVIDIA-H100-80GB-HBM3 have 2 GPUs"):
        planner.make_plan(requested)
    requested = dataclasses.replace(
        inputs, engine=dataclasses.replace(inputs.engine, tensorParallelSize=2, dataParallelSize=2)
    )
    with pytest.raises(Unplannable, match="2: nodes with NVIDIA-H100-80GB-HBM3 have 2 GPUs, and 2 cores need 4"):
        planner.make_plan(requested)


def test_rejects_unknown_and_shared_gpus():
    for spec, message in (
        (None, "spec.gpu: the GPU is unknown"),
        (gpu_spec("{product: NVIDIA-X1}"), "spec.gpu.product: 'NVIDIA-X1' is neither on a node"),
    ):
        with pytest.raises(Unplannable, match=message) as error:
            resolve_gpu(spec)
        assert error.value.reason is UnplannableReason.GPU_UNKNOWN
    with pytest.raises(Unplannable, match="share each GPU among 4 pods") as error:
        resolve_gpu(None, [labels(**{"nvidia.com/gpu.replicas": "4"})])
    assert error.value.reason is UnplannableReason.SHARED_GPU


def test_ignores_labels_that_are_not_numbers():
    plain = resolve_gpu(None, [labels()])
    for name in ("replicas", "count", "compute.minor"):
        gpu = resolve_gpu(None, [labels(**{f"nvidia.com/gpu.{name}": "many"})])
        assert (gpu.memory_mib, gpu.gpus_per_node) == (plain.memory_mib, None)


@pytest.mark.parametrize("memory", ["1k", "640Mi", "641Mi", "2Gi"])
def test_tiny_gpu_fits_no_model(memory):
    gpu = resolve_gpu(gpu_spec(f"{{memory: {memory}}}"))
    with pytest.raises(Unplannable, match="does not fit") as error:
        planner.make_plan(dataclasses.replace(planner_inputs("8b", L4), gpu=gpu))
    assert error.value.reason is UnplannableReason.DOES_NOT_FIT
