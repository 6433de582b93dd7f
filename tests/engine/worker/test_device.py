# SPDX-License-Identifier: Apache-2.0
"""Dtypes, number of threads and available memory of this machine."""

import dataclasses
import subprocess
import sys

import pytest
import torch

from quire_engine.worker import device
from quire_engine.worker.device import num_cores, resolve_cache_dtype, resolve_dtype, set_num_threads
from quire_spec.engine.config import EngineConfig
from quire_spec.errors import ConfigError
from quire_spec.model.host_memory import available_memory_bytes

CONFIG = EngineConfig(model="m")


def test_auto_dtype(monkeypatch):
    config = dataclasses.replace(CONFIG, dtype="auto")
    monkeypatch.setattr(device, "_has_bf16", lambda: True)
    kinds = ("bfloat16", "float16", "float32")
    assert [resolve_dtype(config, kind) for kind in kinds] == [torch.bfloat16, torch.float32, torch.float32]
    monkeypatch.setattr(device, "_has_bf16", lambda: False)
    assert resolve_dtype(config, "bfloat16") == torch.float32
    on_gpu = dataclasses.replace(config, device="cuda")
    assert [resolve_dtype(on_gpu, kind) for kind in kinds] == [torch.bfloat16, torch.float16, torch.float32]
    assert resolve_dtype(dataclasses.replace(config, dtype="bfloat16"), "float32") == torch.bfloat16
    with pytest.raises(ConfigError, match="the checkpoint has 'float8_e4m3fn'; set float32, bfloat16 or float16"):
        resolve_dtype(config, "float8_e4m3fn")


def test_rejects_eight_bit_cache_on_gpus_without_e4m3(monkeypatch):
    on_gpu = dataclasses.replace(CONFIG, device="cuda", kv_cache_dtype="fp8")
    capabilities = iter([(9, 0), (8, 0)])
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: next(capabilities))
    assert resolve_cache_dtype(on_gpu, torch.bfloat16) == torch.float8_e4m3fn
    with pytest.raises(ConfigError, match=r"kv_cache_dtype: 'fp8' requires .* got 8\.0; use 'auto'"):
        resolve_cache_dtype(on_gpu, torch.bfloat16)
    with pytest.raises(ConfigError, match=r"kv_cache_dtype: 'int8_per_token_head' .* use 'fp8' or 'auto'"):
        resolve_cache_dtype(dataclasses.replace(on_gpu, kv_cache_dtype="int8_per_token_head"), torch.bfloat16)
    assert resolve_cache_dtype(dataclasses.replace(on_gpu, kv_cache_dtype="auto"), torch.float16) == torch.float16


def _machine(tmp_path, siblings, quota):
    for cpu, threads in enumerate(siblings):
        topology = tmp_path / f"cpu{cpu}/topology"
        topology.mkdir(parents=True)
        (topology / "thread_siblings_list").write_text(threads + "\n")
    (tmp_path / "cpu.max").write_text(quota)
    return tmp_path, tmp_path / "cpu.max"


@pytest.mark.parametrize(
    ("siblings", "quota", "expected"),
    [
        (["0,2", "1,3", "0,2", "1,3"], "max 100000\n", 2),
        (["0", "1", "2", "3"], "max 100000\n", 4),
        (["0", "1", "2", "3"], "250000 100000\n", 3),
        (["0,1", "0,1"], "50000 100000\n", 1),
        (["0", "1"], "", 2),
    ],
)
def test_num_cores_counts_physical_cores_within_the_quota(siblings, quota, expected, tmp_path, monkeypatch):
    monkeypatch.setattr(device.os, "sched_getaffinity", lambda _: set(range(len(siblings))))
    assert num_cores(*_machine(tmp_path, siblings, quota)) == expected


@pytest.mark.parametrize(
    ("weights", "omp_num_threads", "expected"),
    [
        (6 << 20, "", 1),
        (64 << 20, "", 2),
        (1 << 40, "", 4),
        (1 << 40, "3,2", 3),
        (1 << 40, "64", 4),
        (0, "nonsense", 1),
    ],
)
def test_number_of_threads(weights, omp_num_threads, expected, monkeypatch):
    before = torch.get_num_threads()
    monkeypatch.setattr(device, "num_cores", lambda: 4)
    monkeypatch.setenv("OMP_NUM_THREADS", omp_num_threads)
    try:
        set_num_threads(weights)
        assert torch.get_num_threads() == expected
    finally:
        torch.set_num_threads(before)


def test_available_memory_respects_the_control_group(tmp_path):
    assert available_memory_bytes() > 0
    for name, text in {
        "memory.max": "3000000",
        "memory.current": "2000000",
        "memory.stat": "anon 5\ninactive_file 7",
    }.items():
        (tmp_path / name).write_text(text)
    assert available_memory_bytes(tmp_path) == 1_000_007
    (tmp_path / "memory.max").write_text("max")
    assert available_memory_bytes(tmp_path) > 3_000_000


_FREED = """
from pathlib import Path
import torch
from quire_engine.worker.device import retain_freed_memory, trim_heap

def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

retain_freed_memory()
weights = [torch.ones(1 << 18) for _ in range(256)]
last = torch.ones(1 << 18)  # what lies at the end of the heap stays, so freeing alone gives nothing back
full = resident()
del weights
freed = resident()
trim_heap()
print(full - freed, full - resident())
"""


def test_trim_heap_returns_unpacked_weights_to_the_system() -> None:
    result = subprocess.run([sys.executable, "-c", _FREED], capture_output=True, text=True, timeout=60, check=True)
    freed_by_del, freed_by_trim = map(int, result.stdout.split())
    assert freed_by_del < 64 << 20
    assert freed_by_trim > 240 << 20
