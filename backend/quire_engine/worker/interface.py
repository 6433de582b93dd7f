# SPDX-License-Identifier: Apache-2.0
"""Interface between the engine core and the component that computes steps, on one device or on several.

The engine core sees only this protocol. The implementations are `DeviceModelRunner` (one device) and
`TensorParallelRunner` (several). The module does not import torch, so that importing the engine does not load it.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from quire_engine.kv_cache.swap_policy import SwapCosts
from quire_engine.step.plan import SlotLoad, SpanOutput, StepPlan
from quire_spec.constants import AdapterDigest


class ModelRunner(Protocol):
    """Executes step plans and keeps the adapters that they use."""

    swap_costs: SwapCosts
    """Host memory for KV blocks of preempted sequences, and the measured cost of using it."""

    def read_adapter(self, path: Path) -> object:
        """Read an adapter's folder and pack it for `store_adapter`. Slow; safe to call from any thread.

        Raises:
            InvalidArgument: the folder contains no adapter for this model, or one that cannot be served.
        """

    def host_bytes(self, packed_adapter: object) -> int:
        """Return the size in bytes of a result of `read_adapter`."""

    def store_adapter(self, adapter_digest: AdapterDigest, packed_adapter: object) -> None:
        """Keep an adapter that `read_adapter` returned in host memory, under its content digest."""

    def discard_adapter(self, adapter_digest: AdapterDigest) -> None:
        """Drop the host copy of an adapter. A slot that contains the adapter keeps it until the slot is reloaded."""

    def load_adapter_slot(self, slot_load: SlotLoad) -> Callable[[], None]:
        """Return a function that copies an adapter from its current host copy into a slot.

        Call the function once; any thread can do so while steps run. Steps that start before this function returns
        must not use the slot.
        """

    def execute(self, plan: StepPlan) -> list[SpanOutput]:
        """Run `plan` and return one output per span, in order.

        Raises:
            RunnerLost: no step can run any more; the owner of the engine must create a new one.
            RuntimeError: the device failed; the results of this step are lost.
        """

    def execute_async(self, plan: StepPlan) -> Callable[[], list[SpanOutput]]:
        """Queue `plan` behind all steps that were started earlier, and return a function that waits for it.

        The returned function has the results and the errors of `execute`. PLACEHOLDER_TOKEN in a sequence stands for
        the token that the most recently started step samples for it.

        A step with a grammar computes only logits, because its token masks depend on the tokens of the previous step.
        Call `sample_tokens` as soon as the sequences have these tokens, but before the next step is started.
        """

    def sample_tokens(self) -> None:
        """Sample the tokens of the most recently started step if its sampling was postponed because of a grammar."""
