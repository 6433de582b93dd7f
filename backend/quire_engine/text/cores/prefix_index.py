# SPDX-License-Identifier: Apache-2.0
"""Which core has cached which KV blocks, and which blocks it will have cached soon.

The cores report the blocks that enter and leave their prefix caches. The index also knows the blocks that prompts will
compute that were sent to a core, but have no output yet. Without these, a burst of prompts with the same beginning
would be spread over all cores, and each core would compute the beginning. Pure. The core pool owns the index.
"""

from collections import Counter, OrderedDict
from collections.abc import Sequence

from quire_engine.kv_cache.block_hash import BlockHasher
from quire_spec.constants import AdapterDigest
from quire_spec.protocol.messages import BlockChanges

MAX_BLOCKS = 512
"""Only this number of blocks of a prompt is looked up. Hashing them takes about 1 ms, and the event loop must not be
blocked for longer. Prompts that have so many equal blocks usually continue alike."""
_MAX_BEGINNINGS = 10_000


class PrefixIndex:
    """The cached and expected blocks of each core."""

    def __init__(self, num_cores: int, hasher: BlockHasher | None = None) -> None:
        self.hasher = hasher
        """The hasher of the cores. While it is None, no prompt has hashes."""
        self._cached: list[set[bytes]] = [set() for _ in range(num_cores)]
        self._expected: list[Counter[bytes]] = [Counter() for _ in range(num_cores)]
        self._last_core: OrderedDict[bytes, int] = OrderedDict()
        """The core that last got a prompt, by the hash of the first block of the prompt."""

    def hash_prompt(
        self,
        token_ids: Sequence[int],
        adapter_digest: AdapterDigest | None,
        cache_salt: str | None,
        adapter_start: int = 0,
    ) -> list[bytes]:
        """Return the hashes of the first full blocks of a prompt, at most MAX_BLOCKS.

        `adapter_start` is the position of the first token that the adapter changes.
        """
        if (hasher := self.hasher) is None:
            return []
        size, long_rope = hasher.block_size, hasher.uses_long_rope(len(token_ids))
        root_adapter = None if adapter_start else adapter_digest
        block_hash, hashes = hasher.root(root_adapter, cache_salt, long_rope=long_rope), []
        for index in range(min(len(token_ids) // size, MAX_BLOCKS)):
            block_hash = hasher.switch(block_hash, index, adapter_digest, adapter_start)
            block_hash = hasher.extend(block_hash, token_ids[index * size : (index + 1) * size])
            hashes.append(block_hash)
        return hashes

    def num_cached_blocks(self, core: int, hashes: Sequence[bytes]) -> int:
        """Return how many first blocks of a prompt a core has cached, or will have cached."""
        cached, expected = self._cached[core], self._expected[core]
        for index, block_hash in enumerate(hashes):
            if block_hash not in cached and block_hash not in expected:
                return index
        return len(hashes)

    def served_last(self, core: int, hashes: Sequence[bytes]) -> bool:
        """Return whether this core was the last one that got a prompt with the same first block."""
        return bool(hashes) and self._last_core.get(hashes[0]) == core

    def expect(self, core: int, hashes: Sequence[bytes]) -> None:
        """Record that a prompt is sent to a core."""
        self._expected[core].update(hashes)
        if hashes:
            self._last_core[hashes[0]] = core
            self._last_core.move_to_end(hashes[0])
            if len(self._last_core) > _MAX_BEGINNINGS:
                self._last_core.popitem(last=False)

    def end(self, core: int, hashes: Sequence[bytes]) -> None:
        """Record that a core has computed a prompt, so that it reports the blocks itself, or that the prompt ended."""
        expected = self._expected[core]
        for block_hash in hashes:
            expected[block_hash] -= 1
            if not expected[block_hash]:
                del expected[block_hash]

    def apply(self, core: int, changes: BlockChanges) -> None:
        """Record the blocks that a core has cached and evicted."""
        self._cached[core].difference_update(changes.removed)
        self._cached[core].update(changes.stored)

    def clear(self, core: int) -> None:
        """Forget the blocks of a core that has ended."""
        self._cached[core].clear()
        self._expected[core].clear()
