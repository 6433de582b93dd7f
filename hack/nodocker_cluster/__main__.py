# SPDX-License-Identifier: Apache-2.0
"""`python -m nodocker_cluster`: what the Makefile calls.

tools           find Kubernetes' programs on this machine, or download or build them; says where they are
up              start a cluster of one node (without root: a control plane, no node) and say how to use it
down            end it and remove everything of it, also after a crash
load ARCHIVE"""

import argparse
import sys
from pathlib import Path

from nodocker_cluster import binaries, crd_apiserver, images, local, network
from nodocker_cluster.control_plane import StartError


def print_progress(text: str) -> None:
    """Print a progress line."""
    print(f"cluster: {text}", flush=True)


def main() -> int:
    """Do what the command line says."""
    parser = argparse.ArgumentParser(
        prog="nodocker_cluster", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("command", choices=["tools", "up", "down", "images", "load"])
    parser.add_argument("archive", nargs="?", type=Path, help="of load: from docker save, podman save")
    options = parser.parse_args()
    if options.archive and options.command != "load":
        parser.error("only load takes an archive")
    try:
        _run_command(options.command, options.archive)
    except (binaries.Unavailable, StartError, network.LinkError) as error:
        print(f"cluster: {error}", file=sys.stderr)
        return 1
    return 0


def _run_command(command: str, archive: Path | None) -> None:
    if command == "tools":
        programs = binaries.find_or_build(print_progress)
        print_progress(str(programs))
        if programs.version < crd_apiserver.MIN_CURRENT_VERSION:
            _make_crd_apiserver()
    elif command == "up":
        print_progress(
            f"up; to use it:\n\n  export KUBECONFIG={local.up(print_progress)}\n  kubectl get nodes\n  make "
            "cluster-down\n"
        )
    elif command == "down":
        print_progress("down, and nothing is left" if local.down() else "there was none")
    elif command == "images":
        print_progress(f"images: {', '.join(map(str, images.build(print_progress)))}")
    else:
        for file in [archive] if archive else images.built_archives():
            print_progress(f"loading {file.name}")
            local.load(file)


def _make_crd_apiserver() -> None:
    try:
        print_progress(f"beside it, for definitions: {crd_apiserver.find_or_build(print_progress)}")
    except binaries.Unavailable as error:
        print_progress(f"tests of the definition in a current Kubernetes will be skipped: {error}")


if __name__ == "__main__":
    sys.exit(main())
