# SPDX-License-Identifier: Apache-2.0
"""Entry point of the process of a node other than the first: `python -m quire_engine.executor.rank_node_process`.

The supervisor of the node (`python -m quire_server.rank`) starts it, and starts it again when it has ended. The main
thread answers the supervisor; another thread is the node.
"""

import argparse
import asyncio
import sys
import threading
import time
from pathlib import Path

from quire_engine.executor.rank_node import RankNode
from quire_engine.ipc import process
from quire_engine.weights.checkpoint import Checkpoint
from quire_engine.weights.hub import resolve_model
from quire_spec import constants
from quire_spec.documents.pod_config import PodConfig
from quire_spec.errors import QuireError
from quire_spec.protocol.server import Server

_NAME = "quire_engine.executor.rank_node_process"


def _parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog=_NAME)
    parser.add_argument("--config", type=Path, required=True, help="path of pod.json")
    parser.add_argument("--run-dir", type=Path, required=True, help="folder of the socket for the supervisor")
    parser.add_argument("--cache-dir", type=Path, required=True, help="folder for files of adapters")
    parser.add_argument("--node-rank", type=int, required=True, help="number of this node, from 1")
    parser.add_argument("--master-addr", required=True, help="name or address of the first node")
    parser.add_argument("--join-delay", type=float, default=0.0, help="seconds before it joins a group (default: 0)")
    return parser.parse_args()


def main() -> None:
    """Join a group, and compute until it ends. Raises ConfigError if the model cannot be read."""
    args = _parse_args()
    config = PodConfig.load(args.config).engine
    checkpoint = Checkpoint.load(
        resolve_model(config.model, config.revision, True, config.download_dir), config.model_impl
    )
    node = RankNode(
        config, checkpoint, args.node_rank, args.master_addr, args.cache_dir, join_at=time.monotonic() + args.join_delay
    )
    threading.Thread(target=_run, args=(node,), name="node").start()
    asyncio.run(_serve(node, args.run_dir / constants.process_socket(constants.NODE)))


def _run(node: RankNode) -> None:
    """Run the node. The process ends with it: a new group needs a new process."""
    try:
        reason = node.run()
    except QuireError as error:
        reason = str(error)
    # The supervisor reports the last line.
    print(f"node ended: {reason}", file=sys.stderr)
    process.exit_now(process.EXIT_SOFTWARE)


async def _serve(node: RankNode, socket_path: Path) -> None:
    process.install_exit_handlers(asyncio.get_running_loop())
    async with Server((node.status, node.shared_rows)).listening(socket_path):
        await asyncio.get_running_loop().create_future()


if __name__ == "__main__":
    process.run_main(_NAME, main)
