# SPDX-License-Identifier: Apache-2.0
"""The supervisor of a node other than the first: it keeps a process running, which joins a group of nodes.

If the process loses the group, it ends, and the supervisor starts the next one after a pause. So a crash costs a reload
of the weights, and the pods stay. With `kv_transfer`, a second process (kv_peer) serves this node's parts of KV blocks,
and is restarted by itself.
"""

import asyncio
import contextlib
import logging
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quire_server.rank.group_member import GroupMember
from quire_server.supervisor import engine_process, kv_peer_process, reporting
from quire_server.supervisor.child_process import ChildProcess
from quire_server.supervisor.managed_process import ManagedProcess, RestartBackoff
from quire_server.supervisor.settings import SupervisorSettings
from quire_spec import constants
from quire_spec.errors import QuireError
from quire_spec.protocol.client import ConnectionLost
from quire_spec.protocol.results import KVPeerStatus, NodeStatus

FIRST_DELAY_S, MAX_DELAY_S = 1.0, 60.0
"""Seconds between two groups, doubled after each one that lasted less than half a minute."""
_POLL_S = 0.25
_STOP_TIMEOUT_S = 10.0

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RankStatus:
    """The document of GET /status on a node other than the first."""

    node_rank: int
    generation: int
    """Number of the group that this node is part of, or was part of; 0: none yet."""
    state: str
    """starting, connecting, loading, ready, waiting (before the next group) or draining."""
    last_error: str
    """Why the last group ended or could not be joined; empty if there was none."""
    num_groups_lost: int


class RankSupervisor:
    """State and lifecycle of the node."""

    def __init__(
        self,
        settings: SupervisorSettings,
        member: GroupMember,
        run_dir: Path,
        relay: Callable[[str, str], None],
    ) -> None:
        """`relay(name, line)` is called for each line that the process prints."""
        self._settings, self._member, self._run_dir, self._relay = settings, member, run_dir, relay
        self._node: NodeStatus | None = None
        self._generation = 0
        self._is_draining = False
        self._process = ManagedProcess(
            constants.NODE,
            self._start,
            self._session,
            lambda: None,
            RestartBackoff(0.0, 0.0),
            max_start_attempts=None,
        )
        self._kv_peer: ManagedProcess | None = None
        self._kv_peer_status = KVPeerStatus()
        if settings.config.engine.kv_transfer is not None:
            self._kv_peer = ManagedProcess(
                constants.KV_PEER, self._start_kv_peer, self._watch_kv_peer, lambda: None, max_start_attempts=None
            )
        self._backoff = RestartBackoff(FIRST_DELAY_S, MAX_DELAY_S, num_immediate=0)
        self._started_at: float | None = None
        self._was_in_group = False

    def not_ready_reason(self) -> str:
        """Return why the stages of this node do not serve; an empty text if they do."""
        status = self.status()
        if status.state == "ready":
            return ""
        return f"node {status.node_rank} is {status.state}" + (f": {status.last_error}" if status.last_error else "")

    def status(self) -> RankStatus:
        """Return the status document."""
        state = "starting" if self._process.child is not None else "waiting"
        if self._node is not None:
            state = self._node.state
        if self._is_draining:
            state = "draining"
        error, num_lost = self._process.last_error, self._process.status().restarts
        return RankStatus(self._member.node_rank, self._generation, state, error, num_lost)

    def metrics(self) -> str:
        """Return the metrics of this node."""
        status = self.status()
        lines = []
        for name, kind, text, value in (
            ("quire_rank_ready", "gauge", "1 if the stages of this node serve.", int(status.state == "ready")),
            ("quire_rank_generation", "gauge", "Number of the group of nodes.", status.generation),
            ("quire_rank_groups_lost_total", "counter", "Groups that ended on this node.", status.num_groups_lost),
        ):
            lines += [f"# HELP {name} {text}", f"# TYPE {name} {kind}", f"{name} {value}"]
        page = "\n".join(lines) + "\n"
        return page if self._kv_peer is None else page + reporting.kv_peer_metrics(self._kv_peer_status)

    async def run(self, stop: asyncio.Event) -> None:
        """Join one group after another until `stop` is set. Then compute until the first node has drained.

        Raises:
            StartupFailed: a process cannot start because of its configuration.
        """
        processes = [self._process] if self._kv_peer is None else [self._process, self._kv_peer]
        running: list[asyncio.Task[Any]] = [asyncio.create_task(process.run()) for process in processes]
        stopping: asyncio.Task[Any] = asyncio.create_task(stop.wait())
        try:
            await asyncio.wait((*running, stopping), return_when=asyncio.FIRST_COMPLETED)
            for task in running:
                if task.done():
                    task.result()
        finally:
            node, children = self._node, [process.child for process in processes]
            self._is_draining = True
            for task in (*running, stopping):
                task.cancel()
            await asyncio.wait((*running, stopping))
            # Other pods read the rows until the group has ended.
            for process, child in zip(processes, children, strict=True):
                if child is not None and not child.exited.done():
                    await self._stop(process.name, child, node if process is self._process else None)

    async def _stop(self, name: str, child: ChildProcess, node: NodeStatus | None) -> None:
        """Stop the process, but not before its group has ended: open requests need it."""
        if node is not None and node.state == "ready":
            timeout_s = self._settings.config.limits.drainSeconds + _STOP_TIMEOUT_S
            logger.info("draining: computing until the first node ends the group timeout_s=%g", timeout_s)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    await asyncio.shield(child.exited)
        code = await child.stop(_STOP_TIMEOUT_S)
        logger.info("process stopped name=%s exit_code=%d", name, code)

    async def _start(self) -> ChildProcess:
        """Start the next process. It waits before it joins a group, because it can import torch meanwhile. A process
        that was in no group has waited for nothing, so this method waits instead."""
        now = asyncio.get_running_loop().time()
        delay_s = 0.0 if self._started_at is None else self._backoff.delay_s(now - self._started_at)
        logger.info("next group in delay_s=%g", delay_s)
        if not self._was_in_group:
            await asyncio.sleep(delay_s)
            delay_s = 0.0
        self._started_at, self._was_in_group = now + delay_s, False
        (self._run_dir / constants.process_socket(constants.NODE)).unlink(missing_ok=True)
        settings, member = self._settings, self._member
        argv = [sys.executable, "-m", "quire_engine.executor.rank_node_process", f"--config={settings.config_file}"]
        argv += [f"--run-dir={self._run_dir}", f"--cache-dir={settings.cache_dir}"]
        argv += [f"--node-rank={member.node_rank}", f"--master-addr={member.leader}", f"--join-delay={delay_s}"]
        return await ChildProcess.start(constants.NODE, argv, self._relay, engine_process.core_environment())

    async def _start_kv_peer(self) -> ChildProcess:
        options = f"--node-rank={self._member.node_rank}", f"--first-node={self._member.leader}"
        return await kv_peer_process.start(self._settings.config_file, self._run_dir, self._relay, *options)

    async def _watch_kv_peer(self, child: ChildProcess) -> str:
        def keep(status: KVPeerStatus) -> None:
            self._kv_peer_status = status

        assert self._kv_peer is not None
        return await kv_peer_process.watch(self._run_dir, self._kv_peer.mark_ready, keep)

    async def _session(self, child: ChildProcess) -> str:
        async with engine_process.connect(constants.NODE, self._run_dir) as control:
            try:
                while True:
                    self._node = await control.call("status", NodeStatus, timeout_s=engine_process.STOPPED_TIMEOUT_S)
                    self._generation = max(self._generation, self._node.generation)
                    self._was_in_group |= self._node.state != "connecting"
                    if self._node.state == "ready":
                        self._process.mark_ready()
                    await asyncio.sleep(_POLL_S)
            except ConnectionLost:
                return await engine_process.watch_connection(control)
            except QuireError as error:
                return str(error)
            finally:
                self._node = None
