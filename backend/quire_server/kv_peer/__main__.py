# SPDX-License-Identifier: Apache-2.0
"""The process that serves KV blocks of the pod to other pods: `python -m quire_server.kv_peer`. The supervisor starts
it. It can end and restart at any time: the requests of this pod do not depend on it."""

import argparse
import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

from quire_server.kv_peer.core_rows import CoreRows
from quire_server.kv_peer.first_node import FirstNode
from quire_server.kv_peer.server import KVPeerServer
from quire_spec import constants
from quire_spec.documents.pod_config import PodConfig
from quire_spec.errors import ConfigError, QuireError
from quire_spec.net.addresses import listen_address
from quire_spec.net.listener import listen
from quire_spec.protocol import kv_wire
from quire_spec.protocol.server import Server

_NICE = 5
"""The steps of the cores come first."""

logger = logging.getLogger("quire_server.kv_peer")


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until SIGTERM; return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m quire_server.kv_peer", description="Serve KV blocks to other pods."
    )
    parser.add_argument("--config", type=Path, required=True, metavar="FILE", help="pod.json")
    parser.add_argument("--run-dir", type=Path, required=True, metavar="DIR", help="folder of the pod's Unix sockets")
    parser.add_argument("--node-rank", type=int, default=0, metavar="I", help="number of this node of a group")
    parser.add_argument("--first-node", metavar="HOST", help="the first node of the group, if this is another one")
    args = parser.parse_args(argv)
    logging.basicConfig(
        level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s %(message)s", force=True
    )
    os.nice(_NICE)
    try:
        config = PodConfig.load(args.config)
        if config.engine.kv_transfer is None:
            raise ConfigError(f"{args.config}: engine.kv_transfer: missing; add it, or do not start this process")
        key_file, port = Path(config.engine.kv_transfer.key_file), config.engine.kv_transfer.port
        kv_wire.read_key(key_file)
        listener = listen(listen_address(config.host, os.environ), port, "engine.kv_transfer.port")
    except QuireError as error:
        print(f"kv_peer: {error}", file=sys.stderr)
        return constants.EXIT_CONFIG
    names = constants.core_names(config.engine.data_parallel_size) if args.first_node is None else [constants.NODE]
    cores = [CoreRows(args.run_dir, name) for name in names]
    first_node = None
    if args.first_node is not None:
        first_node = FirstNode(args.first_node, port, key_file, lambda: cores[0].layout)
    speed = config.engine.kv_transfer.bytes_per_second
    server = KVPeerServer(cores, key_file, speed, first_node, args.node_rank)
    with listener:
        asyncio.run(_serve(server, cores, listener, args.run_dir / constants.process_socket(constants.KV_PEER)))
    return 0


async def _serve(server: KVPeerServer, cores: Sequence[CoreRows], listener: socket.socket, status_socket: Path) -> None:
    stop = asyncio.Event()
    for signal_number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(signal_number, stop.set)
    tasks = [asyncio.create_task(core.run()) for core in cores]
    tasks.append(asyncio.create_task(server.run(listener)))
    stopping = asyncio.create_task(stop.wait())
    logger.info("kv peer listens port=%d", listener.getsockname()[1])
    async with Server((server.status,)).listening(status_socket):
        # The other tasks end only with an error, which ends the process.
        await asyncio.wait([stopping, *tasks], return_when=asyncio.FIRST_COMPLETED)
    for task in (*tasks, stopping):
        task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await asyncio.gather(*tasks)


if __name__ == "__main__":
    sys.exit(main())
