# SPDX-License-Identifier: Apache-2.0
"""Real engines give the same greedy output with and without a cache of KV blocks in host memory."""

import contextlib
import functools
import queue
import random
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from support.folder_store import drain
from support.thread_nodes import start_engine
from support.thread_workers import engine_with_thread_workers
from support.tiered_engine import tiered_config as config
from support.tiny_checkpoints import VOCAB, make_adapter, make_checkpoint

from quire_engine.core.engine import Engine
from quire_engine.core.engine_loop import EngineLoop
from quire_engine.executor.node_rows import NodeRows
from quire_engine.kv_cache.swap_policy import SwapCosts
from quire_engine.kv_transfer import store_traffic
from quire_engine.kv_transfer.group_folder import GroupFolder
from quire_engine.weights.checkpoint import Checkpoint
from quire_spec.engine.sampling_params import SamplingParams
from quire_spec.errors import ConfigError, Unavailable
from quire_spec.model.attention import state_config
from quire_spec.protocol.messages import SequenceRequest, StepResult

PREFIXES = [[random.Random(i).randrange(VOCAB) for _ in range(56)] for i in range(3)]
PARAMS = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("llama"), "llama")


@pytest.fixture(scope="module")
def adapters(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {f"sha256:{i}": make_adapter(folder, tmp_path_factory.mktemp("a"), i, r=4) for i in range(2)}


def serve(engine: Engine, adapters: dict[str, Path], num_rounds: int = 3) -> dict[int, list[int]]:
    """Run rounds of requests, with and without adapters, some of them at the same time. In each round, every prefix
    occurs twice in a row."""
    rng, outputs = random.Random(1), dict[int, list[int]]()
    for digest, path in adapters.items():
        engine.add_adapter(digest, path, engine.read_adapter(path))
    owners = [(digest, prefix) for digest in (None, *adapters) for prefix in PREFIXES for _ in range(2)]
    for number, (digest, prefix) in enumerate(owners * num_rounds):
        prompt = prefix[: rng.choice([48, 56])] + [rng.randrange(VOCAB) for _ in range(rng.choice([0, 1, 5]))]
        engine.add(SequenceRequest(number, prompt, PARAMS, digest, None, []))
        outputs[number] = []
        for _ in range(rng.choice([6, 16, 40])):
            step(engine, outputs)
    while engine.has_work:
        step(engine, outputs)
    assert engine.stats().num_used_blocks == engine.stats().num_used_host_blocks == 0
    return outputs


def step(engine: Engine, outputs: dict[int, list[int]]) -> None:
    engine.read_pending_adapters()
    for result in engine.step().results:
        assert not result.error
        outputs[result.id] += result.token_ids
    engine.check_integrity()


@pytest.fixture(scope="module")
def expected(folder: Path, adapters: dict[str, Path]) -> Callable[..., Any]:
    """Return a function that returns the outputs of `serve` without offloading."""
    lora = {"enable_lora": True, "max_loras": 2}

    @functools.cache
    def outputs(*args: int) -> Any:
        return serve(Engine.from_config(config(folder, 200, enable_prefix_caching=False, **lora)), adapters, *args)

    return outputs


@pytest.mark.parametrize(
    ("num_host_blocks", "async_scheduling", "size"),
    [(10, False, 1), (10, True, 1), (200, False, 1), (200, True, 1), (10, True, 2), (200, False, 2)],
)
def test_outputs_are_the_same_with_and_without_offloading(
    folder: Path,
    adapters: dict[str, Path],
    expected: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
    num_host_blocks: int,
    async_scheduling: bool,
    size: int,
) -> None:
    monkeypatch.setattr(SwapCosts, "is_worthwhile", lambda *_: True)
    fields = {"async_scheduling": async_scheduling, "tensor_parallel_size": size, "enable_lora": True, "max_loras": 2}
    engine = engine_with_thread_workers(config(folder, num_host_blocks=num_host_blocks, **fields))
    assert serve(engine, adapters) == expected()
    stats = engine.stats()
    assert stats.num_host_blocks == num_host_blocks and stats.num_cached_host_blocks <= num_host_blocks
    assert stats.kv_offload_store_bytes > 0 and stats.host_cache_queries > stats.host_cache_hits
    # Too few rows for all prefixes are still correct.
    assert (stats.host_cache_hits > 300) == (stats.kv_offload_load_bytes > 0) == (num_host_blocks > 10)
    assert stats.num_preemptions > 0


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("granite4-mamba", {"tensor_parallel_size": 2}),
        ("qwen3_5", {"async_scheduling": True}),
    ],
)
def test_prefixes_continue_from_states_in_host_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, fields: dict[str, Any]
) -> None:
    monkeypatch.setattr(SwapCosts, "is_worthwhile", lambda *_: True)
    # Otherwise, the device has room for all snapshots of this test.
    monkeypatch.setattr(state_config, "_MIN_SNAPSHOTS", 1)
    checkpoint = make_checkpoint(tmp_path, name)
    expected = serve(Engine.from_config(config(checkpoint, 200, enable_prefix_caching=False)), {})
    gib = 2**21 / 2**30
    engine = engine_with_thread_workers(config(checkpoint, kv_offloading_size=gib, max_num_seqs=2, **fields))
    assert serve(engine, {}) == expected
    stats, states = engine.stats(), engine._scheduler.states
    assert states is not None and stats.host_cache_hits > 100
    assert states.host.num_stored > 2 and states.host.num_loaded > 0
    assert engine.memory.swap_bytes <= 2**21
    with pytest.raises(ConfigError, match=r"kv_offloading_size: .*state"):
        Engine.from_config(config(checkpoint, kv_offloading_size=1e-6))


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("qwen3_5", {"async_scheduling": True}),
        ("lfm2", {}),
        ("kimi_linear", {}),
        ("granite4-mamba", {"tensor_parallel_size": 2}),
    ],
)
def test_prefixes_continue_from_states_of_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, fields: dict[str, Any]
) -> None:
    """A file has the parts of all ranks, and its last byte is in the part of the last one."""
    monkeypatch.setattr(SwapCosts, "is_worthwhile", lambda *_: True)
    monkeypatch.setattr(state_config, "_MIN_SNAPSHOTS", 1)
    checkpoint = make_checkpoint(tmp_path / "model", name)
    expected = serve(Engine.from_config(config(checkpoint, 200, enable_prefix_caching=False)), {}, 2)
    fields |= {"kv_offloading_size": 2**21 / 2**30, "kv_offloading_folder": str(tmp_path / "kv"), "max_num_seqs": 2}
    states: list[int] = []
    for start in range(4):
        engine = engine_with_thread_workers(config(checkpoint, **fields))
        traffic = engine._scheduler.store_traffic
        assert traffic is not None and traffic.states is not None
        stores = traffic._store, traffic.states._store
        representation = traffic.states._store._representation.hex()  # type: ignore[attr-defined]
        for path in (tmp_path / "kv" / representation).rglob("[0-9a-f]" * 64) if start > 1 else []:
            if start == 2:
                path.write_bytes(path.read_bytes()[:-1] + b"?")
            else:
                path.unlink()
        if start == 3:
            monkeypatch.setattr(traffic.states._store, "write", lambda _keys, _rows, on_done: on_done(0))
        for store in stores:
            drain(store)
        assert serve(engine, {}, 2) == expected, "the same output in every state of the folder"
        for store in stores:
            drain(store)
        traffic.poll()
        engine.check_integrity()
        stats = engine.stats()
        states.append(stats.num_folder_read_states)
        assert start > 0 or (stats.num_folder_written_states > 2 and stats.num_folder_written_blocks > 10)
        assert set(stats.folder_errors) == ({"corrupt"} if start == 2 else set())
    assert states[0] < states[1] and states[3] == 0


@pytest.mark.parametrize(
    ("settings", "num_rounds"),
    [
        ({"async_scheduling": False}, 2),
        ({"async_scheduling": True}, 2),
        # One round, because four threads that wait for each other take five times as long.
        ({"tensor_parallel_size": 2, "pipeline_parallel_size": 2}, 1),
    ],
)
def test_folder_survives_a_restart_and_serves_only_the_same_model(
    folder: Path,
    adapters: dict[str, Path],
    expected: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    settings: dict[str, Any],
    num_rounds: int,
) -> None:
    monkeypatch.setattr(SwapCosts, "is_worthwhile", lambda *_: True)
    lora: dict[str, Any] = {"enable_lora": True, "max_loras": 2}
    fields = lora | settings | {"kv_offloading_folder": str(tmp_path / "kv")}
    for start in range(3):
        engine = engine_with_thread_workers(config(folder, num_host_blocks=30, **fields))
        traffic = engine._scheduler.store_traffic
        assert traffic is not None
        if start == 2:
            for path in (tmp_path / "kv").rglob("[0-9a-f]" * 64):
                path.write_bytes(path.read_bytes()[:-1] + b"?")
        drain(traffic._store)
        assert serve(engine, adapters, num_rounds) == expected(num_rounds), (
            "the same output in every state of the folder"
        )
        drain(traffic._store)
        traffic.poll()
        assert traffic.num_written_blocks > 10 or start > 0
        assert traffic.num_read_blocks > 0 or start != 1
        assert set(engine.stats().folder_errors) == ({"corrupt"} if start == 2 else set())
        assert engine.stats().num_folder_read_blocks == traffic.num_read_blocks
    other = Path(shutil.copytree(folder, tmp_path / "other"))
    weights = bytearray((other / "model.safetensors").read_bytes())
    weights[len(weights) // 2] ^= 1
    (other / "model.safetensors").write_bytes(weights)
    engine = Engine.from_config(config(other, num_host_blocks=30, **fields))
    serve(engine, {}, 1)
    traffic = engine._scheduler.store_traffic
    assert traffic is not None and traffic.num_read_blocks == 0


class NodeFolders:
    """A group of two nodes, each with a folder of its own."""

    def __init__(self, model: Path, adapters: dict[str, Path], folder: Path) -> None:
        self.adapters, self.folder = adapters, folder
        self.own, self.other = folder / "kv0", folder / "kv1"
        fields: dict[str, Any] = {"enable_lora": True, "max_loras": 2, "kv_offloading_folder": str(self.own)}
        self.config = config(model, 60, 60, pipeline_parallel_size=2, **fields)
        alone = Engine.from_config(config(model, 60, enable_prefix_caching=False, enable_lora=True, max_loras=2))
        self._load_adapters(alone)
        self.expected = self.ask(alone)

    @contextlib.contextmanager
    def start(self, other: Path | None = None) -> Iterator[Engine]:
        changes = {"kv_offloading_folder": str(other or self.other)}
        with start_engine(self.config, 2, self.folder, changes) as engine:
            self._load_adapters(engine)
            drain(self.traffic(engine)._store)
            yield engine

    def run(self, other: Path | None = None) -> tuple[int, dict[str, int]]:
        """Start the group, and ask twice, so that blocks are stored. Return the number of blocks that were read from
        the folders, and their errors."""
        with self.start(other) as engine:
            assert self.ask(engine) == self.expected
            num_read = self.traffic(engine).num_read_blocks
            assert self.ask(engine) == self.expected
            # Blocks are copied to host memory by later steps.
            assert self.ask(engine) == self.expected
            self.settle(engine)
            return num_read, engine.stats().folder_errors

    def ask(self, engine: Engine) -> dict[int, list[int]]:
        outputs: dict[int, list[int]] = {}
        for number, digest in enumerate((None, *self.adapters)):
            outputs[number] = []
            engine.add(SequenceRequest(number, PREFIXES[0], replace(PARAMS, max_tokens=6), digest, None, []))
            while engine.has_work:
                step(engine, outputs)
        return outputs

    def settle(self, engine: Engine) -> None:
        drain(self.traffic(engine)._store)
        self.traffic(engine).poll()
        engine.check_integrity()
        assert not self.traffic(engine).held_rows

    @staticmethod
    def traffic(engine: Engine) -> store_traffic.StoreTraffic:
        traffic = engine._scheduler.store_traffic
        assert traffic is not None and isinstance(traffic._store, GroupFolder)
        return traffic

    def _load_adapters(self, engine: Engine) -> None:
        for digest, path in self.adapters.items():
            engine.add_adapter(digest, path, engine.read_adapter(path))


def files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("[0-9a-f]" * 64) if path.is_file()]


@pytest.fixture
def node_folders(
    folder: Path, adapters: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> NodeFolders:
    monkeypatch.setattr(SwapCosts, "is_worthwhile", lambda *_: True)
    return NodeFolders(folder, adapters, tmp_path)


def test_a_group_reads_only_blocks_of_which_every_node_has_its_part(node_folders: NodeFolders, tmp_path: Path) -> None:
    own, other = node_folders.own, node_folders.other
    assert node_folders.run() == (0, {})
    num_files = len(files(own))
    assert num_files > 10 and {path.name for path in files(own)} == {path.name for path in files(other)}
    assert node_folders.run() == (num_files, {}), "all files are read after a restart"
    shutil.rmtree(other)
    assert node_folders.run() == (0, {}), "nothing is read if one node has lost its folder"
    assert len(files(other)) == num_files, "what the node lacked is written again"
    for path in files(other):
        path.write_bytes((data := path.read_bytes())[:-1] + bytes([data[-1] ^ 1]))
    assert node_folders.run() == (0, {"corrupt": 3}), "one miss for each of the three prompts"
    shutil.rmtree(own)
    assert node_folders.run() == (0, {})
    shutil.copytree(own, swapped := tmp_path / "swapped")
    assert node_folders.run(swapped) == (0, {}), "the parts of another node are not read"
    assert [node_folders.run(own)[0] for _ in range(2)] == [0, num_files], "nodes can share one folder"


def test_a_group_does_not_wait_for_a_node_that_is_late_or_cannot_write(
    node_folders: NodeFolders, monkeypatch: pytest.MonkeyPatch
) -> None:
    node_folders.run()
    monkeypatch.setattr(store_traffic, "READ_DEADLINE_S", 0.2)
    released, start_transfer = threading.Event(), NodeRows.start_transfer

    def hang(rows: NodeRows, call: dict[str, Any], reply: Callable[[list[Any]], None]) -> None:
        start_transfer(rows, call, lambda values: (released.wait(60), reply(values))[1])

    monkeypatch.setattr(NodeRows, "start_transfer", hang)
    with node_folders.start() as engine:
        try:
            assert node_folders.ask(engine) == node_folders.expected
            assert node_folders.traffic(engine).num_read_blocks == 0 < len(node_folders.traffic(engine).held_rows)
        finally:
            released.set()
        node_folders.settle(engine)
        assert node_folders.traffic(engine).num_read_blocks > 0, "the answer serves later requests"
    monkeypatch.setattr(NodeRows, "start_transfer", start_transfer)
    shutil.rmtree(node_folders.own)
    shutil.rmtree(node_folders.other)
    node_folders.other.touch()
    with pytest.raises(Unavailable, match=r"^kv_offloading_folder: '.*kv1' cannot be used on node 1: .*; give a fol"):
        node_folders.run()
    node_folders.other.unlink()
    monkeypatch.setattr(NodeRows, "start_transfer", lambda *_: 1 / 0)
    assert node_folders.run() == (0, {}), "a defect of a node is a miss"
    assert not files(node_folders.other)


def test_loop_computes_a_prompt_when_the_store_is_late(
    folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Nothing else wakes the loop."""
    monkeypatch.setattr(SwapCosts, "is_worthwhile", lambda *_: True)
    monkeypatch.setattr(store_traffic, "READ_DEADLINE_S", 0.3)
    engine = Engine.from_config(config(folder, num_host_blocks=30, kv_offloading_folder=str(tmp_path / "kv")))
    traffic = engine._scheduler.store_traffic
    assert traffic is not None
    reads: list[object] = []
    monkeypatch.setattr(traffic._store, "contains", len)
    monkeypatch.setattr(traffic._store, "read", lambda *arguments: reads.append(arguments))
    published: queue.SimpleQueue[StepResult] = queue.SimpleQueue()
    loop = EngineLoop(engine, lambda _, result: published.put(result), *[lambda *_: None] * 3)
    threading.Thread(target=loop.run, daemon=True).start()
    loop.attach_client(1)
    start, num_results = time.monotonic(), 0
    for number in range(2):
        loop.generate(1, SequenceRequest(number, PREFIXES[0], replace(PARAMS, max_tokens=1), None, None, []))
    while num_results < 2:
        num_results += len(published.get(timeout=10).results)
    assert len(reads) == 1 and time.monotonic() - start >= 0.3


def test_offloading_is_refused_by_name(tmp_path: Path, folder: Path) -> None:
    windows = make_checkpoint(tmp_path / "gemma2", "gemma2")
    with pytest.raises(ConfigError, match=r"^kv_offloading_size: only some layers of this model have a sliding window"):
        Engine.from_config(config(windows, num_host_blocks=10, num_blocks=400))
    with pytest.raises(ConfigError, match=r"^kv_offloading_size: needs enable_prefix_caching"):
        config(folder, num_host_blocks=10, enable_prefix_caching=False)
    with pytest.raises(ConfigError, match=r"^kv_offloading_size: 1000000.0 GiB: .* needs \d+ bytes, but \d+ are free"):
        Engine.from_config(config(folder, kv_offloading_size=1e6))
    with pytest.raises(ConfigError, match=r"^kv_offloading_folder: needs kv_offloading_size"):
        config(folder, kv_offloading_folder="kv")
    with pytest.raises(ConfigError, match=r"^kv_offloading_folder: not possible with a drafter"):
        draft = {"method": "draft_model", "model": "d", "num_speculative_tokens": 2}
        config(folder, num_host_blocks=10, kv_offloading_folder="kv", speculative_config=draft)
    with pytest.raises(ConfigError, match=r"^kv_offloading_folder: '/proc/kv' cannot be used"):
        Engine.from_config(config(folder, num_host_blocks=10, kv_offloading_folder="/proc/kv"))
    assert Checkpoint.load(folder).fingerprint.startswith("sampled-"), "blocks that stay in the process need no digest"
