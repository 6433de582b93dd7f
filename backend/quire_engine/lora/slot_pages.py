# SPDX-License-Identifier: Apache-2.0
"""Placement of adapters in the pages of the slots, and which adapters must leave for another. Pure.

An adapter takes consecutive pages. Adapters of different sizes leave gaps between each other, which no copy closes: an
adapter in use cannot be moved while a step reads it. Instead, as many adapters are evicted as are needed.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence

from quire_engine.sequence import SlotId


def find_pages(taken: Iterable[range], num_pages: int, needed: int) -> range | None:
    """Return `needed` consecutive pages of pages 0 to `num_pages` that no range in `taken` contains, or None.

    They are at the beginning of the smallest gap that is large enough, so that large gaps stay.
    """
    gaps, end = list[range](), 0
    for pages in sorted((pages for pages in taken if pages), key=lambda pages: pages.start):
        gaps.append(range(end, pages.start))
        end = max(end, pages.stop)
    gaps.append(range(end, num_pages))
    fitting = [gap for gap in gaps if len(gap) >= needed]
    if not fitting:
        return None
    start = min(fitting, key=lambda gap: (len(gap), gap.start)).start
    return range(start, start + needed)


def choose_victims(candidates: Sequence[SlotId], is_enough: Callable[[Sequence[SlotId]], bool]) -> list[SlotId] | None:
    """Return the slots whose adapters must be evicted, or None if it is not enough to evict all candidates.

    The candidates come in the order in which they are evicted. The first that are enough are taken, less those that are
    not needed, of which the last stay first. `is_enough` must be monotonic: more victims are never worse.
    """
    if not is_enough(candidates):
        return None
    num_victims = bisect_left(range(len(candidates)), True, key=lambda num: is_enough(candidates[:num]))
    victims = list(candidates[:num_victims])
    for candidate in candidates[:num_victims][::-1]:
        if is_enough(others := [victim for victim in victims if victim != candidate]):
            victims = others
    return victims
