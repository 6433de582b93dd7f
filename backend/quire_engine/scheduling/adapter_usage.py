# SPDX-License-Identifier: Apache-2.0
"""Counts the sequences and KV blocks of each adapter. The scheduler reports them."""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from quire_engine.sequence import Sequence
from quire_spec.constants import AdapterDigest


@dataclass(slots=True)
class AdapterUsage:
    """Sequences and KV blocks of one adapter."""

    num_running: int = 0
    num_waiting: int = 0
    num_blocks: int = 0


def count_usage(running: Iterable[Sequence], waiting: Iterable[Sequence]) -> dict[AdapterDigest | None, AdapterUsage]:
    """Return the usage of each adapter. The key None stands for the base model. A shared block is counted for each
    sequence that uses it.
    """
    usage: defaultdict[AdapterDigest | None, AdapterUsage] = defaultdict(AdapterUsage)
    for sequence in running:
        entry = usage[sequence.adapter_digest]
        entry.num_running += 1
        entry.num_blocks += len(sequence.held_blocks)
    for sequence in waiting:
        usage[sequence.adapter_digest].num_waiting += 1
    return dict(usage)
