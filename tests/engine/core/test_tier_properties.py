# SPDX-License-Identifier: Apache-2.0
"""Whatever is cached where, greedy outputs are those of an engine that caches nothing.

Random requests run on one or two cores that share a folder, each on a core that dispatch could choose. Memory is so
small that sequences are preempted and blocks are evicted from each tier. KV events, if they are on, describe exactly
what each tier holds.
"""

import tempfile
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from support.folder_store import drain
from support.tiered_engine import VOCAB, tiered_config
from support.tiny_checkpoints import make_adapter, make_checkpoint

from quire_engine.core.engine import Engine
from quire_engine.kv_cache.block_events import BlocksStored
from quire_engine.kv_cache.swap_policy import SwapCosts
from quire_spec.constants import AdapterDigest
from quire_spec.engine.sampling_params import SamplingParams
from quire_spec.protocol.messages import SequenceRequest

DIGEST = AdapterDigest("sha256:1")
MAX_OUTPUT = 20
PARAMS = SamplingParams(temperature=0.0, max_tokens=MAX_OUTPUT, ignore_eos=True)
LORA = {"enable_lora": True, "max_loras": 1}


@dataclass(frozen=True)
class Request:
    """A prompt is the beginning of one of three texts, and one token of its own."""

    text: int
    length: int
    last: int
    num_output: int
    digest: AdapterDigest | None
    salt: str | None
    core: int
    num_steps: int
    """Number of steps until the next request arrives."""
    is_aborted: bool

    @property
    def prompt(self) -> list[int]:
        """Token ids."""
        return [(self.text * 101 + i * (self.text + 7)) % VOCAB for i in range(self.length)] + [self.last]


REQUESTS = st.lists(
    st.builds(
        Request,
        text=st.integers(0, 2),
        length=st.sampled_from([16, 40, 56, 70]),
        last=st.integers(0, 2),
        num_output=st.integers(1, MAX_OUTPUT),
        digest=st.sampled_from([None, None, DIGEST]),
        salt=st.sampled_from([None, None, "a"]),
        core=st.integers(0, 1),
        num_steps=st.sampled_from([0, 1, 5, 30]),
        is_aborted=st.sampled_from([False, False, False, True]),
    ),
    min_size=6,
    max_size=24,
)


class Core:
    """An engine, the blocks that its events name, and the outputs of its requests."""

    def __init__(self, engine: Engine, adapter: Path, has_events: bool) -> None:
        self.engine, self._has_events = engine, has_events
        self.outputs = defaultdict[int, list[int]](list)
        self._held: set[tuple[str, bytes]] = set()
        engine.add_adapter(DIGEST, adapter, engine.read_adapter(adapter))
        if has_events:
            engine.observe_blocks()

    def step(self) -> None:
        """Run one step, and check the invariants of the engine."""
        for result in self.engine.step().results:
            assert not result.error, result.error
            self.outputs[result.id] += result.token_ids
        self.engine.check_integrity()
        for event in self.engine.pop_block_events():
            blocks = {(event.medium, key) for key in event.keys}
            if isinstance(event, BlocksStored):
                assert not self._held & blocks, "a block was stored twice"
                self._held |= blocks
            else:
                assert blocks <= self._held, "a block was removed that was not stored"
                self._held -= blocks

    def finish(self) -> None:
        """Run all requests to their ends. The events then name the blocks that each memory holds."""
        while self.engine.has_work:
            self.step()
        if (traffic := self.engine._scheduler.store_traffic) is not None:
            drain(traffic._store)
            traffic.poll()
            assert traffic.errors == {}
        self.step()
        stats = self.engine.stats()
        assert stats.num_used_blocks == stats.num_used_host_blocks == 0
        if self._has_events:
            held = {"GPU": self.engine._block_pool, "CPU": self.engine._scheduler.host_cache.pool}
            for medium, pool in held.items():
                assert {key for name, key in self._held if name == medium} == set(pool.cached_hashes())


class Reference:
    """Outputs of an engine that runs one request at a time and caches nothing."""

    def __init__(self, folder: Path, adapter: Path) -> None:
        engine = Engine.from_config(tiered_config(folder, num_blocks=40, enable_prefix_caching=False, **LORA))
        self._core, self._known = Core(engine, adapter, False), dict[tuple[object, ...], list[int]]()

    def output(self, request: Request) -> list[int]:
        """Return the output tokens of a request."""
        key = (*request.prompt, request.digest)
        if key not in self._known:
            self._core.engine.add(SequenceRequest(0, request.prompt, PARAMS, request.digest))
            self._core.outputs.clear()
            self._core.finish()
            self._known[key] = self._core.outputs[0]
        return self._known[key][: request.num_output]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("llama"), "llama")


@pytest.fixture(scope="module")
def adapter(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_adapter(folder, tmp_path_factory.mktemp("adapter"), 1, r=4)


@pytest.fixture(scope="module")
def reference(folder: Path, adapter: Path) -> Reference:
    return Reference(folder, adapter)


@pytest.fixture(autouse=True)
def always_copy() -> Iterator[None]:
    with patch.object(SwapCosts, "is_worthwhile", lambda *_: True):
        yield


def run(cores: list[Core], requests: list[Request]) -> None:
    """Run the requests to their ends, each on its core."""
    for number, request in enumerate(requests):
        core = cores[request.core % len(cores)]
        params = replace(PARAMS, max_tokens=request.num_output)
        core.engine.add(SequenceRequest(number, request.prompt, params, request.digest, request.salt))
        for _ in range(request.num_steps):
            core.step()
        if request.is_aborted:
            core.engine.abort([number])
    for core in cores:
        core.finish()


@settings(deadline=None, max_examples=30, suppress_health_check=list(HealthCheck))
@given(
    requests=REQUESTS,
    num_blocks=st.integers(13, 30),
    num_host_blocks=st.sampled_from([0, 4, 12, 60]),
    folder_blocks=st.sampled_from([None, 10, 1000]),
    num_cores=st.sampled_from([1, 2]),
    has_events=st.booleans(),
    async_scheduling=st.booleans(),
)
def test_outputs_do_not_depend_on_tiers_dispatch_and_events(
    folder: Path,
    adapter: Path,
    reference: Reference,
    requests: list[Request],
    num_blocks: int,
    num_host_blocks: int,
    folder_blocks: int | None,
    num_cores: int,
    has_events: bool,
    async_scheduling: bool,
) -> None:
    with tempfile.TemporaryDirectory() as root:
        config = tiered_config(
            folder, num_blocks, num_host_blocks, max_num_seqs=4, async_scheduling=async_scheduling, **LORA
        )
        if num_host_blocks and folder_blocks is not None:
            block_gib = config.kv_offloading_size / num_host_blocks
            config = tiered_config(
                folder,
                num_blocks,
                num_host_blocks,
                max_num_seqs=4,
                async_scheduling=async_scheduling,
                kv_offloading_folder=root,
                kv_offloading_folder_size=folder_blocks * block_gib,
                **LORA,
            )
        for _ in range(2 if config.kv_offloading_folder is not None else 1):
            # In the second life, the blocks are only in the folder.
            cores = [Core(Engine.from_config(config), adapter, has_events) for _ in range(num_cores)]
            run(cores, requests)
            for number, request in enumerate(requests):
                output, expected = cores[request.core % num_cores].outputs[number], reference.output(request)
                assert output == (expected[: len(output)] if request.is_aborted else expected), request
