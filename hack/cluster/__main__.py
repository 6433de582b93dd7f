# SPDX-License-Identifier: Apache-2.0
"""`python -m cluster`: what the Makefile calls.

tools           find Kubernetes' programs on this machine, or download or build them; says where they are
up              start a cluster of one node (without root: a control plane, no node) and say how to use it
down            end it and remove everything of it, also after a crash
load ARCHIVE"""

import argparse
import sys
from pathlib import Path

from cluster import definitions, images, local, network, tools
from cluster.control_plane import StartError


def say(text: str) -> None:
    """Print a progress line."""
    print(f"cluster: {text}", flush=True)


def main() -> int:
    """Do what the command line says."""
    parser = argparse.ArgumentParser(
        prog="cluster", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("command", choices=["tools", "up", "down", "images", "load"])
    parser.add_argument("archive", nargs="?", type=Path, help="of load: from docker save, podman save")
    options = parser.parse_args()
    if options.archive and options.command != "load":
        parser.error("only load takes an archive")
    try:
        _run(options.command, options.archive)
    except (tools.Unavailable, StartError, network.LinkError) as error:
        print(f"cluster: {error}", file=sys.stderr)
        return 1
    return 0


def _run(command: str, archive: Path | None) -> None:
    if command == "tools":
        found = tools.make(say)
        say(str(found))
        if found.version < definitions.CURRENT:
            _say_definitions()
    elif command == "up":
        say(f"up; to use it:\n\n  export KUBECONFIG={local.up(say)}\n  kubectl get nodes\n  make cluster-down\n")
    elif command == "down":
        say("down, and nothing is left" if local.down() else "there was none")
    elif command == "images":
        say(f"images: {', '.join(map(str, images.build(say)))}")
    else:
        for file in [archive] if archive else images.built():
            say(f"loading {file.name}")
            local.load(file)


def _say_definitions() -> None:
    try:
        say(f"beside it, for definitions: {definitions.make(say)}")
    except tools.Unavailable as error:
        say(f"tests of the definition in a current Kubernetes will be skipped: {error}")


if __name__ == "__main__":
    sys.exit(main())
