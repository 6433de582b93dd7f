# SPDX-License-Identifier: Apache-2.0
"""Frames on the Unix sockets between a pod's processes: length, version, then one JSON message. No I/O here.

    frontend  --Submit, Cancel-->  text  --Generate, Abort-->  core
              <--------Events----        <--------StepResult---
    supervisor <--Call, Reply, Notice--> text, core

The decoder is fed whatever a socket returned, by threads and by asyncio alike. A frame of another version is refused
at once: processes of one pod come from one image, so a mismatch is a defect of the deployment.
"""

import json
import struct
from collections.abc import Iterator

from quire_spec.errors import Internal
from quire_spec.messages import Message, message_from, payload_of

VERSION = 1
MAX_FRAME_BYTES = 256 * 2**20
"""Larger than any prompt we accept; a larger length is a broken stream, not a message."""

_HEADER = struct.Struct("<IB")


def encode(message: Message) -> bytes:
    """One frame holding `message`."""
    body = json.dumps(payload_of(message), separators=(",", ":"), ensure_ascii=False).encode()
    return _HEADER.pack(len(body), VERSION) + body


class Decoder:
    """Turns bytes, in whatever pieces they come, into messages."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[Message]:
        """Yield every message that `data` completes.

        Raises:
            Internal: the stream is broken or of another version; the connection must be closed.
        """
        self._buffer += data
        start = 0
        try:
            while len(self._buffer) - start >= _HEADER.size:
                length, version = _HEADER.unpack_from(self._buffer, start)
                if version != VERSION or length > MAX_FRAME_BYTES:
                    raise Internal(f"frame of version {version} and {length} bytes; this process speaks {VERSION}")
                end = start + _HEADER.size + length
                if len(self._buffer) < end:
                    break
                body = bytes(self._buffer[start + _HEADER.size : end])
                start = end
                yield message_from(_parsed(body))
        finally:
            del self._buffer[:start]


def _parsed(body: bytes) -> object:
    try:
        return json.loads(body)
    except ValueError as error:
        raise Internal(f"frame is not JSON: {body[:80]!r}") from error
