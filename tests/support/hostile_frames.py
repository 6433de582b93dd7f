# SPDX-License-Identifier: Apache-2.0
"""Frames that no process of Quire sends: their headers are valid, but their payloads are not.

Each of them must end only the requests that its header names.
"""

import struct
from collections.abc import Sequence

import msgspec

from quire_spec.protocol.framing import MAGIC
from quire_spec.protocol.messages import MESSAGE_TYPES

TAGS: dict[str, int] = {cls.__name__: cls.__struct_config__.tag for cls in MESSAGE_TYPES}  # type: ignore[misc]
"""Kinds of frames by the names of their messages."""
UNKNOWN_KIND = 99

PAYLOADS = {
    "empty": b"",
    "truncated": msgspec.msgpack.encode([TAGS["GenerateRequest"], 5, "base", "a long text"])[:-4],
    "not MessagePack": b"\xc1" * 9,
    "wrong type": msgspec.msgpack.encode([TAGS["GenerateRequest"], 5, 7]),
    "too few fields": msgspec.msgpack.encode([TAGS["GenerateRequest"]]),
    "unknown tag": msgspec.msgpack.encode([UNKNOWN_KIND, 5, "base"]),
    "invalid UTF-8": msgspec.msgpack.encode(
        [TAGS["GenerateRequest"], 5, "base", msgspec.Raw(b"\xa1\xff"), None, {}, False]
    ),
    "negative id": msgspec.msgpack.encode([TAGS["GenerateRequest"], -5, "base", "fox", None, {}, False]),
    "nested too deeply": b"\x91" * 100_000 + b"\x90",
}


def hostile_frame(kind: int | str, ids: Sequence[int], payload: bytes) -> bytes:
    """Return a frame; `kind` can be the name of a message."""
    kind = TAGS[kind] if isinstance(kind, str) else kind
    return struct.pack(f"<HBHI{len(ids)}Q", MAGIC, kind, len(ids), len(payload), *ids) + payload
