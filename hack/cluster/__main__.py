# SPDX-License-Identifier: Apache-2.0
"""`python -m cluster`: what the Makefile calls.

tools           find Kubernetes' programs on this machine, or download or build them; says where they are
up              start a cluster of one node (without root: a control plane, no node) and say how to use it
down            end it and remove everything of it, also after a crash
load ARCHIVE    put the images of an archive (podman save, docker save) on its node
"""

import argparse
import sys
from pathlib import Path

from cluster import local, network, tools
from cluster.control_plane import StartError


def say(text: str) -> None:
    """Print a progress line."""
    print(f"cluster: {text}", flush=True)


def main() -> int:
    """Do what the command line says."""
    parser = argparse.ArgumentParser(
        prog="cluster", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("command", choices=["tools", "up", "down", "load"])
    parser.add_argument("archive", nargs="?", type=Path, help="of load")
    options = parser.parse_args()
    if (options.command == "load") != (options.archive is not None):
        parser.error("load takes an archive, and nothing else does")
    try:
        _run(options.command, options.archive)
    except (tools.Unavailable, StartError, network.LinkError) as error:
        print(f"cluster: {error}", file=sys.stderr)
        return 1
    return 0


def _run(command: str, archive: Path | None) -> None:
    if command == "tools":
        say(str(tools.make(say)))
    elif command == "up":
        say(f"up; to use it:\n\n  export KUBECONFIG={local.up(say)}\n  kubectl get nodes\n  make cluster-down\n")
    elif command == "down":
        say("down, and nothing is left" if local.down() else "there was none")
    elif archive:
        local.load(archive)


if __name__ == "__main__":
    sys.exit(main())
