# SPDX-License-Identifier: Apache-2.0
"""The control groups of a cluster's pods. Each cluster has its own tree, so that all its groups can be removed."""

import hashlib
import time
from collections.abc import Iterator
from pathlib import Path

_ROOT = Path("/sys/fs/cgroup")
_PREFIX = "quire-"
_REMOVE_TIMEOUT_S = 10.0


def tree_name(folder: Path) -> str:
    """Return the name of the tree of the cluster in `folder`."""
    return f"{_PREFIX}{hashlib.sha256(str(folder).encode()).hexdigest()[:10]}"


def create(folder: Path) -> None:
    """Create the tree in every cgroup hierarchy of this machine."""
    for tree in _trees(folder):
        tree.mkdir(exist_ok=True)
        if (tree / "cgroup.controllers").exists() and tree.parent == _ROOT:
            # In version 2 of cgroups, children get only the controllers that are written to this file.
            controllers = (tree / "cgroup.controllers").read_text().split()
            (tree / "cgroup.subtree_control").write_text(" ".join(f"+{controller}" for controller in controllers))


def remove_stale() -> None:
    """Remove the trees of clusters that were killed. Call this only while no node runs."""
    for hierarchy in _hierarchies():
        for tree in hierarchy.glob(f"{_PREFIX}*"):
            _try_remove_tree(tree)


def exists(folder: Path) -> bool:
    """Return whether the tree exists."""
    return any(tree.exists() for tree in _trees(folder))


def remove(folder: Path) -> None:
    """Remove the tree. Call this function after the processes of the tree have ended. It waits, because the kernel can
    need more time to release their groups."""
    deadline = time.monotonic() + _REMOVE_TIMEOUT_S
    while remaining := [tree for tree in _trees(folder) if tree.exists()]:
        for tree in remaining:
            _try_remove_tree(tree)
        if time.monotonic() > deadline:
            raise TimeoutError(f"control groups are still in use: {', '.join(map(str, remaining))}")
        time.sleep(0.02)


def _trees(folder: Path) -> Iterator[Path]:
    for hierarchy in _hierarchies():
        yield hierarchy / tree_name(folder)


def _hierarchies() -> Iterator[Path]:
    """Yield the only hierarchy if this machine uses cgroup version 2, or all hierarchies if it uses version 1."""
    if not _ROOT.is_dir():
        return
    if (_ROOT / "cgroup.controllers").exists():
        yield _ROOT
        return
    for hierarchy in sorted(_ROOT.iterdir()):
        if hierarchy.is_dir() and not hierarchy.is_symlink() and (hierarchy / "cgroup.procs").exists():
            yield hierarchy


def _try_remove_tree(tree: Path) -> None:
    """Remove the groups of the tree, children before parents. Groups that are still in use remain until the next
    attempt."""
    for group in [*sorted((g for g in tree.rglob("*") if g.is_dir()), reverse=True), tree]:
        try:
            group.rmdir()
        except OSError:
            pass
