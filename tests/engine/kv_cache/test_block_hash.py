# SPDX-License-Identifier: Apache-2.0
"""Content hashes of KV blocks depend on everything that determines the bytes of a block."""

import struct
from dataclasses import replace
from hashlib import sha256

from quire_engine.kv_cache.block_hash import BlockHasher

HASHER = BlockHasher("sha256:model", "float32", 4, "bfloat16", "int8")


def test_hash_uses_a_fixed_binary_encoding() -> None:
    parent_hash = bytes(range(32))
    assert (
        HASHER.extend(parent_hash, [1, 2, 3, 2**32 - 1])
        == sha256(parent_hash + struct.pack("<4I", 1, 2, 3, 2**32 - 1)).digest()
    )
    fields = [b"2", b"sha256:model", b"float32", b"4", b"bfloat16", b"int8"]
    root = b"".join(b"\1" + struct.pack("<I", len(f)) + f for f in fields) + b"\0" + b"\1\4\0\0\0salt"
    assert HASHER.root(None, "salt") == sha256(root).digest()


def test_hash_depends_on_where_an_adapter_starts() -> None:
    """Before the start, blocks are those of the base model. The block of the start differs for each adapter, and for
    each start, although all of them have the same tokens."""
    base = [HASHER.root(None, "salt")]
    for index in range(3):
        base.append(HASHER.extend(base[-1], [index] * 4))
    hashes = {}
    for digest in ("a", "b"):
        for start in range(1, 13):
            block_hash, chain = base[0], []
            for index in range(3):
                block_hash = HASHER.extend(HASHER.switch(block_hash, index, digest, start), [index] * 4)
                chain.append(block_hash)
            assert chain[: start // 4] == base[1 : 1 + start // 4]
            hashes[digest, start] = chain[start // 4 :]
    later = [block_hash for chain in hashes.values() for block_hash in chain]
    assert len({*later, *base, HASHER.root("a", "salt")}) == len(later) + 5
    fields = b"adapter:" + struct.pack("<Q", 5) + b"\1" + struct.pack("<I", 1) + b"a"
    assert HASHER.switch(base[1], 1, "a", 5) == sha256(base[1] + fields).digest()


def test_root_depends_on_every_field() -> None:
    hashers = [
        HASHER,
        replace(HASHER, model_digest="sha256:other"),
        replace(HASHER, kv_dtype="bfloat16"),
        replace(HASHER, block_size=8),
        replace(HASHER, compute_dtype="float32"),
        replace(HASHER, quantization=None),
        replace(HASHER, quantization=""),
        replace(HASHER, layer_groups=(0, 1)),
    ]
    roots = {
        hasher.root(digest, salt) for hasher in hashers for digest in (None, "", "a", "b") for salt in (None, "", "a")
    }
    assert len(roots) == 8 * 4 * 3
    # Fields cannot run into each other, and half of a surrogate pair, which JSON can contain, is a valid salt.
    assert HASHER.root("ab", "c") != HASHER.root("a", "bc")
    assert HASHER.root(None, "\ud800") != HASHER.root(None, "\ud801")
