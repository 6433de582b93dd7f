# SPDX-License-Identifier: Apache-2.0
"""Passes the calls and replies of ranks between their sockets on this machine and the connection to another node.

    first node: worker group --sockets-- relay ==TCP== relay --sockets-- ranks: other node

Both nodes run one relay for each connection. Subclasses handle steps, files and other frames.
"""

import contextlib
import selectors
import socket
import time
from collections.abc import Mapping
from typing import NoReturn

from quire_engine.distributed.node_connection import NodeConnection
from quire_spec.protocol import rank_wire
from quire_spec.protocol.protocol_error import ProtocolError
from quire_spec.protocol.rank_wire import Kind

_MAX_REASON_BYTES = 2048
_BASE_LIMITS = {Kind.CALL: rank_wire.MAX_CALL_BYTES, Kind.BEAT: 0, Kind.END: _MAX_REASON_BYTES}


class RelayEnded(Exception):
    """The relay cannot continue; the message is the reason."""


class RankRelay:
    """The relay of one connection. `run` uses it in one thread."""

    def __init__(
        self, connection: NodeConnection, controls: Mapping[int, socket.socket], max_bytes: Mapping[Kind, int]
    ) -> None:
        """Create a relay.

        Args:
            connection: to the other node.
            controls: socket of each rank of the other node or of this one, by its number.
            max_bytes: further kinds of frames that are possible, and their maximum lengths.
        """
        self.connection = connection
        self.controls = controls
        self.limits = _BASE_LIMITS | dict(max_bytes)

    def run(self) -> str:
        """Pass frames until the connection or a rank ends; return the reason. Close all sockets."""
        try:
            self._pass_frames()
        except (RelayEnded, ProtocolError, OSError) as error:
            reason = str(error) or type(error).__name__
        with contextlib.suppress(OSError):
            if not isinstance(self.ended_by_peer, str):
                self.connection.send(Kind.END, 0, reason.encode(errors="replace")[:_MAX_REASON_BYTES])
        self.connection.close()
        for control in self.controls.values():
            control.close()
        return reason

    ended_by_peer: str | None = None
    """The reason that the other node gave."""

    def on_call(self, rank: int, call: bytes) -> None:
        """Called for a call or a reply from the other node."""
        self.controls[rank].send(call)

    def on_local_call(self, rank: int, call: bytes) -> None:
        """Called for a call or a reply from this node."""
        self.connection.send(Kind.CALL, rank, call)

    def on_local_end(self, rank: int) -> NoReturn:
        """Called when the socket of a rank was closed on this node. Raises RelayEnded."""
        raise RelayEnded("the group has ended")

    def on_frame(self, kind: Kind, rank: int, length: int) -> None:
        """Called for another frame, whose payload must be received."""
        raise NotImplementedError

    def _pass_frames(self) -> NoReturn:
        with selectors.DefaultSelector() as selector:
            selector.register(self.connection.socket, selectors.EVENT_READ, None)
            for rank, control in self.controls.items():
                selector.register(control, selectors.EVENT_READ, rank)
            heard_at = next_beat = time.monotonic()
            while True:
                for key, _ in selector.select(rank_wire.BEAT_S / 4):
                    if key.data is None:
                        self._receive_frame()
                        heard_at = time.monotonic()
                    else:
                        self._receive_local(key.data)
                now = time.monotonic()
                if now - heard_at > rank_wire.SILENCE_S:
                    raise RelayEnded(f"no answer for {rank_wire.SILENCE_S:g} s")
                if now >= next_beat:
                    self.connection.send(Kind.BEAT)
                    next_beat = now + rank_wire.BEAT_S / 2

    def _receive_frame(self) -> None:
        kind, rank, length = self.connection.receive_header(self.limits)
        if kind is Kind.CALL:
            call = self.connection.receive(length)
            if rank not in self.controls or not call:
                raise ProtocolError("protocol", f"a call for rank {rank}, which is not on this node")
            self.on_call(rank, call)
        elif kind is Kind.END:
            self.ended_by_peer = self.connection.receive(length).decode(errors="replace")
            raise RelayEnded(self.ended_by_peer)
        elif kind is not Kind.BEAT:
            self.on_frame(kind, rank, length)

    def _receive_local(self, rank: int) -> None:
        try:
            call = self.controls[rank].recv(rank_wire.MAX_CALL_BYTES)
        except OSError:
            call = b""
        if not call:
            self.on_local_end(rank)
        self.on_local_call(rank, call)
