# SPDX-License-Identifier: Apache-2.0
"""The phases in the order in which they run: time limit, contents, and the function that measures. Imports no torch."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Phase:
    """One process of the driver."""

    name: str
    limit_s: float
    what: str
    function: str
    """`module:function` of this package, a generator of rows."""
    has_bars: bool = True
    """Runs, and is retried, before the phases that only explain."""
    is_gate: bool = False
    """Is retried at once, and decides on which rung the phases behind it begin."""
    needs_gate: bool = True
    needs_own_kernels: bool = False
    """Times the kernels of this repository, so it does not run where QUIRE_KERNELS selects others."""


PHASES = {
    phase.name: phase
    for phase in (
        Phase("facts", 20, "card, driver, versions, clocks and power at rest", "limits:facts", needs_gate=False),
        Phase("gate", 60, "tier A: every kernel that is timed equals its reference", "gate:tier_a", is_gate=True,
            needs_gate=False),
        Phase("limits", 15, "copy bandwidth and matrix rate of the card, of which fractions are", "limits:limits",
            needs_gate=False),
        Phase("attention", 25, "decode and prefill attention by this repository's kernels", "attention:rows",
            needs_own_kernels=True),
        Phase("engine", 90, "single stream, 256 sequences, idle time, kernels by name, host time", "engine:step_rows"),
        Phase("saturated", 150, "1000 tokens in, 1000 out, 512 requests", "engine:saturated_rows"),
        Phase("cudnn", 30, "prefill attention by cuDNN, also on KV blocks, and by flash attention",
            "attention:fused_rows"),
        Phase("adapters", 100, "32 adapters in a batch, and none, against the base", "lora:engine_rows"),
        Phase("start", 100, "a core with 16 GB of weights in the page cache, started twice", "start:rows"),
        Phase("mixes", 80, "a mix like ShareGPT's at 16 and 32 requests a second", "engine:mix_rows"),
        Phase("products", 30, "matrix products of the model's shapes at 1 to 8,192 rows", "limits:product_rows",
            False, needs_gate=False),
        Phase("gate_b", 90, "tier B: all other shapes, types and implementations; reported only", "gate:tier_b",
            False, needs_gate=False),
        Phase("itl", 360, "time between tokens while 100 cold adapters load, against none", "itl:rows"),
        Phase("kernels", 90, "norms, activations, RoPE, sampler, penalties and adapters by themselves",
            "kernels:rows", False, needs_own_kernels=True),
        Phase("transformers", 280, "the same loads by transformers' continuous batching", "peers:transformers_rows"),
        Phase("vllm", 90, "the same loads by vLLM, where --vllm-python can import it", "peers:vllm_rows"),
        Phase("vllm_adapters", 330, "32 adapters here and in vLLM, from one checkpoint", "vllm:rows"),
        Phase("tune", 200, "other tile sizes of attention and adapters", "attention:tune_rows", False,
            needs_own_kernels=True),
        Phase("loads", 90, "two more proportions of prompt and output, and ShareGPT's mix", "engine:load_rows", False),
        Phase("speculation", 60, "drafts of three tokens against none, 1 and 8 sequences", "engine:speculation_rows",
            False),
        Phase("ncu", 60, "hardware counters of the attention kernels, if ncu is installed", "tools:ncu_rows", False),
        Phase("sanitizer", 120, "compute-sanitizer over tier A's small cases, if it is installed",
            "tools:sanitizer_rows", False),
    )
}  # fmt: skip
"""Phases by name. The time limits up to `kernels` follow from measurements on an H100 and an H200 with 16 cores."""


def describe() -> str:
    """Return the phases for the help."""
    rows = [f"  {phase.name:<14} {phase.limit_s:>4.0f} s  {phase.what}" for phase in PHASES.values()]
    first = sum(phase.limit_s for phase in first_phases())
    return "\n".join([f"phases and their time limits (those up to `mixes` end within {first:.0f} s):", *rows])


def first_phases() -> list[Phase]:
    """Return the phases of the bars that fit into the first 13 minutes, without vLLM, which most machines lack."""
    names = list(PHASES)
    return [PHASES[name] for name in names[: names.index("mixes") + 1] if name != "vllm"]
