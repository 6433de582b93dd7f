# SPDX-License-Identifier: Apache-2.0
"""Everything about speed on one GPU, in one command, on a machine with nothing but PyTorch and Triton.

    python3 tests/bench/gpu.py -o results.json --markdown results.md       all of it, about 30 minutes
    python3 tests/bench/gpu.py --quick                                     a first look, under three minutes
    python3 tests/bench/gpu.py --phases gate,limits,kernels                some of it, in this order
    python3 tests/bench/gpu.py --cpu-rehearsal                             all of its code on a CPU; times mean nothing

Correctness comes first: nothing is timed unless every form equals its reference in float32, float16 and bfloat16, and
the engine makes the same greedy tokens with and without graphs, with adapters too. Weights are random, in the shape of
Llama-3.1-8B, and made on the device. The engine's phases need what the engine imports (tqdm, safetensors,
huggingface_hub) besides. Results are written after each phase, so a run that is cut short keeps what it has.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import gpu_gate

ROOT = Path(__file__).resolve().parents[2]
if "--cpu-rehearsal" in sys.argv:
    # The kernel language reads it when it is imported.
    os.environ["TRITON_INTERPRET"] = "1"
sys.path[:0] = [str(ROOT / "backend"), str(ROOT / "kernels"), str(Path(__file__).parent)]

import torch  # noqa: E402
from card import Card  # noqa: E402
from gpu_report import markdown  # noqa: E402

PHASES = ("gate", "limits", "kernels", "engine", "lora", "itl", "vllm", "peers", "tune")
QUICK = ("gate", "limits", "kernels", "engine")


class RedGate(Exception):
    """Something computes wrongly: its speed says nothing."""


class Bench:
    """One run; every phase fills a part of `results`."""

    def __init__(self, card: Card, quick: bool, out: Path | None, vllm_python: str) -> None:
        self._card, self._quick, self._out, self._vllm_python = card, quick, out, vllm_python
        self._adapter_check: dict[str, int] | None = None
        self.results: dict[str, Any] = {"about": card.about() | {"commit": _commit(), "command": " ".join(sys.argv)}}

    def run(self, phases: Iterable[str]) -> None:
        """Phases in order; each is written down as soon as it is over."""
        for phase in phases:
            start = time.perf_counter()
            print(f"== {phase}", flush=True)
            getattr(self, f"_{phase}")()
            self.results.setdefault("seconds", {})[phase] = time.perf_counter() - start
            self.write()

    def write(self) -> None:
        """What there is so far."""
        if self._out is not None:
            self._out.write_text(json.dumps(self.results, indent=1))

    def _gate(self) -> None:
        import gpu_gate

        findings = self._findings()
        bad = [finding for finding in findings if not finding.good]
        for finding in bad:
            print(f"  WRONG {finding.what}: error {finding.error:.2e}, at most {finding.limit:.0e}", flush=True)
        print(f"  {len(findings) - len(bad)} of {len(findings)} comparisons good", flush=True)
        worst = sorted(findings, key=lambda f: -f.error / max(f.limit, 1e-30))[:10]
        self.results["gate"] = {
            "num": len(findings),
            "bad": [asdict(f) for f in bad],
            "worst": list(map(asdict, worst)),
        }
        self.results["gate"]["eight_bit_error"] = gpu_gate.eight_bit_error(self._card)
        self.write()
        if bad:
            raise RedGate(f"{len(bad)} of {len(findings)} comparisons are wrong; nothing is timed")

    def _findings(self) -> "list[gpu_gate.Finding]":
        """From several processes on a GPU: one would compile for minutes."""
        import gpu_gate

        if not self._card.is_gpu:
            return list(gpu_gate.check_all(self._card, self._quick, gpu_gate.Share()))
        num = max(1, min(12, (os.cpu_count() or 1) - 2))
        command = [sys.executable, __file__, *(["--quick"] if self._quick else []), "--gate-share"]
        running = [subprocess.Popen([*command, f"{i}/{num}"], stdout=subprocess.PIPE, text=True) for i in range(num)]
        findings = []
        for process in running:
            out, _ = process.communicate()
            if process.returncode:
                raise RedGate("a process that checks ended with an error, see above; nothing is timed")
            findings += [gpu_gate.Finding(**found) for found in json.loads(out.splitlines()[-1])]
        return findings

    def _limits(self) -> None:
        self.results["limits"] = {
            "copy_bytes_per_s": self._card.copy_bandwidth(),
            "matrix_flops_per_s": self._card.matrix_rate(),
        }
        print(f"  {self.results['limits']}", flush=True)

    def _kernels(self) -> None:
        import gpu_kernels as kernels
        import gpu_lora as lora

        shape = kernels.LLAMA_8B if self._card.is_gpu else kernels.TINY
        rows = self.results["kernels"] = []
        for measure in (kernels.decode_rows, kernels.prefill_rows, kernels.fused_rows, lora.kernel_rows):
            for row in measure(self._card, self._limits_found(), shape, self._quick):
                self._keep(rows, row)

    def _tune(self) -> None:
        import gpu_kernels as kernels
        import gpu_lora as lora

        shape = kernels.LLAMA_8B if self._card.is_gpu else kernels.TINY
        rows = self.results["tune"] = []
        for measure in (kernels.tune_rows, lora.tune_rows):
            for row in measure(self._card, self._limits_found(), shape):
                self._keep(rows, row)

    def _engine(self) -> None:
        import gpu_engine as engines

        found = self.results["engine"] = {}
        other, all_tokens = engines.check_graphs(self._card)
        found["check"] = {"other_tokens": other, "tokens": all_tokens}
        if other:
            raise RedGate(f"{other} of {all_tokens} greedy tokens differ between graphs and references")
        start = time.perf_counter()
        engine = engines.make_engine(self._card, **engines.settings(self._card))
        found["start_s"] = time.perf_counter() - start
        found["memory"] = asdict(engine.memory)
        if self._card.is_gpu:
            found["graph_bytes"] = engine._runner._graphs.num_bytes  # type: ignore[attr-defined]
        small, large, prompt, steps = (1, 256, 960, 40) if self._card.is_gpu else (1, 3, 12, 3)
        self._say(engines.drive, engine, engines.Load("warm up", ((prompt, 4),) * large))
        found["single"] = self._say(engines.decode_rate, engine, small, 128 if self._card.is_gpu else 12, 4 * steps)
        rate, bound = found["single"]["output_tokens_per_s"], self._limits_found().bytes_per_s
        # All weights but the embedding, of which a token reads one row.
        streamed = engine.memory.weights_bytes - engine.shape.vocab_size * engine.shape.hidden_size * 2
        found["single"]["fraction"] = rate and rate * streamed / bound
        found["decode"] = self._say(engines.decode_rate, engine, large, prompt, 3 * steps)
        found["idle"] = [
            self._say(engines.idle_per_step, engine, large, prompt, steps, ahead) for ahead in (False, True)
        ]
        found["loads"] = []
        for load in engines.loads(self._card, self._quick):
            found["loads"].append(self._say(engines.numbers, engine, load))
            self.write()
        engines.close(engine)

    def _check_adapters(self) -> dict[str, int]:
        """Behind a gate of its own: tokens of adapters with graphs against those without. Once a run."""
        import gpu_engine as engines
        import gpu_lora as lora

        if self._adapter_check is None:
            # Three adapters in turn on two slots, one of more ranks than are multiplied at once.
            add = partial(lora.add_adapters, ranks=(4, 70, 16), everywhere=True)
            other, all_tokens = engines.check_graphs(self._card, add)
            self._adapter_check = {"other_tokens": other, "tokens": all_tokens}
        other, all_tokens = self._adapter_check["other_tokens"], self._adapter_check["tokens"]
        if other:
            raise RedGate(f"{other} of {all_tokens} greedy tokens of adapters differ between graphs and references")
        return self._adapter_check

    def _lora(self) -> None:
        import gpu_lora as lora

        found = self.results["lora"] = {"check": self._check_adapters(), "rows": []}
        for row in lora.rows(self._card):
            print(f"  {row}", flush=True)
            found["rows"].append(row)
            self.write()
        found["ratios"] = lora.ratios(found["rows"])

    def _itl(self) -> None:
        import gpu_itl
        from measure import WrongOutput

        found = self.results["itl"] = {"check": self._check_adapters()}
        try:
            found |= gpu_itl.measure(self._card, self._quick)
        except WrongOutput as error:
            raise RedGate(f"time between tokens: {error}; nothing of it is reported") from error

    def _vllm(self) -> None:
        import gpu_vllm
        from measure import WrongOutput

        try:
            found = self.results["vllm"] = gpu_vllm.compare(self._card, self._vllm_python)
        except WrongOutput as error:
            raise RedGate(f"adapters against vLLM: {error}; nothing of it is reported") from error
        for line in (found["left_out"],) if "left_out" in found else (*found["rows"], *found["ratios"], found["gaps"]):
            print(f"  {line}", flush=True)

    def _peers(self) -> None:
        import gpu_engine as engines

        even = [load for load in engines.loads(self._card, True) if load.rate is None][:1]
        self.results["peers"] = []
        for found in engines.peers(self._card, even):
            print(f"  {found}", flush=True)
            self.results["peers"].append(found)
        engine = engines.make_engine(self._card, **engines.settings(self._card))
        engines.numbers(engine, even[0])
        again = engines.numbers(engine, even[0])
        self.results["peers"].append({"engine": "quire", **again})
        engines.close(engine)

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

    def _limits_found(self) -> Any:
        from gpu_kernels import Limits

        if "limits" not in self.results:
            self._limits()
        return Limits(self.results["limits"]["copy_bytes_per_s"], self.results["limits"]["matrix_flops_per_s"])


def _check_share(text: str, quick: bool) -> int:
    """What each of the gate's processes does."""
    import gpu_gate

    share = gpu_gate.Share(*map(int, text.split("/")))
    with torch.inference_mode():
        findings = list(gpu_gate.check_all(Card(torch.device("cuda")), quick, share))
    print(json.dumps([asdict(finding) for finding in findings]))
    return 0


def _commit() -> str:
    try:
        done = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    except OSError:
        return "unknown"
    return done.stdout.strip() or "unknown"


def main() -> int:
    """Exit code 1 behind a red gate."""
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form)
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="every number, as JSON")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="tables for docs/benchmarks.md")
    parser.add_argument("--phases", metavar="A,B", help=f"of {', '.join(PHASES)} (default: all)")
    parser.add_argument("--quick", action="store_true", help="few shapes and one load: under three minutes")
    parser.add_argument("--cpu-rehearsal", action="store_true", help="tiny shapes on a CPU, kernels interpreted")
    other = "the vllm phase's interpreter, of an environment that has vllm (default: this one)"
    parser.add_argument("--vllm-python", metavar="FILE", default=sys.executable, help=other)
    parser.add_argument("--gate-share", help=argparse.SUPPRESS)
    args = parser.parse_args()
    phases = tuple(args.phases.split(",")) if args.phases else QUICK if args.quick else PHASES
    if unknown := set(phases) - set(PHASES):
        parser.error(f"--phases: {', '.join(sorted(unknown))}: there are {', '.join(PHASES)}")
    if not args.cpu_rehearsal and not torch.cuda.is_available():
        parser.error("torch finds no CUDA device; --cpu-rehearsal runs the code without one")
    if args.gate_share:
        return _check_share(args.gate_share, args.quick)
    if "gate" not in phases[:1]:
        phases = ("gate", *(phase for phase in phases if phase != "gate"))
    card = Card(torch.device("cpu" if args.cpu_rehearsal else "cuda"))
    bench = Bench(card, args.quick, args.output, args.vllm_python)
    try:
        with torch.inference_mode():
            bench.run(phases)
    except RedGate as error:
        print(f"gpu.py: {error}", file=sys.stderr)
        return 1
    finally:
        bench.write()
        text = markdown(bench.results)
        if args.markdown:
            args.markdown.write_text(text)
        print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
