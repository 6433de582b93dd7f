# SPDX-License-Identifier: Apache-2.0
"""CPU time to encode and decode the messages of a step, from the core to the text process and from there to a frontend:
`python tests/bench/wire.py [--base FOLDER]`.

Each round measures this tree and the base in processes of their own, in alternating order. The base is another tree of
the project. By default, it is a temporary worktree of a5127745, the last commit whose messages were JSON. The output is
the median over the rounds, in microseconds per token of a step of 64 sequences, without and with log probabilities of
the 5 most likely tokens. The exit code is 1 if this tree needs more than a quarter of the base's time.
"""

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
BASE_COMMIT = "a5127745"
MAX_RATIO = 0.25
NUM_SEQUENCES = 64
NUM_LOGPROBS = 5
_REPEATS = 15
_CALLS = 100


def main(argv: Sequence[str] | None = None) -> int:
    """Compare both trees; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", type=Path, help=f"tree to compare with (default: a worktree of {BASE_COMMIT})")
    parser.add_argument("--rounds", type=int, default=5, help="measurements of each tree (default: %(default)s)")
    parser.add_argument("--one-tree", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.one_tree:
        print(json.dumps(measure_tree()))
        return 0
    with contextlib.nullcontext(args.base) if args.base else base_worktree() as base:
        rounds = [measure_both(base, first_is_base=i % 2 == 0) for i in range(args.rounds)]
    worst = 0.0
    print(f"{'us per token':28}{'base':>8}{'now':>8}{'ratio':>8}")
    for name in rounds[0]["now"]:
        before, now = (statistics.median(r[tree][name] for r in rounds) for tree in ("base", "now"))
        print(f"{name:28}{before:8.2f}{now:8.2f}{now / before:8.2f}")
        if name.startswith("core to frontend"):
            worst = max(worst, now / before)
    return int(worst > MAX_RATIO)


@contextlib.contextmanager
def base_worktree() -> Iterator[Path]:
    """Check out the base commit while the context is open."""
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "base"
        git = ["git", "-C", str(ROOT), "worktree"]
        subprocess.run([*git, "add", "--quiet", "--detach", str(tree), BASE_COMMIT], check=True)
        try:
            yield tree
        finally:
            subprocess.run([*git, "remove", "--force", str(tree)], check=True)


def measure_both(base: Path, first_is_base: bool) -> dict[str, dict[str, float]]:
    """Measure both trees once."""
    trees = [("base", base), ("now", ROOT)]
    return {name: run_in_tree(tree) for name, tree in (trees if first_is_base else trees[::-1])}


def run_in_tree(tree: Path) -> dict[str, float]:
    """Measure one tree in a process of its own."""
    env = os.environ | {"PYTHONPATH": str(tree / "backend")}
    command = [sys.executable, __file__, "--one-tree"]
    result: dict[str, float] = json.loads(subprocess.run(command, env=env, check=True, capture_output=True).stdout)
    return result


def measure_tree() -> dict[str, float]:
    """Return the microseconds per token of each message, and their sum."""
    from quire_spec.protocol.framing import FrameDecoder, encode_frame

    figures: dict[str, float] = {}
    for suffix, num_logprobs in (("", 0), (f", {NUM_LOGPROBS} logprobs", NUM_LOGPROBS)):
        total = 0.0
        for name, message in (("step", step_of(num_logprobs)), ("deltas", deltas_of(num_logprobs))):
            frame = encode_frame(message)
            decoder = FrameDecoder()
            assert list(decoder.feed(frame)) == [message]
            encode_us = cpu_us(lambda message=message: encode_frame(message))
            decode_us = cpu_us(lambda decoder=decoder, frame=frame: list(decoder.feed(frame)))
            figures[f"encode {name}{suffix}"] = encode_us
            figures[f"decode {name}{suffix}"] = decode_us
            total += encode_us + decode_us
        figures[f"core to frontend{suffix}"] = total
    return figures


def cpu_us(function: Callable[[], Any]) -> float:
    """Return the CPU time of a call per token, in microseconds: the best of several repeats."""
    best = float("inf")
    for _ in range(_REPEATS):
        started = time.process_time()
        for _ in range(_CALLS):
            function()
        best = min(best, time.process_time() - started)
    return 1e6 * best / _CALLS / NUM_SEQUENCES


def step_of(num_logprobs: int) -> Any:
    """Return the result of a step in which each sequence gets one token."""
    from quire_spec.protocol import messages

    entries = [(100 + i, -0.5 - i, i + 1) for i in range(num_logprobs)]
    positions: Any = [entries] if hasattr(messages, "TokenLogprob") else [[list(entry) for entry in entries]]
    results = [
        messages.SequenceDelta((1 << 56) + i, [1000 + i], None, positions if num_logprobs else None)
        for i in range(NUM_SEQUENCES)
    ]
    stats = messages.SchedulerStats(NUM_SEQUENCES, 3, 4096, 1024, 100_000, 50_000, num_steps=12345)
    return messages.StepResult(results, [], stats)


def deltas_of(num_logprobs: int) -> Any:
    """Return the deltas for the same step."""
    from quire_spec.protocol import messages

    logprobs: Any = None
    if num_logprobs and hasattr(messages, "TokenLogprob"):
        logprobs = [[messages.TokenLogprob(100 + i, -0.5 - i, i + 1, " word") for i in range(num_logprobs)]]
    elif num_logprobs:
        entries = [{"logprob": -0.5 - i, "rank": i + 1, "decoded_token": " word"} for i in range(num_logprobs)]
        logprobs = [{str(100 + i): entry for i, entry in enumerate(entries)}]
    deltas = [
        messages.OutputDelta(
            i, " word", [1000 + i], cumulative_logprob=-12.5 if num_logprobs else None, logprobs=logprobs,
            num_input_tokens=200, num_output_tokens=64, num_cached_tokens=128,
        )
        for i in range(NUM_SEQUENCES)
    ]  # fmt: skip
    return messages.OutputDeltas(deltas)


if __name__ == "__main__":
    sys.exit(main())
