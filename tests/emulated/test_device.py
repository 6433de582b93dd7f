# SPDX-License-Identifier: Apache-2.0
"""The emulated device computes what PyTorch computes on a CPU, and makes synchronization errors visible."""

import subprocess
import sys

import torch
from support.requirements_of_machine import emulated_device, requires_emulated_gpu

pytestmark = requires_emulated_gpu


def _pinned(values):
    return torch.tensor(values).pin_memory()


def test_work_runs_late_and_in_stream_order():
    host = torch.empty(2, pin_memory=True)
    host.fill_(7)
    x = torch.ones(2, device="cuda")
    x.add_(1)
    host.copy_(x, non_blocking=True)
    num_waits = emulated_device.waits()
    assert host.tolist() == [7, 7]
    torch.cuda.current_stream().synchronize()
    assert host.tolist() == [2, 2]
    assert emulated_device.waits() == num_waits + 1


def test_early_write_to_pinned_memory_is_visible():
    source, x = _pinned([1.0, 2.0]), torch.zeros(2, device="cuda")
    x.copy_(source, non_blocking=True)
    source.fill_(9)
    assert x.cpu().tolist() == [9, 9]
    x.copy_(torch.tensor([3.0, 4.0]), non_blocking=True)  # pageable memory is read at once
    assert x.cpu().tolist() == [3, 4]


def test_missing_wait_between_streams_is_visible():
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


def test_new_memory_contains_nan():
    assert torch.empty(1 << 20, device="cuda").isnan().all().item()


LOCKS = """
import threading, time
import torch
from emulator import device
side, x = torch.cuda.Stream(), torch.ones(8, device="cuda")
freed = torch.ones(8, device="cuda")
torch.cuda.synchronize()
with torch.cuda.stream(side):
    # It needs Python's lock again after another thread has taken it.
    device.enqueue(lambda: time.sleep(1))
    freed.record_stream(side)
del freed
# The allocator asks for the end of the work on the side stream while it holds its lock.
asking = threading.Thread(target=lambda: torch.empty(1 << 22, device="cuda"))
asking.start()
time.sleep(0.3)
# Takes the allocator's lock, without giving Python's back.
del x
asking.join()
print("done")
"""


def test_work_does_not_run_while_an_allocator_holds_its_lock():
    """Otherwise work that needs Python's lock waits for a thread that has it and waits for the allocator's."""
    result = subprocess.run([sys.executable, "-c", LOCKS], capture_output=True, text=True, timeout=60, check=True)
    assert result.stdout == "done\n"


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


def test_capture_rejects_synchronization_and_unjoined_streams():
    # In a process of its own, because PyTorch keeps its memory after a failed capture.
    result = subprocess.run([sys.executable, "-c", CAPTURES], capture_output=True, text=True, timeout=60, check=True)
    errors = [line.split()[0] for line in result.stdout.splitlines()]
    # PyTorch or the runtime rejects the first four.
    assert len(errors) == 5 and errors[4] == "Unjoined"
    assert all(line.endswith("[0.0, 0.0]") for line in result.stdout.splitlines())
