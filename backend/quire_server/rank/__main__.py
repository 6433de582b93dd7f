# SPDX-License-Identifier: Apache-2.0
"""Command line of a node other than the first: `python -m quire_server.rank`. The operator's worker pods and `quire
serve --node-rank` run it."""

import argparse
import asyncio
import logging
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from aiohttp import web

from quire_server.logs import LogRelay, configure_logging
from quire_server.rank.group_member import GroupMember
from quire_server.rank.health_api import HealthAPI
from quire_server.rank.supervisor import RankSupervisor
from quire_server.supervisor import run_dir
from quire_server.supervisor.child_process import become_subreaper
from quire_server.supervisor.managed_process import StartupFailed
from quire_server.supervisor.settings import SupervisorSettings, new_parser
from quire_spec import constants
from quire_spec.errors import ConfigError, QuireError
from quire_spec.protocol import shared_key

_HELP = """\
Compute the pipeline stages of one node of a group. The first node (node 0) runs python -m quire_server with the same
pod.json, and serves all requests. This node joins it, and joins again after the group has ended.

The health port answers GET /health/live, /health/ready and /metrics, and with the admin key GET /status.
"""
_EXIT_CODES = """\
exit codes:
  0        stopped by a signal
  2        the command line, pod.json or this machine is not usable; the message states what to change
"""
_SHUTDOWN_TIMEOUT_S = 2.0

logger = logging.getLogger("quire_server.rank")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the node until it is stopped, and return the exit code."""
    args = _build_parser().parse_args(argv)
    configure_logging()
    try:
        settings = SupervisorSettings.load(args.config, args.run_dir, args.cache_dir, os.environ)
        member = GroupMember.find(settings.config.engine, args.node_rank, args.master_addr, os.environ)
        asyncio.run(_run(settings, member))
    except QuireError as error:
        print(f"quire: {error}", file=sys.stderr, flush=True)
        return 1 if isinstance(error, StartupFailed) and not error.is_config_error else constants.EXIT_CONFIG
    return 0


async def _run(settings: SupervisorSettings, member: GroupMember) -> None:
    config = settings.config
    assert config.engine.rank_key_file is not None
    shared_key.read_key(Path(config.engine.rank_key_file), "engine.rank_key_file")
    become_subreaper()
    stop = asyncio.Event()
    for signal_number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        asyncio.get_running_loop().add_signal_handler(signal_number, _on_signal, stop, signal_number)
    with run_dir.locked_run_dir(settings.run_dir) as run_folder:
        supervisor = RankSupervisor(settings, member, run_folder, LogRelay(config.server.shows_log))
        app = HealthAPI(supervisor, config.adminKeyFile).app()
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=_SHUTDOWN_TIMEOUT_S)
        await runner.setup()
        try:
            port = config.ports.health
            try:
                await web.TCPSite(runner, settings.host, port).start()
            except OSError as error:
                raise ConfigError(
                    f"ports.health {port}: cannot listen on {settings.host} ({error.strerror})"
                ) from error
            logger.info("node rank=%d of %d leader=%s", member.node_rank, config.engine.nnodes, member.leader)
            await supervisor.run(stop)
        finally:
            await runner.cleanup()


def _on_signal(stop: asyncio.Event, signal_number: signal.Signals) -> None:
    if stop.is_set():
        # The kernel kills the process of the node, too.
        logger.warning("second stop signal signal=%s", signal_number.name)
        logging.shutdown()
        os._exit(128 + signal_number)
    logger.info("stop requested signal=%s", signal_number.name)
    stop.set()


def _build_parser() -> argparse.ArgumentParser:
    parser = new_parser("quire_server.rank", _HELP, _EXIT_CODES)
    parser.add_argument(
        "--node-rank", type=int, metavar="I", help="number of this node, from 1 (default: LWS_WORKER_INDEX)"
    )
    parser.add_argument(
        "--master-addr",
        metavar="HOST",
        help="name or address of the first node (default: engine.master_addr, otherwise LWS_LEADER_ADDRESS)",
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
