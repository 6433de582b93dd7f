# SPDX-License-Identifier: Apache-2.0
"""Real engines give the same greedy output when their folder fails in any way, and after they are killed in a copy."""

import errno
import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.folder_store import drain
from support.tiered_engine import serve_prompts, tiered_config
from support.tiny_checkpoints import make_checkpoint

from quire_engine.core.engine import Engine
from quire_engine.kv_cache.swap_policy import SwapCosts
from quire_engine.kv_transfer import folder_store

ERRORS = (errno.ENOSPC, errno.EROFS, errno.EIO, errno.ESTALE, errno.ENOENT, errno.EACCES, errno.EMFILE, errno.ENOTDIR)
CALLS = ("open", "readv", "writev", "rename", "unlink", "mkdir", "listdir", "scandir", "utime", "fstat", "stat")


class FaultyOs:
    """The module `os`, whose calls fail at random, or move too few or wrong bytes."""

    def __init__(self, seed: int, rate: float) -> None:
        self._rng, self.rate, self.num_faults = random.Random(seed), rate, 0

    def __getattr__(self, name: str) -> Any:
        function = getattr(os, name)
        return self._failing(name, function) if name in CALLS else function

    def _failing(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if self._rng.random() >= self.rate:
                return function(*args, **kwargs)
            self.num_faults += 1
            if name == "writev" and self._rng.random() < 0.5:
                return function(args[0], args[1][: self._rng.randrange(len(args[1]))])
            if name == "readv" and self._rng.random() < 0.5:
                num_bytes, block = function(*args), args[1][-1]
                block[self._rng.randrange(len(block))] ^= 1
                return num_bytes
            number = self._rng.choice(ERRORS)
            raise OSError(number, os.strerror(number))

        return call


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("llama"), "llama")


@pytest.fixture(scope="module")
def expected(folder: Path) -> dict[int, list[int]]:
    return serve_prompts(Engine.from_config(tiered_config(folder, num_blocks=200, enable_prefix_caching=False)))


@pytest.mark.parametrize(("seed", "rate"), [(1, 0.02), (2, 0.2), (3, 1.0)])
def test_outputs_are_right_while_the_file_system_fails(
    folder: Path,
    expected: dict[int, list[int]],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    seed: int,
    rate: float,
) -> None:
    monkeypatch.setattr(SwapCosts, "is_worthwhile", lambda *_: True)
    monkeypatch.setattr(folder_store, "_RETRY_S", 0.0)
    config = tiered_config(folder, num_host_blocks=30, kv_offloading_folder=str(tmp_path / "kv"))
    for start in range(2):
        engine = Engine.from_config(config)
        with monkeypatch.context() as patched:
            faulty = FaultyOs(seed + 10 * start, rate)
            patched.setattr(folder_store, "os", faulty)
            assert serve_prompts(engine) == expected
            traffic = engine._scheduler.store_traffic
            assert traffic is not None
            drain(traffic._store)
            assert faulty.num_faults > 0
    assert serve_prompts(engine) == expected, "and after it"
    engine = Engine.from_config(config)
    traffic = engine._scheduler.store_traffic
    assert traffic is not None
    assert serve_prompts(engine) == expected
    drain(traffic._store)
    traffic.poll()
    assert traffic.num_written_blocks + traffic.num_read_blocks > 0


@pytest.mark.parametrize("place", ["file", "host"])
def test_engine_that_was_killed_in_a_copy_leaves_no_wrong_block(
    folder: Path, expected: dict[int, list[int]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, place: str
) -> None:
    """It is killed when half of a block is copied, and again in the next life."""
    monkeypatch.setattr(SwapCosts, "is_worthwhile", lambda *_: True)
    code = f"import sys; sys.path[:0] = {sys.path!r}; from support.tiered_engine import main; main()"
    for number in (3, 1) if place == "file" else (2,):
        command = [sys.executable, "-c", code, str(folder), str(tmp_path / "kv"), place, str(number)]
        killed = subprocess.run(command, capture_output=True, text=True, timeout=120)
        assert killed.returncode == -signal.SIGKILL, killed.stderr
    temporary = list((tmp_path / "kv").rglob(".tmp-*"))
    assert bool(temporary) == (place == "file")
    for path in temporary:
        os.utime(path, (1, 1))
    for _ in range(2):
        engine = Engine.from_config(
            tiered_config(folder, num_host_blocks=30, kv_offloading_folder=str(tmp_path / "kv"))
        )
        traffic = engine._scheduler.store_traffic
        assert traffic is not None
        drain(traffic._store)
        assert not list((tmp_path / "kv").rglob(".tmp-*")), "what killed processes left is removed"
        assert serve_prompts(engine) == expected
        drain(traffic._store)
        traffic.poll()
        assert traffic.errors == {}
    assert traffic.num_read_blocks > 0
