# SPDX-License-Identifier: Apache-2.0
"""Content hashes of KV blocks, by which sequences find the blocks that they can share.

The prefix cache computes the hashes and the block pool stores them. Equal hashes mean equal bytes on every replica, no
matter which process or programming language computed the block.
"""

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass

from quire_spec.constants import AdapterDigest

LAYOUT_VERSION = 2
"""Increment this with every change to the bytes of a KV block: blocks of two versions must not get equal hashes."""


_HASH_BYTES = hashlib.sha256().digest_size


@dataclass(frozen=True, slots=True)
class BlockHasher:
    """All parameters that determine the bytes of a block, except for the tokens.

    The hash of block i is sha256(hash of block i - 1, tokens of block i as little-endian uint32). `root` returns the
    hash before block 0, `switch` adds an adapter that applies from a later token on, and `add_image` adds an image. All
    hashes use a fixed binary encoding.
    """

    model_digest: str
    """Digest of the checkpoint. If blocks leave the process, it must cover every byte of the weights."""
    kv_dtype: str
    block_size: int
    compute_dtype: str
    """Dtype of the weights and activations."""
    quantization: str | None = None
    """EngineConfig.quantization: how the engine quantizes the weights when it loads them."""
    long_rope_threshold: int | None = None
    """Sequences with more than this number of tokens use the rotary embedding for long sequences (see ModelConfig). If
    None, no sequence uses it.
    """
    layer_groups: tuple[int, ...] = ()
    """The group of each layer, see KVLayout; empty if the layout has only one group. A block of group 0 is identified
    by the hash. A block of another group is identified by the hash and the number of the group."""

    def uses_long_rope(self, num_tokens: int) -> bool:
        """Return whether a sequence of `num_tokens` tokens uses the rotary embedding of long sequences."""
        return self.long_rope_threshold is not None and num_tokens > self.long_rope_threshold

    def root(self, adapter_digest: AdapterDigest | None, cache_salt: str | None, *, long_rope: bool = False) -> bytes:
        """Return the hash of the empty prefix (32 bytes).

        The encoding of each field states its length and whether it is set, so that different fields never have the same
        encoding.
        """
        fields: list[str | None] = [str(LAYOUT_VERSION), self.model_digest, self.kv_dtype, str(self.block_size)]
        fields += [self.compute_dtype, self.quantization, adapter_digest, cache_salt]
        if long_rope:
            # These bytes are part of the hash, so they must not change.
            fields.append("beyond switch")
        if self.layer_groups:
            fields.append(",".join(map(str, self.layer_groups)))
        return hashlib.sha256(b"".join(_encode_field(field) for field in fields)).digest()

    def switch(self, parent_hash: bytes, index: int, adapter_digest: AdapterDigest | None, adapter_start: int) -> bytes:
        """Return the hash before full block `index`, given the hash of the block before it.

        The two differ only if the adapter starts to apply inside of this block. The position is part of the hash,
        because equal tokens can be before or after the start. If the adapter applies from token 0 on, it is part of the
        root.
        """
        start = index * self.block_size
        if adapter_digest is None or not max(start, 1) <= adapter_start < start + self.block_size:
            return parent_hash
        # No token id has these first bytes, so that the hash differs from that of any block.
        fields = b"adapter:" + struct.pack("<Q", adapter_start) + _encode_field(adapter_digest)
        return hashlib.sha256(parent_hash + fields).digest()

    def add_image(self, parent_hash: bytes, start: int, digest: bytes) -> bytes:
        """Return the hash before a block in which an image with this digest begins, at position `start`, given the hash
        before the block without the image."""
        # No token id has these first bytes, so that the hash differs from that of any block.
        return hashlib.sha256(parent_hash + b"image:" + struct.pack("<Q", start) + digest).digest()

    def extend(self, parent_hash: bytes, token_ids: Sequence[int]) -> bytes:
        """Return the hash (32 bytes) of a full block with the tokens `token_ids` [block_size]; `parent_hash` is the
        hash of the block before it."""
        assert len(token_ids) == self.block_size
        return hashlib.sha256(parent_hash + struct.pack(f"<{self.block_size}I", *token_ids)).digest()


def group_hash(block_hash: bytes, group: int) -> bytes:
    """Return the hash of the block of a group of layers. `block_hash` is the hash of the block in group 0."""
    return block_hash + bytes([group]) if group else block_hash


def block_hash_of(group_hash: bytes) -> bytes:
    """Return the hash of the block in group 0 that has the same tokens."""
    return group_hash[:_HASH_BYTES]


def group_of(block_hash: bytes) -> int:
    """Return the group of layers of the block with this hash."""
    return block_hash[_HASH_BYTES] if len(block_hash) > _HASH_BYTES else 0


def _encode_field(field: str | None) -> bytes:
    if field is None:
        return b"\0"
    # A salt comes from a client's JSON and can contain half of a surrogate pair, which plain UTF-8 rejects.
    data = field.encode("utf-8", "surrogatepass")
    return b"\1" + struct.pack("<I", len(data)) + data
