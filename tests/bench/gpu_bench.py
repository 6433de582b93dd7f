# SPDX-License-Identifier: Apache-2.0
"""One run of gpu.py: its phases in order, each behind its gate, each filling a part of the results."""

import gc
import json
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterable
from contextlib import closing
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from card import Card
from gpu_verdict import code, forms

ROOT = Path(__file__).resolve().parents[2]
MAX_WHY = 2000
"""Characters of what is noted of a failure."""


class RedGate(Exception):
    """Something computes wrongly: its speed says nothing."""


@dataclass(frozen=True, slots=True)
class Options:
    """What the command line says."""

    quick: bool = False
    out: Path | None = None
    vllm_python: str = sys.executable
    budget_s: float | None = None
    """After which nothing new is started; None: everything is."""
    gated: Path | None = None
    """Results of a run whose gate counts."""


class Bench:
    """One run; every phase fills a part of `results`."""

    def __init__(self, card: Card, options: Options) -> None:
        self._card, self._options, self._quick = card, options, options.quick
        self._began = time.monotonic()
        self._free_bytes = card.free_bytes
        self._checks: dict[str, dict[str, int]] = {}
        about = card.about() | {"commit": _commit(), "code": code(), "forms": forms(), "command": " ".join(sys.argv)}
        self.results: dict[str, Any] = {"about": about}

    def run(self, phases: Iterable[str]) -> int:
        """Phases in order; each is written down as soon as it is over. The exit code: 1 if one of them failed.

        A red gate ends the run; whatever else fails is noted, and the next phase starts.
        """
        for phase in phases:
            if self._late:
                print(f"== {phase}: not started, {self._options.budget_s:g} s are over", flush=True)
                self.results.setdefault("not_started", []).append(phase)
                continue
            start = time.perf_counter()
            print(f"== {phase}", flush=True)
            try:
                getattr(self, f"_{phase}")()
            except Exception as error:
                self._failed(phase, error)
                if phase == "gate":
                    break
            self.results.setdefault("seconds", {})[phase] = time.perf_counter() - start
            self.write()
        self.write()
        return 1 if "failed" in self.results else 0

    def write(self) -> None:
        """What there is so far; whoever ends this process meanwhile leaves what was there before."""
        if (out := self._options.out) is not None:
            part = out.with_name(f"{out.name}.part")
            part.write_text(json.dumps(self.results, indent=1))
            part.replace(out)

    @property
    def _late(self) -> bool:
        return self._is_late(self._elapsed)

    @property
    def _elapsed(self) -> float:
        return time.monotonic() - self._began

    def _is_late(self, seconds: float) -> bool:
        """Whether so many seconds after the start are too many."""
        return self._options.budget_s is not None and seconds > self._options.budget_s

    def _cut_short(self, phase: str) -> None:
        if phase not in (cut := self.results.setdefault("cut_short", [])):
            cut.append(phase)

    def _failed(self, phase: str, error: Exception) -> None:
        if not isinstance(error, RedGate):
            traceback.print_exception(error)
        # The frames hold what the phase had on the card.
        traceback.clear_frames(error.__traceback__)
        gc.collect()
        why = str(error) if isinstance(error, RedGate) else f"{type(error).__name__}: {error}"
        # A process that ended tells with its whole log; the end of it says why.
        self.results.setdefault("failed", {})[phase] = why[-MAX_WHY:]
        print(f"gpu.py: {phase}: {why}", file=sys.stderr, flush=True)
        self.write()

    def _gate(self) -> None:
        import gpu_gate
        import gpu_verdict

        import quire_kernels

        if (gated := self._options.gated) is not None:
            earlier, why = gpu_verdict.of_earlier(gated, self.results["about"])
            print(f"  {gated} {why}", flush=True)
            if earlier is not None:
                self.results["gate"] = earlier
                self._checks = gpu_verdict.checks_of_earlier(gated)
                return
        findings, whole = gpu_verdict.findings(self._card)
        bad = [finding for finding in findings if not finding.good]
        for finding in bad:
            print(f"  WRONG {finding.what}: error {finding.error:.2e}, at most {finding.limit:.0e}", flush=True)
        print(f"  {len(findings) - len(bad)} of {len(findings)} comparisons good", flush=True)
        if not whole:
            raise RedGate("a process that checks failed, see above; nothing is timed")
        worst = sorted(findings, key=lambda f: -f.error / max(f.limit, 1e-30))[:10]
        left_out = sorted({finding.form for finding in bad if finding.form})
        bad = [finding for finding in bad if not finding.form]
        self.results["gate"] = {
            "num": len(findings),
            "bad": [asdict(f) for f in bad],
            "left_out": left_out,
            "worst": list(map(asdict, worst)),
        }
        self.write()
        if bad:
            raise RedGate(f"{len(bad)} of {len(findings)} comparisons are wrong; nothing is timed")
        if gpu_gate.runs(quire_kernels.paged_attention):
            self.results["gate"]["eight_bit_error"] = gpu_gate.eight_bit_error(self._card)

    def _limits(self) -> None:
        self.results["limits"] = {
            "copy_bytes_per_s": self._card.copy_bandwidth(),
            "matrix_flops_per_s": self._card.matrix_rate(),
        }
        print(f"  {self.results['limits']}", flush=True)

    def _kernels(self) -> None:
        import gpu_kernels as kernels
        import gpu_lora as lora
        from gpu_gate import FUSED

        self._need_own_forms()
        shape = kernels.LLAMA_8B if self._card.is_gpu else kernels.TINY
        rows = self.results["kernels"] = []
        prefill_rows = partial(kernels.prefill_rows, fused=FUSED not in self._left_out)
        for measure in (kernels.decode_rows, prefill_rows, kernels.fused_rows, lora.kernel_rows):
            for row in measure(self._card, self._limits_found(), shape, self._quick):
                self._keep(rows, row)

    def _tune(self) -> None:
        import gpu_kernels as kernels
        import gpu_lora as lora

        self._need_own_forms()
        shape = kernels.LLAMA_8B if self._card.is_gpu else kernels.TINY
        rows = self.results["tune"] = []
        for measure in (kernels.tune_rows, lora.tune_rows):
            for row in measure(self._card, self._limits_found(), shape):
                self._keep(rows, row)
                if self._late:
                    self._cut_short("tune")
                    break

    def _need_own_forms(self) -> None:
        if asked := os.environ.get("QUIRE_KERNELS"):
            raise RedGate(f"these are our own forms, which the gate has not all judged: QUIRE_KERNELS is {asked!r}")

    @property
    def _left_out(self) -> list[str]:
        """Forms that run only where QUIRE_KERNELS asks for them, and are wrong here."""
        found: list[str] = (self.results.get("gate") or {}).get("left_out", [])
        return found

    def _checked(self, of: str) -> dict[str, int]:
        """The engine's own gate, once a run: greedy tokens with graphs against those of the references; `of` base or
        adapters."""
        import gpu_engine as engines
        import gpu_lora as lora

        if of not in self._checks:
            # Three adapters in turn on two slots, one of more ranks than are multiplied at once.
            add = partial(lora.add_adapters, ranks=(4, 70, 16), everywhere=True) if of == "adapters" else None
            other, all_tokens = engines.check_graphs(self._card, add)
            self._checks[of] = {"other_tokens": other, "tokens": all_tokens}
        if other := self._checks[of]["other_tokens"]:
            of_all = f"{other} of {self._checks[of]['tokens']} greedy tokens"
            raise RedGate(f"{of_all} ({of}) differ between graphs and references; nothing of it is timed")
        return self._checks[of]

    def _start(self) -> None:
        import gpu_start
        from measure import WrongOutput

        rows = self.results["start"] = []
        try:
            for row in gpu_start.rows(self._card, self._free_bytes):
                print(f"  {row['what']}: {row['seconds']:.1f} s", *row["log"], sep="\n    ", flush=True)
                rows.append(row)
                self.write()
        except WrongOutput as error:
            self.results.pop("start")
            raise RedGate(f"starts: {error}; nothing of them is reported") from error

    def _engine(self) -> None:
        import gpu_engine as engines

        found = self.results["engine"] = {"check": self._checked("base")}
        start = time.perf_counter()
        engine = engines.make_engine(self._card, **engines.settings(self._card))
        found["start_s"] = time.perf_counter() - start
        found["memory"] = asdict(engine.memory)
        found["graph_bytes"] = engines.graph_bytes(engine)
        small, large, prompt, steps = (1, 256, 960, 40) if self._card.is_gpu else (1, 3, 12, 3)
        self._say(engines.drive, engine, engines.Load("warm up", ((prompt, 4),) * large))
        found["single"] = self._say(engines.decode_rate, engine, small, 128 if self._card.is_gpu else 12, 4 * steps)
        rate, bound = found["single"]["output_tokens_per_s"], self._limits_found().bytes_per_s
        # All weights but the embedding, of which a token reads one row.
        streamed = engine.memory.weights_bytes - engine.shape.vocab_size * engine.shape.hidden_size * 2
        found["single"]["fraction"] = rate and rate * streamed / bound
        self.write()
        found["decode"] = self._say(engines.decode_rate, engine, large, prompt, 3 * steps)
        self.write()
        found["loads"] = []
        for load in engines.loads(self._card, self._quick):
            found["loads"].append(self._say(engines.numbers, engine, load))
            self.write()
        # Last: what has traced a process leaves it slower than it was, if it leaves it running.
        # https://github.com/pytorch/pytorch/issues/144455
        found["idle"] = []
        for ahead in (False, True):
            found["idle"].append(self._say(engines.idle_per_step, engine, large, prompt, steps, ahead))
            self.write()
        engines.close(engine)

    def _lora(self) -> None:
        import gpu_lora as lora
        from gpu_gate import SIDE

        found = self.results["lora"] = {"check": self._checked("adapters"), "rows": []}
        for row in lora.rows(self._card, side=SIDE not in self._left_out):
            print(f"  {row}", flush=True)
            found["rows"].append(row)
            found["ratios"] = lora.ratios(found["rows"])
            self.write()

    def _itl(self) -> None:
        import gpu_itl
        from measure import WrongOutput

        check = self.results["itl"] = {"check": self._checked("adapters")}
        try:
            self._card.wait_free(self._free_bytes)
            with closing(gpu_itl.measure(self._card, self._quick)) as rounds:
                self._take_rounds(rounds, check)
        except WrongOutput as error:
            self.results["itl"] = check
            raise RedGate(f"time between tokens: {error}; nothing of it is reported") from error

    def _take_rounds(self, rounds: Iterable[dict[str, Any]], check: dict[str, Any]) -> None:
        """The figures after each round, as long as there is time for another one."""
        begun: float | None = None
        for figures in rounds:
            now = self._elapsed
            self.results["itl"] = check | figures
            self.write()
            length = 2 * figures["seconds"] if begun is None else now - begun
            if len(figures["runs"]) < figures["rounds"] and self._is_late(now + length):
                self._cut_short("itl")
                break
            begun = now

    def _vllm(self) -> None:
        import gpu_vllm
        from measure import WrongOutput

        try:
            found = self.results["vllm"] = gpu_vllm.compare(self._card, self._options.vllm_python)
        except WrongOutput as error:
            raise RedGate(f"adapters against vLLM: {error}; nothing of it is reported") from error
        for line in (found["left_out"],) if "left_out" in found else (*found["rows"], *found["ratios"], found["gaps"]):
            print(f"  {line}", flush=True)

    def _peers(self) -> None:
        import gpu_peers

        found = self.results["peers"] = {"check": self._checked("base"), "rows": [], "ratios": []}
        for row in gpu_peers.rows(self._card, self._quick, self._options.vllm_python, self._free_bytes):
            print(f"  {row}", flush=True)
            found["rows"].append(row)
            found["ratios"] = gpu_peers.ratios(found["rows"])
            self.write()
        if own := [row["left_out"] for row in found["rows"] if row["engine"] == gpu_peers.QUIRE and "left_out" in row]:
            raise RuntimeError(own[0])

    def _say(self, function: Callable[..., Any], *args: Any) -> Any:
        found = function(*args)
        if "what" in found:
            print(f"  {found}", flush=True)
        return found

    def _keep(self, rows: list[Any], row: Any) -> None:
        rows.append(asdict(row))
        speed = f"{row.flops / row.seconds / 1e12:7.0f} TFLOP/s" if row.what.startswith(("prefill", "tune pre")) else ""
        print(
            f"  {row.what:<70} {row.seconds * 1e6:10.1f} us {row.bytes / row.seconds / 1e9:8.0f} GB/s {speed} "
            f"{row.fraction:6.1%}",
            flush=True,
        )
        self.write()

    def _limits_found(self) -> Any:
        from gpu_kernels import Limits

        if "limits" not in self.results:
            self._limits()
        return Limits(self.results["limits"]["copy_bytes_per_s"], self.results["limits"]["matrix_flops_per_s"])


def _commit() -> str:
    try:
        done = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    except OSError:
        return "unknown"
    return done.stdout.strip() or "unknown"
