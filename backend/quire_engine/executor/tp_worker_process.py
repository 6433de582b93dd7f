# SPDX-License-Identifier: Apache-2.0
"""A rank as a process: `python -m quire_engine.executor.tp_worker_process`, started by group.py and by nobody else.

It ends with rank 0, whatever ends that: the kernel kills it, and it sees the end of its socket.
"""

import logging
import signal
import sys

from quire_engine.distributed.worker_handle import WorkerChannels
from quire_engine.executor.tp_worker import TensorParallelWorker
from quire_engine.ipc import process
from quire_spec import constants
from quire_spec.errors import ConfigError

logger = logging.getLogger(__name__)


def main() -> None:
    """Follow rank 0; the arguments are the file descriptors of `Ends`."""
    process.set_parent_death_signal()
    # Control-C goes to all processes of a terminal; rank 0 says what comes of it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    logging.basicConfig(stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    worker = TensorParallelWorker(WorkerChannels(*map(int, sys.argv[1:])), on_disconnected=lambda: process.exit_now(0))
    try:
        worker.run()
    except ConfigError:
        # Rank 0 has it, and says it.
        process.exit_now(constants.EXIT_CONFIG)
    except Exception:
        logger.exception("rank failed")
        process.exit_now(process.EXIT_SOFTWARE)


if __name__ == "__main__":
    main()
