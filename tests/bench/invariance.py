# SPDX-License-Identifier: Apache-2.0
"""Whether an answer depends on what else is served: greedy requests alone, and then all of them in one batch.

For each engine, it counts the requests whose tokens differ. The engines are those of the other benchmarks, in the same
dtype. This engine also runs with an adapter for each request.
"""

import argparse
import contextlib
import json
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import command_line
import random_adapters
import random_checkpoint
import report
from child import ChildFailed, ChildProcess
from serving import environment_info
from workload import Workload

NUM_ADAPTERS, RANK = 4, 16
EXAMPLES = """\
examples:
  python tests/bench/invariance.py --shape 135m --vllm-python ~/vllm/bin/python --openvino-python ~/openvino/bin/python
  python tests/bench/invariance.py --model examples/models/tiny --requests 8      does everything work?
"""


def run_benchmark(args: argparse.Namespace) -> dict[str, Any]:
    """Run each engine; the results document. Raises ChildFailed if a process failed."""
    model = (args.model or random_checkpoint.cached_checkpoint(args.shape)).resolve()
    folders = random_adapters.make_adapters(model, model.parent / f"{model.name}-adapters", NUM_ADAPTERS, RANK)
    vocab_size = json.loads((model / "config.json").read_text())["vocab_size"]
    workload = Workload(args.requests, args.prompt_tokens, args.output_tokens, vocab_size, args.seed)
    requests = workload.requests(0)
    plain = {"model": str(model), "dtype": args.dtype, "max_num_seqs": args.requests}
    plain |= {"max_num_batched_tokens": 2048, "max_model_len": 1024}
    lora = plain | {"enable_lora": True, "max_loras": NUM_ADAPTERS, "max_lora_rank": RANK}
    adapters = [None if i % 5 == 4 else str(folders[i % NUM_ADAPTERS]) for i in range(len(requests))]
    rows: dict[str, tuple[Any, ...]] = {
        "Quire": ("quire_offline.py", plain, None, ()),
        "Quire, adapters": ("quire_offline.py", lora, adapters, ()),
    }
    if args.vllm_python:
        rows["vLLM"] = ("vllm_offline.py", plain, None, (args.vllm_python,))
    if args.openvino_python:
        rows["OpenVINO"] = ("openvino_offline.py", plain, None, (args.openvino_python,))
    results: dict[str, Any] = {**environment_info(), "dtype": args.dtype, "rows": {}}
    results["workload"] = {
        name: getattr(args, name) for name in ("requests", "prompt_tokens", "output_tokens", "seed", "runs")
    }
    for name, (script, settings, of_requests, python) in rows.items():
        with contextlib.ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="quire-bench-")))
            print(f"invariance: {name}", file=sys.stderr, flush=True)
            child = stack.enter_context(ChildProcess(name, script, settings, folder, *python))
            results["rows"][name] = _count_differences(child, requests, of_requests)
    return results


def _count_differences(child: ChildProcess, requests: Sequence[Any], adapters: list[str | None] | None) -> list[int]:
    """Return, for each request, the position of the first token that differs in the batch, or -1."""

    def run(part: slice) -> list[list[int]]:
        extra = {} if adapters is None else {"adapters": adapters[part]}
        tokens: list[list[int]] = child.call("run", requests=requests[part], offsets=None, **extra)["token_ids"]
        return tokens

    alone = [run(slice(i, i + 1))[0] for i in range(len(requests))]
    pairs = zip(alone, run(slice(len(requests))), strict=True)
    return [next((i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), -1) for a, b in pairs]


def format_report(results: dict[str, Any]) -> str:
    """The table, and what a reader needs to judge it."""
    rows = [
        [name, str(len(first)), str(sum(position >= 0 for position in first))]
        for name, first in results["rows"].items()
    ]
    workload = results["workload"]
    heading = (
        f"{report.environment_line(results)}{workload['requests']} greedy requests, {report.lengths(workload)}, in "
        f"{results['dtype']}, each alone and then all in one batch."
    )
    return f"{heading}\n\n{report.format_table(['what', 'requests', 'with other tokens in the batch'], rows)}"


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = command_line.new_parser("invariance.py", __doc__, EXAMPLES)
    command_line.add_engine_options(parser)
    parser.set_defaults(prompt_tokens="32-256", output_tokens="32-64", runs=1)
    parser.add_argument(
        "--openvino-python", metavar="FILE", help="interpreter of an environment that has openvino_genai; adds OpenVINO"
    )
    parser.add_argument("--dtype", default="bfloat16", help="bfloat16 (default) or float32")
    return command_line.parse_engine_options(parser, argv, ())


def main(argv: Sequence[str] | None = None) -> None:
    """Count and report; every process that was started has ended afterwards."""
    args = parse_arguments(argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        results = run_benchmark(args)
    except ChildFailed as error:
        raise SystemExit(f"invariance: {error}") from error
    command_line.publish("invariance.py", args, results, format_report(results))


if __name__ == "__main__":
    main()
