# SPDX-License-Identifier: Apache-2.0
"""Run as a script: `tether.py PARENT_PID PROGRAM ARGS...` becomes PROGRAM, which the kernel kills when its parent dies.

The server is not ours and cannot ask for that itself, and a preexec_fn in a process with threads may deadlock (Python
3.12 warns of it). Costs about 20 ms a start. Standard library only; imports nothing of ours; processes.py calls it.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Ask for the parent's death signal, then become the program."""
    parent_pid, argv = int(sys.argv[1]), sys.argv[2:]
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    # The parent may have died before the call above: then nobody would ever send the signal.
    if os.getppid() != parent_pid:
        sys.exit("exec_with_pdeathsig: the parent process has ended")
    try:
        os.execvp(argv[0], argv)
    except OSError as error:
        sys.exit(f"exec_with_pdeathsig: {argv[0]!r}: {error.strerror}")


if __name__ == "__main__":
    main()
