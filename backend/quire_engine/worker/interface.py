# SPDX-License-Identifier: Apache-2.0
"""Interface between the engine core and the component that computes steps, on one device or on several.

The engine core uses only this protocol. `DeviceModelRunner` implements it for one device, and `MultiRankRunner`
for several. The module does not import torch. As a result, torch is not loaded when the engine is imported.
"""

from collections.abc import Callable
from typing import Protocol

from quire_engine.images.background_encoder import BackgroundImageEncoder
from quire_engine.kv_cache.swap_policy import SwapCosts
from quire_engine.kv_transfer.store import HostRows
from quire_engine.lora.adapter_info import AdapterInfo
from quire_engine.lora.adapter_source import AdapterSource
from quire_engine.step.plan import SlotLoad, SpanOutput, StepPlan
from quire_spec.constants import AdapterDigest


class ModelRunner(Protocol):
    """Executes step plans, and stores the adapters that the plans use."""

    swap_costs: SwapCosts
    """The amount of host memory that is available for KV blocks of preempted sequences, and the measured cost of
    copying blocks there and back."""

    host_rows: HostRows | None
    """The host memory of these blocks on this rank; None if there is none."""

    host_state_rows: HostRows | None
    """The host memory for snapshots of states; None if there is none, or if no store can read that of several ranks."""

    background_image_encoder: BackgroundImageEncoder | None
    """Encodes images beside steps; None if steps encode them."""

    def read_adapter(self, source: AdapterSource) -> object:
        """Read an adapter's folder, or those of a sum, and pack it for `store_adapter`. This is slow. Any thread can
        call it.

        Raises:
            InvalidArgument: a folder does not contain an adapter for this model, or the adapter cannot be served.
        """

    def adapter_info(self, packed_adapter: object) -> AdapterInfo:
        """Return the size and the properties of an adapter that `read_adapter` returned."""

    def store_adapter(self, adapter_digest: AdapterDigest, packed_adapter: object) -> None:
        """Keep an adapter in host memory, under the digest of its content. `read_adapter` returned the adapter."""

    def discard_adapter(self, adapter_digest: AdapterDigest) -> None:
        """Remove an adapter from host memory.

        If a slot contains the adapter, it stays there until another adapter is loaded into the slot.
        """

    def load_adapter_slot(self, slot_load: SlotLoad) -> Callable[[], None]:
        """Return a function that copies an adapter into a slot.

        The function uses the copy of the adapter that is in host memory when `load_adapter_slot` is called. Call the
        returned function exactly once. Any thread can call it while steps run. Steps that start before the function
        returns must not use the slot.
        """

    def zero_kv_cache(self) -> None:
        """Write to all KV blocks of this rank, so that no later step is the first one to use a page of memory. Call it
        before the first request."""

    def execute(self, plan: StepPlan) -> list[SpanOutput]:
        """Run `plan`, and return one output for each span, in the order of the spans.

        Raises:
            RunnerLost: this runner cannot run any more steps; the owner of the engine must create a new engine.
            RuntimeError: the device failed; the results of this step are lost.
        """

    def execute_async(self, plan: StepPlan) -> Callable[[], list[SpanOutput]]:
        """Queue `plan` after all steps that were started earlier, and return a function that waits for it.

        The returned function returns the same results and raises the same errors as `execute`. A sequence can contain
        PLACEHOLDER_TOKEN. It stands for the token that the most recently started step samples for this sequence.

        A step with a grammar only computes logits at first, because its token masks depend on the tokens of the
        previous step. Call `sample_tokens` when the sequences have these tokens, and before the next step is started.
        """

    def sample_tokens(self) -> None:
        """Run only the sampling that `execute_async` postponed because the most recently started step has a grammar.

        Do nothing if no sampling was postponed.
        """
