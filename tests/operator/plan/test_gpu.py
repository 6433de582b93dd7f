# SPDX-License-Identifier: Apache-2.0
"""Which GPU is planned for: the spec, nodes' labels, then the table of products."""

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
from quire_operator.plan.gpu import PRODUCTS, GpuInfo, MemorySource, node_labels, resolve_gpu
from quire_operator.plan.plan import FitReason


def labels(product=L4, memory="23034", **more):
    return {"nvidia.com/gpu.product": product, "nvidia.com/gpu.memory": memory, **more}


def wanted(text):
    return llm_service(f"gpu: {text}").spec.gpu


def test_nodes_labels_go_before_the_table_and_the_spec_before_both():
    nodes = [labels(memory="23000", **{"nvidia.com/gpu.compute.major": "8", "nvidia.com/gpu.compute.minor": "9"}), {}]
    found = resolve_gpu(wanted(f"{{product: {L4}}}"), nodes)
    assert found == GpuInfo(L4, 23000, MemorySource.NODE_LABELS, (8, 9))
    assert resolve_gpu(wanted(f"{{product: {L4}, memory: 20Gi}}"), nodes) == GpuInfo(
        L4, 20480, MemorySource.SPEC, (8, 9)
    )
    assert resolve_gpu(wanted(f"{{product: {L4}}}")) == GpuInfo.from_product(L4)
    assert resolve_gpu(None, [], T4).memory_mib == 15360


def test_of_several_kinds_the_smallest_is_planned_for():
    nodes = [labels(), labels(H100, "81559"), labels("NVIDIA-A100-SXM4-40GB", "40960", zone="b")]
    found = resolve_gpu(None, nodes)
    assert (found.product, found.larger_products) == (L4, ("NVIDIA-A100-SXM4-40GB", H100))
    assert resolve_gpu(wanted("{nodeSelector: {zone: b}}"), nodes).product == "NVIDIA-A100-SXM4-40GB"
    made = planner.make_plan(
        dataclasses.replace(planner_inputs("8b", L4), gpu=dataclasses.replace(found, memory_mib=81559))
    )
    assert made.fit is FitReason.HETEROGENEOUS_POOL
    assert H100 in made.advice


def test_a_slice_has_its_own_memory_and_a_node_so_many_gpus():
    mig = {"nvidia.com/mig-3g.40gb.product": "NVIDIA-H100-MIG-3g.40gb", "nvidia.com/mig-3g.40gb.memory": "40448"}
    nodes = [labels(H100, "81559", **mig, **{"nvidia.com/gpu.count": "2"})]
    slice_ = wanted("{resourceName: nvidia.com/mig-3g.40gb}")
    assert (resolve_gpu(slice_, nodes).memory_mib, resolve_gpu(slice_, nodes).gpus_per_node) == (40448, None)
    with pytest.raises(Unplannable, match=r"'nvidia.com/mig-3g.40gb': no node says how much memory such a slice has"):
        resolve_gpu(wanted(f"{{product: {H100}, resourceName: nvidia.com/mig-3g.40gb}}"))
    whole = resolve_gpu(None, nodes)
    assert (whole.memory_mib, whole.gpus_per_node) == (81559, 2)
    given = dataclasses.replace(planner_inputs("70b", H100, "lora: {maxLoaded: 0}\ngpu: {count: 8}"), gpu=whole)
    assert planner.make_plan(given).tensorParallelSize.value == 2
    pinned = dataclasses.replace(given, engine=dataclasses.replace(given.engine, tensorParallelSize=4))
    with pytest.raises(Unplannable, match="4: nodes with NVIDIA-H100-80GB-HBM3 have 2 GPUs"):
        planner.make_plan(pinned)


def test_gpus_that_nobody_knows_or_that_are_shared_are_refused():
    for asked, words in (
        (None, "spec.gpu: no node says what GPU it has"),
        (wanted("{product: NVIDIA-X1}"), "spec.gpu.product: 'NVIDIA-X1' is on no node"),
    ):
        with pytest.raises(Unplannable, match=words) as error:
            resolve_gpu(asked)
        assert error.value.reason is UnplannableReason.GPU_UNKNOWN
    with pytest.raises(Unplannable, match="share each GPU between 4 pods") as error:
        resolve_gpu(None, [labels(**{"nvidia.com/gpu.replicas": "4"})])
    assert error.value.reason is UnplannableReason.SHARED_GPU


def test_a_label_that_is_no_number_says_nothing():
    plain = resolve_gpu(None, [labels()])
    for name in ("replicas", "count", "compute.minor"):
        found = resolve_gpu(None, [labels(**{f"nvidia.com/gpu.{name}": "many"})])
        assert (found.memory_mib, found.gpus_per_node) == (plain.memory_mib, None)


def test_node_listings_of_kubectl():
    listing = {"kind": "List", "items": [{"metadata": {"labels": {"a": "b"}}}, {"metadata": {}}]}
    assert node_labels(listing) == [{"a": "b"}, {}]
    assert node_labels({"kind": "Node", "metadata": {"labels": {"a": "b"}}}) == [{"a": "b"}]
    assert node_labels([]) == []


def test_the_table_of_products_is_in_order():
    assert list(PRODUCTS.values()) == sorted(PRODUCTS.values(), key=lambda entry: entry[0])


@pytest.mark.parametrize("memory", ["1k", "640Mi", "641Mi", "2Gi"])
def test_a_gpu_of_hardly_any_memory_fits_nothing(memory):
    found = resolve_gpu(wanted(f"{{memory: {memory}}}"))
    with pytest.raises(Unplannable, match="does not fit") as error:
        planner.make_plan(dataclasses.replace(planner_inputs("8b", L4), gpu=found))
    assert error.value.reason is UnplannableReason.DOES_NOT_FIT
