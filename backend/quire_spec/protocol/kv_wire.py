# SPDX-License-Identifier: Apache-2.0
"""Protocol by which pods read KV blocks from each other over TCP. Pure: it encodes, decodes and checks, without I/O.

    server                                    reader
    Challenge(nonce)                ------->
                                    <-------  Proof(nonce, mac, layout)
    Welcome(mac, difference)        ------->
                                    <-------  Lease(keys)
    Leased(lease, rows)             ------->
                                    <-------  Read(lease, rows)
    Reading, then the bytes of rows ------->
                                    <-------  Heartbeat(lease) or Release(lease)
    Done                            ------->

If layers have states, blocks are of use only up to a state. The server then also answers:

    server                                    reader
                                    <-------  LeaseState(keys, first)
    LeasedState(lease, block, row)  ------->

If the rows are divided between several nodes, the server of the first node also answers the following messages. The
other nodes of the reader then read their parts from the nodes with the same number.

    server                                    reader
                                    <-------  Nodes
    NodeAddresses(addresses)        ------->

    server of another node                    another node of the reader
                                    <-------  Part(lease, node, rows)
    Leased(lease, rows)             ------->
                                    <-------  Read(lease, rows)

    server of the first node                  server of another node of the same group
                                    <-------  Check(lease, generation, rows)
    Checked(rows, seconds)          ------->

A frame is a magic number, the length of the message, and the message as MessagePack. Both ends prove that they have the
same key (HMAC-SHA256 over both nonces and the layout), and nothing is leased before that. The key does not protect the
bytes after that: they are neither encrypted nor signed. Each row has a checksum, which detects damage.
"""

import struct
from pathlib import Path
from typing import Annotated, TypeVar

import msgspec
from msgspec import Meta

from quire_spec.protocol import shared_key
from quire_spec.protocol.protocol_error import ProtocolError

VERSION = 1
"""It changes with the messages, except for those between groups of nodes and those about states: their layouts contain
the number of nodes, or the layout of a state, which earlier versions do not know."""
MAX_NODES = 64
MAX_KEYS = 2048
"""Maximum number of blocks of a lease."""
MAX_FRAME_BYTES = 256 * 1024
"""Maximum length of a message. No end sends a longer one."""
MAX_HANDSHAKE_BYTES = 4096
"""Maximum length of a message before the key is proved."""
LEASE_S = 30.0
"""A lease lasts for this many seconds, as in vLLM."""
EXTENSION_S = 20.0
"""A heartbeat makes a lease last for at least this many further seconds."""
HEARTBEAT_S = 5.0

_MAGIC = b"QKVP"
_HEADER = struct.Struct("<4sI")
HEADER_BYTES = _HEADER.size
_Bytes16 = Annotated[bytes, Meta(min_length=16, max_length=16)]
_Bytes32 = Annotated[bytes, Meta(min_length=32, max_length=32)]
_Row = Annotated[int, Meta(ge=0, lt=2**32)]
_Text = Annotated[str, Meta(max_length=1024)]
_Rows = Annotated[list[_Row], Meta(min_length=1, max_length=MAX_KEYS)]


class _Message(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Base of the messages."""


class RowLayout(_Message, frozen=True):
    """Everything that determines what the bytes of a row mean. Two pods exchange blocks only if all of it is equal."""

    version: int
    """VERSION."""
    block_size: int
    kv_dtype: _Text
    parallel: _Text
    """Numbers of tensor-parallel ranks and of pipeline stages, whose parts a row contains, and of nodes if there are
    several; 0/1 if there is one rank."""
    model: _Text
    """Hash of weights, quantization and compute dtype. It also covers the fields before it, which are compared first,
    so that the difference is named exactly."""
    rows: _Text
    """Version of the layout, device, dtypes and shapes of a row, and of a row of states if layers have them."""
    row_bytes: int
    """Bytes of the part of a row on the first node."""

    def difference(self, other: "RowLayout") -> str:
        """Return the name of the first field that differs; empty if the layouts are equal."""
        names = self.__struct_fields__
        return next((name for name in names if getattr(self, name) != getattr(other, name)), "")


class Challenge(_Message, frozen=True, tag=1):
    """server -> reader: the first message."""

    nonce: _Bytes32


class Proof(_Message, frozen=True, tag=2):
    """reader -> server: proves that the reader has the key."""

    nonce: _Bytes32
    mac: _Bytes32
    layout: RowLayout


class Welcome(_Message, frozen=True, tag=3):
    """server -> reader: proves that the server has the key."""

    mac: _Bytes32
    difference: _Text = ""
    """Field of the layout that differs, or `loading` if no core is ready. If it is not empty, the server closes the
    connection."""


class Lease(_Message, frozen=True, tag=4):
    """reader -> server: asks for blocks. The rows of those that the server has are pinned in its host memory."""

    keys: Annotated[list[_Bytes32], Meta(min_length=1, max_length=MAX_KEYS)]


class LeasedRow(_Message, frozen=True):
    """Where the server has a block."""

    row: _Row
    """Address: the number of the row."""
    length: Annotated[int, Meta(ge=1, lt=2**40)]
    checksum: _Bytes16
    """xxh3_128 of the row."""


class Leased(_Message, frozen=True, tag=5):
    """server -> reader: one entry for each key. None: the server does not have the block, or no room to pin it."""

    lease: _Bytes16
    rows: Annotated[list[LeasedRow | None], Meta(max_length=MAX_KEYS)]


class Read(_Message, frozen=True, tag=6):
    """reader -> server: asks for the bytes of leased rows."""

    lease: _Bytes16
    rows: _Rows


class Reading(_Message, frozen=True, tag=7):
    """server -> reader: the bytes of the rows follow, in the order of the request, without anything between them."""


class Heartbeat(_Message, frozen=True, tag=8):
    """reader -> server: the lease is still needed. Any connection can send it."""

    lease: _Bytes16


class Release(_Message, frozen=True, tag=9):
    """reader -> server: the lease is no longer needed."""

    lease: _Bytes16


class Done(_Message, frozen=True, tag=10):
    """server -> reader: answers Heartbeat and Release."""

    is_known: bool
    """False if the lease has ended before."""


class Nodes(_Message, frozen=True, tag=11):
    """reader -> server: asks where the other parts of the rows are."""


class NodeAddresses(_Message, frozen=True, tag=12):
    """server -> reader: HOST:PORT of the servers of the other nodes, from node 1."""

    addresses: Annotated[list[Annotated[str, Meta(max_length=300)]], Meta(max_length=MAX_NODES)]


class Part(_Message, frozen=True, tag=13):
    """another node of the reader -> server of the node with the same number: asks for parts of rows that the first
    node of the reader has leased. The connection can then read them."""

    lease: _Bytes16
    node: Annotated[int, Meta(ge=1, le=MAX_NODES)]
    """Number of the node. Another node refuses the message."""
    rows: _Rows
    """Addresses from the first node's answer."""


class Check(_Message, frozen=True, tag=14):
    """server of another node -> server of the first node of its group: is this lease valid, and what are its rows?"""

    lease: _Bytes16
    generation: Annotated[int, Meta(ge=0, le=2**62)]
    """Number of the group whose rows the other node has."""
    rows: _Rows


class Checked(_Message, frozen=True, tag=15):
    """server of the first node -> server of another node."""

    rows: Annotated[list[_Row], Meta(max_length=MAX_KEYS)]
    """Number of the row of each address; empty if the lease is not valid, or was taken in another generation."""
    seconds: Annotated[float, Meta(ge=0, le=3600)]
    """The lease lasts for this time."""


class LeaseState(_Message, frozen=True, tag=16):
    """reader -> server: asks for the state after the last of these blocks that has one, if the server has all blocks
    from number `first` up to there. Its row is pinned like those of blocks."""

    keys: Annotated[list[_Bytes32], Meta(min_length=1, max_length=MAX_KEYS)]
    first: Annotated[int, Meta(ge=0, le=MAX_KEYS)]
    """The reader has the blocks before this number."""


class LeasedState(_Message, frozen=True, tag=17):
    """server -> reader."""

    lease: _Bytes16
    block: Annotated[int, Meta(ge=0, lt=MAX_KEYS)] = 0
    """Number of the block after which the state is."""
    row: LeasedRow | None = None
    """Where the state is. None: the server has none, or no room to pin it."""


Request = Lease | Read | Heartbeat | Release | Nodes | Part | Check | LeaseState
T = TypeVar("T", bound=_Message)
_encode = msgspec.msgpack.Encoder().encode
_request_decoder: msgspec.msgpack.Decoder[Request] = msgspec.msgpack.Decoder(Request)


def encode(message: _Message) -> bytes:
    """Return the frame of a message."""
    payload = _encode(message)
    assert len(payload) <= MAX_FRAME_BYTES
    return _HEADER.pack(_MAGIC, len(payload)) + payload


def payload_length(header: bytes, max_bytes: int) -> int:
    """Return the length of a message from the HEADER_BYTES before it.

    Raises:
        ProtocolError: this is not a frame, or it is longer than `max_bytes`.
    """
    magic, length = _HEADER.unpack(header)
    if magic != _MAGIC:
        raise ProtocolError("protocol", f"a frame begins with {magic!r} instead of {_MAGIC!r}")
    if not 0 < length <= max_bytes:
        raise ProtocolError("protocol", f"a message has {length} bytes, but at most {max_bytes} are possible")
    return int(length)


def decode(message_type: type[T], payload: bytes) -> T:
    """Return a message of this type; raises ProtocolError."""
    try:
        return msgspec.msgpack.decode(payload, type=message_type)
    except (ValueError, RecursionError) as error:
        raise ProtocolError("protocol", f"{message_type.__name__}: {error}") from None


def decode_request(payload: bytes) -> Request:
    """Return a request of a reader; raises ProtocolError."""
    try:
        return _request_decoder.decode(payload)
    except (ValueError, RecursionError) as error:
        raise ProtocolError("protocol", f"request: {error}") from None


def prove(key: bytes, challenge: Challenge, layout: RowLayout) -> Proof:
    """Return the reader's answer to a challenge."""
    nonce = shared_key.new_nonce()
    mac = shared_key.compute_mac(key, _role(b"reader"), challenge.nonce, nonce, _encode(layout))
    return Proof(nonce, mac, layout)


def welcome(key: bytes, challenge: Challenge, proof: Proof, difference: str = "") -> Welcome:
    """Return the server's answer to a proof.

    Raises:
        ProtocolError: the reader does not have the key.
    """
    nonces = challenge.nonce, proof.nonce
    if not shared_key.is_mac(proof.mac, key, _role(b"reader"), *nonces, _encode(proof.layout)):
        raise ProtocolError("key", "the reader has another key")
    return Welcome(shared_key.compute_mac(key, _role(b"server"), *nonces, difference.encode()), difference)


def check_welcome(key: bytes, challenge: Challenge, proof: Proof, answer: Welcome) -> None:
    """Check that the server has the key; raises ProtocolError."""
    difference = answer.difference.encode("utf-8", "surrogatepass")
    if not shared_key.is_mac(answer.mac, key, _role(b"server"), challenge.nonce, proof.nonce, difference):
        raise ProtocolError("key", "the server has another key")


def read_key(path: Path) -> bytes:
    """Return the key in a file; see `shared_key.read_key`."""
    return shared_key.read_key(path, "kv_transfer.key_file")


def _role(end: bytes) -> bytes:
    return b"quire kv peer %d " % VERSION + end
