# SPDX-License-Identifier: Apache-2.0
"""A rank as a process: `python -m quire_engine.rank_process`, started by group.py and by nobody else.

It ends with rank 0, whatever ends that: the kernel kills it, and it sees the end of its socket.
"""

import logging
import signal
import sys

from quire_engine import process
from quire_engine.follower import Follower
from quire_engine.member import Ends
from quire_spec import constants
from quire_spec.errors import ConfigError

_log = logging.getLogger("quire.rank")


def main() -> None:
    """Follow rank 0; the arguments are the file descriptors of `Ends`."""
    process.die_with_parent()
    # Control-C goes to all processes of a terminal; rank 0 says what comes of it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    logging.basicConfig(stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    follower = Follower(Ends(*map(int, sys.argv[1:])), on_gone=lambda: process.leave(0))
    try:
        follower.run()
    except ConfigError:
        # Rank 0 has it, and says it.
        process.leave(constants.EXIT_CONFIG)
    except Exception:
        _log.exception("rank failed")
        process.leave(process.EXIT_DEFECT)


if __name__ == "__main__":
    main()
