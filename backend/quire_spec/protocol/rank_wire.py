# SPDX-License-Identifier: Apache-2.0
"""Protocol by which the first node of a group sends steps and calls to the ranks of another node over TCP. Pure: it
encodes, decodes and checks, without I/O.

    first node                               other node
    Challenge(nonce)                ------->
                                    <-------  Proof(nonce, mac, node)
    Welcome(mac, difference)        ------->
    Generation                      ------->  when all nodes are connected
    calls, steps, files, beats      ------->
                                    <-------  replies, receipts, beats
    End(reason)                     <------>

Nothing but the first three messages is accepted before both ends have proved that they have the same key
(shared_key.py). Every frame begins with a magic number, its kind, the rank that it is for, and its length, which is
checked before memory is allocated. Nothing is unpickled.
"""

import json
import struct
from collections.abc import Mapping
from enum import IntEnum
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta

from quire_spec.protocol import shared_key
from quire_spec.protocol.protocol_error import ProtocolError

VERSION = 1
"""It changes with the messages."""
MAX_HANDSHAKE_BYTES = 64 << 10
"""Maximum length of a message before the key is proved."""
MAX_CALL_BYTES = 64 << 10
"""Maximum length of a call or a reply."""
FILE_CHUNK_BYTES = 256 << 10
"""Maximum bytes of a file in a frame. A node sends no further chunk of an adapter before the other node has written
this one, so that a step never waits behind more bytes of each adapter that is being loaded."""
MAX_FILE_BYTES = FILE_CHUNK_BYTES + 1024
BEAT_S = 2.0
"""Each end sends a frame at least this often."""
SILENCE_S = 10.0
"""An end from which nothing has arrived for this many seconds is lost."""

_MAGIC = b"QRNK"
_HEADER = struct.Struct("<4sHHI")
HEADER_BYTES = _HEADER.size
_Bytes32 = Annotated[bytes, Meta(min_length=32, max_length=32)]
_Text = Annotated[str, Meta(max_length=1024)]
_FileName = Annotated[str, Meta(pattern=r"^[A-Za-z0-9_][-A-Za-z0-9._]{0,99}$")]
_Int = Annotated[int, Meta(ge=0, le=2**62)]


class Kind(IntEnum):
    """Kind of a frame."""

    HANDSHAKE = 0
    CALL = 1
    """A call for a rank, or its reply. JSON; see executor/rank_worker.py of the engine."""
    STEP = 2
    """The input of a step for all ranks of the node: a row of the ring without its unused end."""
    FILE = 3
    """FileChunk."""
    RECEIPT = 4
    """FileReceipt."""
    BEAT = 5
    GENERATION = 6
    """Generation."""
    END = 7
    """UTF-8: why this end closes the connection."""


class _Message(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Base of the messages."""


class Node(_Message, frozen=True):
    """What a node claims about itself."""

    node_rank: Annotated[int, Meta(ge=0, lt=2**16)]
    generation: _Int
    """The last generation that this node was part of; 0 if there was none."""
    quire_version: _Text
    model: _Text
    """Fingerprint of the checkpoint."""
    config: Annotated[str, Meta(max_length=MAX_HANDSHAKE_BYTES // 2)]
    """JSON object: the fields of EngineConfig in which all nodes must agree."""

    def difference(self, other: "Node") -> str:
        """Return the first thing in which the nodes disagree, with both values; empty if there is none."""
        ours, theirs = ({**_object(node.config), **node._own_fields()} for node in (self, other))
        for name in (*ours, *theirs):
            if ours.get(name) != theirs.get(name):
                return (
                    f"{name}: is {ours.get(name)!r} on node {self.node_rank} and {theirs.get(name)!r} on node "
                    f"{other.node_rank}; use the same on all nodes"
                )[:1000]
        return ""

    def _own_fields(self) -> dict[str, str]:
        return {"version of Quire": self.quire_version, "model": self.model}


class Challenge(_Message, frozen=True, tag=1):
    """First message of the first node."""

    nonce: _Bytes32


class Proof(_Message, frozen=True, tag=2):
    """The other node proves that it has the key."""

    nonce: _Bytes32
    mac: _Bytes32
    node: Node


class Welcome(_Message, frozen=True, tag=3):
    """The first node proves that it has the key."""

    mac: _Bytes32
    problem: _Text = ""
    """Why the node cannot join. If it is not empty, the connection is then closed."""


class Generation(_Message, frozen=True, tag=4):
    """All nodes are connected."""

    number: _Int
    """Number of the group: above those of all groups that one of its nodes was part of."""


class FileChunk(_Message, frozen=True, tag=5):
    """Part of a file of an adapter. The parts of a file arrive in order; an empty one begins it."""

    key: _Int
    """Key of the adapter."""
    folder: Annotated[int, Meta(ge=0, lt=2**16)]
    """Number of the folder in the adapter's source."""
    name: _FileName
    data: Annotated[bytes, Meta(max_length=FILE_CHUNK_BYTES)]


class FileReceipt(_Message, frozen=True, tag=6):
    """A chunk was written, or could not be written."""

    key: _Int
    error: _Text = ""


T = TypeVar("T", bound=_Message)
_encode = msgspec.msgpack.Encoder().encode


def header(kind: Kind, rank: int, length: int) -> bytes:
    """Return the header of a frame whose payload has `length` bytes."""
    return _HEADER.pack(_MAGIC, kind, rank, length)


def parse_header(data: bytes, max_bytes: Mapping[Kind, int]) -> tuple[Kind, int, int]:
    """Return kind, rank and length of a frame from its HEADER_BYTES. `max_bytes` contains the kinds that are possible
    now, and their maximum lengths.

    Raises:
        ProtocolError: this is not a frame, or it is not possible now.
    """
    magic, number, rank, length = _HEADER.unpack(data)
    if magic != _MAGIC:
        raise ProtocolError("protocol", f"a frame begins with {magic!r} instead of {_MAGIC!r}")
    limit = next((limit for kind, limit in max_bytes.items() if kind == number), -1)
    if length > limit:
        raise ProtocolError(
            "protocol", f"a frame of kind {number} has {length} bytes, but at most {limit} are possible"
        )
    return Kind(number), rank, length


def encode(message: _Message) -> bytes:
    """Return the payload of a message."""
    return _encode(message)


def decode(message_type: type[T], payload: bytes | memoryview) -> T:
    """Return a message of this type; raises ProtocolError."""
    try:
        return msgspec.msgpack.decode(payload, type=message_type)
    except (ValueError, RecursionError) as error:
        raise ProtocolError("protocol", f"{message_type.__name__}: {error}") from None


def prove(key: bytes, challenge: Challenge, node: Node) -> Proof:
    """Return a node's answer to the challenge."""
    nonce = shared_key.new_nonce()
    return Proof(nonce, shared_key.compute_mac(key, _role(b"node"), challenge.nonce, nonce, _encode(node)), node)


def check_proof(key: bytes, challenge: Challenge, proof: Proof) -> None:
    """Check that a node has the key; raises ProtocolError."""
    if not shared_key.is_mac(proof.mac, key, _role(b"node"), challenge.nonce, proof.nonce, _encode(proof.node)):
        raise ProtocolError("key", "the node has another key")


def welcome(key: bytes, challenge: Challenge, proof: Proof, problem: str = "") -> Welcome:
    """Return the first node's answer to a proof that was checked."""
    mac = shared_key.compute_mac(key, _role(b"first node"), challenge.nonce, proof.nonce, problem.encode())
    return Welcome(mac, problem)


def check_welcome(key: bytes, challenge: Challenge, proof: Proof, answer: Welcome) -> None:
    """Check that the first node has the key; raises ProtocolError."""
    problem = answer.problem.encode("utf-8", "surrogatepass")
    if not shared_key.is_mac(answer.mac, key, _role(b"first node"), challenge.nonce, proof.nonce, problem):
        raise ProtocolError("key", "the first node has another key")


def _role(end: bytes) -> bytes:
    return b"quire ranks %d " % VERSION + end


def _object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return {"config": text[:80]}
    return value if isinstance(value, dict) else {"config": text[:80]}
