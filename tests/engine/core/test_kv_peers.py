# SPDX-License-Identifier: Apache-2.0
"""An engine reads KV blocks from the server of another one over TCP, or computes them, with the same greedy output."""

import contextlib
import gc
import random
import socket
import struct
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from support.kv_peer import PeerServer
from support.kv_peer_relay import Relay
from support.thread_workers import ThreadWorker, engine_with_thread_workers
from support.tiered_engine import tiered_config
from support.tiny_checkpoints import BASE, CHECKPOINTS, VOCAB, make_adapter, make_checkpoint, write_checkpoint

from quire_engine.core.engine import Engine
from quire_engine.distributed.worker_handle import WorkerChannels
from quire_engine.kv_cache.swap_policy import SwapCosts
from quire_engine.kv_transfer import peer_connection, peer_store, store_traffic
from quire_engine.worker.model_runner import DeviceModelRunner
from quire_server.kv_peer import server
from quire_spec.engine.kv_transfer_config import PeerAddress
from quire_spec.engine.sampling_params import SamplingParams
from quire_spec.errors import Code, Internal
from quire_spec.protocol.messages import SequenceDelta, SequenceRequest
from quire_spec.protocol.protocol_error import ProtocolError

PREFIXES = [[random.Random(i).randrange(VOCAB) for _ in range(56)] for i in range(3)]
PARAMS = SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True)


@pytest.fixture(autouse=True)
def always_worthwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SwapCosts, "is_worthwhile", lambda *_: True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with a layer for each of three pipeline stages."""
    kind, overrides = CHECKPOINTS["llama"]
    return write_checkpoint(tmp_path_factory.mktemp("llama"), kind(**(BASE | {"num_hidden_layers": 4} | overrides)), 1)


@pytest.fixture(scope="module")
def adapter(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_adapter(folder, tmp_path_factory.mktemp("a"), 0, r=4)


@pytest.fixture(scope="module")
def key_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("key") / "key"
    file.touch(0o600)
    file.write_text("k" * 32)
    return file


def create(folder: Path, key_file: Path | None, adapter: Path | None = None, **fields: Any) -> Engine:
    lora = {} if adapter is None else {"enable_lora": True, "max_loras": 1}
    transfer = {} if key_file is None else {"kv_transfer": {"key_file": str(key_file)}, "kv_recompute_threshold": 0}
    config = tiered_config(folder, **({"num_blocks": 100, "num_host_blocks": 100} | lora | transfer | fields))
    engine = Engine.from_config(config) if config.ranks_per_core == 1 else engine_with_thread_workers(config)
    if adapter is not None:
        engine.add_adapter("sha256:0", adapter, engine.read_adapter(adapter))
    return engine


def serve(engine: Engine, source: str = "", adapter: bool = False) -> list[list[int]]:
    """Return the output of each prefix."""
    outputs: dict[int, list[int]] = {}
    for number, prefix in enumerate(PREFIXES):
        digest = "sha256:0" if adapter and number else None
        engine.add(SequenceRequest(number, [*prefix, 5], PARAMS, digest, kv_source=source))
        outputs[number] = []
    while engine.has_work:
        engine.read_pending_adapters()
        for result in engine.step().results:
            assert not result.error
            outputs[result.id] += result.token_ids
        engine.check_integrity()
    return list(outputs.values())


@contextlib.contextmanager
def peer(engine: Engine, key_file: Path, *args: int) -> Iterator[PeerServer]:
    server = PeerServer(engine, key_file, *args)
    try:
        yield server
    finally:
        server.close()
    engine.check_integrity()
    assert engine.stats().num_leased_rows == 0, "leases end with their connections"


@pytest.mark.parametrize(
    ("kv_cache_dtype", "tensor", "pipeline"),
    [
        ("auto", 1, 1),
        ("int8_per_token_head", 1, 1),
        ("auto", 2, 1),
        ("int8_per_token_head", 1, 2),
        ("auto", 1, 3),
        ("int8_per_token_head", 2, 2),
        ("auto", 2, 3),
    ],
)
def test_outputs_are_the_same_with_blocks_of_a_peer(
    folder: Path, adapter: Path, key_file: Path, kv_cache_dtype: str, tensor: int, pipeline: int
) -> None:
    """The tokens are those of one rank."""
    fields = {"kv_cache_dtype": kv_cache_dtype}
    expected = serve(create(folder, None, adapter, **fields), adapter=True)
    ranks = {"tensor_parallel_size": tensor, "pipeline_parallel_size": pipeline}
    holder, reader = (create(folder, key_file, adapter, **fields, **ranks) for _ in range(2))
    # The holder has used each prompt once, so that its blocks are only on the device.
    assert serve(holder, adapter=True) == expected and holder.stats().num_cached_host_blocks == 0
    with peer(holder, key_file) as server:
        assert serve(reader, server.address, adapter=True) == expected
        stats = reader.stats()
        assert stats.num_peer_read_blocks == stats.num_peer_requested_blocks == 21 and not stats.peer_errors
        assert stats.host_cache_hits > 150
        assert server.server.status().num_sent_blocks == 21


@pytest.mark.parametrize(
    ("name", "tensor", "fault"),
    [("qwen3_5", 1, ""), ("granite4-mamba", 2, ""), ("lfm2", 1, ""), ("kimi_linear", 1, ""), ("qwen3_5", 1, "damage")],
)
def test_prefixes_continue_from_states_of_a_peer(
    tmp_path: Path, key_file: Path, monkeypatch: pytest.MonkeyPatch, name: str, tensor: int, fault: str
) -> None:
    """The tokens are those of one rank. The holder has no snapshot in host memory before it is asked."""
    monkeypatch.setattr(store_traffic, "READ_DEADLINE_S", 20.0)
    checkpoint = make_checkpoint(tmp_path, name)
    adapter = make_adapter(checkpoint, tmp_path / "adapter", 0, r=4)
    fields = {"kv_offloading_size": 2**22 / 2**30, "tensor_parallel_size": tensor}
    expected = serve(create(checkpoint, None, adapter, **fields | {"tensor_parallel_size": 1}), adapter=True)
    holder, reader = (create(checkpoint, key_file, adapter, **fields) for _ in range(2))
    assert serve(holder, adapter=True) == expected and holder.stats().num_host_states == 0
    with peer(holder, key_file) as server, Relay(server.address, fault) as relay:
        assert serve(reader, relay.address, adapter=True) == expected
        stats, sent = reader.stats(), server.server.status().num_sent_blocks
        if fault:
            assert stats.num_peer_read_states == 0 and set(stats.peer_errors) == {"checksum"}
            return
        # The last of the seven blocks of a prompt ends before its last token.
        assert (stats.num_peer_read_states, stats.num_peer_read_blocks, sent) == (3, 21, 24)
        assert not stats.peer_errors and stats.host_cache_hits == 3 * 56
        assert holder.stats().num_host_states == 3


def test_leased_rows_contain_the_parts_of_all_ranks_while_steps_are_in_flight(folder: Path, key_file: Path) -> None:
    """A peer asks after each step, while blocks are evicted, and gets each block as every rank has it."""
    fields = {"kv_transfer": {"key_file": str(key_file)}, "kv_cache_memory_bytes": 60_000}
    fields |= {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}
    config = tiered_config(folder, num_host_blocks=40, **fields)
    workers: list[ThreadWorker] = []

    def start_worker(channels: WorkerChannels) -> ThreadWorker:
        workers.append(ThreadWorker(channels))
        return workers[-1]

    holder = engine_with_thread_workers(config, start_worker=start_worker)
    runner: Any = holder._runner
    ranks: list[Any] = [runner._local_runner, *(worker._worker._runner for worker in workers)]
    caches = [rank._kv_cache._data for rank in ranks]
    num_compared = num_in_flight = 0
    for number, prefix in enumerate(PREFIXES * 2):
        holder.add(SequenceRequest(number, [*prefix, number], PARAMS))
    while holder.has_work:
        holder.step()
        if keys := holder._block_pool.cached_hashes()[-10:]:
            rows = holder.lease_rows(b"lease", keys)
            for key, row in zip(keys, rows, strict=True):
                if row is not None and (block := holder._block_pool.lookup(key)) is not None:
                    parts = b"".join(cache[:, :, block].contiguous().numpy().tobytes() for cache in caches)
                    [buffer] = runner.host_rows.buffers(row)
                    assert bytes(buffer) == parts
                    num_compared += 1
                    num_in_flight += bool(holder._scheduler._in_flight)
            assert holder.leases is not None
            holder.leases.release_all()
        holder.check_integrity()
    assert num_compared > 50 and num_in_flight > 10


def test_a_peer_that_is_not_named_any_more_is_freed(
    folder: Path, key_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also without the garbage collector: its connection counts at the other pod, and it has threads."""
    monkeypatch.setattr(peer_store, "_MAX_PEERS", 1)
    holder, reader = create(folder, key_file), create(folder, key_file)
    serve(holder)
    gc.disable()
    try:
        with peer(holder, key_file) as server, Relay(server.address) as relay:
            serve(reader, server.address)
            assert reader._peers is not None
            store = weakref.ref(reader._peers.find(server.address))
            assert store() is not None and reader.stats().num_peer_read_blocks == 21
            reader._peers.find(relay.address)
            deadline = time.monotonic() + 10
            while store() is not None and time.monotonic() < deadline:
                time.sleep(0.01)
            assert store() is None
    finally:
        gc.enable()


def test_the_uncached_tokens_of_a_prompt_are_counted(folder: Path, adapter: Path, key_file: Path) -> None:
    engine = create(folder, key_file, adapter)
    serve(engine, adapter=True)

    def count(prefix: list[int], digest: str | None, salt: str | None = None) -> int:
        request = SequenceRequest(0, [*prefix, 5], SamplingParams(seed=0), digest, salt)
        return engine.uncached_prompt(request).num_tokens

    assert [count(prefix, "sha256:0" if number else None) for number, prefix in enumerate(PREFIXES)] == [1, 1, 1]
    assert count(PREFIXES[0][:28], None) == 5, "blocks of 8 tokens"
    assert count(PREFIXES[0], "sha256:0") == count(PREFIXES[1], None) == count(PREFIXES[0], "sha256:1") == 57
    assert count(PREFIXES[0], None, "salt") == 57
    engine.check_integrity()


@pytest.mark.parametrize("required", [True, False])
@pytest.mark.parametrize("quota", [100, 4])
def test_blocks_that_a_peer_does_not_lease_are_computed_or_end_the_request(
    folder: Path, key_file: Path, quota: int, required: bool
) -> None:
    holder, reader = create(folder, key_file), create(folder, key_file)
    expected = serve(holder)
    assert holder.leases is not None
    holder.leases.max_rows = quota
    outputs, errors = {0: list[int](), 1: list[int]()}, dict[int, str | None]()
    with peer(holder, key_file) as server:
        for number in outputs:
            tokens = [*PREFIXES[number], 5]
            reader.add(SequenceRequest(number, tokens, PARAMS, kv_source=server.address, kv_source_required=required))
        while reader.has_work:
            for result in reader.step().results:
                outputs[result.id] += result.token_ids
                if result.error_code is not None:
                    errors[result.id] = result.error_code
            reader.check_integrity()
    # The first one gets four of its seven blocks, and the lease ends after that.
    is_failed = required and quota < 7
    assert errors == (dict.fromkeys(outputs, Code.UNAVAILABLE) if is_failed else {})
    assert list(outputs.values()) == ([[], []] if is_failed else expected[:2])


@pytest.mark.parametrize("required", [True, False])
def test_a_peer_with_other_keys_is_not_asked(folder: Path, adapter: Path, key_file: Path, required: bool) -> None:
    holder, reader = create(folder, key_file, adapter), create(folder, key_file, adapter)
    prompt = [*PREFIXES[0], 5]

    def run(engine: Engine, **fields: Any) -> list[SequenceDelta]:
        engine.add(SequenceRequest(0, fields.pop("prompt", prompt), PARAMS, **fields))
        results = []
        while engine.has_work:
            engine.read_pending_adapters()
            results += engine.step().results
        return results

    expected = run(holder, returns_prompt_keys=True)
    keys = expected[0].prompt_keys
    assert keys is not None and keys.tokens == 56 and all(result.prompt_keys is None for result in expected[1:])
    others = {
        "keys_root": ({"cache_salt": "other"}, keys),
        "tokens": ({}, msgspec.structs.replace(keys, tokens=48)),
        "digest": ({"prompt": [4, *prompt[1:]]}, keys),
    }
    with peer(holder, key_file) as server:
        source = {"kv_source": server.address, "kv_source_required": required}
        for number, (reason, (fields, other)) in enumerate(others.items(), 1):
            results = run(reader, **fields, **source, kv_source_keys=other)
            assert [result.error_code for result in results if result.error_code] == [Code.UNAVAILABLE] * required
            assert required or [r.token_ids for r in results] == [r.token_ids for r in run(holder, **fields)]
            assert reader.stats().peer_errors[reason] == 1 and len(reader.stats().peer_errors) == number
        assert reader.stats().num_peer_requested_blocks == 0
        fresh = create(folder, key_file, adapter)
        assert [r.token_ids for r in run(fresh, **source, kv_source_keys=keys)] == [r.token_ids for r in expected]
        assert fresh.stats().num_peer_read_blocks == 7 and not fresh.stats().peer_errors


def test_short_prompts_are_computed_without_asking(folder: Path, key_file: Path) -> None:
    holder = create(folder, key_file)
    expected = serve(holder)
    with peer(holder, key_file) as server:
        for threshold, num_requested in ((58, 0), (57, 21)):
            reader = create(folder, key_file, kv_recompute_threshold=threshold)
            assert serve(reader, server.address) == expected
            assert reader.stats().num_peer_requested_blocks == num_requested


def test_what_differs_is_counted_and_computed(folder: Path, key_file: Path, tmp_path: Path) -> None:
    holder = create(folder, key_file)
    serve(holder)
    other_key = tmp_path / "other"
    other_key.touch(0o600)
    other_key.write_text("o" * 32)
    other_model = make_checkpoint(tmp_path / "other-model", "mistral")
    with peer(holder, key_file) as server:
        for checkpoint, key, fields, reason in (
            (folder, key_file, {"block_size": 16}, "block_size"),
            (folder, key_file, {"kv_cache_dtype": "int8_per_token_head"}, "kv_dtype"),
            (other_model, key_file, {}, "model"),
            (folder, other_key, {}, "closed"),
            (folder, key_file, {"tensor_parallel_size": 2}, "parallel"),
        ):
            reader = create(checkpoint, key, **fields)
            assert serve(reader, server.address) == serve(create(checkpoint, None, **fields)), reason
            assert reader.stats().num_peer_read_blocks == 0 and set(reader.stats().peer_errors) == {reason}
        assert server.server.status().refused == {"block_size": 1, "kv_dtype": 1, "model": 1, "key": 1, "parallel": 1}


@pytest.mark.parametrize("fault", ["hang", "drip", "damage", "huge", "random", "cut", "nobody"])
def test_outputs_are_right_whatever_a_peer_sends(
    folder: Path, key_file: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    """The reader connects through a relay that changes what the peer sends after the handshake."""
    monkeypatch.setattr(peer_connection, "STALL_S", 0.3)
    monkeypatch.setattr(peer_store, "_LATE_S", 0.4)
    monkeypatch.setattr(store_traffic, "READ_DEADLINE_S", 0.5)
    holder, reader = (create(folder, key_file) for _ in range(2))
    expected = serve(holder)
    with peer(holder, key_file) as server, Relay(server.address, fault) as relay:
        start = time.monotonic()
        assert serve(reader, relay.address) == expected
        assert time.monotonic() - start < 8
        while not (errors := reader.stats().peer_errors):
            assert time.monotonic() - start < 10, "the error is counted when the read ends"
            time.sleep(0.01)
        assert reader.stats().num_peer_read_blocks < 21
        if fault in (reasons := {"damage": "checksum", "drip": "deadline", "hang": "deadline"}):
            assert set(errors) == {reasons[fault]}


def test_a_peer_that_hangs_delays_no_read_of_another_one(folder: Path, key_file: Path) -> None:
    holder, reader = (create(folder, key_file) for _ in range(2))
    expected = serve(holder)
    with peer(holder, key_file) as server, Relay(server.address, "hang") as relay:
        for number, source in enumerate((relay.address, server.address, server.address)):
            reader.add(SequenceRequest(number, [*PREFIXES[number], 5], PARAMS, kv_source=source))
        outputs: dict[int, list[int]] = {0: [], 1: [], 2: []}
        while not len(outputs[1]) == len(outputs[2]) == PARAMS.max_tokens:
            for result in reader.step().results:
                outputs[result.id] += result.token_ids
        assert [outputs[1], outputs[2]] == expected[1:] and outputs[0] == []
        assert reader.stats().num_peer_read_blocks == 14 and not reader.stats().peer_errors
        reader.abort([0])


@pytest.mark.parametrize(
    "data", [b"", b"G" * 5000, b"QKVP" + b"\xff" * 12, b"QKVP" + struct.pack("<I", 40) + b"\xc1" * 40]
)
def test_server_ends_what_is_not_its_protocol(folder: Path, key_file: Path, data: bytes) -> None:
    holder = create(folder, key_file)
    with peer(holder, key_file) as server:
        host, port = server.address.split(":")
        with socket.create_connection((host, int(port)), 5) as connection:
            connection.sendall(data)
            with contextlib.suppress(OSError):  # the server has already closed the connection
                connection.shutdown(socket.SHUT_WR)
            with contextlib.suppress(ConnectionResetError):
                while connection.recv(4096):
                    pass
        assert sum(server.server.status().refused.values()) == bool(data)
        assert serve(create(folder, key_file), server.address) == serve(holder)


def test_slow_connections_and_too_many_of_one_address_are_closed(
    folder: Path, key_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "HANDSHAKE_S", 0.4)
    monkeypatch.setattr(server, "MAX_ADDRESS_CONNECTIONS", 2)
    with peer(create(folder, key_file), key_file) as peer_server, contextlib.ExitStack() as stack:
        host, port = peer_server.address.split(":")
        connections = [stack.enter_context(socket.create_connection((host, int(port)), 5)) for _ in range(3)]
        # Each message of the server is shorter.
        challenges = [connection.recv(1000) for connection in connections]
        assert [bool(challenge) for challenge in challenges] == [True, True, False]
        for byte in b"QKVP":
            connections[0].sendall(bytes([byte]))
            time.sleep(0.05)
        assert [connection.recv(1000) for connection in connections[:2]] == [b"", b""]
        assert peer_server.server.status().refused == {"limit": 1, "deadline": 2}


def test_quota_and_expiry_of_leases(folder: Path, key_file: Path) -> None:
    now = [0.0]
    holder = create(folder, key_file)
    serve(holder)
    holder._clock = lambda: now[0]
    keys = holder._block_pool.cached_hashes()[:20]
    assert None not in holder.lease_rows(b"1", keys) and holder.stats().num_leased_rows == 20
    # The quota is a quarter of 100 rows. The oldest lease stays.
    assert sum(row is not None for row in holder.lease_rows(b"2", keys)) == 5
    assert holder.stats().num_refused_leases == 15
    holder.check_integrity()
    now[0] = 29.0
    assert holder.extend_leases([b"1", b"3"]) == [True, False]
    now[0] = 31.0
    assert holder.expire_leases() == 20
    now[0] = 49.0
    assert holder.expire_leases() == 0 and holder.extend_leases([b"1"]) == [False]
    holder.check_integrity()


def test_copies_that_fail_pin_no_row(folder: Path, key_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank has no memory, for example. Rank 0 gets its error."""

    def fail(*_: object) -> None:
        raise RuntimeError("no memory")

    holder = create(folder, key_file, tensor_parallel_size=2)
    serve(holder)
    keys = holder._block_pool.cached_hashes()[:10]
    holder.lease_rows(b"1", keys[:5])
    with monkeypatch.context() as patch, pytest.raises(Internal, match="RuntimeError: no memory"):
        patch.setattr(DeviceModelRunner, "copy_rows", fail)
        holder.lease_rows(b"2", keys)
    holder.check_integrity()
    assert holder.stats().num_leased_rows == 5
    assert None not in holder.lease_rows(b"2", keys) and holder.stats().num_leased_rows == 15
    holder.check_integrity()


def test_another_node_sends_only_what_its_first_node_has_leased(
    folder: Path, key_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As long as the lease lasts. The number of the node and the generation of the group must be right."""
    holder = create(folder, key_file)
    serve(holder)
    layout, keys = holder.row_layout, holder._block_pool.cached_hashes()[:3]
    assert layout is not None
    monkeypatch.setattr(server, "_RECHECK_S", 60.0)
    with peer(holder, key_file) as first, contextlib.ExitStack() as stack:
        node = stack.enter_context(contextlib.closing(PeerServer(holder, key_file, None, first.address)))

        def connect(peer_server: PeerServer) -> peer_connection.PeerConnection:
            address = PeerAddress.parse(peer_server.address)
            assert address is not None
            connection = peer_connection.PeerConnection.open(address, b"k" * 32, layout, lambda: True)
            return stack.enter_context(peer_connection.closing(connection))

        connection = connect(first)
        assert connection.nodes() == []
        leased = connection.lease(keys)
        addresses, buffers = [0, 1, 2], [[memoryview(bytearray(layout.row_bytes))] for _ in keys]
        part = connect(node)
        places = part.part(leased.lease, 1, addresses)
        assert places == leased.rows, "both have the same rows"
        for _, place, buffer in zip(part.read(leased.lease, addresses, buffers), places, buffers, strict=True):
            assert peer_store.checksum(buffer) == place.checksum
        calls: dict[str, Callable[[peer_connection.PeerConnection], object]] = {
            "another node": lambda connection: connection.part(leased.lease, 2, addresses),
            "another lease": lambda connection: connection.part(b"x" * 16, 1, addresses),
            "another row": lambda connection: connection.part(leased.lease, 1, [3]),
            "only node 0 leases": lambda connection: connection.lease(keys),
            "only node 0 has heartbeats": lambda connection: connection.heartbeat(leased.lease),
        }
        for call in calls.values():
            with pytest.raises(ProtocolError):
                call(connect(node))
        node.rows.generation = 1
        with pytest.raises(ProtocolError):
            connect(node).part(leased.lease, 1, addresses)
        node.rows.generation = 0
        connection.release(leased.lease)
        with pytest.raises(ProtocolError):
            list(part.read(leased.lease, addresses, buffers))
        assert node.server.status().refused == {"nodes": 1, "lease": 4, "protocol": 2}


def test_aborted_request_ends_its_read(folder: Path, key_file: Path) -> None:
    holder, reader = (create(folder, key_file) for _ in range(2))
    serve(holder)
    assert holder.row_layout is not None
    with peer(holder, key_file, holder.row_layout.row_bytes) as server:
        reader.add(SequenceRequest(0, [*PREFIXES[0], 5], PARAMS, kv_source=server.address))
        reader.step()
        deadline = time.monotonic() + 10
        while not holder.stats().num_leased_rows and time.monotonic() < deadline:
            time.sleep(0.01)
        assert holder.stats().num_leased_rows == 7
        reader.abort([0])
        start = time.monotonic()
        while holder.stats().num_leased_rows:
            assert time.monotonic() - start < 1.0, "no row is pinned after a second"
            time.sleep(0.01)
