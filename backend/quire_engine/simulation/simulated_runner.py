# SPDX-License-Identifier: Apache-2.0
"""A model runner that computes nothing: its steps take the time that a step model predicts."""

from collections.abc import Callable
from random import Random

from quire_engine.images.background_encoder import BackgroundImageEncoder
from quire_engine.kv_cache.swap_policy import SwapCosts
from quire_engine.kv_transfer.store import HostRows
from quire_engine.lora.adapter_info import AdapterInfo
from quire_engine.lora.adapter_source import AdapterSource
from quire_engine.simulation.step_features import StepFeatures
from quire_engine.simulation.step_model import StepModel
from quire_engine.step.plan import SlotLoad, SpanOutput, StepPlan
from quire_spec.constants import AdapterDigest


class SimulatedRunner:
    """Runs the steps of one engine; implements ModelRunner."""

    def __init__(self, model: StepModel, swap_costs: SwapCosts, adapter_info: AdapterInfo) -> None:
        """`adapter_info` is that of each adapter."""
        self.swap_costs = swap_costs
        self.host_rows: HostRows | None = None
        self.host_state_rows: HostRows | None = None
        self._model = model
        self._adapter_info = adapter_info
        self._step_s = 0.0
        self._random = Random(0)
        # Every output token. Outputs end by their length, but no prompt must continue like an output.
        self._token = model.info.shape.vocab_size - 1
        self.busy_s = 0.0
        self.outside_s = 0.0
        """Part of `busy_s` in steps that are larger than every recorded one."""
        self.num_steps = 0
        self.background_image_encoder: BackgroundImageEncoder | None = None

    def execute(self, plan: StepPlan) -> list[SpanOutput]:
        """Predict the time of a step. Each sequence whose prompt is complete gets a token."""
        features = StepFeatures.from_plan(plan)
        seconds = self._model.varied_seconds(features, self._random)
        self._step_s = seconds
        self.busy_s += seconds
        self.outside_s += seconds if self._model.is_outside(features) else 0.0
        self.num_steps += 1
        return [SpanOutput([self._token] if span.samples else []) for span in plan.spans]

    def pop_seconds(self) -> float:
        """Return the seconds of the step since the last call; 0 if none ran."""
        seconds, self._step_s = self._step_s, 0.0
        return seconds

    def execute_async(self, plan: StepPlan) -> Callable[[], list[SpanOutput]]:
        """Not used: a recorded step contains everything from the end of the step before it to its own end, so the
        simulated engine runs one step at a time."""
        raise NotImplementedError

    def sample_tokens(self) -> None:
        """Do nothing."""

    def read_adapter(self, source: AdapterSource) -> object:
        """Return an adapter without content."""
        return source

    def adapter_info(self, packed_adapter: object) -> AdapterInfo:
        """Return the sizes of an adapter. Nothing reads the rest."""
        return self._adapter_info

    def store_adapter(self, adapter_digest: AdapterDigest, packed_adapter: object) -> None:
        """Do nothing."""

    def discard_adapter(self, adapter_digest: AdapterDigest) -> None:
        """Do nothing."""

    def zero_kv_cache(self) -> None:
        """Do nothing."""

    def load_adapter_slot(self, slot_load: SlotLoad) -> Callable[[], None]:
        """Return a function that does nothing: the simulated core waits for the time of the copy."""
        return lambda: None
