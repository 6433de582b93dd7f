# SPDX-License-Identifier: Apache-2.0
"""Frames on the Unix sockets between a pod's processes: length, version, then one JSON message. No I/O here.

    frontend  --Submit, Cancel, Refused-->  text  --Generate, Abort-->  core
              <--------Events-------------        <--------StepResult---
    supervisor <--Call, Reply--> text, core

The decoder is fed whatever a socket returned, by threads and by asyncio alike. A frame of another version is refused
at once: processes of one pod come from one image, so a mismatch is a defect of the deployment.
"""

import json
import struct
from collections.abc import Callable, Iterator

from quire_spec.errors import Internal
from quire_spec.protocol.messages import IpcMessage, decode_message, encode_message

VERSION = 2
MAX_FRAME_BYTES = 256 * 2**20
"""Larger than any prompt we accept; a larger length is a broken stream, not a message."""

HEAD_BYTES = 256
"""What a reader gets to see of a frame that is too long for it: enough for a message's type and id."""

_HEADER = struct.Struct("<IB")


def encode_frame(message: IpcMessage) -> bytes:
    """One frame holding `message`."""
    body = json.dumps(encode_message(message), separators=(",", ":"), ensure_ascii=False).encode()
    return _HEADER.pack(len(body), VERSION) + body


class FrameDecoder:
    """Turns bytes, in whatever pieces they come, into messages.

    A frame longer than `max_bytes` is never held in memory: `on_oversize` gets its first HEAD_BYTES and its length,
    and the rest is dropped as it comes. Without `on_oversize` such a frame is an error.
    """

    def __init__(
        self, max_bytes: int = MAX_FRAME_BYTES, on_oversize: Callable[[bytes, int], None] | None = None
    ) -> None:
        self._buffer = bytearray()
        self._max_bytes = max_bytes if on_oversize else MAX_FRAME_BYTES
        self._on_oversize = on_oversize
        self._num_to_drop = 0
        """Bytes still to come of a frame that was too long."""

    def feed(self, data: bytes) -> Iterator[IpcMessage]:
        """Yield every message that `data` completes.

        Raises:
            Internal: the stream is broken or of another version; the connection must be closed.
        """
        new_data = data[self._num_to_drop :]
        self._num_to_drop -= len(data) - len(new_data)
        self._buffer += new_data
        start = 0
        try:
            while len(self._buffer) - start >= _HEADER.size:
                length, version = _HEADER.unpack_from(self._buffer, start)
                if version != VERSION or length > MAX_FRAME_BYTES:
                    raise Internal(f"frame of version {version} and {length} bytes; this process speaks {VERSION}")
                is_oversize = length > self._max_bytes
                body_start, end = start + _HEADER.size, start + _HEADER.size + length
                required_end = min(end, body_start + HEAD_BYTES) if is_oversize else end
                if len(self._buffer) < required_end:
                    break
                body = bytes(self._buffer[body_start:required_end])
                start = min(end, len(self._buffer))
                if is_oversize and self._on_oversize:
                    self._num_to_drop = end - start
                    self._on_oversize(body, length)
                else:
                    yield decode_message(_parse_json(body))
        finally:
            del self._buffer[:start]


def _parse_json(body: bytes) -> object:
    try:
        return json.loads(body)
    except (ValueError, RecursionError) as error:
        raise Internal(f"frame is not JSON: {body[:80]!r}") from error
