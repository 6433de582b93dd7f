# SPDX-License-Identifier: Apache-2.0
"""uvicorn's HTTP protocol, extended with limits on the head of a request: its size in bytes, the number of headers, and
the time until it is complete.

Without these limits, uvicorn would buffer headers and trailers of any size and would wait for them forever.
"""

import asyncio
import re
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MAX_HEAD_BYTES = 64 * 2**10
MAX_HEADERS = 100
HEAD_TIMEOUT_S = 20.0
_UPGRADE_TO_HTTP2 = re.compile(rb"\r\nupgrade:(?=[ \t]*h2c[ \t]*\r\n)", re.IGNORECASE)
"""Header of clients that offer HTTP/2, such as Java's. It must be ignored (RFC 9110, section 7.8), but the parser drops
the body of a request that has it."""
_BODY = b'{"error":{"message":"headers: too large; send less","type":"RequestHeaderFieldsTooLargeError","code":431}}'
_TOO_LARGE = (
    b"HTTP/1.1 431 Request Header Fields Too Large\r\ncontent-type: application/json\r\n"
    b"content-length: %d\r\nconnection: close\r\n\r\n%b" % (len(_BODY), _BODY)
)


class LimitedHttpProtocol(HttpToolsProtocol):
    """The connection of one client. The connection is closed if the head of a request is too large or arrives too
    slowly."""

    _num_head_bytes = 0
    _is_in_head = True
    _is_in_body = False
    _num_framing_bytes = 0
    """Number of bytes that were received since the last part of the body: sizes and extensions of chunks, trailers."""
    _head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Called by asyncio when the socket is connected."""
        super().connection_made(transport)
        self._start_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """Called by asyncio when the socket is closed."""
        self._end_head()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Called by asyncio when bytes were received."""
        was_in_head = self._is_in_head
        if not self._is_in_body:
            head, end, body = data.partition(b"\r\n\r\n")
            data = _UPGRADE_TO_HTTP2.sub(b"\r\nx-upgrade:", head + end) + body
        self._num_framing_bytes += len(data)
        super().data_received(data)
        if self._is_in_body and self._num_framing_bytes > MAX_HEAD_BYTES:
            self._reject()
        if self._is_in_head and was_in_head:
            # The parser stores the parts of an incomplete header. Their bytes are counted here, so that they cannot
            # fill the memory.
            self._num_head_bytes += len(data)
            if self._num_head_bytes > MAX_HEAD_BYTES:
                self._reject()
        elif not self._is_in_body and (self.cycle is None or self.cycle.response_complete):
            # Empty lines came after a request. They end uvicorn's timer of idle connections.
            self._start_head()

    def on_message_begin(self) -> None:
        """Called by the parser when a request begins."""
        super().on_message_begin()
        self._start_head()

    def on_headers_complete(self) -> None:
        """Called by the parser when all headers were read."""
        self._end_head()
        num_bytes = len(self.url) + sum(len(name) + len(value) for name, value in self.headers)
        if num_bytes > MAX_HEAD_BYTES or len(self.headers) > MAX_HEADERS:
            self._reject()
            return
        self._is_in_body, self._num_framing_bytes = True, 0
        super().on_headers_complete()

    def on_header(self, name: bytes, value: bytes) -> None:
        """Called by the parser for each header and each trailer. Trailers are ignored."""
        if not self._is_in_body:
            super().on_header(name, value)

    def on_body(self, body: bytes) -> None:
        """Called by the parser for each part of the body."""
        self._num_framing_bytes = 0
        if not self.transport.is_closing():
            super().on_body(body)

    def on_message_complete(self) -> None:
        """Called by the parser when a request is complete."""
        self._is_in_body = False
        if not self.transport.is_closing():
            super().on_message_complete()

    def _start_head(self) -> None:
        self._end_head()
        self._is_in_head, self._num_head_bytes = True, 0
        self._head_timer = self.loop.call_later(HEAD_TIMEOUT_S, self._on_head_timeout)

    def _end_head(self) -> None:
        self._is_in_head = False
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _reject(self) -> None:
        if not self.transport.is_closing():
            self.transport.write(_TOO_LARGE)
            self.transport.close()

    def _on_head_timeout(self, *_: Any) -> None:
        if not self.transport.is_closing():
            self.transport.close()
