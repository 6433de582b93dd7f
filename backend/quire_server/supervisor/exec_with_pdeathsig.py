# SPDX-License-Identifier: Apache-2.0
"""Script that sets the parent-death signal and then executes a program: `exec_with_pdeathsig.py PARENT_PID ARGV...`.

The kernel then kills the program when the supervisor dies. The server cannot set the signal itself. A preexec_fn cannot
set it either: in a process with threads, it can deadlock, and Python 3.12 warns about it. The script adds about 20 ms
to each start, and imports only the standard library. child_process.py runs it.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Set the parent-death signal, then execute the program."""
    parent_pid, argv = int(sys.argv[1]), sys.argv[2:]
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    # If the parent died before the call above, the signal is never sent.
    if os.getppid() != parent_pid:
        sys.exit("exec_with_pdeathsig: the parent process has ended")
    try:
        os.execvp(argv[0], argv)
    except OSError as error:
        sys.exit(f"exec_with_pdeathsig: {argv[0]!r}: {error.strerror}")


if __name__ == "__main__":
    main()
