# SPDX-License-Identifier: Apache-2.0
"""A folder of compiled kernels replaces their compilation, if its key matches."""

import json
import os
import subprocess
import sys

import pytest

from quire_kernels.gpu import kernel_cache

HOPPER = (9, 0)
# Compiles two norms for a Hopper GPU and prints the numbers of the kernels that were compiled and found.
SCRIPT = """
import sys, torch
from triton import knobs
from quire_kernels.gpu import compilation, kernel_cache
from quire_kernels.gpu.norm import rms_norm
if len(sys.argv) > 1:
    kernel_cache.install_shipped_cache((9, 0))
found = []
knobs.compilation.listener = lambda **event: found.append(event["cache_hit"])
x = torch.empty(4, 512, dtype=torch.bfloat16)
with compilation.compile_only((9, 0)):
    rms_norm(x, x[0], 1e-5)
    rms_norm(x[:, :256], x[0, :256], 1e-5)
print(found.count(False), found.count(True))
"""


def _run(cache, *args, **variables):
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(cache)} | {name: str(value) for name, value in variables.items()}
    done = subprocess.run([sys.executable, "-c", SCRIPT, *args], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.split()


def test_installed_kernels_are_not_compiled_again(tmp_path):
    """The installed files do not refer to the image: it may be gone."""
    shipped, cache = tmp_path / "image", tmp_path / "cache"
    shipped.mkdir()
    assert _run(shipped) == ["2", "0"]
    kernel_cache.write_key(shipped, HOPPER)
    assert _run(cache, "install", QUIRE_KERNEL_CACHE=shipped) == ["0", "2"]
    shipped.rename(tmp_path / "elsewhere")
    assert _run(cache) == ["0", "2"]


@pytest.mark.parametrize("stale", ["sources", "triton", "capability", None])
def test_stale_folder_is_ignored_with_one_log_line(tmp_path, monkeypatch, caplog, stale):
    shipped, cache = tmp_path / "image", tmp_path / "cache"
    (shipped / "ABC").mkdir(parents=True)
    cache.mkdir()
    if stale is not None:
        kernel_cache.write_key(shipped, HOPPER)
        key = json.loads((shipped / "key.json").read_text())
        (shipped / "key.json").write_text(json.dumps(key | {stale: "other"}))
    monkeypatch.setenv("QUIRE_KERNEL_CACHE", str(shipped))
    assert kernel_cache.install_shipped_cache(HOPPER, cache) == 0
    assert not list(cache.iterdir())
    [record] = caplog.records
    assert (f"{stale}=other expected=" if stale else "FileNotFoundError") in record.getMessage()


def test_matching_folder_is_installed_once(tmp_path, monkeypatch):
    shipped, cache = tmp_path / "image", tmp_path / "cache"
    cache.mkdir()
    assert kernel_cache.install_shipped_cache(HOPPER, cache) == 0
    (shipped / "ABC").mkdir(parents=True)
    (shipped / "ABC/__grp__k.json").write_text(json.dumps({"child_paths": {"k.cubin": "/build/ABC/k.cubin"}}))
    kernel_cache.write_key(shipped, HOPPER)
    monkeypatch.setenv("QUIRE_KERNEL_CACHE", str(shipped))
    assert [kernel_cache.install_shipped_cache(HOPPER, cache) for _ in range(2)] == [1, 0]
    paths = json.loads((cache / "ABC/__grp__k.json").read_text())["child_paths"]
    assert paths == {"k.cubin": str(cache / "ABC/k.cubin")}
