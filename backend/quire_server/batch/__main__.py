# SPDX-License-Identifier: Apache-2.0
"""Command line of batches: `python -m quire_server.batch`. `quire batch` starts it."""

import argparse
import asyncio
import contextlib
import logging
import os
import signal
import sys
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

from quire_server.batch.http_endpoint import HttpEndpoint
from quire_server.batch.input_file import InputFile
from quire_server.batch.progress import Progress
from quire_server.batch.reply import Endpoint
from quire_server.batch.result_store import ResultStore
from quire_server.batch.runner import BatchRunner, RunnerSettings
from quire_spec import constants
from quire_spec.errors import ConfigError, QuireError

EXIT_STOPPED_EARLY = 1
EXIT_LINES_FAILED = 3
DEFAULT_HTTP_INFLIGHT = 64
DEFAULT_HTTP_PRIORITY = 100
_CANCEL_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

_HELP = """\
Run the requests of a file in the format of OpenAI's Batch API, on a server (--url) or on the model of pod.json.
`quire batch --help` explains the files and has examples."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a batch, and return the exit code."""
    args = _parse_args(argv)
    level = logging.INFO if args.verbose else logging.WARNING
    logging.basicConfig(level=level, stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    if not args.verbose:
        # This logger warns about the end of each connection, even if the connection is closed on purpose.
        logging.getLogger("quire_spec.protocol").setLevel(logging.ERROR)
    try:
        return asyncio.run(_run_until_signal(args))
    except QuireError as error:
        print(f"quire batch: {error}", file=sys.stderr)
        return constants.EXIT_CONFIG if isinstance(error, ConfigError) else EXIT_STOPPED_EARLY


async def _run_until_signal(args: argparse.Namespace) -> int:
    """Run a batch until it is complete, or until SIGINT, SIGTERM or SIGHUP arrives."""
    received: list[int] = []
    task = asyncio.create_task(_run(args))

    def on_signal(signal_number: int) -> None:
        received.append(signal_number)
        task.cancel()

    for signal_number in _CANCEL_SIGNALS:
        asyncio.get_running_loop().add_signal_handler(signal_number, on_signal, signal_number)
    try:
        return await task
    except asyncio.CancelledError:
        print("quire batch: stopped; run the same command again to continue", file=sys.stderr)
        return 128 + received[0]


async def _run(args: argparse.Namespace) -> int:
    error_file = args.error_file or args.output.with_suffix(".errors.jsonl")
    with (
        ResultStore(args.output, error_file, args.input) as results,
        InputFile(args.input, results.is_done) as input_file,
    ):
        num_lines = await asyncio.to_thread(input_file.count_lines)
        num_before = results.num_done
        if num_before:
            print(f"quire batch: continuing after {num_before} of {num_lines} lines", file=sys.stderr)
        async with _open_endpoint(args) as (endpoint, settings):
            progress = Progress(num_lines, results)
            try:
                await BatchRunner(endpoint, input_file, results, progress, settings).run()
            finally:
                progress.close()
        num_ok = results.num_done - results.num_failed
        print(f"quire batch: {num_ok} results in {args.output}", file=sys.stderr)
        if results.num_failed:
            print(f"quire batch: {results.num_failed} failed lines in {error_file}", file=sys.stderr)
        return EXIT_LINES_FAILED if results.num_failed else 0


@contextlib.asynccontextmanager
async def _open_endpoint(args: argparse.Namespace) -> AsyncIterator[tuple[Endpoint, RunnerSettings]]:
    """Yield the endpoint that the command line selects, and settings for the runner."""
    if args.url is None:
        # This import needs packages that are not required with --url.
        from quire_server.batch.local import open_local_endpoint

        async with open_local_endpoint(args) as (endpoint, max_inflight):
            yield endpoint, RunnerSettings(args.max_inflight or max_inflight, retry_s=args.retry_timeout)
        return
    max_inflight = args.max_inflight or DEFAULT_HTTP_INFLIGHT
    priority = DEFAULT_HTTP_PRIORITY if args.priority is None else args.priority
    api_key = os.environ.get(args.api_key_env, "")
    async with HttpEndpoint(args.url, api_key, max_inflight, args.timeout) as endpoint:
        yield endpoint, RunnerSettings(max_inflight, priority, args.retry_timeout)


def _parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m quire_server.batch", description=_HELP)
    parser.add_argument("--input", type=Path, required=True, metavar="FILE", help="file with one request on each line")
    parser.add_argument("--output", type=Path, required=True, metavar="FILE", help="file to which results are appended")
    parser.add_argument(
        "--error-file",
        type=Path,
        metavar="FILE",
        help="file to which errors are appended (default: OUTPUT.errors.jsonl)",
    )
    parser.add_argument("--max-inflight", type=int, metavar="N", help="maximum number of open requests")
    parser.add_argument(
        "--retry-timeout",
        type=float,
        default=600.0,
        metavar="S",
        help="end the run if no request succeeds for this many seconds (default: %(default)s)",
    )
    parser.add_argument(
        "--verbose", action="store_true", help="also log each repeated request, and show the engine's log"
    )
    server = parser.add_argument_group("on a server")
    server.add_argument("--url", help="base URL of a server with the OpenAI API")
    server.add_argument(
        "--api-key-env", default="OPENAI_API_KEY", metavar="NAME", help="environment variable that contains the API key"
    )
    server.add_argument("--priority", type=int, metavar="N", help="priority of requests that do not set one")
    server.add_argument("--timeout", type=float, default=3600.0, metavar="S", help="time limit of one request")
    local = parser.add_argument_group("on this machine")
    local.add_argument("--config", type=Path, metavar="FILE", help="pod.json")
    local.add_argument(
        "--run-dir", type=Path, metavar="DIR", help="folder for the sockets of this batch; it must not be shared"
    )
    local.add_argument("--cache-dir", type=Path, metavar="DIR", help="folder in which adapters are kept for later runs")
    args = parser.parse_args(argv)
    if args.url is None and None in (args.config, args.run_dir, args.cache_dir):
        parser.error("--config, --run-dir and --cache-dir are required, unless --url is set")
    if args.max_inflight is not None and args.max_inflight < 1:
        parser.error(f"--max-inflight {args.max_inflight}: must be at least 1")
    return args


if __name__ == "__main__":
    sys.exit(main())
