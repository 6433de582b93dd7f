# SPDX-License-Identifier: Apache-2.0
"""The emulated device itself: it computes what PyTorch does, and shows the faults that it is there to show."""

import subprocess
import sys

import pytest
import torch
from support.requirements_of_machine import emulated_device, requires_emulated_gpu

pytestmark = requires_emulated_gpu


def _pinned(values):
    return torch.tensor(values).pin_memory()


def test_operations_compute_what_the_cpu_computes():
    x = torch.linspace(-1, 1, 12).view(3, 4)
    y = x.cuda()
    for compute in (
        lambda t: t @ t.T,
        lambda t: t[t > 0],
        lambda t: t.softmax(-1).to(torch.bfloat16),
        lambda t: t.sort(descending=True)[1],
        lambda t: torch.zeros_like(t).index_copy_(0, torch.tensor([2, 0], device=t.device), t[:2]),
        lambda t: t.t().contiguous().nonzero(),
    ):
        assert torch.equal(compute(y).cpu(), compute(x))
    assert y.sum().item() == pytest.approx(0, abs=1e-6)


def test_work_is_done_late_and_in_the_order_of_its_stream():
    host = torch.empty(2, pin_memory=True)
    host.fill_(7)
    x = torch.ones(2, device="cuda")
    x.add_(1)
    host.copy_(x, non_blocking=True)
    before = emulated_device.waits()
    assert host.tolist() == [7, 7]
    torch.cuda.current_stream().synchronize()
    assert host.tolist() == [2, 2]
    assert emulated_device.waits() == before + 1


def test_pinned_memory_that_is_written_too_early_shows():
    source, x = _pinned([1.0, 2.0]), torch.zeros(2, device="cuda")
    x.copy_(source, non_blocking=True)
    source.fill_(9)
    assert x.cpu().tolist() == [9, 9]
    x.copy_(torch.tensor([3.0, 4.0]), non_blocking=True)  # pageable memory is read at once
    assert x.cpu().tolist() == [3, 4]


def test_a_stream_that_does_not_wait_for_another_shows():
    x, side = torch.zeros(2, device="cuda"), torch.cuda.Stream()
    torch.cuda.synchronize()
    x.fill_(1)
    with torch.cuda.stream(side):
        unordered = x.clone()
    side.synchronize()
    torch.cuda.synchronize()
    assert unordered.cpu().tolist() == [0, 0]
    x.fill_(2)
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        ordered = x.clone()
    side.synchronize()
    assert ordered.cpu().tolist() == [2, 2]


def test_fresh_memory_is_garbage():
    assert torch.empty(1 << 20, device="cuda").isnan().all().item()


def test_a_graph_reads_its_memory_as_it_is_when_it_runs():
    x = torch.zeros(2, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = x * 2 + 1
    for value in (3, 5):
        x.fill_(value)
        graph.replay()
        assert y.cpu().tolist() == [2 * value + 1] * 2


CAPTURES = """
import torch
def forks(x):
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        x.add_(1)
waits = lambda x: x.sum().item(), lambda x: x.cpu(), lambda x: torch.cuda.synchronize(), torch.nonzero
for forbidden in (*waits, forks):
    x = torch.zeros(2, device="cuda")
    try:
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            forbidden(x)
    except RuntimeError as error:
        print(str(error).split()[2].removeprefix("cudaErrorStreamCapture"), x.cpu().tolist())
"""


def test_a_capture_refuses_what_waits_and_a_stream_that_does_not_come_back():
    # In a process of its own: PyTorch keeps its memory after a capture that failed.
    done = subprocess.run([sys.executable, "-c", CAPTURES], capture_output=True, text=True, timeout=60, check=True)
    found = [line.split()[0] for line in done.stdout.splitlines()]
    # Four refusals, by PyTorch or by the runtime.
    assert len(found) == 5 and found[4] == "Unjoined"
    assert all(line.endswith("[0.0, 0.0]") for line in done.stdout.splitlines())


def test_memory_ends():
    total = torch.cuda.mem_get_info()[1]
    with pytest.raises(torch.cuda.OutOfMemoryError):
        torch.empty(total + 1, dtype=torch.uint8, device="cuda")
