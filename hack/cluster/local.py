# SPDX-License-Identifier: Apache-2.0
"""A cluster for people: up until it is taken down, whatever ends in between. One for each user of this machine."""

import os
import shutil
from pathlib import Path

from cluster import archive, cgroups, control_plane, network, node, tools
from cluster.kubeconfig import Access


def folder() -> Path:
    """Where it is: certificates, kubeconfigs, data, logs."""
    return tools.cache() / "up"


def up(say: tools.Say) -> Path:
    """Start a control plane, and a node where this is root; the kubeconfig.

    Raises:
        Unavailable: one is up already, or the programs are not there and cannot be had.
        StartError: a program did not start.
    """
    here = folder()
    if here.exists():
        raise tools.Unavailable(f"a cluster is up, or was not taken down: {here}; make cluster-down ends it")
    with_node = _can_have_node(say)
    programs = tools.make(say)
    here.mkdir(parents=True, mode=0o700)
    try:
        say("starting the control plane")
        plane = control_plane.start(here, programs, network.HERE.host if with_node else "127.0.0.1")
        if with_node:
            say("starting the node")
            node.start(plane, archive.pause(here / "pause.tar"))
    except BaseException:
        down()
        raise
    return plane.kubeconfig


def down() -> bool:
    """End all of it and remove its folder; False where there was none."""
    here = folder()
    if not here.exists():
        return False
    if cgroups.exist(here) or (here / "pause.tar").exists():
        node.stop(here)
    control_plane.stop(here)
    shutil.rmtree(here)
    return True


def load(images: Path) -> None:
    """Put the images of an archive on the node of the cluster that is up.

    Raises:
        Unavailable: no cluster with a node is up.
    """
    here = folder()
    running = node.first_process(here)
    if running is None:
        raise tools.Unavailable("no cluster with a node is up; make cluster-up as root starts one")
    programs = tools.find()
    if programs is None:
        raise tools.Unavailable("the programs of Kubernetes have gone; make cluster-tools")
    access = Access.read(here / "admin.kubeconfig")
    node.Node(control_plane.ControlPlane(here, programs, network.HERE.host, access), running).load(images)


def _can_have_node(say: tools.Say) -> bool:
    if os.geteuid() != 0:
        say("not root: a control plane without a node, where pods stay Pending")
        return False
    node.prepare(say)
    return True
