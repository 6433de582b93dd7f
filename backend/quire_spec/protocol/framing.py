# SPDX-License-Identifier: Apache-2.0
"""Framing of messages on the Unix sockets between the processes of a pod.

A frame consists of a length, a version, and one message as JSON. This module does no I/O.

- The frontend sends GenerateRequest, CancelRequests and RequestRejected to the text process. The text process sends
  OutputDeltas to the frontend.
- The text process sends SequenceRequest and AbortSequences to the core. The core sends StepResult to the text process.
- The supervisor sends ControlRequest to the text process and to the core. They answer with ControlResponse.

Threads and asyncio readers pass received bytes to the decoder. All processes of a pod come from one image. Therefore, a
frame that has another version is an error.
"""

import json
import struct
from collections.abc import Callable, Iterator

from quire_spec.errors import Internal
from quire_spec.protocol.messages import IpcMessage, decode_message, encode_message

VERSION = 3
MAX_FRAME_BYTES = 256 * 2**20
"""Maximum length of a frame. Every prompt that is accepted is shorter than this. If the length is larger, the stream is
corrupt."""

HEAD_BYTES = 256
"""`on_oversize` gets this number of bytes of an oversize frame. They are enough for the type and the id of the
message."""

_HEADER = struct.Struct("<IB")


def encode_frame(message: IpcMessage) -> bytes:
    """Return one frame that contains `message`."""
    body = json.dumps(encode_message(message), separators=(",", ":"), ensure_ascii=False).encode()
    return _HEADER.pack(len(body), VERSION) + body


class FrameDecoder:
    """Decoder that receives bytes in chunks and converts them to messages.

    A frame is oversize if it is longer than `max_bytes`. If a frame is oversize, the decoder passes its first
    HEAD_BYTES bytes and its length to `on_oversize`. It drops the rest of the frame. If `on_oversize` is not given, an
    oversize frame is an error.
    """

    def __init__(
        self, max_bytes: int = MAX_FRAME_BYTES, on_oversize: Callable[[bytes, int], None] | None = None
    ) -> None:
        self._buffer = bytearray()
        self._max_bytes = max_bytes if on_oversize else MAX_FRAME_BYTES
        self._on_oversize = on_oversize
        self._num_to_drop = 0
        """Number of bytes of an oversize frame that are still to be received and dropped."""

    def feed(self, data: bytes) -> Iterator[IpcMessage]:
        """Add received bytes. Yield every message that is now complete.

        Raises:
            Internal: the stream is corrupt or has another version; the connection must be closed.
        """
        new_data = data[self._num_to_drop :]
        self._num_to_drop -= len(data) - len(new_data)
        self._buffer += new_data
        start = 0
        try:
            while len(self._buffer) - start >= _HEADER.size:
                length, version = _HEADER.unpack_from(self._buffer, start)
                if version != VERSION or length > MAX_FRAME_BYTES:
                    raise Internal(f"frame has version {version} and {length} bytes; expected version {VERSION}")
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
