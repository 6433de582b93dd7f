# SPDX-License-Identifier: Apache-2.0
"""Devices with programmatic dependent launch."""

import ast
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import triton

from quire_kernels.gpu import attention
from quire_kernels.gpu.occupancy import programs_per_sm
from quire_kernels.gpu.pdl import supports_pdl


@pytest.mark.parametrize(
    ("device", "capability", "interpreted", "wanted", "expected"),
    [
        ("cuda", (9, 0), False, None, True),
        ("cuda", (10, 0), False, "1", True),
        ("cuda", (9, 0), False, "0", False),
        ("cuda", (8, 9), False, None, False),
        ("cuda", (9, 0), True, None, False),
        ("cpu", (9, 0), False, None, False),
    ],
)
def test_supported_on_hopper_with_compiled_kernels(monkeypatch, device, capability, interpreted, wanted, expected):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(triton.knobs.runtime, "interpret", interpreted)
    if wanted is not None:
        monkeypatch.setenv("QUIRE_EARLY_LAUNCH", wanted)
    assert supports_pdl.__wrapped__(torch.device(device)) is expected


def test_not_supported_on_amd(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 4))
    monkeypatch.setattr(triton.knobs.runtime, "interpret", False)
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert not supports_pdl.__wrapped__(torch.device("cuda"))


def test_attention_and_shrink_are_not_launched_dependently():
    """`_combine` and `_expand` read tables before they wait, so no kernel before them may start early: `launch_pdl` on
    `_split_kv_decode` or `_shrink` would let the first layer race with the plan or the routing."""
    found = set()
    for path in Path(attention.__file__).parent.rglob("*.py"):
        for call in ast.walk(ast.parse(path.read_text())):
            if isinstance(call, ast.Call) and any(keyword.arg == "launch_pdl" for keyword in call.keywords):
                found.add(ast.unparse(call.func).partition("[")[0])
    assert found == {"_combine", "_expand"}


def _kernel(registers, shared, num_warps=4):
    metadata = SimpleNamespace(num_warps=num_warps, shared=shared)
    return SimpleNamespace(n_regs=registers, metadata=metadata, hash=f"{registers} {shared} {num_warps}")


@pytest.fixture
def hopper(monkeypatch):
    """The sizes of a multiprocessor of an H200."""
    properties = SimpleNamespace(
        regs_per_multiprocessor=65536,
        shared_memory_per_multiprocessor=228 << 10,
        max_threads_per_multi_processor=2048,
        multi_processor_count=132,
    )
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    monkeypatch.setattr(attention, "_num_sms", lambda _: properties.multi_processor_count)
    monkeypatch.setattr(attention, "_measured_workers_per_sm", {})
    monkeypatch.setattr(attention, "_checked_kernels", set())
    return torch.device("cuda")


@pytest.mark.parametrize(
    ("kernel", "expected"),
    [
        (_kernel(168, 74752), 3),  # decode attention, as compiled for sm_90
        (_kernel(169, 74752), 2),  # the next register granule
        (_kernel(168, 77824), 2),  # 3 KB more of shared memory
        (_kernel(216, 135168, num_warps=8), 1),  # prefill attention
        (_kernel(32, 0), 16),  # the limit of threads
    ],
)
def test_programs_per_multiprocessor(hopper, kernel, expected):
    assert programs_per_sm(kernel, hopper) == expected


def test_workers_follow_the_compiled_kernel(hopper, caplog):
    """With one more register granule a third of the workers would wait for the others, without any error."""
    assert attention.num_workers(hopper, 128, 2) == 396
    attention._check_occupancy(_kernel(168, 74752), hopper, 128, 2)
    assert (attention.num_workers(hopper, 128, 2), caplog.text) == (396, "")
    attention._check_occupancy(_kernel(176, 74752), hopper, 128, 2)
    assert attention.num_workers(hopper, 128, 2) == 264
    assert "programs_per_sm=2 planned=3 head_dim=128 registers=176 shared=74752" in caplog.text
    assert attention.num_workers(hopper, 64, 2) == 396


def test_first_launch_is_repeated_with_the_workers_of_later_ones(hopper, monkeypatch):
    """Otherwise, the first result of a kernel has other bits: seen on an H200 in float32, where fewer workers fit."""
    attention._check_occupancy(_kernel(168, 74752), hopper, 128, 4)
    grids = {"_split_kv_decode": [], "_combine": []}

    class Launcher:
        def __init__(self, name):
            self.name = name

        def __getitem__(self, grid):
            grids[self.name].append(grid[0])
            return lambda *_, **__: _kernel(255, 74752)

    for name in grids:
        monkeypatch.setattr(attention, name, Launcher(name))
    monkeypatch.setattr(attention, "_allocate_partials", lambda *_: (None, None))
    monkeypatch.setattr(attention, "supports_pdl", lambda _: True)
    queries = SimpleNamespace(device=hopper, element_size=lambda: 4, shape=(1, 32, 128))
    arguments = (queries, *[None] * 7)
    for _ in range(2):
        sizes = {"OUT_DIM": 128, "DIM": 128}
        attention._attend_short_spans(arguments, sizes, {}, attention.select_tiles(128, 4, False), 16, 4)
    assert grids == {"_split_kv_decode": [396, 264, 264], "_combine": [264, 264]}
