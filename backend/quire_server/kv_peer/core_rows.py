# SPDX-License-Identifier: Apache-2.0
"""The host memory of one core, or of a node other than the first: its rows, which this process reads but never writes,
and the core's leases on them."""

import asyncio
import contextlib
import logging
import mmap
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from quire_spec.constants import process_socket
from quire_spec.errors import QuireError
from quire_spec.protocol.client import Client
from quire_spec.protocol.kv_wire import RowLayout
from quire_spec.protocol.messages import Hello
from quire_spec.protocol.results import SharedRows

_RETRY_S = 0.2
_CALL_TIMEOUT_S = 10.0
_SHARED_ROWS: Any = SharedRows | None
_LEASED_STATE: Any = tuple[int, int] | None

logger = logging.getLogger(__name__)


class CoreRows:
    """The rows of a core that is running, starting or restarting. The core owns them and decides about each lease."""

    def __init__(self, run_dir: Path, name: str) -> None:
        """`name` is the name of the core's process."""
        self._client = Client(run_dir / process_socket(name), Hello("kv_peer", pid=os.getpid()), name)
        self._memory: memoryview | None = None
        self._shared: SharedRows | None = None

    @property
    def generation(self) -> int:
        """Number of the group of nodes; 0 if there is one node, or while the core is not ready."""
        return 0 if self._shared is None else self._shared.generation

    @property
    def nodes(self) -> list[str]:
        """HOST:PORT of the servers of the other nodes of the group."""
        return [] if self._shared is None else self._shared.nodes

    def rows(self) -> "Rows | None":
        """Return the rows; None while the core is not ready."""
        memory, shared = self._memory, self._shared
        if memory is None or shared is None:
            return None
        return Rows(memory[: shared.num_rows * shared.row_bytes], shared.row_bytes)

    @property
    def layout(self) -> RowLayout | None:
        """The layout of the rows; None while the core is not ready."""
        return None if self._shared is None else self._shared.layout

    async def run(self) -> None:
        """Stay connected to the core until the task is cancelled."""
        while True:
            try:
                await self._client.connect()
                while (shared := await self._find_shared()) is None:
                    await asyncio.sleep(_RETRY_S)
                self._memory, self._shared = _map(shared), shared
                logger.info("rows of %s are shared rows=%d", self._client.peer_name, shared.num_rows)
                await self._client.closed.wait()
            except (OSError, QuireError) as error:
                if self._client.is_connected:
                    logger.error("rows of %s cannot be shared error=%s", self._client.peer_name, error)
                    await self._client.close()
            finally:
                # Rows that are being sent stay mapped until then. The core is gone, so that nothing changes them.
                self._memory = self._shared = None
            await asyncio.sleep(_RETRY_S)

    async def _find_shared(self) -> SharedRows | None:
        shared: SharedRows | None = await self._client.call("shared_rows", _SHARED_ROWS, timeout_s=_CALL_TIMEOUT_S)
        return shared

    async def lease(self, lease: bytes, keys: Sequence[bytes]) -> list[tuple[int, memoryview] | None]:
        """Pin blocks in the core, and return number and bytes of the row of each; None: the core does not have the
        block, or does not respond."""
        if (shared := self.rows()) is None:
            return [None] * len(keys)
        try:
            args = {"lease": lease, "keys": list(keys)}
            rows = await self._client.call("lease_rows", list[int | None], args, timeout_s=_CALL_TIMEOUT_S)
        except QuireError:
            return [None] * len(keys)
        return [None if row is None else (row, shared[row]) for row in rows]

    async def lease_state(self, lease: bytes, keys: Sequence[bytes], first: int) -> tuple[int, int, memoryview] | None:
        """Pin a state; see `kv_wire.LeaseState`. Return the number of its block, and number and bytes of its row; None:
        the core has none, or does not respond."""
        if (states := self._states()) is None:
            return None
        try:
            args = {"lease": lease, "keys": list(keys), "first": first}
            found = await self._client.call("lease_state", _LEASED_STATE, args, timeout_s=_CALL_TIMEOUT_S)
        except QuireError:
            return None
        return None if found is None else (found[0], found[1], states[found[1]])

    def _states(self) -> "Rows | None":
        memory, shared = self._memory, self._shared
        return None if memory is None or shared is None else state_rows(memory, shared)

    async def extend(self, lease: bytes) -> bool:
        """Prolong a lease; return whether the core has it."""
        with contextlib.suppress(QuireError):
            [known] = await self._client.call("extend_leases", list[bool], {"leases": [lease]})
            return known
        return False

    async def release(self, leases: Sequence[bytes]) -> None:
        """End leases. If the core does not respond, they end with their time."""
        with contextlib.suppress(QuireError):
            await self._client.call("release_leases", type(None), {"leases": list(leases)})


class Rows:
    """The bytes of each row in a memory."""

    def __init__(self, memory: memoryview, row_bytes: int) -> None:
        self._memory, self._row_bytes = memory, row_bytes

    def __len__(self) -> int:
        return len(self._memory) // self._row_bytes

    def __getitem__(self, row: int) -> memoryview:
        return self._memory[row * self._row_bytes : (row + 1) * self._row_bytes]


def state_rows(memory: memoryview, shared: SharedRows) -> Rows | None:
    """Return the rows of states; None if layers have no states."""
    end = shared.states_start + shared.num_states * shared.state_bytes
    return Rows(memory[shared.states_start : end], shared.state_bytes) if shared.num_states else None


def _map(shared: SharedRows) -> memoryview:
    """Map the memory file of a core; raises OSError."""
    # Opened through /proc, the file gets a mode of its own, so that the rows cannot be written here.
    file = os.open(f"/proc/{shared.pid}/fd/{shared.file}", os.O_RDONLY | os.O_CLOEXEC)
    try:
        num_bytes = max(
            shared.num_rows * shared.row_bytes, shared.states_start + shared.num_states * shared.state_bytes
        )
        if os.fstat(file).st_size < num_bytes:
            raise OSError(f"the memory file has less than {num_bytes} bytes")
        return memoryview(mmap.mmap(file, num_bytes, prot=mmap.PROT_READ))
    finally:
        os.close(file)
