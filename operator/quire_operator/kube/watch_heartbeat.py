# SPDX-License-Identifier: Apache-2.0
"""Heard: since when the API server has said nothing of a kind. Whoever watches tells it, the operator's health asks."""

import time

from quire_operator.kube.resources import Resource


class WatchHeartbeat:
    """When the API server last said something of a kind, in one namespace or in all. Safe to tell from any thread."""

    def __init__(self, resource: Resource, namespace: str | None = None) -> None:
        """`namespace` None: all."""
        self.resource, self.namespace = resource, namespace
        self.ever_beat = False
        """Something was heard since there is somebody who listens."""
        self._last_beat_at = time.monotonic()

    def beat(self) -> None:
        """It said something: objects, a bookmark, or that a watch begins."""
        self._last_beat_at = time.monotonic()
        self.ever_beat = True

    def reset(self) -> None:
        """It could not say anything so far: the time counts from now."""
        self._last_beat_at = time.monotonic()

    @property
    def age_s(self) -> float:
        """Seconds since anything was heard, or since there is somebody who listens."""
        return time.monotonic() - self._last_beat_at
