# SPDX-License-Identifier: Apache-2.0
"""Entry point of the process of a worker: `python -m quire_engine.executor.rank_worker_process`.

`distributed/worker_handle.py` starts it. The process ends when rank 0 ends: the kernel kills it when rank 0 dies, and
it exits when its socket closes.
"""

import logging
import signal
import sys

from quire_engine.distributed.worker_handle import WorkerChannels
from quire_engine.executor.rank_worker import RankWorker
from quire_engine.ipc import process
from quire_spec import constants
from quire_spec.errors import ConfigError

logger = logging.getLogger(__name__)


def main() -> None:
    """Run a worker; the arguments are the file descriptors of `WorkerChannels`."""
    process.set_parent_death_signal()
    # Control-C reaches all processes of a terminal; only rank 0 handles it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    logging.basicConfig(stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    worker = RankWorker(WorkerChannels(*map(int, sys.argv[1:])), on_disconnected=lambda: process.exit_now(0))
    try:
        worker.run()
    except ConfigError:
        # The error was sent to rank 0, which reports it.
        process.exit_now(constants.EXIT_CONFIG)
    except Exception:
        logger.exception("worker failed")
        process.exit_now(process.EXIT_SOFTWARE)


if __name__ == "__main__":
    main()
