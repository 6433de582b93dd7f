# SPDX-License-Identifier: Apache-2.0
"""Framing of messages on the Unix sockets between the processes of a pod.

A frame consists of a header and a payload. The header contains a magic number, the kind of the message, the number of
request ids, the length of the payload, and the request ids. The payload is the message as MessagePack. This module does
no I/O.

A payload that cannot be decoded belongs to the requests that the header names: these requests fail, and the next frame
is read. All processes of a pod come from one image. Therefore, a frame with another magic number means that the stream
is corrupt.
"""

import struct
from array import array
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from quire_spec.errors import Code, Internal, InvalidArgument, QuireError
from quire_spec.protocol.messages import MESSAGE_TYPES, Message, OutputDelta, OutputDeltas, SequenceDelta, StepResult

MAGIC = 0x5104
"""Identifies the format of frames and messages. It changes with the format."""
MAX_PAYLOAD_BYTES = 256 * 2**20
"""Maximum length of a payload. No process sends a longer one."""

_HEADER = struct.Struct("<HBHI")
_ID_BYTES = 8
_KINDS: dict[type[Message], int] = {cls: cls.__struct_config__.tag for cls in MESSAGE_TYPES}  # type: ignore[misc]
_TYPES = {kind: cls for cls, kind in _KINDS.items()}
_ITEM_TYPES: dict[type[Message], type[Any]] = {OutputDeltas: OutputDelta, StepResult: SequenceDelta}
"""Messages with items that belong to different requests, and the types of the items."""
_encode = msgspec.msgpack.Encoder().encode
_decoders = {cls: msgspec.msgpack.Decoder(cls) for cls in MESSAGE_TYPES}


class Oversized(InvalidArgument):
    """A payload is longer than the receiver accepts."""

    def __init__(self, name: str, num_bytes: int, max_bytes: int) -> None:
        super().__init__(f"{name}: the message has {num_bytes} bytes, but at most {max_bytes} are allowed; shorten it")
        self.num_bytes = num_bytes


@dataclass(frozen=True, slots=True)
class InvalidFrame:
    """A frame whose payload was not accepted."""

    message_type: type[Message] | None
    """Type of the message; None if the kind is unknown."""
    request_ids: Sequence[int]
    error: QuireError


def encode_frame(message: Message) -> bytes:
    """Return the frame of a message.

    If a message with several items cannot be encoded as a whole, the result consists of several frames, in which each
    item that cannot be encoded is replaced by an error.

    Raises:
        InvalidArgument: a message that belongs to one request cannot be encoded, or is too large.
    """
    try:
        return _encode_frame(message)
    except InvalidArgument:
        if not isinstance(message, OutputDeltas | StepResult) or not message.request_ids:
            raise
    if len(message.request_ids) > 1:
        return b"".join(map(encode_frame, message.split()))
    return _encode_frame(_with_error(message))


class FrameDecoder:
    """Decoder that receives bytes in chunks and converts them to messages."""

    def __init__(
        self, accepted: Collection[type[Message]] = MESSAGE_TYPES, max_payload_bytes: int = MAX_PAYLOAD_BYTES
    ) -> None:
        """Messages of other types than `accepted`, and longer payloads than `max_payload_bytes`, are invalid."""
        self._accepted = frozenset(accepted)
        self._max_payload_bytes = max_payload_bytes
        self._buffer = bytearray()
        self._num_to_drop = 0
        """Number of bytes of a payload that are still to be received and dropped."""

    def feed(self, data: bytes) -> Iterator[Message | InvalidFrame]:
        """Add received bytes. Yield each message that is now complete, and each frame that is not accepted.

        Raises:
            Internal: the stream is corrupt; the connection must be closed.
        """
        new_data = data[self._num_to_drop :]
        self._num_to_drop -= len(data) - len(new_data)
        self._buffer += new_data
        start = 0
        try:
            while len(self._buffer) - start >= _HEADER.size:
                magic, kind, num_ids, length = _HEADER.unpack_from(self._buffer, start)
                if magic != MAGIC:
                    raise Internal(f"the stream is corrupt: a frame starts with {magic:#06x} instead of {MAGIC:#06x}")
                ids_start = start + _HEADER.size
                payload_start = ids_start + _ID_BYTES * num_ids
                end = payload_start + length
                is_accepted = length <= self._max_payload_bytes and _TYPES.get(kind) in self._accepted
                if len(self._buffer) < (end if is_accepted else payload_start):
                    break
                request_ids = array("Q", bytes(self._buffer[ids_start:payload_start]))
                payload = bytes(self._buffer[payload_start:end]) if is_accepted else None
                start = min(end, len(self._buffer))
                self._num_to_drop = end - start
                yield self._decode(kind, request_ids, length, payload)
        finally:
            del self._buffer[:start]

    def _decode(
        self, kind: int, request_ids: Sequence[int], length: int, payload: bytes | None
    ) -> Message | InvalidFrame:
        message_type = _TYPES.get(kind)
        if message_type is None:
            return InvalidFrame(None, request_ids, Internal(f"messages of kind {kind} are unknown"))
        name = message_type.__name__
        if message_type not in self._accepted:
            return InvalidFrame(message_type, request_ids, Internal(f"{name}: not accepted by this process"))
        if payload is None:
            return InvalidFrame(message_type, request_ids, Oversized(name, length, self._max_payload_bytes))
        try:
            return _decoders[message_type].decode(payload)
        except (ValueError, RecursionError, QuireError) as cause:
            # A text that is not UTF-8 raises UnicodeDecodeError, which is not a DecodeError.
            error = cause if isinstance(cause, QuireError) else InvalidArgument(f"{name}: {cause}")
        if message_type in _ITEM_TYPES:
            try:
                return _decode_items(message_type, payload, request_ids)
            except (ValueError, RecursionError, TypeError) as cause:
                error = Internal(f"{name}: {cause}")
        return InvalidFrame(message_type, request_ids, error)


def _encode_frame(message: Message) -> bytes:
    name = type(message).__name__
    try:
        payload, request_ids = _encode(message), array("Q", message.request_ids)
        header = _HEADER.pack(MAGIC, _KINDS[type(message)], len(request_ids), len(payload))
    except (ValueError, OverflowError, RecursionError, struct.error) as error:
        # Lone surrogates, integers of more than 64 bits, and values that are nested too deeply.
        field = _find_invalid(message) or name
        raise InvalidArgument(f"{field}: cannot be sent to another process ({error}); send another value") from None
    if len(payload) > MAX_PAYLOAD_BYTES:
        raise Oversized(name, len(payload), MAX_PAYLOAD_BYTES)
    return b"".join((header, request_ids.tobytes(), payload))


def _find_invalid(value: Any) -> str:
    """Return the name of the field of a Struct, or of a Struct in it, that cannot be encoded; "" for other values."""
    for name in getattr(value, "__struct_fields__", ()):
        part = getattr(value, name)
        try:
            msgspec.msgpack.encode(part)
        except (ValueError, OverflowError, RecursionError):
            return _find_invalid(part) or name
    return ""


def _with_error(message: OutputDeltas | StepResult) -> Message:
    """Replace the only item of a message by an error."""
    error = _error_item(
        _ITEM_TYPES[type(message)], message.request_ids[0], "the output cannot be sent to another process"
    )
    if isinstance(message, OutputDeltas):
        return OutputDeltas([error])
    return msgspec.structs.replace(message, results=[error])


def _decode_items(message_type: type[Message], payload: bytes, request_ids: Sequence[int]) -> Message:
    """Decode a message in which single items are invalid. These items are replaced by errors."""
    tag, items, *others = msgspec.msgpack.decode(payload)
    item_type = _ITEM_TYPES[message_type]
    for i, (request_id, item) in enumerate(zip(request_ids, items, strict=True)):
        try:
            msgspec.convert(item, item_type)
        except msgspec.ValidationError as error:
            items[i] = _error_item(item_type, request_id, f"{item_type.__name__}: {error}")
    return _decoders[message_type].decode(_encode([tag, items, *others]))


def _error_item(item_type: type[Any], request_id: int, text: str) -> Any:
    return item_type(request_id, error_code=Code.INTERNAL, error=text)
