# SPDX-License-Identifier: Apache-2.0
"""The rows of host memory of a node other than the first: the parts of its ranks. The first node decides what is in a
row, and lets this one read parts of other pods into it, or exchange parts with its own folder. Torch-free."""

import logging
import mmap
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from quire_engine.kv_cache.row_file import RowFile
from quire_engine.kv_transfer.folder_store import FolderStore
from quire_engine.kv_transfer.peer_connection import Cancelled, PeerConnection, closing
from quire_engine.kv_transfer.peer_store import checksum
from quire_engine.kv_transfer.store import RowBuffers
from quire_spec.engine.config import EngineConfig
from quire_spec.engine.kv_transfer_config import PeerAddress
from quire_spec.errors import QuireError, Unavailable
from quire_spec.protocol import kv_wire
from quire_spec.protocol.kv_wire import RowLayout
from quire_spec.protocol.protocol_error import ProtocolError
from quire_spec.protocol.results import SharedRows

FOLDER_CALLS = ("read_folder", "write_folder")
CALLS = ("share_rows", "read_rows", "end_read", "open_folder", *FOLDER_CALLS)
"""The calls that the node itself answers."""
_MAX_MESSAGE = 500
_KEY_BYTES = 32

logger = logging.getLogger(__name__)


class NodeRows:
    """The file with the rows of the ranks of this node. `run` answers calls, each in a thread of its own, except for
    FOLDER_CALLS, which the threads of the folder answer."""

    def __init__(self, config: EngineConfig, node_rank: int) -> None:
        self.file = RowFile.create()
        """The workers map it."""
        self._config, self._node_rank = config, node_rank
        self._layout: RowLayout | None = None
        self._num_rows = self._row_bytes = 0
        self._memory = memoryview(b"")
        self._folder: FolderStore | None = None
        self._reads: set[str] = set()
        """Leases whose rows are being read."""
        self._lock = threading.Lock()

    def shared_rows(self, generation: int) -> SharedRows | None:
        """Return where another process of this user finds the rows; None if the first node is not ready yet."""
        if (layout := self._layout) is None:
            return None
        return SharedRows(os.getpid(), self.file.file, self._num_rows, layout, self._row_bytes, generation)

    def prepare(self, call: dict[str, Any]) -> None:
        """Called for each call in the order of their arrival, before `run`."""
        if call["call"] == "read_rows":
            with self._lock:
                self._reads.add(call["lease"])
        elif call["call"] == "end_read":
            with self._lock:
                self._reads.discard(call["lease"])

    def run(self, call: dict[str, Any]) -> list[int | str] | int:
        """Return the value of the reply to a call."""
        if call["call"] == "share_rows":
            layout = msgspec.convert(call["layout"], RowLayout)
            self._map(int(call["num_rows"]), int(call["row_bytes"]))
            self._layout = layout
        elif call["call"] == "open_folder":
            self._map(int(call["num_rows"]), int(call["row_bytes"]))
            self._open_folder(str(call["layout"]), f"{call['parallel']}, node {self._node_rank}")
        elif call["call"] == "read_rows":
            return self._read(call)
        return 0

    def start_transfer(self, call: dict[str, Any], reply: Callable[[list[Any]], None]) -> None:
        """Start to read parts of rows from the folder of this node, or to write them. `reply` gets, in any thread, the
        values of a FolderReply.

        Raises:
            ProtocolError: the call is wrong.
        """
        folder = self._folder
        keys, rows = [bytes.fromhex(key) for key in call["keys"]], [int(row) for row in call["rows"]]
        if folder is None or len(keys) != len(rows) or any(len(key) != _KEY_BYTES for key in keys):
            raise ProtocolError("protocol", f"{call['call']} of {len(keys)} keys and {len(rows)} rows")
        for row in rows:
            self._row(row)

        def on_done(num_blocks: int) -> None:
            absent = [num_blocks + number for number in folder.absent(keys[num_blocks:])]
            reply([num_blocks, absent, folder.errors])

        (folder.read if call["call"] == "read_folder" else folder.write)(keys, rows, on_done)

    def _open_folder(self, layout: str, parallel: str) -> None:
        path, size = self._config.kv_offloading_folder, self._config.kv_offloading_folder_size
        assert path is not None
        try:
            self._folder = FolderStore(
                Path(path),
                _Rows(layout, self._row),
                parallel,
                None if size is None else int(size * 2**30),
                self._config.nnodes,
            )
        except OSError as error:
            raise Unavailable(
                f"kv_offloading_folder: {path!r} cannot be used on node {self._node_rank}: {error}; give a folder that "
                "this process can write"
            ) from error

    def _map(self, num_rows: int, row_bytes: int) -> None:
        # The ranks have given the file its size.
        if os.fstat(self.file.file).st_size != num_rows * row_bytes:
            raise Unavailable(f"the rows of node {self._node_rank} do not have {num_rows} * {row_bytes} bytes")
        self._memory = memoryview(mmap.mmap(self.file.file, num_rows * row_bytes))
        self._num_rows, self._row_bytes = num_rows, row_bytes

    def _read(self, call: dict[str, Any]) -> list[int | str]:
        """Read parts of rows; return how many of the first ones were read and checked, and why not all."""
        lease, num_read, reason, message = call["lease"], 0, "", ""
        try:
            peer = PeerAddress.parse(call["peer"])
            transfer = self._config.kv_transfer
            assert peer is not None and self._layout is not None and transfer is not None
            key = kv_wire.read_key(Path(transfer.key_file))
            with closing(PeerConnection.open(peer, key, self._layout, lambda: lease in self._reads)) as connection:
                addresses = [int(address) for address, _ in call["rows"]]
                buffers = [self._row(int(row)) for _, row in call["rows"]]
                places = connection.part(bytes.fromhex(lease), self._node_rank, addresses)
                if any(place.length != self._row_bytes for place in places):
                    raise ProtocolError("length", f"parts of rows must have {self._row_bytes} bytes")
                rows = connection.read(bytes.fromhex(lease), addresses, [[buffer] for buffer in buffers])
                for _, place, buffer in zip(rows, places, buffers, strict=True):
                    if checksum([buffer]) != place.checksum:
                        raise ProtocolError("checksum", "a part of a block was damaged on the way")
                    num_read += 1
        except Cancelled:
            reason, message = "deadline", "the first node has ended the read"
        except ProtocolError as error:
            reason, message = error.reason, str(error)
        except QuireError as error:
            reason, message = "key", str(error)
        except Exception as error:
            logger.exception("parts of rows could not be read")
            reason, message = "internal", str(error)
        finally:
            with self._lock:
                self._reads.discard(lease)
        return [num_read, reason, f"node {self._node_rank}: {message}"[:_MAX_MESSAGE]]

    def _row(self, row: int) -> memoryview:
        if not 0 <= row < self._num_rows:
            raise ProtocolError("protocol", f"row {row} of {self._num_rows}")
        return self._memory[row * self._row_bytes : (row + 1) * self._row_bytes]


class _Rows(RowBuffers):
    """The rows of this node, for its folder."""

    def __init__(self, layout: str, row: Callable[[int], memoryview]) -> None:
        self._layout, self._row = layout, row

    @property
    def layout(self) -> str:
        """See RowBuffers."""
        return self._layout

    def buffers(self, row: int) -> list[memoryview]:
        """See RowBuffers."""
        return [self._row(row)]

    def synchronize(self) -> None:
        """See RowBuffers. The first node has waited for all ranks before the call."""
