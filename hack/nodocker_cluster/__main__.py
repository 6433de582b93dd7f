# SPDX-License-Identifier: Apache-2.0
"""Command line of the cluster for machines without Docker; the Makefile calls it.

tools           find, download or build Kubernetes, Helm and the endpoint picker, and download CRDs for the tests
controllers     build KEDA and Kueue, and download Prometheus, for make test-controllers
up              start a cluster with one node (without root: only a control plane) and print how to use it
down            stop the cluster and remove all of its files, also after a crash
images          build this checkout's images
load [ARCHIVE]  load the built images, or an archive of docker save or podman save, onto the node"""

import argparse
import sys
from pathlib import Path

from nodocker_cluster import azurite, binaries, controllers, crds, helm, prometheus


def print_progress(text: str) -> None:
    """Print a progress line."""
    print(f"cluster: {text}", flush=True)


def main() -> int:
    """Run the command that is given on the command line."""
    parser = argparse.ArgumentParser(
        prog="nodocker_cluster", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("command", choices=["tools", "controllers", "up", "down", "images", "load"])
    parser.add_argument("archive", nargs="?", type=Path, help="for load: a file that docker save or podman save wrote")
    options = parser.parse_args()
    if options.archive and options.command != "load":
        parser.error("an archive is allowed for load only")
    try:
        _run_command(options.command, options.archive)
    except binaries.ClusterError as error:
        print(f"cluster: {error}", file=sys.stderr)
        return 1
    return 0


def _run_command(command: str, archive: Path | None) -> None:
    if command == "tools":
        print_progress(str(binaries.find_or_build(print_progress)))
        print_progress(f"Helm: {helm.find_or_build(print_progress)}")
        try:
            print_progress(f"endpoint picker: {controllers.PICKER.find_or_build(print_progress)}")
            print_progress(f"LeaderWorkerSet: {controllers.LWS.find_or_build(print_progress)}")
            print_progress(f"CoreDNS: {controllers.DNS.find_or_build(print_progress)}")
            print_progress(f"OpenTelemetry Collector: {controllers.COLLECTOR.find_or_build(print_progress)}")
            print_progress(f"CRDs of {', '.join(crds.find_or_download(print_progress))}")
            print_progress(f"servers of files: {controllers.STORES.find_or_build(print_progress)}")
            # The last one, because only it needs Node.js.
            print_progress(f"Azurite: {azurite.find_or_install(print_progress)}")
        except binaries.Unavailable as error:
            print_progress(f"tests that need other projects will be skipped: {error}")
        return
    if command == "controllers":
        for controller in (controllers.KUEUE, controllers.KEDA):
            print_progress(f"{controller.name}: {controller.find_or_build(print_progress)}")
        print_progress(f"Prometheus: {prometheus.find_or_unpack(print_progress)}")
        return
    # `tools` runs before the project's environment exists, and needs only the standard library.
    from nodocker_cluster import images, local

    if command == "up":
        print_progress(
            f"up; to use it:\n\n  export KUBECONFIG={local.up(print_progress)}\n  kubectl get nodes\n  make "
            "cluster-down\n"
        )
    elif command == "down":
        print_progress("stopped and removed" if local.down() else "no cluster was up")
    elif command == "images":
        print_progress(f"images: {', '.join(map(str, images.build(print_progress)))}")
    else:
        for file in [archive] if archive else images.built_archives():
            print_progress(f"loading {file.name}")
            local.load(file)


if __name__ == "__main__":
    sys.exit(main())
