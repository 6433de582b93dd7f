# SPDX-License-Identifier: Apache-2.0
"""The phases of gpu.py: what each is for and how long it should take, for its help and its order. Imports no torch."""

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Phase:
    """One of them."""

    what: str
    seconds: int
    """Expected on an H100, by bytes and operations (docs/gpu-design.md) and counted starts; none was measured."""


# In this order without --phases. The engine's ends with traces, after which its process may be slower: what is compared
# in this process comes before it.
PHASES = {
    "gate": Phase("every kernel against its reference; nothing is timed behind a red one; always comes first", 60),
    "limits": Phase("the card's copy bandwidth and matrix rate, of which fractions are", 5),
    "kernels": Phase("attention, fused operations, sampler, adapters: each by itself", 100),
    "start": Phase("a core whose 16 GB of weights are in the page cache, twice (bar 20 s)", 110),
    "lora": Phase("32 adapters in a batch, and none, against the base (bars 0.88 and 0.98)", 200),
    "vllm": Phase("32 adapters here and in vLLM (bar 1.2); a second where vLLM is missing", 330),
    "engine": Phase("decoding, throughput of four loads, latencies at three rates, idle time", 310),
    "itl": Phase("time between tokens while 100 cold adapters load, against none (bar 1.10)", 420),
    "peers": Phase("short, mixed and saturated loads here, in transformers (bar 3) and in vLLM", 400),
    "tune": Phase("other tile sizes, as many as there is time for: what the constants should be", 260),
}
QUICK = ("gate", "limits", "kernels", "engine")
QUICK_SECONDS = 190

EXAMPLES = """\
examples, for 30 minutes on a card with at most 10 minutes a command:
  python3 tests/bench/gpu.py --quick -o quick.json                                  does it work at all?
  python3 tests/bench/gpu.py --phases lora,engine --gated quick.json --budget-s 570 -o engine.json
  python3 tests/bench/gpu.py --phases itl --gated engine.json --budget-s 570 -o itl.json
  python3 tests/bench/gpu.py --phases peers --gated engine.json --budget-s 570 -o peers.json
and for another 30 minutes:
  python3 tests/bench/gpu.py --phases limits,kernels,start,tune --budget-s 570 -o kernels.json
  python3 tests/bench/gpu.py --phases vllm --vllm-python ~/vllm/bin/python --budget-s 570 -o vllm.json
without a card:
  python3 tests/bench/gpu.py --cpu-rehearsal                  all of it with tiny shapes, about a minute
"""


def table() -> str:
    """The phases for the help."""
    rows = [f"  {name:<8} {_minutes(phase.seconds):>6}  {phase.what}" for name, phase in PHASES.items()]
    total = _minutes(sum(phase.seconds for phase in PHASES.values()))
    return "\n".join(
        [
            "phases, and minutes:seconds that each should take on an H100 (expected, never measured):",
            *rows,
            f"  {'all':<8} {total:>6}",
            f"  {'--quick':<8} {_minutes(QUICK_SECONDS):>6}  {', '.join(QUICK)}, with few shapes and one load",
        ]
    )


def ordered(phases: Iterable[str]) -> tuple[str, ...]:
    """Each once, the gate before all others."""
    return tuple(dict.fromkeys(("gate", *phases)))


def _minutes(seconds: int) -> str:
    return f"{seconds // 60}:{seconds % 60:02}"
