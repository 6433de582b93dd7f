# SPDX-License-Identifier: Apache-2.0
"""Long chunks by cuDNN: graphs of the real package, checked by it, and computed here from their own description."""

import ctypes
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from support.attention_batches import make_batch
from support.requirements_of_machine import requires_interpreter
from torch.nn.attention import SDPBackend

from quire_kernels import dispatch, paged_attention, prefill_attention, prepare_chunk_attention
from quire_kernels.gpu import fused_attention
from quire_kernels.gpu.candidates import cudnn_attention
from quire_kernels.gpu.candidates.cudnn_attention import ChunkPlans, ChunkShape

pytestmark = requires_interpreter
cudnn = pytest.importorskip("cudnn", reason="needs nvidia-cudnn-frontend")

SUPPORT = Path(__file__).parents[3] / "support"
SCALE = 0.15
HOPPER = {"sm_version": 90, "sm_count": 132}


def _compile_stub(name: str, folder: Path, *libraries: str) -> list[Path]:
    source, paths = SUPPORT / name, [folder / library for library in libraries]
    for path in paths:
        subprocess.run(["cc", "-shared", "-fPIC", "-o", str(path), str(source)], check=True)
    return paths


@pytest.fixture(scope="module", autouse=True)
def libcudnn(tmp_path_factory):
    """A library with which the package can describe and check graphs, and not compute them."""
    [path] = _compile_stub("cudnn_stub.c", tmp_path_factory.mktemp("cudnn"), "libcudnn.so.9")
    cudnn._pybind_module._set_dlhandle_cudnn(ctypes.CDLL(str(path))._handle)


class _ComputedHere:
    """A described graph that torch computes from the tensors that cuDNN would get, by their declared layout."""

    def __init__(self, graph: Any, scale: float) -> None:
        graph.validate()
        self._graph, self._scale = graph, scale

    def get_workspace_size(self) -> int:
        return 8704

    def execute(self, tensors: dict[int, Any], workspace: Any, handle: Any) -> None:
        assert workspace.numel() == self.get_workspace_size()

        def declared(uid: int, offset: int = 0, tokens: int | None = None) -> Any:
            tensor, attributes = tensors[uid], self._graph.query_tensor_attributes_of_uid(uid)
            dims = attributes.get_dim()
            if tokens is not None:
                assert tokens <= dims[2]
                dims = [*dims[:2], tokens, dims[3]]
            return tensor.as_strided(dims, attributes.get_stride(), tensor.storage_offset() + offset)

        offsets = declared(cudnn_attention._OFFSETS).flatten().tolist()
        num_tokens = declared(cudnn_attention._QUERY_LENGTH).item()
        context = declared(cudnn_attention._KEY_LENGTH).item()
        queries = declared(cudnn_attention._QUERIES, offsets[0], num_tokens)[0]
        out = declared(cudnn_attention._OUT, offsets[0], num_tokens)[0]
        assert offsets[1] - offsets[0] == queries.numel()
        kv = []
        for container, table in (("_KEYS", "_KEY_PAGES"), ("_VALUES", "_VALUE_PAGES")):
            pages = declared(getattr(cudnn_attention, table)).flatten()
            assert pages.dtype == torch.int32
            # A cuDNN tile may read past the context, but only pages of the same sequence.
            gathered = declared(getattr(cudnn_attention, container))[pages.long()].transpose(0, 1).flatten(1, 2)
            assert gathered.isfinite().all()
            kv.append(gathered[:, :context].float().repeat_interleave(len(queries) // len(gathered), 0))
        scores = queries.float() @ kv[0].mT * self._scale
        is_masked = torch.ones(num_tokens, context).triu(context - num_tokens + 1).bool()
        out.copy_((scores.masked_fill(is_masked, float("-inf")).softmax(-1) @ kv[1]).to(out.dtype))


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> list[ChunkShape]:
    """Shapes for which a plan was built, in order. Chunks of 32 tokens are long, and graphs are computed here."""
    torch.manual_seed(42)
    built: list[ChunkShape] = []

    def build(self: ChunkPlans, shape: ChunkShape) -> _ComputedHere:
        built.append(shape)
        return _ComputedHere(self.describe(shape), shape.scale)

    monkeypatch.setattr(cudnn_attention, "MIN_TOKENS", 32)
    monkeypatch.setattr(fused_attention, "MIN_TOKENS", 32)
    monkeypatch.setattr(fused_attention, "BACKENDS", (SDPBackend.MATH,))
    monkeypatch.setattr(ChunkPlans, "build", build)
    monkeypatch.setattr(ChunkPlans, "__init__", _init_for_hopper(ChunkPlans.__init__))
    monkeypatch.setattr(cudnn_attention, "_plans", {})
    return built


def _init_for_hopper(init: Any) -> Any:
    return lambda self, *args: init(self, *args, **HOPPER)


def _rehearse(cache: Any, heads: int, max_tokens: int = 64, max_blocks: int = 12) -> int:
    # Other pages than block 0 are not read, so zeros there are enough.
    trial = torch.zeros_like(cache)
    return cudnn_attention.rehearse(trial, heads, SCALE, cache.dtype, max_tokens, max_blocks)


MIXES = {
    "one chunk": [(16, 32)],
    "chunks of other lengths": [(1, 33), (100, 64), (17, 40)],
    "beside decodes and short chunks": [(40, 1), (16, 37), (41, 1), (5, 20), (16, 64)],
    "beside prompts": [(0, 33), (16, 45), (0, 20), (5, 1), (0, 64)],
    "only chunks and long prompts": [(0, 40), (7, 50)],
    "none that is long": [(40, 1), (0, 31), (16, 20)],
}


@pytest.mark.parametrize("spans", MIXES.values(), ids=MIXES.keys())
@pytest.mark.parametrize(("heads", "block_size"), [((4, 2), 16), ((3, 3), 32)], ids=str)
def test_equals_reference(spans, heads, block_size, computed):
    queries, cache, batch = make_batch(spans, heads=heads, block_size=block_size, dtype=torch.float16)
    # As the projection's output: queries, keys and values of a token side by side.
    wide = torch.randn(len(queries), heads[0] + 2 * heads[1], queries.shape[2]).half()
    queries = wide[:, : heads[0]].copy_(queries)
    assert _rehearse(cache, heads[0]) == 2
    del computed[:]
    found = paged_attention.get("cuda", "cudnn")(queries, cache, batch, SCALE)
    expected = paged_attention.reference(queries, cache, batch, SCALE)
    torch.testing.assert_close(found, expected, rtol=3e-3, atol=3e-3)
    chunks = [batch.chunk_spans[i] for i, span in enumerate(batch.chunk_spans) if span.length >= 32]
    assert {key[1] for key in batch.work_plans if key[0] == "cudnn"} == set(chunks)
    # The rehearsal has built all plans.
    assert not computed


@pytest.mark.parametrize("options", [{"window": 20}, {"softcap": 2.0}, {"sinks": torch.zeros(4).half()}], ids=str)
def test_other_kernels_compute_other_options(options, computed):
    queries, cache, batch = make_batch(MIXES["one chunk"], heads=(4, 2), dtype=torch.float16)
    _rehearse(cache, 4)
    found = paged_attention.get("cuda", "cudnn")(queries, cache, batch, SCALE, **options)
    expected = paged_attention.reference(queries, cache, batch, SCALE, **options)
    torch.testing.assert_close(found, expected, rtol=3e-3, atol=3e-3)
    assert not any(key[0] == "cudnn" for key in batch.work_plans)


def test_plans_of_another_cache_are_dropped(computed):
    cache = torch.zeros(2, 3, 16, 2, 64, dtype=torch.float16)
    assert _rehearse(cache, 4, max_tokens=100) == 3
    assert [shape.max_tokens for shape in computed] == [32, 64, 128]
    _rehearse(cache[:, :1], 4, max_tokens=32)
    assert [shape.num_blocks for shape in computed] == [3, 3, 3, 1]
    with pytest.raises(RuntimeError, match="use bfloat16 for both"):
        cudnn_attention.rehearse(cache.float(), 4, SCALE, torch.float32, 64, 12)
    assert not cudnn_attention._plans


@pytest.mark.parametrize("missing", ["package", "library", "device", ""])
def test_a_missing_library_leaves_it_out_with_one_line(missing, computed, monkeypatch, caplog):
    monkeypatch.setattr(dispatch, "overrides", lambda: {"paged_attention": "cudnn"})
    monkeypatch.setattr(prefill_attention, "_has_hopper_kernels", lambda device: missing != "device")
    if missing == "package":
        monkeypatch.setitem(sys.modules, "cudnn", None)
    if missing == "library":
        monkeypatch.setattr(cudnn, "backend_version", lambda: 90500)
    caplog.set_level("INFO")
    queries, cache, batch = make_batch(MIXES["one chunk"], heads=(4, 2), dtype=torch.float16)
    prepare_chunk_attention(torch.zeros_like(cache), 4, SCALE, cache.dtype, 64, 12)
    [line] = caplog.messages
    expected = {
        "package": "cuDNN cannot compute chunks; other kernels compute them: import of cudnn",
        "library": "cuDNN has version 90500; use 90700 or later",
        "device": "cpu is not a CUDA device of compute capability 9.0 or later",
        "": "cuDNN computes long chunks plans=2",
    }
    assert expected[missing] in line
    found = paged_attention.get("cuda", "cudnn")(queries, cache, batch, SCALE)
    torch.testing.assert_close(found, paged_attention.reference(queries, cache, batch, SCALE), rtol=3e-3, atol=3e-3)
    assert any(key[0] == "cudnn" for key in batch.work_plans) is not bool(missing)


BUILD = """
import json, sys, torch, cudnn
from quire_kernels.gpu.candidates.cudnn_attention import ChunkPlans, ChunkShape
device = json.loads(sys.argv[1])
plans = ChunkPlans(cudnn, 0, None, device_property=cudnn.create_device_properties(json.dumps(device)),
                   sm_version=90, sm_count=132)
for tokens, heads, kv_heads, dim, block in ((1024, 32, 8, 128, 16), (8192, 32, 8, 128, 16), (2048, 9, 3, 64, 32)):
    graph = plans.build(ChunkShape(tokens, heads, 190000, block, kv_heads, dim, 8192, 0.1, torch.bfloat16))
    print(graph.get_plan_name_at_index(0), graph.get_workspace_size())
"""
H200 = {
    "deviceName": "NVIDIA H200", "deviceVer": 900, "cudaDeviceId": 0, "pciDeviceId": 0, "driverVer": 13000,
    "multiProcessorCount": 132, "totalGlobalMem": 150_000_000_000, "l2CacheSize": 62914560, "warpSize": 32,
    "maxGridSize": [2147483647, 65535, 65535], "maxBlockSize": [1024, 1024, 64], "regsPerBlock": 65536,
    "maxRegistersPerSM": 65536, "maxSharedMemoryPerBlock": 49152, "maxSharedMemoryPerBlockOptin": 232448,
    "reservedSharedMemoryPerBlock": 1024, "maxCtasPerSM": 32, "maxThreadsPerBlock": 1024, "maxThreadsPerSM": 2048,
    "smClockRateKHz": 1980000, "memClockRateKHz": 3201000, "isTccDriver": 0, "supportCoopLaunch": 1,
}  # fmt: skip


@pytest.mark.skipif(
    "QUIRE_TEST_CUDNN" not in os.environ,
    reason="needs 500 MB: pip install --no-deps --target DIR nvidia-cudnn-cu13==9.19.0.56 nvidia-cuda-nvrtc==13.0.88;"
    " QUIRE_TEST_CUDNN=DIR",
)
def test_cudnn_compiles_the_plans_for_hopper(tmp_path):
    """The real libcudnn takes the graphs at real shapes, and compiles kernels for sm_90 on a machine without a GPU."""
    import json

    folder = Path(os.environ["QUIRE_TEST_CUDNN"])
    _compile_stub("cuda_stub.c", tmp_path, "libcuda.so.1", "libcublasLt.so.13")
    paths = [folder / "nvidia/cudnn/lib", folder / "nvidia/cu13/lib", tmp_path]
    environment = os.environ | {
        "LD_LIBRARY_PATH": os.pathsep.join(map(str, paths)), "CUDA_STUB_DUMP": str(tmp_path)
    }  # fmt: skip
    argv = [sys.executable, "-c", BUILD, json.dumps(H200)]
    result = subprocess.run(argv, env=environment, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr[-2000:]
    workspaces = [int(line.split()[1]) for line in result.stdout.splitlines()]
    assert len(workspaces) == 3 and max(workspaces) < 1 << 20
    # ELF files for a machine of NVIDIA's.
    cubins = [path.read_bytes() for path in tmp_path.glob("*.cubin")]
    assert len(cubins) == 3 and {int.from_bytes(cubin[18:20], "little") for cubin in cubins} == {190}
    assert all(b"sm90_flash_fprop_wgmma" in cubin for cubin in cubins)
