# SPDX-License-Identifier: Apache-2.0
"""Groups of nodes: which nodes may join, and what happens when one is lost."""

import dataclasses
import re
import secrets
import socket
import struct
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from support.thread_nodes import ThreadNode, group_config
from support.thread_workers import engine_with_thread_workers
from support.tiny_checkpoints import greedy_output, make_llama

from quire_engine import SamplingParams
from quire_engine.step.plan import RunnerLost
from quire_spec.engine.config import EngineConfig
from quire_spec.protocol.messages import SequenceRequest


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return make_llama(tmp_path_factory.mktemp("llama"))


@pytest.fixture
def config(model: Path, tmp_path: Path) -> EngineConfig:
    small = {"dtype": "float32", "max_model_len": 64, "kv_cache_memory_bytes": 1 << 20}
    return group_config(EngineConfig(model=str(model), pipeline_parallel_size=2, **small), 2, tmp_path)


def _generate(engine):
    engine.add(SequenceRequest(1, [1, 2, 3], SamplingParams.from_mapping({"temperature": 0.0, "max_tokens": 8})))
    tokens = []
    while engine.has_work:
        tokens += [token for result in engine.step().results for token in result.token_ids]
    return tokens


def test_a_group_forms_only_of_nodes_with_the_key_that_agree(config, model, tmp_path, monkeypatch):
    """While the first node waits, it closes connections that send random bytes, too long frames or nothing."""
    monkeypatch.setattr("quire_engine.distributed.node_connection.HANDSHAKE_S", 0.5)
    other_key = tmp_path / "other-key"
    other_key.touch(0o600)
    other_key.write_text("o" * 32)
    wrong = {
        r"use the same key on all nodes": {"rank_key_file": str(other_key)},
        r"block_size: is 16 on node 0 and 32 on node 1": {"block_size": 32},
        r"model: is 'sampled-sha256:\w+' on node 0 and 'sampled-": {"model": str(make_llama(tmp_path / "other", 5))},
    }
    with ThreadPoolExecutor() as threads:
        engine = threads.submit(engine_with_thread_workers, config)
        refused = {
            pattern: ThreadNode(dataclasses.replace(config, **changes), 1, tmp_path / "wrong")
            for pattern, changes in wrong.items()
        }
        refused["node rank 2: must be from 1 to 1"] = ThreadNode(config, 2, tmp_path / "wrong")
        for pattern, node in refused.items():
            assert re.search(pattern, node.wait()), node.outcome
        for data in (secrets.token_bytes(4096), struct.pack("<4sHHI", b"QRNK", 0, 0, 2**32 - 1), b""):
            with socket.create_connection(("127.0.0.1", config.rank_port)) as hostile:
                hostile.sendall(data)
                hostile.settimeout(5)
                try:
                    while hostile.recv(4096):
                        pass
                except ConnectionResetError:
                    pass
        node = ThreadNode(config, 1, tmp_path)
        assert _generate(engine.result(30)) == greedy_output(model, [1, 2, 3], 8)
    assert (node.node.status().state, node.node.status().generation) == ("ready", 1)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", config.rank_port))
    node.node.close()
    node.wait()


def test_a_lost_node_ends_the_group_and_the_next_group_has_a_higher_generation(config, model, tmp_path):
    reasons, lost = [], threading.Event()

    def on_lost(reason):
        reasons.append(reason)
        lost.set()

    for generation in (1, 2):
        node = ThreadNode(config, 1, tmp_path)
        engine = engine_with_thread_workers(config, on_lost=on_lost)
        assert node.node.status().generation == generation
        assert _generate(engine) == greedy_output(model, [1, 2, 3], 8)
        lost.clear()
        # As if the worker of the node was killed.
        node.node._relay._workers.handles[1].kill()
        assert "rank 1 ended" in node.wait()
        assert lost.wait(5) and re.match("rank 1 of 2 ended: node 1: 127.0.0.1: rank 1 ended: ", reasons[-1]), reasons
        with pytest.raises(RunnerLost, match="rank 1 of 2 ended"):
            _generate(engine)
        engine._runner._worker_group._watch_thread.join(5)


def test_an_error_of_another_node_names_the_rank_and_does_not_count_as_configuration(config, tmp_path, monkeypatch):
    """Two stages cannot load: the second one has another folder than the first, without weights."""
    node = ThreadNode(config, 1, tmp_path)
    node.node._checkpoint = dataclasses.replace(node.node._checkpoint, folder=tmp_path / "empty")
    (tmp_path / "empty").mkdir()
    with pytest.raises(RunnerLost, match=r"rank 1 cannot load: .*config\.json"):
        engine_with_thread_workers(config)
    assert node.wait()
