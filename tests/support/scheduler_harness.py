# SPDX-License-Identifier: Apache-2.0
"""Test harness for the scheduler: a scheduler with a TokenEchoRunner, stepped by the test."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from support.fake_runner import TokenEchoRunner, expected_output
from support.fake_store import FakeStore
from support.scripted_drafts import ScriptedProposer

from quire_engine.kv_cache.block_hash import BlockHasher
from quire_engine.kv_cache.block_pool import BlockPool
from quire_engine.kv_cache.state_pool import StatePool
from quire_engine.kv_cache.swap_policy import SwapCosts
from quire_engine.lora.adapter_info import AdapterInfo
from quire_engine.lora.registry import AdapterRegistry
from quire_engine.scheduling.scheduler import Scheduler
from quire_engine.sequence import Sequence
from quire_engine.step.plan import InFlightStep, StepPlan
from quire_spec.engine.config import EngineConfig
from quire_spec.engine.sampling_params import SamplingParams
from quire_spec.model.kv_layout import KVLayout

CONFIG = EngineConfig("m", block_size=8, max_num_seqs=8, max_num_batched_tokens=64, enable_prefix_caching=False)

ONE_GROUP = KVLayout()
NEVER_SWAP = SwapCosts()
ALWAYS_SWAP = SwapCosts(64, seconds_per_block=0.0, seconds_per_token=1.0)


@dataclass
class SchedulerHarness:
    """A scheduler with a TokenEchoRunner and so few blocks that tests can count them."""

    config: EngineConfig = CONFIG
    num_blocks: int = 32
    max_model_len: int = 128
    adapter_digests: str = ""
    max_loras: int = 2
    swap_costs: SwapCosts = NEVER_SWAP
    lookahead: bool = False
    """Launch each step, where possible, while the previous one is in flight."""
    layout: KVLayout = ONE_GROUP
    invocations: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Invocation tokens of some adapters."""
    has_store: bool = False
    """Whether a FakeStore is behind the cache in host memory; its transfers end when nothing else can run."""
    num_states: int = 0
    """Number of rows for states; 0 if the model has none."""
    now: float = 0.0
    next_id: int = 0
    outputs: dict[int, list[int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.block_pool = BlockPool(self.num_blocks)
        self.registry = AdapterRegistry(self.max_loras, 4 * self.max_loras)
        self.runner = TokenEchoRunner(
            self.num_blocks, self.config.block_size, swap_costs=self.swap_costs, layout=self.layout
        )
        for digest in self.adapter_digests:
            self.registry.add(
                digest, Path(digest), False, AdapterInfo(invocation_tokens=self.invocations.get(digest, ()))
            )
            self.runner.store_adapter(digest, digest)
        self.store = FakeStore(self.runner) if self.has_store else None
        self.state_store = FakeStore(self.runner, self.num_states) if self.has_store and self.num_states else None
        self.block_hasher = BlockHasher("m", "float32", self.config.block_size, "float32")
        self.scheduler = Scheduler(
            self.config,
            self.block_pool,
            self.registry,
            self.block_hasher,
            self.max_model_len,
            self.swap_costs,
            self.layout,
            self.store,
            StatePool(self.num_states) if self.num_states else None,
            state_store=self.state_store,
        )
        if self.scheduler.states is not None:
            self.scheduler.states._decode_interval = 2 * self.config.block_size
        if self.scheduler.draft_planner is not None:
            self.scheduler.draft_planner._proposer = ScriptedProposer(
                lambda sequence, num_tokens: expected_output(
                    sequence.tokens(0, sequence.num_tokens), num_tokens, sequence.adapter_until(sequence.num_tokens)
                )
            )
        self.sequences: dict[int, Sequence] = {}
        self.lookahead_step: InFlightStep | None = None
        """The step that was launched ahead."""

    def add(self, prompt: list[int] | int, num_output: int = 4, **fields: Any) -> Sequence:
        """Queue a sequence. `prompt`: token ids, or the length of a prompt of unique tokens."""
        params = SamplingParams(
            max_tokens=num_output, min_tokens=fields.pop("min_tokens", 0), **fields.pop("params", {})
        )
        sequence_id = self.next_id
        if isinstance(prompt, int):
            prompt = [sequence_id] * prompt
        sequence = Sequence(sequence_id, prompt, params, 0, num_output, **fields)
        self.scheduler.add(sequence)
        self.next_id += params.num_sequences
        self.sequences[sequence_id] = sequence
        return sequence

    def step(self) -> list[tuple[int, int, int]]:
        """Run one step; return its batch as (id, start, length), empty if nothing can run."""
        in_flight = self.launch()
        if in_flight is None:
            return []
        batch = self.runner.batches[-1]
        self.launch_lookahead()
        self.complete(in_flight)
        return batch

    def launch(self) -> InFlightStep | None:
        """Return the step that was launched ahead, else launch one; return None if nothing can run."""
        in_flight, self.lookahead_step = self.lookahead_step, None
        if in_flight is None and (plan := self.schedule()):
            in_flight = InFlightStep(plan, self.runner.execute_async(plan))
        return in_flight

    def launch_lookahead(self) -> None:
        """Launch the next step, if lookahead is enabled and possible."""
        if self.lookahead and (plan := self.scheduler.schedule_async(self.now)):
            self.scheduler.check_integrity()
            self.lookahead_step = InFlightStep(plan, self.runner.execute_async(plan))
        self._load_slots()

    def complete(self, in_flight: InFlightStep) -> None:
        """Apply the outputs of a step."""
        for sequence, span_output in self.scheduler.update_from_step(in_flight.plan, in_flight.get_outputs()):
            self.outputs.setdefault(sequence.id, []).extend(span_output.token_ids)
        self.scheduler.check_integrity()

    def fail_step(self, in_flight: InFlightStep) -> list[Sequence]:
        """Fail a step and the one that was launched ahead of it; return the sequences that end."""
        failed = self.scheduler.fail_step(in_flight.plan)
        self.scheduler.check_integrity()
        lookahead_step, self.lookahead_step = self.lookahead_step, None
        return failed + (self.scheduler.fail_step(lookahead_step.plan) if lookahead_step else [])

    def schedule(self) -> StepPlan | None:
        """Plan a step. Fill slots immediately, and plan again if nothing could run before that."""
        plan = self._plan()
        num_ready = self._load_slots()
        # A sequence can wait for the read of another sequence, and then start its own.
        while plan is None and num_ready + self.complete_transfers():
            plan, num_ready = self._plan(), 0
        return plan

    def _plan(self) -> StepPlan | None:
        plan = self.scheduler.schedule(self.now)
        self.scheduler.check_integrity()
        return plan

    def complete_transfers(self, num: int = 1 << 30) -> int:
        """End the first transfers of the store."""
        # A read of a state starts the read of its blocks when it ends.
        num_ended = sum(store.complete(num) for store in (self.state_store, self.store) if store is not None)
        if num_ended:
            self.scheduler.on_resource_ready()
        return num_ended

    def _load_slots(self) -> int:
        slot_loads = self.registry.slot_table.pop_loads()
        for slot_load in slot_loads:
            self.runner.load_adapter_slot(slot_load)()
            self.registry.slot_table.on_loaded(slot_load)
            self.scheduler.on_resource_ready()
        return len(slot_loads)

    def run_until_preempted(self) -> list[tuple[int, int, int]]:
        """Run steps until one preempts a sequence; return its batch."""
        while self.scheduler.has_work:
            batch = self.step()
            if self.scheduler.num_preemptions:
                return batch
        raise AssertionError("no sequence was preempted")

    def run(self) -> dict[int, list[int]]:
        """Run steps until no sequence is left; return all outputs. Every step must have work."""
        while self.scheduler.has_work:
            assert self.step()
        if self.scheduler.store_traffic is not None:
            self.complete_transfers()
            self.scheduler.store_traffic.poll()
        assert self.block_pool.num_used == 0 and self.scheduler.block_manager.num_used_host_blocks == 0
        return self.outputs
