# SPDX-License-Identifier: Apache-2.0
"""Attacks a real `quire serve` beside a client that streams on each port.

    make test-hostile                                   # every attack, about 15 minutes
    python tests/hostile/run.py --seconds 120           # a sample: as many attacks of each group as fit
    python tests/hostile/run.py --only gRPC --verbose   # one group, with each answer

Each module of this folder contains the attacks of some groups. The exit status is 1 if a stream of the neighbour broke
or had a wrong text, if an attack got no answer within its documented limit and 2 s, or if an attack succeeded. If every
attack runs, the largest gap of the neighbour's streams and the memory of each process have bars, too.
"""

import argparse
import asyncio
import itertools
import os
import random
import shutil
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parents[2]
sys.path += [str(ROOT / "tests"), str(ROOT / "hack")]
os.environ["GRPC_ENABLE_FORK_SUPPORT"] = "0"  # otherwise, gRPC writes a line for each process that is started

import adapters  # noqa: E402
import borders  # noqa: E402
import chats  # noqa: E402
import constraints  # noqa: E402
import http_framing  # noqa: E402
import kserve  # noqa: E402
import openai_bodies  # noqa: E402
from attack import Attack, Target  # noqa: E402
from neighbour import Neighbour, Report  # noqa: E402
from support.quire_serve import EXAMPLES, QuireServeProcess, example_document, running_service  # noqa: E402

GROUPS = (
    *(openai_bodies.attacks, constraints.attacks, chats.templates, chats.control_tokens, chats.tokenizer),
    *(http_framing.attacks, http_framing.server_framings, kserve.http, kserve.grpc),
    *(borders.keys_and_paths, borders.live, borders.prefix_cache, borders.local_user),
    *(adapters.places, adapters.folders),
)
ANSWER_TOLERANCE_S = 2.0
MAX_SAMPLE_LIMIT_S = 40.0
"""Attacks that wait for a longer limit are not part of a sample."""
MIB = 2**20
NUM_ATTACKERS = 3
NUM_WAITING = 60
"""Attacks that wait for a limit of a minute need no CPU time, so many of them run at a time."""
LONG_LIMIT_S = 45.0
WARM_UP = 400
"""Number of requests that fill each cache before every attack runs. In a sample, memory does not count."""
BASELINE_S = 10.0
MIN_GAP_BAR_S = 0.1
GAP_BAR_RATIO = 3.0
MEMORY_BAR_RATIO = 1.2
KEY, OTHER_KEY, FLOOD_KEY, ADMIN_KEY = "key-of-bob", "key-of-alice", "key-of-carol", "key-of-the-admin"


@dataclass
class Outcomes:
    """Results of the attacks."""

    answers: defaultdict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    """For each group, the number of answers with each status."""
    unanswered: list[str] = field(default_factory=list)
    succeeded: list[str] = field(default_factory=list)
    periods: dict[str, tuple[float, float]] = field(default_factory=dict)
    """For each attack, its start and its end on the clock of `time.monotonic`."""

    def slowest(self, count: int) -> list[tuple[str, float]]:
        """Return the attacks that took the longest, and their seconds."""
        seconds = [(name, end - start) for name, (start, end) in self.periods.items()]
        return sorted(seconds, key=lambda item: -item[1])[:count]

    def during(self, start: float, end: float) -> list[str]:
        """Return the attacks that ran at some time of a period, the newest first."""
        found = [(began, name) for name, (began, ended) in self.periods.items() if began < end and ended > start]
        return [name for _, name in sorted(found, reverse=True)]


def main() -> int:
    """Run the attacks and print a report; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, help="run a sample for this time (default: every attack)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the order and of the sample (default: 0)")
    parser.add_argument("--only", metavar="TEXT", help="only attacks whose group or name contains this text")
    parser.add_argument("--verbose", action="store_true", help="print each answer")
    args = parser.parse_args()
    attacks = [a for a in _all_attacks() if not args.only or args.only in f"{a.group}: {a.name}"]
    chosen = _order(attacks, args.seed, is_sample=args.seconds is not None)
    with tempfile.TemporaryDirectory(prefix="quire-hostile-") as name:
        folder = Path(name)
        folder.chmod(0o755)  # other users get as far as the files of the service
        with running_service(example_document(), folder, *_options(folder)) as service:
            target = Target(service.ports, KEY, OTHER_KEY, FLOOD_KEY, ADMIN_KEY, folder / "adapters")
            return asyncio.run(_run(service, target, chosen, args.seconds, args.verbose))


def _all_attacks() -> list[Attack]:
    return list(itertools.chain.from_iterable(group() for group in GROUPS))


def _order(attacks: Sequence[Attack], seed: int, is_sample: bool) -> list[Attack]:
    """Return the attacks in random order. In a sample, the groups take turns, so that each of them gets its share."""
    source = random.Random(seed)
    by_group: defaultdict[str, list[Attack]] = defaultdict(list)
    for attack in attacks:
        if not is_sample or attack.limit_s <= MAX_SAMPLE_LIMIT_S or attack.group == "adapters":
            by_group[attack.group].append(attack)
    for group in by_group.values():
        source.shuffle(group)
    if is_sample:
        turns = itertools.zip_longest(*by_group.values())
        return [attack for turn in turns for attack in turn if attack is not None]
    return sorted(itertools.chain.from_iterable(by_group.values()), key=lambda _: source.random())


def _options(folder: Path) -> Iterator[str]:
    keys = folder / "keys"
    keys.mkdir()
    (keys / "bob").write_text(KEY)
    (keys / "alice").write_text(OTHER_KEY)
    (keys / "carol").write_text(FLOOD_KEY)
    (folder / "admin-key").write_text(ADMIN_KEY)
    (folder / "admin-key").chmod(0o600)
    keys.chmod(0o700)
    (folder / "adapters").mkdir()
    shutil.copytree(EXAMPLES / "adapters/pirate", folder / "adapters/pirate")
    yield f"--openai-api-keys-dir={keys}"
    yield f"--admin-key-file={folder / 'admin-key'}"
    yield f"--allowed-local-lora-path={folder / 'adapters'}"
    yield "--allow-runtime-lora-updating"


async def _run(
    service: QuireServeProcess, target: Target, attacks: Sequence[Attack], seconds: float | None, is_verbose: bool
) -> int:
    outcomes = Outcomes()
    async with target:
        await _warm_up(target, is_complete=seconds is None)
        before = _memory(service)
        neighbour = Neighbour(service.ports, OTHER_KEY)
        await asyncio.to_thread(neighbour.reports)
        await asyncio.sleep(BASELINE_S)
        baseline = await asyncio.to_thread(neighbour.reports)
        started = time.monotonic()
        await _attack(target, attacks, outcomes, None if seconds is None else started + seconds, is_verbose)
        during = await asyncio.to_thread(neighbour.stop)
        if seconds is None:
            await asyncio.sleep(6)  # memory is returned after some seconds, and counts in a complete run only
        after = _memory(service)
    memory = {name: (before[name], after[name]) for name in sorted(before.keys() & after.keys())}
    return _report(outcomes, baseline, during, memory, time.monotonic() - started, is_complete=seconds is None)


async def _warm_up(target: Target, is_complete: bool) -> None:
    """Fill the KV pages, the caches of grammars and segments, and what a process allocates for its first requests."""
    text = "the fox " * 600
    size = WARM_UP if is_complete else 50
    bodies = [{"model": "tales", "prompt": f"{i} {text}", "max_tokens": 2} for i in range(size)]
    schemas = [
        {"json": {"type": "object", "properties": {f"k{i}{j}": {"type": "string"} for j in range(20)}}}
        for i in range(size)
    ]
    bodies += [{"model": "tales", "prompt": "x", "max_tokens": 4, "structured_outputs": schema} for schema in schemas]
    for start in range(0, len(bodies), 8):
        await asyncio.gather(*(target.post("/v1/completions", body) for body in bodies[start : start + 8]))
    for i in range(size):
        messages = [{"role": "user", "content": f"{i} " + "x " * 30_000}]
        await target.post("/tokenize", {"model": "tales", "messages": messages})
    # The largest requests that each port accepts: regions of shared memory grow with them, and stay.
    for size in (7 * MIB, 8 * MIB - 1000):
        await target.post("/v1/completions", {"model": "tales", "prompt": "x" * size})
    for attack in kserve.largest():
        await attack.send(target)


async def _attack(
    target: Target, attacks: Sequence[Attack], outcomes: Outcomes, deadline: float | None, is_verbose: bool
) -> None:
    """Run the attacks until the deadline."""
    waiting = [attack for attack in attacks if attack.limit_s > LONG_LIMIT_S and attack.group not in ("adapters",)]
    queues = [(iter(waiting), NUM_WAITING), (iter([a for a in attacks if a not in waiting]), NUM_ATTACKERS)]

    async def attacker(queue: Iterator[Attack]) -> None:
        for attack in queue:
            if deadline is not None and time.monotonic() > deadline:
                return
            await _attack_once(target, attack, outcomes, is_verbose)

    await asyncio.gather(*(attacker(queue) for queue, count in queues for _ in range(count)))


async def _attack_once(target: Target, attack: Attack, outcomes: Outcomes, is_verbose: bool) -> None:
    started = time.monotonic()
    limit_s = attack.limit_s + ANSWER_TOLERANCE_S
    try:
        answer = await asyncio.wait_for(attack.send(target), limit_s)
    except TimeoutError:
        answer = "none"
        outcomes.unanswered.append(f"{attack.group}: {attack.name}: no answer after {limit_s:g} s")
    except Exception as error:
        answer = f"wrong: {type(error).__name__}: {error}"
    name, ended = f"{attack.group}: {attack.name}", time.monotonic()
    outcomes.periods[name] = (started, ended)
    outcomes.answers[attack.group][answer.split(" ")[0].rstrip(":")] += 1
    if answer.startswith("wrong"):
        outcomes.succeeded.append(f"{name}: {answer}")
    if is_verbose:
        print(f"{ended - started:6.2f} s  {name}: {answer[:150]!r}", flush=True)


def _memory(service: QuireServeProcess) -> dict[str, int]:
    """Return the resident bytes of each long-lived process."""
    sizes: dict[str, int] = {}
    for process in [*service.child_processes(), psutil.Process(service.process.pid)]:
        try:
            command, size = process.cmdline(), process.memory_info().rss
        except psutil.Error:
            continue
        name = next((part for part in _NAMES if any(part in argument for argument in command[:4])), None)
        if name is not None and "_worker" not in " ".join(command):
            sizes[_NAMES[name]] = sizes.get(_NAMES[name], 0) + size
    return sizes


_NAMES = {
    "quire_engine.core": "core",
    "quire_engine.text": "text",
    "quire_server.openai": "front",
    "triton_python_backend_stub": "stubs",
    "bin/tritonserver": "server",
    "bin/quire": "supervisor",
}


def _report(
    outcomes: Outcomes,
    baseline: dict[str, Report],
    during: dict[str, Report],
    memory: dict[str, tuple[int, int]],
    seconds: float,
    is_complete: bool,
) -> int:
    """Print the report; return the exit status."""
    num_attacks = sum(counts.total() for counts in outcomes.answers.values())
    print(f"\n{num_attacks} attacks in {seconds:.0f} s")
    for group, counts in sorted(outcomes.answers.items()):
        print(f"  {group:26} {counts.total():5}  " + ", ".join(f"{k} {v}" for k, v in counts.most_common(8)))
    for name, took in outcomes.slowest(5):
        print(f"  slowest: {took:6.1f} s  {name}")
    for port, report in during.items():
        for start, end in report.largest_gaps(5):
            beside = "; ".join(outcomes.during(start, end)[:4])
            print(f"  gap on {port}: {start:.2f}-{end:.2f} {1000 * (end - start):5.0f} ms  beside {beside}")
    broken = [f"{port}: {text}" for port, report in during.items() for text in report.broken]
    wrong = [f"{port}: {text[:200]!r}" for port, report in during.items() for text in report.wrong]
    for title, texts in {"broken": broken, "wrong": wrong}.items():
        for text in texts[:5]:
            print(f"  {title}: {text}")
    for text in [*outcomes.unanswered, *outcomes.succeeded]:
        print(f"  {text[:300]}")
    num_streams = sum(report.num_streams for report in during.values())
    failed = [
        _bar(f"broken streams of the neighbour (of {num_streams})", len(broken), 0),
        _bar("wrong texts of the neighbour", len(wrong), 0),
        _bar("requests without an answer", len(outcomes.unanswered), 0),
        _bar("attacks that succeeded", len(outcomes.succeeded), 0),
        num_streams == 0,
    ]
    measured = [
        _bar(
            f"largest gap of the neighbour on {port} in ms (alone: p99 {1000 * alone.p99:.0f}, largest "
            f"{1000 * alone.largest_gap:.0f})",
            round(1000 * during[port].largest_gap),
            round(1000 * max(MIN_GAP_BAR_S, GAP_BAR_RATIO * alone.p99)),
            counts=is_complete,
        )
        for port, alone in baseline.items()
    ]
    measured += [
        _bar(f"memory of {name} / before ({before >> 20} MiB)", round(after / before, 2), MEMORY_BAR_RATIO, is_complete)
        for name, (before, after) in memory.items()
    ]
    return int(any(failed) or (is_complete and any(measured)))


def _bar(what: str, value: float, bar: float, counts: bool = True) -> bool:
    """Print a figure and its bar; return whether it fails the bar. A figure of a sample does not count."""
    print(f"  {'ok  ' if value <= bar else 'FAIL' if counts else 'more'} {what}: {value} (at most {bar})")
    return value > bar


if __name__ == "__main__":
    sys.exit(main())
