# SPDX-License-Identifier: Apache-2.0
"""Label values of adapters in metrics, whose number is bounded."""

from collections.abc import Collection

MAX_ADAPTER_LABELS = 100
"""Maximum number of adapters that have their own series. All other adapters share one series. Each adapter adds about
60 lines to a scrape, and most of these lines are buckets. With 1,000 adapters, a scrape would be larger than the
traffic that it describes.
"""

OTHER_LABEL = "_other"
"""Label of the shared series. It is not a valid name for an adapter."""


class AdapterLabels:
    """Chooses the label values of adapters. The first MAX_ADAPTER_LABELS adapters that are used get their own label
    values."""

    def __init__(self) -> None:
        self._names: set[str] = set()
        self._labelled_names: set[str] = set()

    def label(self, name: str) -> str:
        """Return the label value of an adapter; OTHER_LABEL for an adapter that was removed from the catalog."""
        if name in self._labelled_names:
            return name
        if name not in self._names or len(self._labelled_names) >= MAX_ADAPTER_LABELS:
            return OTHER_LABEL
        self._labelled_names.add(name)
        return name

    def has_label(self, name: str) -> bool:
        """Return whether an adapter has its own label value already."""
        return name in self._labelled_names

    def set_names(self, names: Collection[str]) -> set[str]:
        """Set the adapter names that the catalog contains, and return the names whose series must be removed."""
        self._names = set(names)
        removed_names = self._labelled_names - self._names
        self._labelled_names -= removed_names
        return removed_names
