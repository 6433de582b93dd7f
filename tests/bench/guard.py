# SPDX-License-Identifier: Apache-2.0
"""Cost of the server's guard over HTTP, with and without it, in alternating rounds: tokens per second and CPU time.

Two services run at the same time and only one is busy. The guard scans each request, never a response. On a machine
that does something else, read the CPU time: that of the whole service for each token.
"""

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import random_checkpoint
from clients import Clients
from tqdm import tqdm

ROOT = Path(__file__).resolve().parents[2]
sys.path += [str(ROOT / "tests"), str(ROOT / "hack")]

from support.quire_serve import QuireServeProcess, running_service  # noqa: E402

NAME = "bench"
VARIABLE = "QUIRE_SERVER_GUARD"
GUARDS = ("0", "1")
EXAMPLES = """\
examples:
  python tests/bench/guard.py --model examples/models/tiny --tokens 200
  python tests/bench/guard.py --shape 135m --tokens 16
"""


@contextmanager
def running_bench_service(model: Path, guard: str, folder: Path) -> Iterator[QuireServeProcess]:
    """Start a service on the CPU with or without the guard."""
    folder.mkdir()
    document = {
        "apiVersion": "quire.dev/v1alpha1",
        "kind": "LLMService",
        "metadata": {"name": NAME},
        "spec": {"device": "CPU", "model": {"source": {"path": str(model)}}, "engine": {"maxNumSeqs": 64}},
    }
    os.environ[VARIABLE] = guard
    with running_service(document, folder) as service:
        yield service


def measure(
    service: QuireServeProcess, num_streams: int, num_prompt_tokens: int, num_tokens: int
) -> tuple[float, float]:
    """Tokens per second of one round of streams, and CPU microseconds of the service for each token."""
    client = Clients({"model": NAME, "http": service.ports["http"]})
    requests = [([5 + i % 64] * num_prompt_tokens, num_tokens) for i in range(num_streams)]
    cpu_s, started = service.cpu_seconds(), time.perf_counter()
    client.run(requests, None, "http")
    seconds, total = time.perf_counter() - started, num_streams * num_tokens
    return total / seconds, (service.cpu_seconds() - cpu_s) / total * 1e6


def main(args: argparse.Namespace) -> None:
    model = (args.model or random_checkpoint.cached_checkpoint(args.shape)).resolve()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        services = {g: stack.enter_context(running_bench_service(model, g, folder / g)) for g in GUARDS}
        sizes = (args.streams, args.prompt_tokens, args.tokens)
        for service in services.values():
            measure(service, *sizes)
        rounds = [
            {g: measure(services[g], *sizes) for g in (GUARDS, GUARDS[::-1])[i % 2]}
            for i in tqdm(range(args.rounds), disable=None)
        ]
    for i, what in enumerate(("tokens/s", "CPU us/token")):
        without, guarded = ([r[g][i] for r in rounds] for g in GUARDS)
        ratios = [a / b for a, b in zip(guarded, without, strict=True)]
        print(f"{what}: without {statistics.median(without):.0f}, with {statistics.median(guarded):.0f}")
        print(f"  ratio {statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f}, {args.rounds} rounds)")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, help="folder of a checkpoint")
    parser.add_argument("--shape", choices=sorted(random_checkpoint.SHAPES), default="135m", help="random weights")
    parser.add_argument("--streams", type=int, default=64, help="concurrent streams (default: %(default)s)")
    parser.add_argument("--prompt-tokens", type=int, default=32, help="tokens of each prompt (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=64, help="tokens of each output (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=8, help="(default: %(default)s)")
    main(parser.parse_args())
