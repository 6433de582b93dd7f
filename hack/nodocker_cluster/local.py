# SPDX-License-Identifier: Apache-2.0
"""A cluster for manual use. Each user of this machine can have one. The cluster runs until `down` is called, even if
the process that started it has ended."""

import os
import shutil
from pathlib import Path

from nodocker_cluster import archive, binaries, cgroups, control_plane, dns, network, node
from nodocker_cluster.kubeconfig import ClusterAccess


def cluster_folder() -> Path:
    """Return the folder of the cluster's certificates, kubeconfigs, data and logs."""
    return binaries.cache_folder() / "up"


def up(report_progress: binaries.ProgressCallback) -> Path:
    """Start a control plane and return its kubeconfig. If the user is root, also start a node.

    Raises:
        Unavailable: a cluster is already up, or the programs are not available.
        StartError: a program did not start.
    """
    cluster_dir = cluster_folder()
    if cluster_dir.exists():
        raise binaries.Unavailable(
            f"a cluster is already up, or was not stopped completely: {cluster_dir}; run make cluster-down"
        )
    with_node = _can_have_node(report_progress)
    programs = binaries.find_or_build(report_progress)
    cluster_dir.mkdir(parents=True, mode=0o700)
    try:
        report_progress("starting the control plane")
        plane = control_plane.start(cluster_dir, programs, network.NETWORK.host if with_node else "127.0.0.1")
        if with_node:
            report_progress("starting the node")
            node.start(plane, archive.write_pause_archive(cluster_dir / "pause.tar"))
            dns.start(plane, report_progress)
    except BaseException:
        down()
        raise
    return plane.kubeconfig


def down() -> bool:
    """Stop the cluster and remove its folder; return False if there was no cluster."""
    cluster_dir = cluster_folder()
    if not cluster_dir.exists():
        return False
    if cgroups.exists(cluster_dir) or (cluster_dir / "pause.tar").exists():
        node.stop(cluster_dir)
    dns.stop(cluster_dir)
    control_plane.stop(cluster_dir)
    shutil.rmtree(cluster_dir)
    return True


def load(archive: Path) -> None:
    """Load the images of an archive onto the node of the running cluster.

    Raises:
        Unavailable: no cluster with a node is up.
    """
    cluster_dir = cluster_folder()
    node_pid = node.first_process(cluster_dir)
    if node_pid is None:
        raise binaries.Unavailable("no cluster with a node is up; run make cluster-up as root to start one")
    programs = binaries.find()
    if programs is None:
        raise binaries.Unavailable("Kubernetes' programs no longer exist; run make cluster-tools")
    access = ClusterAccess.read(cluster_dir / "admin.kubeconfig")
    node.Node(control_plane.ControlPlane(cluster_dir, programs, network.NETWORK.host, access), node_pid).load(archive)


def _can_have_node(report_progress: binaries.ProgressCallback) -> bool:
    if os.geteuid() != 0:
        report_progress("not root, so only the control plane is started; it has no node, so pods stay Pending")
        return False
    node.install_packages(report_progress)
    return True
