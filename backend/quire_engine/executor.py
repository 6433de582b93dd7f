# SPDX-License-Identifier: Apache-2.0
"""The executor behind an engine: one runner on this process's device, or that and a group of ranks beside it."""

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from quire_engine.group import Group
from quire_engine.member import Ends, Member, RankProcess
from quire_engine.ranks import TIMEOUT_S
from quire_engine.runner import TorchRunner
from quire_engine.step import Runner, Sampled, SlotLoad, StepPlan
from quire_engine.work import max_elements
from quire_spec.engine.config import EngineConfig
from quire_spec.model.model_config import ModelConfig
from quire_spec.model.tensor_parallel import TensorParallelShard


@dataclass(frozen=True, slots=True, weakref_slot=True)
class SharedAdapter:
    """An adapter in host memory: rank 0's part here, the others' parts there."""

    own: object
    key: int
    """What the other ranks know theirs by."""


class GroupRunner(Runner):
    """Rank 0's runner, with what the other ranks have to do of everything."""

    def __init__(self, own: TorchRunner, group: Group) -> None:
        """The group is open."""
        self._own = own
        self._group = group
        self._keys = count()
        self._held: dict[str, SharedAdapter] = {}
        self.swap_space = own.swap_space
        self.memory = own.memory

    def read(self, path: Path) -> SharedAdapter:
        """Read an adapter's folder, all ranks at the same time; see step.Runner."""
        key = next(self._keys)
        reading = self._group.begin("read", key=key, path=str(path))
        try:
            try:
                own = self._own.read(path)
            finally:
                self._group.end(reading)
        except Exception:
            self._group.tell("forget", key=key)
            raise
        made = SharedAdapter(own, key)
        # Theirs goes when nobody here has ours: a step that loads it has then long begun.
        # At this process's end, all ranks end.
        weakref.finalize(made, self._group.tell, "forget", key=key).atexit = False
        return made

    def host_bytes(self, packed: object) -> int:
        """Bytes on this rank; see step.Runner."""
        assert isinstance(packed, SharedAdapter)
        return self._own.host_bytes(packed.own)

    def hold(self, digest: str, packed: object) -> None:
        """Keep an adapter in host memory; see step.Runner."""
        assert isinstance(packed, SharedAdapter)
        self._held[digest] = packed
        self._own.hold(digest, packed.own)

    def drop(self, digest: str) -> None:
        """Forget the host copy of an adapter; see step.Runner."""
        self._held.pop(digest, None)
        self._own.drop(digest)

    def load(self, load: SlotLoad) -> Callable[[], None]:
        """The work of filling a slot on all ranks; see step.Runner."""
        own, adapter = self._own.load(load), self._held[load.digest]

        def fill() -> None:
            filling = self._group.begin("fill", key=adapter.key, slot=load.slot)
            try:
                own()
            finally:
                self._group.end(filling)

        return fill

    def execute(self, plan: StepPlan) -> list[Sampled]:
        """Run a step; see step.Runner."""
        return self._own.execute(plan)

    def begin(self, plan: StepPlan) -> Callable[[], list[Sampled]]:
        """Have a step run after those begun before; see step.Runner."""
        outcome = self._own.begin(plan)
        return lambda: self._group.take(outcome)


def open_runner(
    config: EngineConfig,
    shape: ModelConfig,
    folder: Path,
    *,
    progress: bool = False,
    on_lost: Callable[[str], None] | None = None,
    start: Callable[[Ends], Member] = RankProcess,
    timeout_s: float = TIMEOUT_S,
) -> "TorchRunner | GroupRunner":
    """The runner that a configuration asks for, with the ranks beside it; raises as TorchRunner. See Engine.from_config
    for `on_lost`, Group for `start` and Ranks for `timeout_s`."""
    if config.tensor_parallel_size == 1:
        return TorchRunner(config, shape, folder, progress=progress)
    TensorParallelShard(shape, 0, config.tensor_parallel_size).validate()
    group = Group(config, shape, folder, start, on_lost, timeout_s)
    try:
        runner = TorchRunner(config, shape, folder, ranks=group.ranks, group=group, progress=progress)
        blocks_per_seq = -(-runner.memory.max_model_len // config.block_size)
        num_moves = 2 * runner.swap_space.num_blocks
        group.open(max_elements(config.max_num_seqs, config.max_num_batched_tokens, blocks_per_seq, num_moves))
    except Exception as error:
        group.close()
        raise group.refusal(error) from error
    made = GroupRunner(runner, group)
    weakref.finalize(made, _close, runner, group)
    return made


def _close(runner: TorchRunner, group: Group) -> None:
    group.close()
    # In time: the last thing that goes with a runner is its connection to the ranks, whose end waits for these.
    runner.close()
