# SPDX-License-Identifier: Apache-2.0
"""Command line of the pod supervisor: `python -m quire_server`.

The operator's pods and `quire serve` run this module.
"""

import argparse
import asyncio
import os
import sys
from collections.abc import Sequence

from quire_server.logs import configure_logging
from quire_server.supervisor.app import run
from quire_server.supervisor.managed_process import StartupFailed
from quire_server.supervisor.settings import SupervisorSettings, new_parser
from quire_spec import constants
from quire_spec.errors import QuireError

EXIT_STOPPED = 0
EXIT_STARTUP_FAILED = 1

_HELP = """\
Serve one model and its adapters: start and supervise Triton Inference Server, the text process and the engine core,
fetch the adapters, and answer probes. Ctrl-C or SIGTERM drains open requests; a second signal stops at once.

pod.json contains all settings; quire_spec/documents/pod_config.py describes its fields. `quire serve` writes it, and
so does the operator. The supervisor listens on these ports:
  HTTP, gRPC   Triton Inference Server, with one model for the base and for each exposed adapter
  metrics      the server's own metrics
  health       GET /health/live, /health/ready, /metrics; with the admin key: GET /status, PUT /adapters,
               /v2/repository/index, /v2/repository/models/NAME/load and unload
  openai       the OpenAI API, only if pod.json has the field openai
Point probes at the health port, which also reports why a pod is not ready. The server's own ports report ready only
if the health port does.

Example:
  python -m quire_server --config pod.json --run-dir /tmp/quire --cache-dir ~/.cache/quire
"""
_EXIT_CODES = """\
exit codes:
  0        stopped by a signal after an orderly shutdown
  1        a process did not start; its last lines contain the reason
  2        the command line, pod.json, adapters.json or this machine is not usable; the message states what to change
  130, 143 stopped at once by a second SIGINT or SIGTERM (129: SIGHUP), or by the first one if no process had started
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the supervisor until it is stopped, and return the exit code."""
    args = _build_parser().parse_args(argv)
    configure_logging()
    try:
        asyncio.run(run(SupervisorSettings.load(args.config, args.run_dir, args.cache_dir, os.environ)))
    except StartupFailed as error:
        return _print_error(error, constants.EXIT_CONFIG if error.is_config_error else EXIT_STARTUP_FAILED)
    except QuireError as error:
        return _print_error(error, constants.EXIT_CONFIG)
    return EXIT_STOPPED


def _print_error(error: QuireError, code: int) -> int:
    print(f"quire: {error}", file=sys.stderr, flush=True)
    return code


def _build_parser() -> argparse.ArgumentParser:
    return new_parser("quire_server", _HELP, _EXIT_CODES)


if __name__ == "__main__":
    sys.exit(main())
