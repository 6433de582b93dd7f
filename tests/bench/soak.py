# SPDX-License-Identifier: Apache-2.0
"""Soak test of a real `quire serve` with all kinds of clients: detects wrong answers, hangs and growing processes.

    python tests/bench/soak.py                             # two minutes, 48 clients
    python tests/bench/soak.py --minutes 60 --kill 15      # and every 15 s a process is killed

Clients send requests to the base model and its adapters over HTTP, HTTP streams, gRPC streams and the OpenAI API. A
tenth of them disconnects during an answer. Twice a second the catalog changes, and one name refers to another adapter
or to none. Every answer must equal the answer of the same request alone. If processes are killed, an answer may end in
an error, but must not be wrong or hang.

Memory, threads and open files of each process are shown after each quarter. The last column is the slope of the memory
in the second half, fitted by least squares. The exit status is 1 if an answer was wrong or hung, or failed without a
kill. In a run of an hour without kills, it is also 1 if a slope exceeds its bar.
"""

import argparse
import asyncio
import itertools
import json
import random
import shutil
import statistics
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
import psutil
from tqdm import tqdm

ROOT = Path(__file__).resolve().parents[2]
sys.path += [str(ROOT / "tests"), str(ROOT / "hack")]

from support.quire_serve import EXAMPLES, QuireServeProcess, StreamedResponse, example_document, running_service  # noqa: E402

PROMPTS = ("Once upon a time", "The captain said", "select", "A little girl found")
LENGTHS = (1, 12, 40, 120)
STABLE_MODELS = ("tales", "pirate", "sql")
STUB = "stub of tales"
CHANGING_MODEL = "swapped"
"""Refers to one adapter, to the other, or to none, in turn."""
ProcessSizes = dict[str, tuple[float, int, int]]
"""For each process: MB of private memory, threads, open files; zeros if the process did not exist."""
ABSENT_ERRORS = ("unknown model", "is not served", "is not loaded yet", "HTTP 404")
"""Parts of error messages for a model that does not exist."""
TIMEOUT_S = 60.0
"""A request that takes longer counts as hung."""
MAX_SLOPE, MAX_CORE_SLOPE = 0.1, 0.5
"""Bars for the growth of a process in MB a minute. The core fills its cache of compiled grammars."""
SLOPE_MINUTES = 60
"""Shorter runs show slopes, but do not fail because of them: caches still fill."""
NUM_SAMPLES = 240


@dataclass
class Outcomes:
    """Results of the requests."""

    num_right: int = 0
    num_disconnected: int = 0
    """The client went away."""
    num_absent: int = 0
    """The catalog did not contain the requested model at that time."""
    errors: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)


class Soak:
    """Runs the clients of one service, changes its catalog, and kills processes."""

    def __init__(self, service: QuireServeProcess, seed: int) -> None:
        self.outcomes = Outcomes()
        self._service = service
        self._random = random.Random(seed)
        self._expected = {
            key: service.text(*key[:2], **greedy(key[2])) for key in itertools.product(STABLE_MODELS, PROMPTS, LENGTHS)
        }
        self._ends_at = 0.0

    async def run(self, seconds: float, num_clients: int, kill_every_s: float | None) -> None:
        """Run everything for `seconds`, then wait for open requests."""
        self._ends_at = time.monotonic() + seconds
        tasks = [asyncio.create_task(self._run_client()) for _ in range(num_clients)]
        tasks.append(asyncio.create_task(self._change_catalog()))
        if kill_every_s:
            tasks.append(asyncio.create_task(self._kill_processes(kill_every_s)))
        await asyncio.gather(*tasks)

    def _is_over(self) -> bool:
        return time.monotonic() >= self._ends_at

    async def _run_client(self) -> None:
        while not self._is_over():
            model, prompt = self._random.choice((*STABLE_MODELS, CHANGING_MODEL)), self._random.choice(PROMPTS)
            num_tokens = self._random.choice(LENGTHS)
            send = self._random.choice(
                (self._service.http_stream, self._service.grpc_stream, self._generate_unstreamed, self._complete)
            )
            stream = StreamedResponse()
            call = send(model, prompt, stream, **greedy(num_tokens))
            disconnects = self._random.random() < 0.1
            try:
                await asyncio.wait_for(call, self._random.random() if disconnects else TIMEOUT_S)
            except TimeoutError:
                if disconnects:
                    self.outcomes.num_disconnected += 1
                else:
                    self.outcomes.wrong.append(f"{model} {num_tokens} {send.__name__}: no end after {TIMEOUT_S:g} s")
            else:
                self._check_response(model, prompt, num_tokens, stream)

    async def _generate_unstreamed(
        self, model: str, prompt: str, streamed_response: StreamedResponse, **parameters: object
    ) -> None:
        """HTTP without a stream."""
        response = await asyncio.to_thread(
            self._service.generate, model, prompt, exclude_input_in_output=True, **parameters
        )
        if response.status == 200:
            streamed_response.pieces.append(response.body["text_output"])
        else:
            streamed_response.error = str(response.body["error"] if isinstance(response.body, dict) else response.body)

    async def _complete(
        self, model: str, prompt: str, streamed_response: StreamedResponse, **parameters: object
    ) -> None:
        """A stream of the OpenAI API."""
        url = f"http://127.0.0.1:{self._service.ports['openai']}/v1/completions"
        body = {"model": model, "prompt": prompt, "stream": True, **parameters}
        try:
            async with aiohttp.ClientSession() as session, session.post(url, json=body) as response:
                if response.status != 200:
                    streamed_response.error = await response.text()
                async for line in response.content:
                    if not line.startswith(b"data: {"):
                        continue
                    if "error" in (event := json.loads(line.removeprefix(b"data: "))):
                        streamed_response.error = str(event["error"])
                        return
                    streamed_response.pieces.append(event["choices"][0]["text"])
        except (aiohttp.ClientError, OSError) as error:
            streamed_response.error = f"{type(error).__name__}: {error}"

    def _check_response(self, model: str, prompt: str, num_tokens: int, stream: StreamedResponse) -> None:
        models = [name for name in STABLE_MODELS if name != "tales"] if model == CHANGING_MODEL else [model]
        expected = [self._expected[name, prompt, num_tokens] for name in models]
        if stream.error is None and stream.text in expected:
            self.outcomes.num_right += 1
        elif stream.error is None:
            self.outcomes.wrong.append(f"{model} {num_tokens}: {stream.text!r}, expected one of {expected}")
        elif model == CHANGING_MODEL and any(fragment in stream.error for fragment in ABSENT_ERRORS):
            self.outcomes.num_absent += 1
        else:
            self.outcomes.errors[" ".join(stream.error.split())[:100]] += 1

    async def _change_catalog(self) -> None:
        for generation in itertools.count(self._service.status()["generation"] + 1):
            if self._is_over():
                return
            folder = (None, "pirate", "sql")[generation % 3]
            await asyncio.to_thread(self._service.put_adapters, catalog(generation, folder))
            await asyncio.sleep(0.5)

    async def _kill_processes(self, every_s: float) -> None:
        for name in itertools.cycle(("core", "text", "server", STUB)):
            await asyncio.sleep(every_s)
            if self._is_over():
                return
            try:
                psutil.Process(pid(self._service, name)).kill()
            except (AssertionError, KeyError, TypeError, psutil.NoSuchProcess):
                tqdm.write(f"{name} did not exist and was not killed")


def greedy(num_tokens: int) -> dict[str, object]:
    """Return the parameters of a request with a known answer."""
    return {"temperature": 0.0, "ignore_eos": True, "max_tokens": num_tokens}


def catalog(generation: int, changing: str | None) -> dict[str, object]:
    """Return a catalog with the example's adapters and the changing one."""
    folders = {"pirate": "pirate", "sql": "sql"} | ({CHANGING_MODEL: changing} if changing else {})
    adapters = [
        {"name": name, "source": {"path": str(EXAMPLES / "adapters" / folder)}} for name, folder in folders.items()
    ]
    return {"generation": generation, "adapters": adapters}


def process_sizes(service: QuireServeProcess) -> ProcessSizes:
    """Return the current size of each process."""
    return {name: process_size(service, name) for name in ("supervisor", "core", "text", "openai", "server", STUB)}


def process_size(service: QuireServeProcess, name: str) -> tuple[float, int, int]:
    """Return the current size of one process."""
    try:
        process = psutil.Process(pid(service, name))
        return process.memory_full_info().uss / 1e6, process.num_threads(), process.num_fds()
    except (AssertionError, KeyError, TypeError, psutil.NoSuchProcess):
        return 0.0, 0, 0


def pid(service: QuireServeProcess, name: str) -> int:
    """Return a process id. Raises one of several errors if the process does not exist."""
    if name == "supervisor":
        return service.process.pid
    return service.stub("tales").pid if name == STUB else service.pid(name)


async def sample_sizes(service: QuireServeProcess, seconds: float) -> list[ProcessSizes]:
    """Return NUM_SAMPLES process sizes at equal intervals, with a progress bar."""
    samples = []
    for _ in tqdm(range(NUM_SAMPLES), unit="sample", dynamic_ncols=True):
        await asyncio.sleep(seconds / NUM_SAMPLES)
        samples.append(await asyncio.to_thread(process_sizes, service))
    return samples


def slope(samples: list[ProcessSizes], name: str, minutes: float) -> float:
    """Return the growth of a process in the second half of a run, in MB a minute."""
    sizes = [sample[name][0] for sample in samples[len(samples) // 2 :]]
    times = [minutes * i / len(samples) for i in range(len(sizes))]
    return statistics.linear_regression(times, sizes).slope


async def soak_and_report(soak: Soak, service: QuireServeProcess, args: argparse.Namespace) -> list[ProcessSizes]:
    """Run the soak test and its progress display."""
    seconds = args.minutes * 60
    samples, _ = await asyncio.gather(sample_sizes(service, seconds), soak.run(seconds, args.clients, args.kill))
    return samples


def main() -> int:
    """Run the soak test and print the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=2.0, metavar="M")
    parser.add_argument("--clients", type=int, default=48, metavar="N", help="clients, each with one request at a time")
    parser.add_argument("--kill", type=float, metavar="S", help="kill core, text, server and a stub in turn, every S s")
    parser.add_argument("--seed", type=int, default=0, help="seed of the requests")
    parser.add_argument("--log", type=Path, metavar="FILE", help="copy the log of the service, to explain a failure")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, running_service(example_document(), Path(folder)) as service:
        soak = Soak(service, args.seed)
        samples = asyncio.run(soak_and_report(soak, service, args))
        if args.log is not None:
            shutil.copy(service.log, args.log)
        service.wait_ready()
    outcomes = soak.outcomes
    print(
        f"right {outcomes.num_right}, disconnected {outcomes.num_disconnected}, model did not exist "
        f"{outcomes.num_absent}"
    )
    for error, count in outcomes.errors.most_common():
        print(f"{count:6} x {error}")
    quarters = samples[NUM_SAMPLES // 4 - 1 :: NUM_SAMPLES // 4]
    slopes = {name: slope(samples, name, args.minutes) for name in samples[0]}
    print(f"{'after each quarter':20}{'MB':>24}{'threads':>24}{'open files':>24}{'MB a minute':>14}")
    for name, growth in slopes.items():
        sizes = (f"{round(sample[name][i]):6}" for i in range(3) for sample in quarters)
        print(f"{name:20}", *sizes, f"{growth:14.2f}", sep="")
    for wrong in outcomes.wrong:
        print(f"WRONG: {wrong}")
    grows = [name for name, growth in slopes.items() if growth > (MAX_CORE_SLOPE if name == "core" else MAX_SLOPE)]
    failed_by_growth = bool(grows) and not args.kill and args.minutes >= SLOPE_MINUTES
    failed_by_errors = bool(outcomes.wrong or (outcomes.errors and not args.kill) or not outcomes.num_right)
    return int(failed_by_errors or failed_by_growth)


if __name__ == "__main__":
    sys.exit(main())
