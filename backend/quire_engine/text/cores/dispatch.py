# SPDX-License-Identifier: Apache-2.0
"""Chooses the core that runs a request: the one that is estimated to need the fewest seconds until its first token.

The estimate has one unit, so that prompts, the running batch and adapters can be compared. Pure: no socket and no
clock. The core pool calls it for every request.
"""

from collections.abc import Mapping
from dataclasses import dataclass

_DECAY = 0.98
"""Weight of all earlier steps relative to a new step. A speed follows about the last fifty steps."""
_FIRST_TOKEN_S = 1e-4
_FIRST_STEP_S = 0.02
_MAX_SILENT_S = 1.0
_MAX_SILENT_STEPS = 10


@dataclass(frozen=True, slots=True)
class CoreLoad:
    """What one core would have to do before and for a new request."""

    queued_tokens: int = 0
    """Prompt tokens of earlier requests that this core still has to compute."""
    uncached_tokens: int = 0
    """Prompt tokens of the new request that this core has not cached, and will not have cached by then."""
    running_share: float = 0.0
    """Running sequences, relative to max_num_seqs."""
    adapter_load_s: float = 0.0
    """Seconds to load the adapter of the new request; 0 if it is in a slot of this core, or on its way there."""
    evicts_adapter: bool = False
    """Whether another adapter must leave its slot for the adapter of the new request."""
    silent_s: float = 0.0
    """Seconds since the last step of a core that has work. 0 for a core without work."""
    kv_usage: float = 0.0
    """Fraction of the KV blocks in use."""
    served_last: bool = False
    """Whether this core was the last one that got a prompt with the same beginning."""


@dataclass(slots=True)
class Speeds:
    """Measured speeds of the cores of a pod. All cores have the same model and the same kind of device."""

    step_s: float = _FIRST_STEP_S
    """Seconds of a step without prompts."""
    _prefill_s: float = _FIRST_TOKEN_S
    _num_prefill_tokens: float = 1.0

    @property
    def token_s(self) -> float:
        """Seconds to compute one token of a prompt."""
        return self._prefill_s / self._num_prefill_tokens

    def record_step(self, seconds: float, num_prefill_tokens: int, had_prompts: bool) -> None:
        """Record a step. `num_prefill_tokens` are the computed tokens of the prompts that the step completed; a step
        that computed only a part of a prompt has none, but has `had_prompts`."""
        if not had_prompts:
            self.step_s += (1 - _DECAY) * (seconds - self.step_s)
            return
        self._prefill_s = _DECAY * self._prefill_s + max(0.0, seconds - self.step_s)
        self._num_prefill_tokens = _DECAY * self._num_prefill_tokens + num_prefill_tokens


def estimate_s(load: CoreLoad, speeds: Speeds) -> float:
    """Return the estimated seconds until the first token of a new request.

    A core that has work and has been silent for much longer than a step may hang. Its silence counts, so that it gets
    no more requests while it hangs.
    """
    silence = load.silent_s - max(_MAX_SILENT_S, _MAX_SILENT_STEPS * speeds.step_s)
    return (
        speeds.token_s * (load.queued_tokens + load.uncached_tokens)
        + speeds.step_s * load.running_share
        + load.adapter_load_s
        + max(0.0, silence)
    )


def choose_core(loads: Mapping[int, CoreLoad], speeds: Speeds) -> int:
    """Return the core with the smallest estimate. Among equal ones, it is one that need not evict an adapter, then the
    one that served the same beginning last, and then the one with the most free KV blocks."""

    def order(core: int) -> tuple[float, bool, bool, float]:
        load = loads[core]
        return estimate_s(load, speeds), load.evicts_adapter, not load.served_last, load.kv_usage

    return min(loads, key=order)
